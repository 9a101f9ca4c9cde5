"""What a journal tells of charges, from its records as JSON objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from medsilo.privacy.budget.accounting import Event
from medsilo.privacy.budget.ledger import Charges, Subject
from medsilo.privacy.budget.loss import Losses
from medsilo.privacy.journal.records import LedgerRecord, VoidRecord, charges_of, read


def told(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every charge, as often as it is told."""
    return [charge for record in records for charge in charges_of(read(dict(record)))]


def replay(records: Iterable[Mapping[str, Any]]) -> dict[Subject, list[Event]]:
    """The events of each account."""
    charges = Charges()
    for record in map(read, map(dict, records)):
        for charge in charges_of(record):
            charges.add(charge)
        if isinstance(record, VoidRecord):
            charges.void(record.charge, record.index)
    return charges.events()


def losses(records: Iterable[Mapping[str, Any]]) -> Losses:
    """As a report takes them."""
    found = Losses()
    for record in map(read, map(dict, records)):
        for charge in charges_of(record):
            found.charged(charge)
        if isinstance(record, LedgerRecord) and record.spent is not None:
            found.spent(record.charge, record.unit_spent)
    return found
