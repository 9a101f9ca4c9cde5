"""``silo budget``: what the privacy ledgers of a silo say, as tables, JSON, and a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rich.markup import escape as escape_markup
from rich.table import Table

from medsilo.algorithms.datasets import load_npz
from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Guarantee
from medsilo.privacy.budget.ledger import Entry, Ledger, Spending, Subject, ledgers
from medsilo.privacy.budget.loss import DELTA
from medsilo.privacy.consent.consent import ConsentFile, PrivacyConsent
from medsilo.privacy.errors import DataError
from medsilo.privacy.pages.plots import spending
from medsilo.privacy.pages.wording import shown
from medsilo.silo.state.config import SiloConfig

_STYLE = (
    "body{font-family:sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem;color:#1b2733}"
    "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1rem 0}caption{text-align:left;font-weight:bold}"
    "th,td{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #8b98a3}.number{text-align:right}"
)


@dataclass(frozen=True)
class Part:
    """What some of the charges would have cost alone; the whole is less than the parts' sum."""

    name: str
    charges: int
    epsilon: float


@dataclass(frozen=True)
class AccountView:
    """One version's account.

    Attributes:
        subject: whose.
        spent: what the image (patient) of the version that has cost most has cost, by all charges of all accounts.
        version: what this account's charges come to alone.
        versions: the accounts in which the most-spent one is, this one first.
        budget: the consent's; None where it gives none.
        left: the budget less what is spent.
        runs, releases: this account's charges.
        course: the ε of the most-spent one after so many charges, of at most ``POINTS`` numbers of charges, the first
            and the last among them.
        alone: what is spent with no more than the hospital's own share of noise that was shared out; None where none
            was.
        voided: how many more charges do not count, because a journal proves that nothing of what they were for has
            left.
    """

    subject: Subject
    spent: Guarantee
    version: Guarantee
    versions: tuple[Part, ...]
    budget: float | None
    left: float | None
    runs: tuple[Part, ...]
    releases: tuple[Part, ...]
    course: tuple[tuple[int, float], ...]
    voided: int = 0
    alone: Guarantee | None = None


POINTS = 40
"""For so many points of a ledger's course the ε is computed: each takes a tenth of a second."""


def read_accounts(config: SiloConfig, *, course: bool = False) -> list[AccountView]:
    """All ledgers of a silo, with their course if it is wanted; raises ``BudgetError`` for one that cannot be read."""
    consent = ConsentFile.read(config.consent).consent.privacy
    found = ledgers(config.ledgers)
    costs = {ledger.subject: ledger.cost(_delta(consent)).epsilon for ledger in found}
    return [replace(_view(ledger, consent, costs, course=course), voided=len(ledger.voids())) for ledger in found]


def remember(config: SiloConfig, shard: Path) -> str:
    """Keeps whose images and patients an older version of the data set has, so that its charges count for those alone;
    says which version. Raises ``DataError`` for a file that is no version that was ever charged for."""
    dataset = load_npz(shard)
    accounts = [one.subject for one in ledgers(config.ledgers) if one.subject.data_sha256 == dataset.fingerprint]
    if not accounts:
        raise DataError(f"{shard}: it is data set {dataset.fingerprint[:16]}, for which nothing was ever charged")
    Ledger(config.ledgers, accounts[0], dataset.contents).remember()
    return dataset.fingerprint


@dataclass(frozen=True)
class PatientView:
    """What one patient has cost, by all charges of all accounts in which it is.

    Attributes:
        patient: its number or name, as the shard has it.
        charges: how many.
        spent: a bound from above, where charges for images count for all of a patient's.
        alone: that with no more than the hospital's own share of noise that was shared out; None where none was.
    """

    patient: str
    charges: int
    spent: Guarantee
    alone: Guarantee | None


def read_patients(config: SiloConfig) -> list[PatientView]:
    """The training patients of the silo's shard, the most-spent first; raises ``DataError`` for a shard that does
    not say whose its images are, ``BudgetError`` for a ledger that cannot be read."""
    dataset = load_npz(config.shard)
    if dataset.train.patients is None:
        raise DataError(f"{config.shard}: it does not say whose the images are, so no patient's spending is known")
    consent = ConsentFile.read(config.consent).consent.privacy
    ledger = Ledger(config.ledgers, Subject(dataset.fingerprint, "patient"), dataset.contents)
    return [
        PatientView(name, len(spending.course), spending.guarantee, spending.alone)
        for name, spending in ledger.of_patients(_delta(consent)).items()
    ]


