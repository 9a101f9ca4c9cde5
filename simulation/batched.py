"""A round's local training of many silos at once: on several threads, or stacked into one program.

``train_round`` runs the silo sides one after the other up to their ``site.fit``, where each waits; when all have
come that far, an ``Engine`` does all those trainings, and the sides go on with trained models, as if each had
trained alone. No method has to know of it, and sites may share one module: what a side had loaded is kept while it
waits. Fits that an engine does not take are done at once, alone. Three engines:

``InThreads`` does the fits themselves side by side, one PyTorch thread each. Bit-equal to one after the other with one
PyTorch thread.

``InLanes`` does the same, and small convolutional networks in another arrangement of memory
(``medsilo.simulation.lanes``), in which a step takes less than half of PyTorch's time. For CPUs. Equal up to rounding.

``Stacked`` trains all silos as one program: parameters ``[N, ...]``, one forward and backward pass for all, one
optimiser. Equal up to rounding, because sums are grouped otherwise; made for small models, where a step's cost is
mostly the calls, and for GPUs.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from medsilo.algorithms.method import Correction, Downloads, Objective, SiloSide, State, Watch
from medsilo.algorithms.models import OnFixedFeatures, frozen_names
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.training.local_training import chosen_of, diverged, gradients_of
from medsilo.silo.training.optimizers import make_optimizer
from medsilo.silo.training.site import LocalSite

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


@dataclass(frozen=True)
class Fit:
    """One call of ``LocalSite.fit``; the fields but ``site`` and ``state`` are that method's arguments.

    ``state``: what the site's model holds when training begins.
    """

    site: LocalSite
    state: State
    round_number: int
    correction: Correction | None = None
    objective: Objective | None = None
    trainable: Collection[str] | None = None
    extra: nn.Module | None = None
    epochs: int | None = None
    phase: str = "training"
    watch: Watch | None = None

    @property
    def plain(self) -> bool:
        """Whether it is cross entropy on the plan's model alone and draws nothing from PyTorch's generator, so that
        nothing but tensors differs between silos."""
        random = any(isinstance(module, _RANDOM) for module in self.site.model.modules())
        return self.objective is None and self.extra is None and not random

    def alone(self) -> Trained:
        """Does it as the silo itself would, in a module of its own."""
        return self.with_module(copy.deepcopy(self.site.model))

    def with_module(self, model: nn.Module) -> Trained:
        """Does it in a module of the same parameters, which it changes."""
        twin = self.site.with_model(model)
        twin.load(self.state)
        steps = LocalSite.fit(
            twin,
            self.round_number,
            correction=self.correction,
            trainable=self.trainable,
            epochs=self.epochs,
            phase=self.phase,
            watch=self.watch,
        )
        return Trained({name: tensor.detach() for name, tensor in model.state_dict().items()}, steps)


@dataclass(frozen=True)
class Trained:
    """What a fit leaves: the model's whole state, and the number of steps."""

    state: State
    steps: int


class Engine(ABC):
    """Does many fits."""

    @abstractmethod
    def takes(self, fit: Fit) -> bool:
        """Whether it can do this one."""

    @abstractmethod
    def train(self, fits: Sequence[Fit]) -> list[Trained]:
        """Does fits that it takes; the sites' own modules stay as they are. Raises what a failing fit raises."""


class InThreads(Engine):
    """Plain fits on several threads, each with one PyTorch thread.

    ``workers``: at least 1, at best the number of cores.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; there has to be at least one")
        self._workers = workers

    def takes(self, fit: Fit) -> bool:
        """What is plain: an objective of a method's own may draw random numbers, and all threads share a generator."""
        return fit.plain

    def train(self, fits: Sequence[Fit]) -> list[Trained]:
        """See ``Engine``."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self._workers, thread_name_prefix="fit") as pool:
                return list(pool.map(self._do, fits))
        finally:
            torch.set_num_threads(threads)

    def _do(self, fit: Fit) -> Trained:
        return fit.alone()


class InLanes(InThreads):
    """Plain fits on several threads, those of small convolutional networks in lanes.

    Raises ``ConfigurationError`` if Numba, which they need, is not installed.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        try:
            from medsilo.simulation.lanes import in_lanes
        except ModuleNotFoundError:
            raise ConfigurationError(
                "`engine: lanes` needs Numba, which is not installed; `pip install 'medsilo[lanes]'`, or take `engine: "
                "threads`, which is slower"
            ) from None
        self._in_lanes = in_lanes

    def _do(self, fit: Fit) -> Trained:
        model = copy.deepcopy(fit.site.model)
        return fit.with_module(self._in_lanes(model) or model)


