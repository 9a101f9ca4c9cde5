"""How it stands with a party's witnesses, in words and for Prometheus.

What is known of them stands in the state folder (``medsilo.privacy.witness.status``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def witness_lines(witnesses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How it stands with a party's witnesses (``read_status``), a line each."""
    lines = []
    for name, one in witnesses.items():
        seen = "has cosigned nothing yet"
        if one["time"]:
            seen = (
                f"has cosigned the first {one['size']} records ({datetime.fromtimestamp(one['time'], UTC):%F %R} UTC)"
            )
        away = f"; away since {one['away_since']}: {one['away']}" if one["away"] else ""
        lines.append(f"witness {name} {seen}{away}")
    return lines


def witness_gauges(witnesses: Mapping[str, Mapping[str, Any]], registry: CollectorRegistry) -> None:
    """The same for Prometheus."""
    from prometheus_client import Gauge

    away = Gauge("medsilo_witness_away", "1 while a witness does not answer.", ["witness"], registry=registry)
    time = Gauge("medsilo_witness_time", "When it cosigned last, in s since 1970.", ["witness"], registry=registry)
    size = Gauge("medsilo_witness_records", "How many records it has cosigned.", ["witness"], registry=registry)
    for name, one in witnesses.items():
        away.labels(name).set(one["away"] is not None)
        time.labels(name).set(one["time"] or 0)
        size.labels(name).set(one["size"])