def patients_table(patients: list[PatientView]) -> Table:
    """Patients by what they have cost."""
    shares = any(one.alone is not None for one in patients)
    conditions = f"δ = {patients[0].spent.delta:g}, {patients[0].spent.conditions}" if patients else ""
    title = f"What each training patient of the shard has cost: {conditions}. It stays here; nothing sends it."
    table = Table(title=title, title_justify="left")
    for column in ("patient", "charges", "ε", *(["ε by the own share of noise alone"] if shares else [])):
        table.add_column(column, justify="left" if column == "patient" else "right", overflow="fold")
    for one in patients:
        own = [shown((one.alone or one.spent).epsilon)] if shares else []
        table.add_row(escape_markup(one.patient), str(one.charges), shown(one.spent.epsilon), *own)
    return table


def _delta(consent: PrivacyConsent | None) -> float:
    return consent.delta if consent is not None else DELTA


def _view(
    ledger: Ledger, consent: PrivacyConsent | None, costs: Mapping[Subject, float], *, course: bool
) -> AccountView:
    subject, entries = ledger.subject, ledger.counting()
    budget = consent.budget(subject.split) if consent is not None and consent.unit == subject.unit else None
    delta = _delta(consent)
    spending = ledger.spending(delta)

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
        spending.guarantee,
        Guarantee(costs[subject], delta, subject.unit, subject.adjacency),
        tuple(
            Part(f"{one.data_sha256[:16]}, unit {one.unit}, split {one.split}", count, costs[one])
            for one, count in spending.accounts.items()
            if count
        ),
        budget,
        None if budget is None else max(budget - spending.epsilon, 0.0),
        parts(lambda entry: f"{entry.purpose.federation}/{entry.purpose.run}"),
        parts(lambda entry: f"{entry.purpose.phase} ({entry.event.kind})"),
        _course(spending) if course else (),
        alone=spending.alone,
    )


def _course(spending: Spending) -> tuple[tuple[int, float], ...]:
    count = len(spending.course)
    steps = min(count, POINTS) - 1
    places = sorted({1 + round(step * (count - 1) / steps) for step in range(steps + 1)} if steps > 0 else {count})
    return tuple((place, spending.after(place)) for place in places if place)


def as_json(account: AccountView) -> dict[str, Any]:
    """An account for machines."""
    content = {**asdict(account), "conditions": account.spent.conditions}
    del content["course"]
    return content


def tables(account: AccountView) -> list[Table]:
    """An account by run and by kind of release."""
    made = []
    for title, parts in titled(account):
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


def titled(account: AccountView) -> list[tuple[str, tuple[Part, ...]]]:
    """An account's parts by what they are told apart by; the versions only where there are others."""
    inherited = [("version", account.versions)] if len(account.versions) > 1 else []
    return [("run", account.runs), ("release", account.releases), *inherited]


def lines(account: AccountView) -> list[str]:
    """What is spent and left, in words."""
    unit = account.subject.unit
    found = [
        f"Spent on these images ({account.subject.split} split) by all runs with differential privacy together: "
        f"{account.spent}. Runs without it, if there were any, are not in it: what they tell has no bound "
        "(`silo report` names them)."
    ]
    if len(account.versions) > 1:
        found.append(
            f"That is the {unit} that has cost most: it is in {len(account.versions)} accounts (other versions of the "
            "data set, units or splits), whose charges all count. The charges for this version alone come to "
            f"{account.version}."
        )
    if account.alone is not None:
        found.append(account.alone.if_alone)
    if account.budget is None or account.left is None:
        found.append(
            f"The consent gives them no budget with the {unit} as unit: each run is held to its own promise, whatever "
            "other runs have spent."
        )
    else:
        found.append(f"The consent's budget is {account.budget:g}; {shown(account.left)} of it is left.")
    if account.voided:
        found.append(
            f"{account.voided} more were charged before a crash and voided: nothing of what they were for has left, "
            "which the journal proves (`silo audit verify`)."
        )
    return found


def to_html(silo: str, accounts: list[AccountView]) -> str:
    """A page with a picture for each ledger; ``accounts`` as ``read_accounts`` gives them."""
    title = f"Privacy loss at {escape(silo)}"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1>",
    ]
    if not accounts:
        parts.append(
            "<p>There is no privacy ledger: nothing was trained with differential privacy. What is learnt from "
            "what was learnt from models without it has no bound.</p>"
        )
    for number, account in enumerate(accounts):
        subject = account.subject
        parts.append(f"<h2>Data set {escape(subject.data_sha256[:16])}, split {escape(subject.split)}</h2>")
        parts.extend(f"<p>{escape(line)}</p>" for line in lines(account))
        parts.append(spending(account.course, account.budget, identifier=f"account{number}"))
        parts.extend(_rows(title, rows) for title, rows in titled(account))
    return "\n".join(parts) + "</html>\n"


def _rows(title: str, rows: tuple[Part, ...]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th><td class="number">{row.charges}</td>'
        f'<td class="number">{shown(row.epsilon)}</td></tr>'
        for row in rows
    )
    head = f'<tr><th scope="col">{title}</th><th scope="col">charges</th><th scope="col">ε alone</th></tr>'
    return f"<table><caption>By {title}</caption>{head}{body}</table>"
