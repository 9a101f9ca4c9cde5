"""``silo budget``: what the privacy ledgers of a silo say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from privacy import accounting
from privacy.accounting import Guarantee, shown
from privacy.consent import ConsentFile, PrivacyConsent
from privacy.ledger import Entry, Subject, ledgers
from privacy.loss import DELTA
from silo.config import SiloConfig


@dataclass(frozen=True)
class Part:
    """What some of the charges would have cost alone; the whole is less than the parts' sum."""

    name: str
    charges: int
    epsilon: float


@dataclass(frozen=True)
class AccountView:
    """One ledger. ``left`` is the budget less what is spent; None where the consent gives it no budget."""

    subject: Subject
    spent: Guarantee
    budget: float | None
    left: float | None
    runs: tuple[Part, ...]
    releases: tuple[Part, ...]


def read_accounts(config: SiloConfig) -> list[AccountView]:
    """All ledgers of a silo; raises ``BudgetError`` for one that cannot be read."""
    consent = ConsentFile.read(config.consent).consent.privacy
    return [_view(ledger.subject, list(ledger.entries()), consent) for ledger in ledgers(config.ledgers)]


def _view(subject: Subject, entries: list[Entry], consent: PrivacyConsent | None) -> AccountView:
    budget = consent.budget(subject.split) if consent is not None and consent.unit == subject.unit else None
    delta = consent.delta if consent is not None else DELTA
    events = [entry.event for entry in entries]
    spent = accounting.epsilon(events, delta=delta, adjacency=subject.adjacency)

    def parts(name: Callable[[Entry], str]) -> tuple[Part, ...]:
        groups: dict[str, list[Entry]] = {}
        for entry in entries:
            groups.setdefault(name(entry), []).append(entry)
        return tuple(
            Part(key, len(own), accounting.epsilon([e.event for e in own], delta=delta, adjacency=subject.adjacency))
            for key, own in groups.items()
        )

    return AccountView(
        subject,
        Guarantee(spent, delta, subject.unit, subject.adjacency),
        budget,
        None if budget is None else max(budget - spent, 0.0),
        parts(lambda entry: f"{entry.purpose.federation}/{entry.purpose.run}"),
        parts(lambda entry: f"{entry.purpose.phase} ({entry.event.kind})"),
    )


def as_json(account: AccountView) -> dict[str, Any]:
    """An account for machines."""
    return {**asdict(account), "conditions": account.spent.conditions}


def tables(account: AccountView) -> list[Table]:
    """An account by run and by kind of release."""
    made = []
    for title, parts in (("run", account.runs), ("release", account.releases)):
        table = Table(
            title=f"Data set {account.subject.data_sha256[:16]}, split {account.subject.split}, by {title}: "
            f"δ = {account.spent.delta:g}, {account.spent.conditions}",
            title_justify="left",
        )
        for column in (title, "charges", "ε alone"):
            table.add_column(column, justify="left" if column == title else "right", overflow="fold")
        for part in parts:
            table.add_row(part.name, str(part.charges), shown(part.epsilon))
        made.append(table)
    return made


def lines(account: AccountView) -> list[str]:
    """What is spent and left, in words."""
    found = [f"Spent on these images ({account.subject.split} split), all runs together: {account.spent}."]
    if account.budget is None or account.left is None:
        found.append(f"The consent gives them no budget with the {account.subject.unit} as unit.")
    else:
        found.append(f"The consent's budget is {account.budget:g}; {shown(account.left)} of it is left.")
    found.append(
        "Another version of the data set has a ledger of its own; for images that are in both, the costs of both count."
    )
    return found