class Stacked(Engine):
    """Plain fits of equal models with equal numbers of batches as one program.

    Batches of unequal sizes are padded with images of weight 0. Silos with different numbers of batches an epoch,
    of different models, or that train different parameters go into programs of their own; a silo that is alone in
    its program, or whose model ``torch.vmap`` refuses, is fitted as always.
    """

    def takes(self, fit: Fit) -> bool:
        """What is plain and without buffers: batch normalisation's statistics would see the padding. Optimisers kept
        from round to round, changed images and weights of classes are each silo's own."""
        training = fit.site.training
        own = training.keep_optimizer_state or training.augmentation or training.class_weights
        return fit.plain and not own and _unchanging(fit.site.model)

    def train(self, fits: Sequence[Fit]) -> list[Trained]:
        """See ``Engine``."""
        groups: dict[object, list[int]] = {}
        for index, fit in enumerate(fits):
            groups.setdefault(_kind(fit), []).append(index)
        done: dict[int, Trained] = {}
        for indices in groups.values():
            members = [fits[index] for index in indices]
            results = _together(members) if len(members) > 1 else None
            done.update(zip(indices, results or [member.alone() for member in members], strict=True))
        return [done[index] for index in range(len(fits))]


def train_round(
    sides: Mapping[str, SiloSide],
    round_number: int,
    downloads: Downloads,
    sites: Mapping[str, LocalSite],
    engine: Engine,
) -> None:
    """Trains one round of all given silo sides.

    Args:
        sides: by silo name.
        round_number: from 0.
        downloads: what each silo gets.
        sites: the sides' sites by silo name.
        engine: does the fits.

    Raises what a side raises; the other sides are then stopped where they wait.
    """
    waiting: list[_Trainee] = []
    try:
        for name, side in sides.items():
            work = partial(side.train, round_number, downloads.for_silo(name))
            trainee = _Trainee(work, sites[name], engine)
            waiting.append(trainee)
            trainee.go_on()
        while fits := [(trainee, trainee.fit) for trainee in waiting if trainee.fit is not None]:
            for (trainee, _), trained in zip(fits, engine.train([fit for _, fit in fits]), strict=True):
                trainee.go_on(trained)
    finally:
        for trainee in waiting:
            trainee.stop()


class _Stopped(BaseException):
    """Ends a side that waits for a training that will not come."""


class _Trainee:
    """A side's round in a thread of its own, of which at any time either it or its owner runs: a coroutine whose
    ``site.fit`` hands over."""

    def __init__(self, work: Callable[[], None], site: LocalSite, engine: Engine) -> None:
        self.fit: Fit | None = None
        self._work = work
        self._site = site
        self._engine = engine
        self._trained: Trained | None = None
        self._error: BaseException | None = None
        self._mine, self._owners = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"half of {site.name}", daemon=True)
        vars(site)["fit"] = self._hand_over
        self._thread.start()

    def go_on(self, trained: Trained | None = None) -> None:
        """Runs the half up to its next fit or its end; ``trained`` is what the fit it waited for left."""
        self.fit, self._trained = None, trained
        self._mine.release()
        self._owners.acquire()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends the thread, wherever it is, and gives the site its own ``fit`` back."""
        self._trained = None
        self._mine.release()
        self._thread.join()
        vars(self._site).pop("fit", None)

    def _run(self) -> None:
        self._mine.acquire()
        try:
            self._work()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._owners.release()

    def _hand_over(self, round_number: int, **arguments: Any) -> int:
        model = self._site.model
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        fit = Fit(self._site, state, round_number, **arguments)
        if not self._engine.takes(fit):
            return LocalSite.fit(self._site, round_number, **arguments)
        self.fit = fit
        self._owners.release()
        self._mine.acquire()
        if self._trained is None:
            raise _Stopped
        model.load_state_dict(self._trained.state)
        model.train()
        return self._trained.steps


def _unchanging(model: nn.Module) -> bool:
    """Whether nothing but training changes it; a fixed extractor's buffers, and frozen ones, are constants."""
    frozen = frozen_names(model)
    return isinstance(model, OnFixedFeatures) or all(name in frozen for name, _ in model.named_buffers())


