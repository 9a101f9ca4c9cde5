"""One silo's training in several processes: each computes the gradient of a part of every batch, and the parts' sum is
the gradient of the whole batch, up to the order in which floating-point numbers are added.

All processes take every step alike: they begin a training with the first one's model, draw the same batches, and give
their optimisers the same sums. The process group is PyTorch's, with gloo between CPUs and NCCL between GPUs, on this
machine's loopback interface alone; processes find each other through a file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from medsilo.algorithms.method import Method
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, TrainingError

PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others in the middle of a step."""


class LostProcessError(TrainingError):
    """Another process of this silo's training has ended, or does not answer."""


@dataclass(frozen=True)
class Part:
    """What a process computes of a batch: ``index`` of its images, ``first`` of them by place in the batch, ``share``
    by which their mean loss counts in the batch's."""

    index: Tensor
    first: int = 0
    share: float = 1.0


class Alone:
    """The one process of a silo that trains on one device: its part of a batch is the whole."""

    rank = 0
    size = 1

    def part(self, index: Tensor) -> Part:
        """The own part of a batch ``[b]``, b ≥ 1."""
        return Part(index)

    def backward(self, loss: Tensor, part: Part, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Leaves the whole batch's gradients in ``parameters``; returns its loss. ``loss``: the mean over the part."""
        del part, parameters
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def mean(self, values: Tensor) -> Tensor:
        """Of the part's rows ``[b, ...]`` the mean over the whole batch's, ``[...]``, with its gradient's history."""
        return values.mean(dim=0)

    @contextmanager
    def training(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, these modules are trained."""
        del modules
        yield


class DataParallel(Alone):
    """A process's place among those that train one silo's model together.

    A batch of fewer images than processes is not split: every process computes all of it.

    Args:
        rank: from 0, the process that is the silo.
        devices: one for each process; all of one kind.
        meeting: a file, not there yet, in a folder that is closed to others, through which processes find each other.

    Raises ``LostProcessError`` if the others do not come.
    """

    def __init__(self, rank: int, devices: Sequence[torch.device], meeting: Path) -> None:
        self.rank, self.size = rank, len(devices)
        self._split: int | None = None
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _loopback()
        os.environ["NCCL_IB_DISABLE"] = "1"
        device = devices[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with _waiting_for_others():
            store = dist.FileStore(str(meeting), self.size)  # type: ignore[attr-defined]
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, timeout=PATIENCE)

    def close(self) -> None:
        """Leaves the others."""
        dist.destroy_process_group()

    def part(self, index: Tensor) -> Part:
        """See ``Alone``. Sizes of parts differ by one at most."""
        if len(index) < self.size:
            self._split = None
            return Part(index, share=1 / self.size)
        self._split = len(index)
        parts = index.tensor_split(self.size)
        own = parts[self.rank]
        return Part(own, sum(len(part) for part in parts[: self.rank]), len(own) / len(index))

    def backward(self, loss: Tensor, part: Part, parameters: Sequence[nn.Parameter]) -> Tensor:
        """See ``Alone``. Raises ``LostProcessError``."""
        loss = loss * part.share
        loss.backward()  # type: ignore[no-untyped-call]
        whole = loss.detach().float()
        summed = [whole, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
        total = _sum(torch.cat([tensor.reshape(-1) for tensor in summed]))
        pieces = torch.split(total, [tensor.numel() for tensor in summed])
        for tensor, piece in zip(summed, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        return whole

    def mean(self, values: Tensor) -> Tensor:
        """See ``Alone``. Raises ``LostProcessError``."""
        return values.mean(dim=0) if self._split is None else _Sum.apply(values.sum(dim=0)) / self._split

    @contextmanager
    def training(self, *modules: nn.Module) -> Iterator[None]:
        """See ``Alone``. They start as they are in the first process, and their batch normalisation takes means and
        variances of whole batches. Raises ``LostProcessError``."""
        with _waiting_for_others():
            for module in modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.detach(), src=0)
        layers = [layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)]
        for layer in layers:
            vars(layer)["forward"] = partial(self._normalise, layer)
        try:
            yield
        finally:
            self._split = None
            for layer in layers:
                del vars(layer)["forward"]

    def _normalise(self, layer: _BatchNorm, values: Tensor) -> Tensor:
        """Batch normalisation ``[b, C, ...]`` by the whole batch (PyTorch's ``SyncBatchNorm`` is for GPUs alone)."""
        by_batch = layer.training or layer.running_mean is None
        if self._split is None or not by_batch:
            return type(layer).forward(layer, values)
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        others = [0, *range(2, wide.ndim)]
        shape = [1, -1, *[1] * (wide.ndim - 2)]
        count = self._split * wide[0, 0].numel()
        mean: Tensor = _Sum.apply(wide.sum(others)) / count
        centred = wide - mean.view(shape)
        variance: Tensor = _Sum.apply(centred.square().sum(others)) / count
        if layer.training and layer.running_mean is not None and layer.running_var is not None:
            with torch.no_grad():
                assert layer.num_batches_tracked is not None
                layer.num_batches_tracked += 1
                momentum = 1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
                layer.running_mean.lerp_(mean, momentum)
                layer.running_var.lerp_(variance * (count / (count - 1)), momentum)
        found = centred * torch.rsqrt(variance + layer.eps).view(shape)
        if layer.weight is not None:
            found = found * layer.weight.view(shape) + layer.bias.view(shape)
        return found.to(values.dtype)


def check_divisible(plan: RunPlan, method: Method) -> None:
    """Raises ``ConfigurationError`` for a run whose training cannot be divided among processes, with the reason."""
    if plan.privacy is not None:
        reason = "trains with differential privacy, whose samples and noise one process alone may draw and charge for"
    elif plan.is_blind:
        reason = "has blind mixtures, for which one process alone trains, seals and opens"
    elif method.own_steps:
        reason = f"trains by {method.name}, which takes steps of its own that every process would only repeat"
    else:
        return
    raise ConfigurationError(f"device: run {plan.run} {reason}; name one device instead of several")


def check_layers(model: nn.Module) -> None:
    """Raises ``ConfigurationError`` for a model with a layer whose statistics are not those of whole batches here."""
    for path, layer in model.named_modules():
        if getattr(layer, "track_running_stats", False) and not isinstance(layer, _BatchNorm):
            raise ConfigurationError(
                f"device: the model's layer {path} ({type(layer).__name__}) keeps statistics of its batches, which "
                "several processes do not add up; name one device instead of several"
            )


class _Sum(torch.autograd.Function):
    """The sum over all processes; as every process's loss is a summand of the batch's, so is its gradient."""

    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        return _sum(values.clone())

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient.clone())


def _sum(values: Tensor) -> Tensor:
    """Over all processes, in place."""
    with _waiting_for_others():
        dist.all_reduce(values)
    return values


@contextmanager
def _waiting_for_others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(f"another process of this silo's training has ended or does not answer ({error})") from (
            error
        )


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            return name
    raise ConfigurationError(
        "device: this machine has no loopback interface, which several processes need; name one device"
    )
