"""What a journal tells of the privacy loss of a party's images: replayed from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from privacy import accounting
from privacy.accounting import Guarantee, shown
from privacy.errors import JournalError
from privacy.ledger import Subject, replay

DELTA = 1e-5
"""At which a loss is told where no consent names a δ."""


@dataclass(frozen=True)
class PrivacyLoss:
    """One data set version's account. ``budget`` is the newest consent's, where it has one for this unit."""

    data_sha256: str
    split: str
    spent: Guarantee
    charges: int
    budget: float | None

    @property
    def left(self) -> float | None:
        """What is left of the budget."""
        return None if self.budget is None else max(self.budget - self.spent.epsilon, 0.0)

    def __str__(self) -> str:
        what = "training with" if self.split == "train" else "measuring on the test images, apart from training, with"
        told = f"All {what} differential privacy on data set {self.data_sha256[:16]} has cost {self.spent}"
        if self.budget is None or self.left is None:
            return f"{told}; the consent names no budget for that unit."
        return f"{told}; of the budget of {self.budget:g}, {shown(self.left)} is left."


def privacy_losses(records: Iterable[Mapping[str, Any]], consents: Iterable[Mapping[str, Any]]) -> list[PrivacyLoss]:
    """The accounts that a journal's records tell of; ``consents`` are its records of consents, oldest first.

    Raises ``JournalError`` for charges that cannot be read, or of which two records say different things.
    """
    budget: Mapping[str, Any] = {}
    for record in consents:
        budget = record["consent"].get("privacy") or {}
    delta = float(budget.get("delta", DELTA))
    try:
        events = replay(records)
    except ValueError as error:
        raise JournalError(f"the journal's records of privacy loss cannot be read: {error}") from None
    return [
        PrivacyLoss(
            subject.data_sha256,
            subject.split,
            Guarantee(
                accounting.epsilon(own, delta=delta, adjacency=subject.adjacency),
                delta,
                subject.unit,
                subject.adjacency,
            ),
            len(own),
            _budget(budget, subject) if budget.get("unit") == subject.unit else None,
        )
        for subject, own in events.items()
    ]


def _budget(consent: Mapping[str, Any], subject: Subject) -> float | None:
    found = consent["epsilon"] if subject.split == "train" else consent.get("metrics_epsilon")
    return None if found is None else float(found)