def _kind(fit: Fit) -> object:
    model, site = fit.site.model, fit.site
    epochs = fit.epochs or site.training.epochs
    batches = len(site.batch_sizes())
    shapes = tuple((name, parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters())
    device = site.inputs()[0].device
    return repr(model), shapes, device, site.training, epochs, batches, tuple(sorted(chosen_of(model, fit.trainable)))


def _together(fits: Sequence[Fit]) -> list[Trained] | None:
    """Trains equal models as one; None if ``vmap`` refuses the model."""
    first = fits[0].site
    model, training = first.model, first.training
    model.train()
    chosen = list(chosen_of(model, fits[0].trainable))
    stacked = {name: torch.stack([fit.state[name] for fit in fits]) for name in fits[0].state}
    leaves = {name: nn.Parameter(stacked[name]) for name in chosen}
    weights = {**stacked, **leaves}
    optimizer = make_optimizer(list(leaves.values()), training)
    correct = _corrections([fit.correction for fit in fits], leaves)

    def output_of(own: dict[str, Tensor], images: Tensor) -> Tensor:
        output: Tensor = functional_call(model, own, (images,))
        return output

    outputs_of = vmap(output_of)
    batches = _Batches(fits)
    steps = 0
    epochs = fits[0].epochs or training.epochs
    for epoch in range(epochs):
        total = torch.zeros(len(fits), device=batches.device)
        for images, labels, shares in batches.epoch():
            optimizer.zero_grad(set_to_none=True)
            try:
                outputs = outputs_of(weights, images)
            except RuntimeError:
                if steps:
                    raise
                return None
            # Outside of ``vmap``, which takes it apart into many calls.
            each = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
            losses = (each.view_as(shares) * shares).sum(dim=1)
            losses.sum().backward()  # type: ignore[no-untyped-call]
            for row, fit in enumerate(fits):
                if fit.watch is not None:
                    fit.watch({name: gradient[row] for name, gradient in gradients_of(leaves).items()})
            correct()
            optimizer.step()
            steps += 1
            total += losses.detach()
        finite = torch.isfinite(total)
        for leaf in leaves.values():
            finite &= torch.isfinite(torch.linalg.vector_norm(leaf.detach().flatten(1), torch.inf, dim=1))
        if not bool(finite.all()):
            worst = int((~finite).nonzero()[0])
            raise diverged(fits[worst].round_number, epoch, total[worst].item() / len(first.batch_sizes()))
    trained = {**stacked, **{name: leaf.detach() for name, leaf in leaves.items()}}
    return [Trained({name: rows[row] for name, rows in trained.items()}, steps) for row in range(len(fits))]


class _Batches:
    """The mini-batches that each silo's own fit would see, side by side: images ``[N, B, C, H, W]`` (or features
    ``[N, B, F]``), labels ``[N, B]`` and shares ``[N, B]``, 1/(images of the silo's batch) for images and 0 for
    padding."""

    def __init__(self, fits: Sequence[Fit]) -> None:
        images, labels = zip(*(fit.site.inputs() for fit in fits), strict=True)
        # All silos' images one after the other, so that a batch of all is one gather.
        self._images, self._labels = torch.cat(images), torch.cat(labels)
        self.device = self._labels.device
        counts = torch.tensor([0, *(len(own) for own in labels[:-1])])
        self._firsts = counts.cumsum(0).unsqueeze(1).to(self.device)
        self._orders = [
            fit.site.orders(fit.round_number, fit.epochs or fit.site.training.epochs, fit.phase) for fit in fits
        ]
        sizes = [fit.site.batch_sizes() for fit in fits]
        self._widths = [max(column) for column in zip(*sizes, strict=True)]
        shares = torch.zeros(len(fits), sum(self._widths))
        for row, own in zip(torch.split(shares, 1), sizes, strict=True):
            for part, size in zip(torch.split(row, self._widths, dim=1), own, strict=True):
                part[:, :size] = 1 / size
        self._shares = shares.to(self.device)

    def epoch(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The next epoch's batches."""
        index = torch.stack([self._row(next(orders)) for orders in self._orders]) + self._firsts
        parts, shares = (torch.split(one, self._widths, dim=1) for one in (index, self._shares))
        for part, share in zip(parts, shares, strict=True):
            flat = part.reshape(-1)
            images = self._images.index_select(0, flat).view(*part.shape, *self._images.shape[1:])
            yield images, self._labels.index_select(0, flat).view(part.shape), share

    def _row(self, batches: list[Tensor]) -> Tensor:
        """A silo's order of images; its first image is the padding."""
        missing = [wide - len(batch) for batch, wide in zip(batches, self._widths, strict=True)]
        return torch.cat(
            [F.pad(batch, (0, lacks)) if lacks else batch for batch, lacks in zip(batches, missing, strict=True)]
        )


def _corrections(corrections: Sequence[Correction | None], leaves: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """``Correction.bind`` for stacked parameters: every silo its own strength, centre and linear term."""
    given = [correction or Correction() for correction in corrections]
    alike: dict[float, list[str]] = {}  # pulled as strongly for every silo: one call for all of them
    apart: dict[str, Tensor] = {}
    centres: dict[str, Tensor] = {}
    pushed: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        strengths = [c.strength if name in c.centre else 0.0 for c in given]
        if any(strengths):
            centres[name] = _stack([c.centre.get(name) for c in given], leaf)
            if len(set(strengths)) == 1:
                alike.setdefault(strengths[0], []).append(name)
            else:
                apart[name] = torch.tensor(strengths, device=leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))
        if any(name in c.linear for c in given):
            pushed[name] = _stack([c.linear.get(name) for c in given], leaf)

    def correct() -> None:
        with torch.no_grad():
            for name in {**centres, **pushed}:
                if leaves[name].grad is None:
                    leaves[name].grad = torch.zeros_like(leaves[name])
            for strength, names in alike.items():
                distances = torch._foreach_sub([leaves[name] for name in names], [centres[name] for name in names])
                gradients = list(gradients_of({name: leaves[name] for name in names}).values())
                torch._foreach_add_(gradients, distances, alpha=strength)
            for name, strengths in apart.items():
                leaves[name].grad.addcmul_(leaves[name] - centres[name], strengths)  # type: ignore[union-attr]
            for name, linears in pushed.items():
                leaves[name].grad.add_(linears)  # type: ignore[union-attr]

    return correct


def _stack(rows: Sequence[Tensor | None], leaf: Tensor) -> Tensor:
    return torch.stack([leaf.new_zeros(leaf.shape[1:]) if row is None else row.to(leaf.device) for row in rows])
