"""What the store keeps, as the rest of the coordinator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

EVERYONE = "*"
"""In place of a silo's name: a download for every silo that has none of its own."""


@dataclass(frozen=True)
class Member:
    """A silo's answer to the plan; ``missing`` names what its consent lacked."""

    silo: str
    accepted: bool
    missing: tuple[str, ...]
    audit_key: str
    certificate_sha256: str
    answered_at: str


@dataclass(frozen=True)
class Participation:
    """A silo in a round. ``late``: the round ended without it. ``file``: where its update lies. ``change``: what is
    said of it beside the others'; None for masked rounds, updates without a model, and until the round has ended."""

    round: int
    silo: str
    delivered_at: str | None
    late: bool
    file: str | None
    receipt: dict[str, Any] | None
    accuracy: float | None
    loss: float | None
    change: Change | None = None


@dataclass(frozen=True)
class RoundState:
    """A round's times (UTC, ISO 8601) and its participants by silo."""

    number: int
    opened_at: str
    closed_at: str | None
    participants: Mapping[str, Participation]


@dataclass(frozen=True)
class Withdrawal:
    """The end of a silo's part before the run's: ``statement`` is its own signed word (a DSSE envelope).

    ``rounds_acknowledged``: rounds whose updates had been acknowledged to it. ``dropped_round``: the one among them
    that was still open, so that its update is used for nothing.
    """

    silo: str
    at: str
    reason: str
    rounds_acknowledged: tuple[int, ...]
    dropped_round: int | None
    statement: Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A request that was turned away."""

    at: str
    peer: str
    rpc: str
    reason: str


def now() -> str:
    """The time, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


UNUSUAL_SCORE = 3.5
"""Of a norm's robust z-score: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993."""
AGAINST = -0.5
"""Cosines below it are unusual (ours): honest silos that differ come below -0.25 now and then (docs/poisoning.md)."""


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
