"""What a journal tells of the privacy loss of a party's images: replayed from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Event, Guarantee
from medsilo.privacy.budget.ledger import Charges, Subject, read_spent
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
        alone: what they come to with no more than the hospital's own share of noise that was shared out; None where
            none was.
        of_unit: what the version's most-spent image (patient) has cost, by charges for other versions, units or splits
            too, as the journal says it; None where it says nothing of others.
    """

    data_sha256: str
    split: str
    spent: Guarantee
    charges: int
    budget: float | None
    of_unit: Guarantee | None = None
    alone: Guarantee | None = None

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
        if self.alone is not None:
            told += f". {self.alone.if_alone.removesuffix('.')}"
        if self.budget is None:
            return f"{told}; the consent names no budget for that unit."
        if self.left is None:
            return f"{told}; at the δ of the newest consent that is not known: `silo budget` tells it."
        return f"{told}; of the budget of {self.budget:g}, {shown(self.left)} is left."


class Losses:
    """Takes what a journal tells of charges, in the order of its records.

    Its methods raise ``KeyError``, ``TypeError`` or ``ValueError`` for what cannot be read, or is told in two ways.
    """

    def __init__(self) -> None:
        self._charges = Charges()
        self._of_unit: dict[Subject, Guarantee | None] = {}

    def charged(self, charge: Mapping[str, Any]) -> None:
        """Takes a charge, which may have been told of before."""
        self._charges.add(charge)

    def spent(self, charge: Mapping[str, Any], of_unit: Mapping[str, Any] | None) -> None:
        """Takes what the most-spent image (patient) has cost when a charge was made; None where nothing is said of
        other accounts."""
        subject = Subject.read(charge)
        found = None if of_unit is None else Guarantee(*read_spent(of_unit), subject.unit, subject.adjacency)
        self._of_unit[subject] = found

    def voided(self, charge: Mapping[str, Any], record: int) -> None:
        """From the record with this number on, a charge counts no more."""
        self._charges.void(charge, record)

    def by_account(self, consents: Iterable[Mapping[str, Any]]) -> list[PrivacyLoss]:
        """What each account has cost; ``consents``: what the journal's consents say, oldest first."""
        budget: Mapping[str, Any] = {}
        for consent in consents:
            budget = consent.get("privacy") or {}
        delta = float(budget.get("delta", DELTA))
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
                self._of_unit.get(subject),
                _alone(own, delta, subject),
            )
            for subject, own in self._charges.events().items()
        ]


def _alone(events: Sequence[Event], delta: float, subject: Subject) -> Guarantee | None:
    own = [accounting.own_share(event) for event in events]
    if own == list(events):
        return None
    cost = accounting.epsilon(own, delta=delta, adjacency=subject.adjacency)
    return Guarantee(cost, delta, subject.unit, subject.adjacency)


def _budget(consent: Mapping[str, Any], subject: Subject) -> float | None:
    found = consent["epsilon"] if subject.split == "train" else consent.get("metrics_epsilon")
    return None if found is None else float(found)
