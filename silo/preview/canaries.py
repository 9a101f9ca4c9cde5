"""Units of a hospital's own images that a rehearsal's training may or may not see."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import ImageDataset
from medsilo.privacy.budget.accounting import Unit
from medsilo.privacy.budget.noise import NoiseSource

FEWEST_UNITS = 20
"""Guesses about fewer prove nothing."""


class Blanking(NoiseSource):
    """Another source's noise and samples, but for units that no sample may hold."""

    def __init__(self, source: NoiseSource, blanked: npt.NDArray[np.int64]) -> None:
        super().__init__()
        self._source = source
        self._blanked = blanked

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        return self._source.gaussian(shape, deviation)

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        return np.setdiff1d(self._source.sample(count, rate), self._blanked, assume_unique=True)

    def shuffled(self, count: int) -> npt.NDArray[np.int64]:
        return self._source.shuffled(count)


def units_of(dataset: ImageDataset, unit: Unit) -> list[npt.NDArray[np.int64]]:
    """Each unit's training images, as indices."""
    if unit == "image":
        return list(np.arange(len(dataset.train), dtype=np.int64).reshape(-1, 1))
    from medsilo.silo.training.private_training import owners_of  # Opacus takes seconds to load

    owners = owners_of(dataset, unit)
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)


def without(dataset: ImageDataset, indices: npt.NDArray[np.int64]) -> ImageDataset:
    """The data set less some of its training images."""
    left = np.setdiff1d(np.arange(len(dataset.train), dtype=np.int64), indices)
    return dataclasses.replace(dataset, train=dataset.train.take(left))
