"""What an audit's scores and guesses prove of μ, where a mechanism is claimed to be μ-Gaussian differentially private.

(Dong, Roth and Su, "Gaussian differential privacy", 2022: nobody tells a unit's presence from its absence better than
N(μ, 1) from N(0, 1). T Gaussian releases of multiplier z have μ = √T/z.) Every bound lies above the truth with
probability ``level`` at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri
from scipy.stats import beta, nct

_LARGEST = 20.0


def epsilon_of(mu: float, delta: float) -> float:
    """The least ε with which a Gaussian mechanism of that μ is (ε, δ)-private: Balle and Wang, "Improving the Gaussian
    mechanism for differential privacy", 2018, Theorem 8, solved for ε."""

    def spent(epsilon: float) -> float:
        return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))

    return _largest(lambda epsilon: spent(epsilon) > delta, 100.0) if mu > 0 else 0.0


def of_many_runs(*, runs: int, right: int, level: float) -> float:
    """From independent trainings, each with or without the canary by a fair coin, and guesses of the coins.

    No guess is right with a probability above Φ(μ/2). Of the mechanism nothing is taken for granted (Clopper and
    Pearson's interval, one-sided).
    """
    share = float(beta.ppf(level, right, runs - right + 1)) if right else 0.0
    return max(0.0, 2 * float(ndtri(share)))


def of_one_run(*, canaries: int, guesses: int, right: int, level: float) -> float:
    """From one training with many canaries, each in by a fair coin of its own, and so many guesses of the coins.

    Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run", 2024, Theorem 9 and Algorithm 3:
    of the mechanism nothing is taken for granted, and so the canaries' noise may even hang together.
    """
    return _largest(lambda mu: refuted(mu, canaries=canaries, guesses=guesses, right=right, level=level))


def refuted(mu: float, *, canaries: int, guesses: int, right: int, level: float) -> bool:
    """Whether no μ-Gaussian differentially private mechanism gives so many right guesses, or more, with a probability
    above ``level``.

    With pᵢ the probability of i right ones of r guesses of m, rᵢ = Σ_{j≥i} j·pⱼ/m and hᵢ = Σ_{j≥i} (r - j)·pⱼ/m,
    whoever turns one canary's coin over turns a right guess into a wrong one: hᵢ ≥ Φ(Φ⁻¹(rᵢ₊₁) - μ). From the least
    that the tail leaves, all pᵢ follow; together they cannot be above 1.
    """
    inside, outside = level * right / canaries, level * (guesses - right) / canaries
    for count in range(right - 1, -1, -1):
        if inside + outside > guesses / canaries:
            return True
        least = max(outside, float(ndtr(ndtri(inside) - mu)))
        inside += count / (guesses - count) * (least - outside)
        outside = least
    return inside + outside > guesses / canaries


def of_statistics(scores: npt.NDArray[np.float64], inside: npt.NDArray[np.bool_], *, level: float) -> float:
    """From one training, where canaries' scores are independent normal numbers of one deviation: that is what noise on
    gradients at right angles gives, and is taken for granted.

    The μ is how far apart the means of those in and of those left out are, in deviations: Student's t of the two groups
    has a noncentral distribution.
    """
    groups = scores[inside], scores[~inside]
    degrees = len(scores) - 2
    deviation = math.sqrt(sum(float(((one - one.mean()) ** 2).sum()) for one in groups) / degrees)
    scale = math.sqrt(sum(1 / len(one) for one in groups))
    found = float(groups[0].mean() - groups[1].mean()) / deviation / scale
    return _largest(lambda mu: float(nct.sf(found, degrees, mu / scale)) < level)


def _largest(holds: Callable[[float], bool], end: float = _LARGEST) -> float:
    """Up to where a condition holds that does not hold from some number on; rounded down."""
    low, high = 0.0, end
    if not holds(low):
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
