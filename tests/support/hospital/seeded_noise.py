"""Noise of private training that is the same every time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from medsilo.privacy.budget.noise import NoiseSource


class Seeded(NoiseSource):
    """Noise that can be repeated; ``factor`` is what a fault makes of its scale."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        self._generator = np.random.default_rng(seed)
        self.factor = factor
        self.counts: set[int] = set()

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        return super().gaussian(shape, deviation) * self.factor

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        self.counts.add(count)
        return super().sample(count, rate)
