"""What guesses about membership prove: a lower bound on ε from one training run.

Some units (images, patients) are *canaries*: a fair coin for each decides whether the training sees it. Whoever then
guesses the coins from what the training gave, better than (ε, δ)-differential privacy allows, has shown that the
training is not (ε, δ)-private. Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run",
2023, Theorem 3.1 and Algorithm 1.

Nine guesses, all right, of nine canaries: too good for ε = 0.9, but not for ε = 1.

>>> round(epsilon_lower_bound(canaries=9, guesses=9, right=9, delta=0), 3)
0.929

A bound of 0 proves nothing; in particular it does not prove that the training is private.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""With a training that is (ε, δ)-private, a bound above ε comes out of at most one rehearsal in twenty."""

SHARES = (1.0, 0.5, 0.25, 0.1)
"""Of all canaries, the shares about which guesses are tried: all, and only the surest."""

_LARGEST = 64.0


def p_value(epsilon: float, *, canaries: int, guesses: int, right: int, delta: float) -> float:
    """The most that Theorem 3.1 gives the probability of so many right guesses, of any (ε, δ)-private training.

    With f(k) = P[W ≥ k] for W ~ Binomial(r, e^ε / (e^ε + 1)), r guesses of m canaries, v of them right, it is
    f(v) + 2 m δ · max over 1 ≤ i ≤ m of (f(v - i) - f(v)) / i, and 1 at most.

    Args:
        epsilon: at least 0.
        canaries: m, those of no guess included.
        guesses: r ≤ m.
        right: v ≤ r.
        delta: in [0, 1).

    Raises ``ValueError`` for numbers outside these ranges.
    """
    if not 0 <= right <= guesses <= canaries or not canaries:
        raise ValueError(f"{right} right of {guesses} guesses about {canaries} canaries: that cannot be")
    if not epsilon >= 0 or not 0 <= delta < 1:
        raise ValueError(f"epsilon is {epsilon} and delta {delta}; they must be at least 0, and delta below 1")
    if right == 0:
        return 1.0
    from scipy.special import betainc  # takes a moment to load

    # f(v), f(v - 1) … f(1), and f(0) = 1; beyond that f stays 1, so that the quotient only falls.
    least = np.arange(right, 0, -1)
    tails = np.append(betainc(least, guesses - least + 1, 1 / (1 + math.exp(-epsilon))), 1.0)
    slope = float(((tails[1:] - tails[0]) / np.arange(1, right + 1)).max())
    return min(1.0, float(tails[0]) + 2 * canaries * delta * slope)


@lru_cache(maxsize=4096)
def epsilon_lower_bound(
    *, canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest ε, rounded down, that so many right guesses refute; 0 where they refute none.

    The arguments are those of ``p_value``; ``confidence`` lies in (0, 1): a right bound comes out at least so often.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must lie in (0, 1)")

    def refuted(epsilon: float) -> bool:
        found = p_value(epsilon, canaries=canaries, guesses=guesses, right=right, delta=delta)
        return found <= 1 - confidence

    low, high = 0.0, _LARGEST
    if not refuted(low):
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Guesses:
    """The surest guesses: half of them "trained on" (the highest scores), half "left out" (the lowest).

    ``highest`` is what the bound would have been had all been right.
    """

    made: int
    right: int
    epsilon: float
    highest: float

    @property
    def chance(self) -> float:
        """The probability that tossed coins give so many right ones, or more."""
        return p_value(0.0, canaries=self.made, guesses=self.made, right=self.right, delta=0.0)


@dataclass(frozen=True)
class Attack:
    """One way of scoring canaries.

    ``auc``: the probability that a canary that was trained on has a higher score than one that was not: 0.5 for who
    knows nothing, 1 for who always knows; not a number where the coins all fell alike. ``guesses``: one for each of
    ``SHARES``.
    """

    name: str
    auc: float
    guesses: tuple[Guesses, ...]

    @property
    def best(self) -> Guesses:
        """The guesses that prove the most; where none prove anything, those that chance gives least."""
        return max(self.guesses, key=lambda found: (found.epsilon, -found.chance))


@dataclass(frozen=True)
class MembershipAudit:
    """What attackers' scores of the canaries prove.

    Attributes:
        canaries: m.
        trained: how many of them the coins gave to the training.
        attacks: each attacker's.
        delta: at which ``epsilon`` holds.
        confidence: with which it holds.
    """

    canaries: int
    trained: int
    attacks: tuple[Attack, ...]
    delta: float
    confidence: float

    @property
    def epsilon(self) -> float:
        """The lower bound: the best that any guesses prove."""
        return self.best.best.epsilon

    @property
    def best(self) -> Attack:
        """The attacker that proves the most, or else whose guesses chance gives least."""
        return max(self.attacks, key=lambda attack: (attack.best.epsilon, -attack.best.chance))

    @property
    def tests(self) -> int:
        """How many sets of guesses were tried, of which the best is told."""
        return sum(len(attack.guesses) for attack in self.attacks)

    @property
    def chance(self) -> float:
        """The most that the probability can be that tossed coins do as well in any of the tests."""
        return min(1.0, self.tests * self.best.best.chance)

    @property
    def highest(self) -> float:
        """What the bound would have been had every guess been right. Of a training that keeps no promise at all, no
        more than this can be noticed with so few canaries."""
        return max(guesses.highest for attack in self.attacks for guesses in attack.guesses)


def audit_scores(
    scores: Mapping[str, npt.NDArray[np.float64]],
    trained: npt.NDArray[np.bool_],
    *,
    delta: float,
    confidence: float = CONFIDENCE,
) -> MembershipAudit:
    """Guesses about the canaries from their scores, and what the right ones prove.

    Every share in ``SHARES`` is a test, for every attacker; each is made at a confidence with which all together hold
    at ``confidence`` (a union bound), so that the best may be taken.

    Args:
        scores: by attacker, ``float64 [m]``, m ≥ 2, finite; the higher, the likelier the canary was trained on. They
            may depend on everything but the coins themselves.
        trained: the coins, ``bool [m]``: fair, independent, and thrown for this run.
        delta: at which the bound is to hold.

    Raises ``ValueError`` for arrays of other shapes, or scores that are not finite.
    """
    count = len(trained)
    for name, found in scores.items():
        if count < 2 or found.shape != (count,) or not np.isfinite(found).all():
            raise ValueError(
                f"{name}: scores {found.shape} of {count} canaries; there must be two at least, all finite"
            )
    single = 1 - (1 - confidence) / (len(SHARES) * len(scores))

    def bound(made: int, right: int) -> float:
        return epsilon_lower_bound(canaries=count, guesses=made, right=right, delta=delta, confidence=single)

    attacks = []
    for name, found in scores.items():
        order = np.argsort(found, kind="stable")
        tests = []
        for share in SHARES:
            half = max(1, math.floor(share * count / 2))
            right = int(trained[order[-half:]].sum()) + int((~trained[order[:half]]).sum())
            tests.append(Guesses(2 * half, right, bound(2 * half, right), bound(2 * half, 2 * half)))
        attacks.append(Attack(name, area_under_curve(found, trained), tuple(tests)))
    return MembershipAudit(count, int(trained.sum()), tuple(attacks), delta, confidence)


def area_under_curve(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float:
    """The share of pairs (positive, negative) in which the positive has the higher score; equal ones count half."""
    inside, outside = scores[positive], np.sort(scores[~positive])
    if not len(inside) or not len(outside):
        return math.nan
    below = np.searchsorted(outside, inside, side="left")
    upto = np.searchsorted(outside, inside, side="right")
    return float((below + upto).mean() / 2 / len(outside))
