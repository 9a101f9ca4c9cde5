"""What a journal tells of the privacy loss of a party's images: replayed from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Guarantee
from medsilo.privacy.budget.ledger import Subject, read_spent, replay
from medsilo.privacy.errors import JournalError
from medsilo.privacy.pages.wording import shown

DELTA = 1e-5
"""At which a loss is told where no consent names a δ."""


@dataclass(frozen=True)
class PrivacyLoss:
    """One data set version's account.

    Attributes:
        data_sha256: the version.
        split: train or test.
        spent: what the account's charges come to.
        charges: how many those are.
        budget: the newest consent's, where it has one for this unit.
        of_unit: what the version's most-spent image (patient) has cost, by charges for other versions, units or splits
            too, as the journal says it; None where it says nothing of others.
    """

    data_sha256: str
    split: str
    spent: Guarantee
    charges: int
    budget: float | None
    of_unit: Guarantee | None = None

    @property
    def most(self) -> Guarantee:
        """What the most-spent image (patient) has cost, as far as is known."""
        return self.spent if self.of_unit is None or self.of_unit.epsilon < self.spent.epsilon else self.of_unit

    @property
    def left(self) -> float | None:
        """What is left of the budget; None where there is none, or at another δ than the newest statement."""
        if self.budget is None or (self.of_unit is not None and self.of_unit.delta != self.spent.delta):
            return None
        return max(self.budget - self.most.epsilon, 0.0)

    def __str__(self) -> str:
        what = "training with" if self.split == "train" else "measuring on the test images, apart from training, with"
        told = f"All {what} differential privacy on data set {self.data_sha256[:16]} has cost {self.spent}"
        if self.of_unit is not None:
            told += (
                f". With what was charged for the same {self.spent.unit}s in other versions, units or splits of the "
                f"data set, the {self.spent.unit} that has cost most has cost {self.of_unit}"
            )
        if self.budget is None:
            return f"{told}; the consent names no budget for that unit."
        if self.left is None:
            return f"{told}; at the δ of the newest consent that is not known: `silo budget` tells it."
        return f"{told}; of the budget of {self.budget:g}, {shown(self.left)} is left."


def privacy_losses(records: Iterable[Mapping[str, Any]], consents: Iterable[Mapping[str, Any]]) -> list[PrivacyLoss]:
    """The accounts that a journal's records tell of; ``consents`` are its records of consents, oldest first.

    Raises ``JournalError`` for charges that cannot be read, or of which two records say different things.
    """
    budget: Mapping[str, Any] = {}
    for record in consents:
        budget = record["consent"].get("privacy") or {}
    delta = float(budget.get("delta", DELTA))
    records = list(records)
    try:
        events = replay(records)
        of_unit = _of_unit(records)
    except (ValueError, KeyError, TypeError) as error:
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
            of_unit.get(subject),
        )
        for subject, own in events.items()
    ]


def _of_unit(records: Iterable[Mapping[str, Any]]) -> dict[Subject, Guarantee | None]:
    found: dict[Subject, Guarantee | None] = {}
    for record in records:
        if "spent" in record:
            subject, said = Subject.read(record["charge"]), record.get("unit_spent")
            found[subject] = None if said is None else Guarantee(*read_spent(said), subject.unit, subject.adjacency)
    return found


def _budget(consent: Mapping[str, Any], subject: Subject) -> float | None:
    found = consent["epsilon"] if subject.split == "train" else consent.get("metrics_epsilon")
    return None if found is None else float(found)
