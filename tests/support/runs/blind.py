"""Plans with blind mixtures."""

from __future__ import annotations

from typing import Any

from tests.support.runs.federation import Federation
from tests.support.runs.masked import Make

BLIND = [
    "PROTOCOL",
    "IDENTITY",
    "SEALED_MODEL",
    "MODEL_DISTANCES",
    "OPENING_SHARES",
    "MIXING_WEIGHTS",
    "SEALED_MIXTURE",
]
EXACT = 1 << 18
"""A sketch that is larger than the tests' models: distances are right up to rounding."""
ANY = 1000.0
"""An isolation that no method's weights come to: they stay as they are."""


SMOOTH = {"epochs": 1, "batch_size": 30, "optimizer": "sgd", "learning_rate": 0.1}
"""Adam makes whole steps of the least differences."""
NEAR = 1e-3
"""Weights are multiples of 2^-10 and models' numbers some 0.1 apart; errors add a tenth of that; training magnifies
both, to 3·10^-4 as measured. Without mixtures, models are 10^-2 away."""
SETTINGS = {"mode": "blind", "minimum": 3, "sketch_size": EXACT, "largest_isolation": ANY}


def blind(
    make: Make, *, run: dict[str, Any] | None = None, isolation: float = ANY, sketch: int = EXACT, **options: Any
) -> Federation:
    settings = {
        "rounds": 2,
        "ask_for": [],
        "secure_aggregation": {**SETTINGS, "sketch_size": sketch, "largest_isolation": isolation},
    }
    one = make(run={**settings, **(run or {})}, exposures=BLIND, **options)
    for name in one.silos:
        one.write_consent(name, secure_aggregation={"minimum": 3, "largest_isolation": isolation, "largest_sketch": 1})
    return one
