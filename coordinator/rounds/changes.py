"""What is said of each silo's change of the model in a round: how long it is, and whether it points where others' do.

Unusual is not malicious: a hospital whose patients differ from the others' sends updates that differ. And a poisoned
update can be made to look usual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from medsilo.coordinator.store.records import Change

LEAST_SPREAD = 0.1
"""Of the median: silos that agree closely do not make a small difference unusual (ours)."""
FEWEST = 3
"""Fewer silos have no majority to differ from."""


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
