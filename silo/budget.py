"""``silo budget``: what the privacy ledgers of a silo say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from privacy import accounting
from privacy.accounting import Event, Guarantee, shown
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
    """One ledger. ``left`` is the budget less what is spent; None where the consent gives it no budget. ``course``: the
    ε after so many charges, of at most ``POINTS`` numbers of charges, the first and the last among them."""

    subject: Subject
    spent: Guarantee
    budget: float | None
    left: float | None
    runs: tuple[Part, ...]
    releases: tuple[Part, ...]
    course: tuple[tuple[int, float], ...]


POINTS = 40
"""For so many points of a ledger's course the ε is computed: each takes a tenth of a second."""


def read_accounts(config: SiloConfig, *, course: bool = False) -> list[AccountView]:
    """All ledgers of a silo, with their course if it is wanted; raises ``BudgetError`` for one that cannot be read."""
    consent = ConsentFile.read(config.consent).consent.privacy
    found = ledgers(config.ledgers)
    return [_view(ledger.subject, list(ledger.entries()), consent, course=course) for ledger in found]


def _view(subject: Subject, entries: list[Entry], consent: PrivacyConsent | None, *, course: bool) -> AccountView:
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
        _course(events, delta, subject) if course else (),
    )


def _course(events: list[Event], delta: float, subject: Subject) -> tuple[tuple[int, float], ...]:
    count = len(events)
    steps = min(count, POINTS) - 1
    places = sorted({1 + round(step * (count - 1) / steps) for step in range(steps + 1)} if steps > 0 else {count})
    return tuple(
        (place, accounting.epsilon(events[:place], delta=delta, adjacency=subject.adjacency))
        for place in places
        if place
    )


def as_json(account: AccountView) -> dict[str, Any]:
    """An account for machines."""
    content = {**asdict(account), "conditions": account.spent.conditions}
    del content["course"]
    return content


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
    found = [
        f"Spent on these images ({account.subject.split} split) by all runs with differential privacy together: "
        f"{account.spent}. Runs without it, if there were any, are not in it: what they tell has no bound "
        "(`silo report` names them)."
    ]
    if account.budget is None or account.left is None:
        found.append(f"The consent gives them no budget with the {account.subject.unit} as unit.")
    else:
        found.append(f"The consent's budget is {account.budget:g}; {shown(account.left)} of it is left.")
    found.append(
        "Another version of the data set has a ledger of its own; for images that are in both, the costs of both count."
    )
    return found
