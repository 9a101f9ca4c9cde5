"""Why a run, or a hospital's part in one, has ended before its plan's last round, in words that travel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class EndReason(Enum):
    """What ended a run: the name is the wire's and the database's; the value is what people read, and names no
    hospital."""

    WITHDRAWN = "every hospital has withdrawn"
    TOO_FEW_FOR_MASKS = "so many hospitals have withdrawn that too few are left for a masked sum"
    WITHDRAWN_FROM_MASKS = "a hospital has withdrawn, and a masked sum over the others would give away what it sent"
    UNKNOWN = "for a reason that this release does not know; ask the coordinator's operator"


@dataclass(frozen=True)
class EarlyEnd:
    """``rounds``: so many had been done."""

    rounds: int
    reason: EndReason

    def words(self, planned: int) -> str:
        """``ended after 2 of 30 rounds: every hospital has withdrawn``."""
        return f"ended {self.when(planned)}: {self.reason.value}"

    def when(self, planned: int) -> str:
        """``after 2 of 30 rounds``."""
        return f"after {self.rounds} of {planned} round{'' if planned == 1 else 's'}"


class Cause(StrEnum):
    """Why a hospital's part in a run ended early. These words travel; a hospital's own reasons do not."""

    WITHDRAWN = "withdrawn by the hospital"
    EXPIRED = "consent expired"
    NARROWED = "consent narrowed"
    ROUNDS = "round cap reached"
    BUDGET = "privacy budget used up"
