"""Random changes of training images, as the plan lists them (``medsilo.privacy.consent.plan.AugmentationPlan``).

    change = Augmenter(plan.training.augmentation, seeded(7))
    batch = change(images)   # float32 [b, C, H, W], as networks take them, in [-1, 1]

Every image becomes one changed image: no batch grows, and under differential privacy a record stays one record. Draws
never depend on pixels. Those of a plain training follow from the seed and the places in the batches, and not from
PyTorch's own generator: daemons and simulation draw the same. Under differential privacy they come from the secret
source of the samples: by draws that are known, the others' changes would tell who else is in a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medsilo.privacy.consent.plan import AugmentationPlan

Draws = Callable[[int], Tensor]
"""Gives the draws of so many images: float32 ``[n, 2]`` from [0, 1), on the CPU whatever the images are on."""


def seeded(seed: int) -> Draws:
    """The draws of a seed, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.rand(count, 2, generator=generator)


class Augmenter:
    """Changes batch after batch; draws go on from one to the next.

    Args:
        steps: applied in this order; none leave the images as they are, bit by bit.
        draws: at random, anew for each step.
    """

    def __init__(self, steps: Sequence[AugmentationPlan], draws: Draws) -> None:
        self._steps = steps
        self._draws = draws

    def __call__(self, images: Tensor, *, first: int = 0, of: int | None = None) -> Tensor:
        """Changed copies of the images ``[b, C, H, W]``; from the ``first`` place of a batch ``of`` so many, for all
        of which is drawn."""
        if not self._steps:
            return images
        shown = images * 0.5 + 0.5  # 0 is black, 1 white
        for step in self._steps:
            drawn = self._draws(of or len(images))[first : first + len(images)]
            shown = _CHANGES[step.kind](shown, drawn, step.amount)
        return (shown - 0.5) / 0.5


def _flip(axis: int) -> Callable[[Tensor, Tensor, float], Tensor]:
    def flip(images: Tensor, drawn: Tensor, probability: float) -> Tensor:
        chosen = (drawn[:, 0] < probability).to(images.device)
        return torch.where(chosen[:, None, None, None], images.flip(axis), images)

    return flip


def _rotate(images: Tensor, drawn: Tensor, degrees: float) -> Tensor:
    """About the centre; between pixels it is linear, and beyond an edge the mirror."""
    angles = (2 * drawn[:, 0] - 1) * math.radians(degrees)
    height, width = images.shape[2:]
    cos, sin, none = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # Coordinates go from -1 to 1 along either side, however long it is.
    rows = [torch.stack(row, dim=1) for row in ((cos, -sin * height / width, none), (sin * width / height, cos, none))]
    grid = F.affine_grid(torch.stack(rows, dim=1).to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _crop(images: Tensor, drawn: Tensor, pixels: float) -> Tensor:
    margin = int(pixels)
    height, width = images.shape[2:]
    padded = F.pad(images, [margin] * 4, mode="reflect")
    # A draw is below 1, but times a whole number it may be rounded up to it.
    places = (drawn * (2 * margin + 1)).long().clamp(max=2 * margin).tolist()
    return torch.stack([one[:, y : y + height, x : x + width] for one, (y, x) in zip(padded, places, strict=True)])


def _colour(name: str, middle: float) -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's ``adjust_…``, with a factor of each image's own between ``middle`` ± the amount."""

    def adjust(images: Tensor, drawn: Tensor, amount: float) -> Tensor:
        from torchvision.transforms.v2 import functional  # takes seconds to load

        change = getattr(functional, f"adjust_{name}")
        factors = (middle + (2 * drawn[:, 0].double() - 1) * amount).tolist()
        return torch.stack([change(one, factor) for one, factor in zip(images, factors, strict=True)])

    return adjust


_CHANGES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "horizontal_flip": _flip(3),
    "vertical_flip": _flip(2),
    "rotation": _rotate,
    "crop": _crop,
    "brightness": _colour("brightness", 1),
    "contrast": _colour("contrast", 1),
    "saturation": _colour("saturation", 1),
    "hue": _colour("hue", 0),
}
