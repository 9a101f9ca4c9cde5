"""Plans under masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


MASKED = ["PROTOCOL", "IDENTITY", "MASKED_UPDATE", "PEER_DERIVED"]


def masked(
    make: Make, *, exposures: list[str] = MASKED, run: dict[str, Any] | None = None, **options: Any
) -> Federation:
    settings = {"method": {"name": "fedavg"}, "rounds": 2, "ask_for": [], "secure_aggregation": {"minimum": 3}}
    one = make(run={**settings, **(run or {})}, exposures=exposures, **options)
    if settings["secure_aggregation"] and exposures == MASKED:
        for name in one.silos:
            one.write_consent(name, secure_aggregation={"minimum": 3})
    return one
