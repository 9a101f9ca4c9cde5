"""Noise that several hospitals add to a masked sum together, as whole numbers in the ring of the masks.

Each hospital makes its clipped sum of gradients a vector of whole numbers, multiples of 2^-F, and adds discrete
Gaussian noise of deviation s to each (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation", 2021). Of the sum over all, the noise of the m hospitals that are honest,
whose noise nobody else knows, has deviation √m·s. That it costs no more than a Gaussian release of multiplier z:

* **What one unit moves.** Blanking a unit moves a hospital's sum by at most C, which is Δ = η·C·2^F in multiples once
  it is scaled by the step size η. Rounding moves each of the d coordinates by at most ½, and so does the product's last
  bit: the whole numbers of neighbours lie at most Δ + 2√d apart. In a ring of 2^64 there is room to make that as good
  as Δ: no random rounding, no rotation and no flattening is needed, as it is where every bit counts.
* **The sum of discrete Gaussians.** Their sum over m is no discrete Gaussian, but its probabilities are those of the
  discrete Gaussian of deviation √m·s but for factors of e^±τ, τ = 10·Σ_{k<m} exp(-2π²s²·k/(k + 1)) (shown there).
* **From discrete to continuous.** Draw a continuous Gaussian y of variance v² - r² around a whole number μ, and then a
  whole number x around y with probability proportional to exp(-(x - y)²/2r²). That x is a discrete Gaussian around μ of
  deviation v, but for factors within 1 ± 5·exp(-2π²r²): the sum over whole x of exp(-(x - y)²/2r²) hardly depends on y
  (Peikert, "An Efficient and Parallel Gaussian Sampler for Lattices", 2010, section 3). So what leaves is made from
  a continuous Gaussian release of deviation √(v² - r²), whose privacy loss distribution is what the accountant has.
* **The deviation** s is therefore the least whole number with m·s² - r² ≥ (z·(Δ + 2√d))², and 6 at least. For one
  number the sum's factor is then within 1 ± 10^-153, and with r = 4 the other within 1 ± 10^-136. Of all d numbers in
  all rounds together, 10^30 and more of them, they change a probability by less than one part in 10^100.
* **Wrap-around.** Adding up modulo 2^64 is made from the sum, so it costs nothing. That it spoils nothing is a matter
  of room: ``check_room``.

Noise that is added in floating point, and rounded then, would be a hospital's own function of its own noise: of several
such the sum is not what the sum of all noise gives, and nothing bounds what it tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medsilo.privacy.budget.discrete_gaussian import LARGEST_DEVIATION
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.errors import TrainingError

SMOOTHING = 4
"""r."""

LEAST_DEVIATION = 6
"""Of a share, so that sums of shares are discrete Gaussians but for a factor that is nothing."""

MOST_SILOS = 1024
"""In one sum; each may take its share of the ring."""

_ROOM = 1 << 51
"""A quarter of a silo's share of ±2^63: so much for its step, noise apart, and so much for its model. Below 2^52, so
that float64 holds each whole number."""


@dataclass(frozen=True)
class Lattice:
    """How a hospital's sum of gradients becomes whole numbers with its share of the noise.

    Attributes:
        rate: η, the step size, by which the sum is scaled.
        clipping_norm: C, the most that one unit counts in the sum (its Euclidean norm).
        fraction_bits: F; whole numbers are multiples of 2^-F.
        noise_multiplier: z, of the honest hospitals' noise together.
        honest: m, how many of those there are at least.
        dimension: d, how many numbers the sum has.
    """

    rate: float
    clipping_norm: float
    fraction_bits: int
    noise_multiplier: float
    honest: int
    dimension: int

    @property
    def sensitivity(self) -> float:
        """By how much blanking one unit moves the whole numbers, rounding included: Δ + 2√d."""
        return self.rate * self.clipping_norm * self._multiples + 2 * math.sqrt(self.dimension)

    @property
    def deviation(self) -> int:
        """s, of one hospital's share of the noise on each number."""
        needed = (self.noise_multiplier * self.sensitivity) ** 2 + SMOOTHING**2
        # Rounding of the square root is made up for by one more.
        return max(LEAST_DEVIATION, math.isqrt(math.ceil(needed / self.honest)) + 1)

    def check_room(self, units: int) -> None:
        """Raises ``TrainingError`` unless the sum over so many units has room in a hospital's share of the ring. That
        is found by public numbers alone: a refusal by what the sum is would tell of it."""
        largest = units * self.rate * self.clipping_norm * self._multiples
        if largest > _ROOM or self.deviation > LARGEST_DEVIATION:
            raise TrainingError(
                f"the sum of {units} clipped gradients, times the learning rate {self.rate:g}, has no room for its "
                f"noise in masked numbers of fraction_bits {self.fraction_bits}. Nothing of it was sent; ask the "
                "coordinator for fewer `fraction_bits`, or a smaller learning rate"
            )

    def noised(self, total: npt.NDArray[np.float64], source: NoiseSource) -> npt.NDArray[np.int64]:
        """A sum of clipped gradients ``[d]`` as whole numbers with this hospital's share of the noise."""
        exact = np.rint(total * (self.rate * self._multiples)).astype(np.int64)
        return exact + source.discrete_gaussians(len(total), self.deviation)

    @property
    def _multiples(self) -> float:
        return 2.0**self.fraction_bits
