"""The clipped sum of a linear head's gradients, from the head's inputs alone.

Where all that is trained is one linear layer, and what goes into it is the same in every step, no image's gradient need
be written out. With an image's features x, its probabilities p and its class as a unit vector y, the gradient of the
cross entropy is (p - y)(x, 1)ᵀ, the 1 for the bias. Its norm is exactly ‖p - y‖·‖(x, 1)‖, and the sum over images, each
times its factor, is one matrix product (Goodfellow, "Efficient Per-Example Gradient Computations", 2015). A step so
costs about what a plain one does.

The bound and all that is drawn are those of ``medsilo.silo.training.private_training``, which takes this way by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PASS = 512
"""Images in one pass through what comes before the head."""

_GRADIENT_NUMBERS = 1 << 26
_MARGIN = 1 - 1e-6
_SMALLEST = 1e-30
"""Below about 1e-38 a float32 has fewer digits and rounds by up to its half: no bound would be left of a product."""


@dataclass(frozen=True)
class Head:
    """A linear layer, and all training images as it sees them, unit by unit.

    Attributes:
        layer: gives the model's logits.
        trained: its parameters in the order of the sums.
        inputs: ``float32 [n, F]``, and a column of ones where the bias is trained; a row that is not finite is zeros.
        lengths: the rows' norms, ``float64 [n]``; not finite where a row was not.
        labels: ``[n]``.
        sizes: how many rows each unit has, ``int64 [units]``.
    """

    layer: nn.Linear
    trained: tuple[nn.Parameter, ...]
    inputs: Tensor
    lengths: Tensor
    labels: Tensor
    sizes: npt.NDArray[np.int64]

    def clipped_sum(
        self, units: npt.NDArray[np.int64], bound: float, *, precise: bool = False
    ) -> tuple[list[Tensor], float, int]:
        """The sum over some units of their gradients, each the mean of its images' and clipped to the norm ``bound``.

        Blanking any one unit moves the sum by at most ``bound``, in the Euclidean norm over weight and bias together. A
        gradient that is not finite counts as none.

        Args:
            units: their numbers, in order, each once; may be empty.
            bound: C > 0.
            precise: whether gradients are added up in 64 bits.

        Returns:
            A tensor of each trained parameter's shape, the sum of the images' cross entropies, and their number.
        """
        inputs, lengths, labels = self._rows(units)
        count, sizes = len(labels), self.sizes[units]
        with torch.no_grad():
            logits = F.linear(inputs[:, : self.layer.in_features], self.layer.weight, self.layer.bias)
            logarithms = F.log_softmax(logits, dim=1)
            loss = float(F.nll_loss(logarithms, labels, reduction="sum"))
            residuals = logarithms.exp_()
            residuals[torch.arange(count, device=labels.device), labels] -= 1
            if count == len(units):
                norms = torch.linalg.vector_norm(residuals, dim=1, dtype=torch.float64) * lengths
                # What is multiplied by the inputs has the norm C / ‖(x, 1)‖, whatever the factor.
                factors = torch.where(bound / lengths < _SMALLEST, 0, clipping_factors(norms, bound))[:, None]
                clipped = torch.where(factors > 0, residuals * factors.to(residuals.dtype), 0).T
                total = clipped.double() @ inputs.double() if precise else clipped @ inputs
            else:
                residuals[~torch.isfinite(lengths)] = torch.nan
                total = _of_groups(residuals, inputs, sizes.tolist(), bound, torch.float64 if precise else inputs.dtype)
        return self._split(total), loss, count

    def _rows(self, units: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs, lengths and labels of some units' images."""
        if len(units) == len(self.sizes):
            return self.inputs, self.lengths, self.labels
        if len(self.sizes) == len(self.labels):
            rows = torch.from_numpy(units).to(self.labels.device)
        else:
            taken = np.zeros(len(self.sizes), dtype=bool)
            taken[units] = True
            rows = torch.from_numpy(np.flatnonzero(np.repeat(taken, self.sizes))).to(self.labels.device)
        return self.inputs[rows], self.lengths[rows], self.labels[rows]

    def _split(self, total: Tensor) -> list[Tensor]:
        """The sums of the trained parameters, from the product ``[K, F (+ 1)]``."""
        features = self.layer.in_features
        return [total[:, :features] if p is self.layer.weight else total[:, features] for p in self.trained]


