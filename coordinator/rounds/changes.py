"""What is said of each silo's change of the model in a round: how long it is, and whether it points where others' do.

Unusual is not malicious: a hospital whose patients differ from the others' sends updates that differ. And a poisoned
update can be made to look usual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNUSUAL_SCORE = 3.5
"""Of a norm's robust z-score: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993."""
AGAINST = -0.5
"""Cosines below it are unusual (ours): honest silos that differ come below -0.25 now and then (docs/poisoning.md)."""
LEAST_SPREAD = 0.1
"""Of the median: silos that agree closely do not make a small difference unusual (ours)."""
FEWEST = 3
"""Fewer silos have no majority to differ from."""


@dataclass(frozen=True)
class Change:
    """One silo's change in one round.

    Attributes:
        norm: Euclidean, of the update minus what the silo was sent.
        score: robust z-score of the norm among the round's: (norm − median) / max(1.4826 · MAD, 0.1 · median); None
            with fewer than three silos, or where most did not change anything.
        cosine: the median of its cosines with each other silo's change; None where there is nothing to compare.
    """

    norm: float
    score: float | None
    cosine: float | None

    @property
    def unusual(self) -> list[str]:
        """What is unusual about it, in words; empty where nothing is."""
        found = []
        if self.score is not None and abs(self.score) > UNUSUAL_SCORE:
            found.append("much larger than others'" if self.score > 0 else "much smaller than others'")
        # Without a score there are too few to tell.
        if self.score is not None and self.cosine is not None and self.cosine < AGAINST:
            found.append("points against most others'")
        return found


def compare(products: Sequence[Sequence[float]]) -> list[Change]:
    """The figures of N silos, of the inner products ``[N][N]`` of their changes."""
    norms = [math.sqrt(max(0.0, row[place])) for place, row in enumerate(products)]
    scores = _scores(norms)
    found = []
    for place, (norm, score) in enumerate(zip(norms, scores, strict=True)):
        cosines = [
            max(-1.0, min(1.0, product / norm / other))
            for index, (product, other) in enumerate(zip(products[place], norms, strict=True))
            if index != place and norm > 0 and other > 0
        ]
        found.append(Change(norm, score, statistics.median(cosines) if cosines else None))
    return found


def _scores(norms: Sequence[float]) -> list[float | None]:
    if len(norms) < FEWEST or (middle := statistics.median(norms)) == 0:
        return [None] * len(norms)
    spread = 1.4826 * statistics.median(abs(norm - middle) for norm in norms)
    return [(norm - middle) / max(spread, LEAST_SPREAD * middle) for norm in norms]
