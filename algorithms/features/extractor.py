"""What a fixed extractor is: features of one image, that nobody trains."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

SMALLEST = 16
"""The smallest height and width, in pixels."""


class Extractor(Protocol):
    """What features that are kept are made by: a function of one image."""

    @property
    def definition(self) -> str:
        """What it computes, in one line: features that are kept are found by it. Another computation, or other weights,
        have another definition."""

    @property
    def features(self) -> int:
        """F, how many numbers it gives for an image."""

    def __call__(self, images: Tensor) -> Tensor:
        """float32 ``[n, F]`` of images ``[n, C, H, W]`` in [-1, 1], on the device where it is."""


class FixedExtractor(nn.Module):
    """A function of one image that has no parameter and never changes.

    What it says of an image depends on no other image. Constants that it needs are no part of a model's state
    (``persistent=False``), so they do not travel.

    Attributes:
        definition: what it computes, in one line, with a version. Another computation needs another.
        features: F, how many numbers it gives for an image.
        bound: no image's features are longer (Euclidean norm).
        pixels_at_once: for how many pixels it has memory at once; larger batches are cut.
    """

    definition: str
    features: int
    bound: float
    pixels_at_once: ClassVar[int] = 1 << 18

    def forward(self, images: Tensor) -> Tensor:
        """float32 ``[n, F]`` of images ``[n, 1 or 3, H, W]`` in [-1, 1], H and W ≥ 16. Grey ones count as RGB of three
        equal channels. No gradient goes back to the images. Raises ``ValueError`` for others."""
        if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < SMALLEST:
            raise ValueError(
                f"images of [n, 1 or 3, {SMALLEST} or more, {SMALLEST} or more] are needed, not {list(images.shape)}"
            )
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            coloured = images.expand(-1, 3, -1, -1)
            if torch.compiler.is_exporting():  # the graph is of any number of images
                return self.of(coloured)
            at_once = max(1, self.pixels_at_once // (images.shape[2] * images.shape[3]))
            return torch.cat([self.of(part) for part in torch.split(coloured, at_once)])

    @abstractmethod
    def of(self, images: Tensor) -> Tensor:
        """float32 ``[n, F]`` of RGB images ``[n, 3, H, W]`` in [-1, 1]."""