def clipping_factors(norms: Tensor, bound: float) -> Tensor:
    """By what gradients of these norms, ``float64 [n]``, are multiplied so that none is longer than ``bound``:
    ``float64``; 0 for one that is not finite, and for one so long that the factor, in 32 bits, would round up."""
    # The margin keeps what 32-bit rounding adds within the bound.
    factors = (bound * _MARGIN / norms.clamp(min=1e-300)).clamp(max=1)
    return torch.where(torch.isfinite(norms) & (factors >= _SMALLEST), factors, 0)


def _of_groups(residuals: Tensor, inputs: Tensor, sizes: Sequence[int], bound: float, dtype: torch.dtype) -> Tensor:
    """The sum over groups of rows of each group's mean gradient, clipped."""
    total = inputs.new_zeros(residuals.shape[1], inputs.shape[1], dtype=dtype)
    most = max(1, _GRADIENT_NUMBERS // total.numel())
    counts = torch.tensor(sizes, dtype=residuals.dtype, device=residuals.device)
    parts = list(zip(torch.split(residuals, list(sizes)), torch.split(inputs, list(sizes)), strict=True))
    for start in range(0, len(parts), most):
        sums = [own.T @ seen for own, seen in parts[start : start + most]]
        means = torch.stack(sums) / counts[start : start + most, None, None]
        factors = clipping_factors(torch.linalg.vector_norm(means, dim=(1, 2), dtype=torch.float64), bound)
        means[factors == 0] = 0
        total += torch.tensordot(factors.to(dtype), means.to(dtype), dims=1)
    return total


def head_of(
    model: nn.Module,
    chosen: Mapping[str, nn.Parameter],
    data: tuple[Tensor, Tensor],
    images_of: Sequence[npt.NDArray[np.int64]],
) -> Head | None:
    """The head that a training of the chosen parameters is of; None where it trains anything else, or where what the
    head sees is not the same in every step (dropout before it, say).

    Args:
        model: in training mode; no parameter but the chosen ones requires gradients.
        chosen: the trained parameters by name.
        data: the training images ``[n, C, H, W]`` and labels ``[n]``.
        images_of: the indices of each unit's images; every image is one unit's.
    """
    layers = [module for module in model.modules() if {*map(id, module.parameters(recurse=False))} & _ids(chosen)]
    if len(layers) != 1 or type(layers[0]) is not nn.Linear:
        return None
    layer = layers[0]
    trained = tuple(chosen.values())
    if _ids(chosen) - {id(layer.weight), id(layer.bias)} or all(p is not layer.weight for p in trained):
        return None
    images, labels = data
    parts = []
    for part in torch.split(images, _PASS):
        if (seen := _before(model, layer, part)) is None:
            return None
        parts.append(seen)
    order = torch.from_numpy(np.concatenate(images_of)).to(labels.device)
    inputs = torch.cat(parts)[order]
    if any(p is layer.bias for p in trained):
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
    lengths = torch.linalg.vector_norm(inputs, dim=1, dtype=torch.float64)
    inputs[~torch.isfinite(lengths)] = 0
    sizes = np.array([len(own) for own in images_of], dtype=np.int64)
    return Head(layer, trained, inputs, lengths, labels[order], sizes)


def _ids(chosen: Mapping[str, nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in chosen.values()}


def _before(model: nn.Module, layer: nn.Linear, images: Tensor) -> Tensor | None:
    """What the layer sees of images, ``[b, F]``; None if the model's output is not the layer's, if what it sees
    depends on what is trained, or if something was drawn at random on the way (then nothing was drawn after all)."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _layer, inputs, output: seen.append((inputs[0], output)))
    before = _drawn(images.device)
    try:
        logits = model(images)
    finally:
        handle.remove()
    drawn = _drawn(images.device)
    if any(not torch.equal(one, other) for one, other in zip(before, drawn, strict=True)):
        torch.random.set_rng_state(before[0])
        if len(before) > 1:
            torch.cuda.set_rng_state(before[1], images.device)
        return None
    if len(seen) != 1:
        return None
    features, output = seen[0]
    if output is not logits or features.requires_grad or features.shape != (len(images), layer.in_features):
        return None
    return features.detach()


def _drawn(device: torch.device) -> list[Tensor]:
    """Where PyTorch's generators stand."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
