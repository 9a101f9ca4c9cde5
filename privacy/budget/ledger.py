"""The privacy ledger: what a data set's releases have cost so far, across runs, federations and restarts.

There is an account for each version of a data set (its fingerprint), unit of privacy and split. A charge is on disk
before the step is taken or the byte leaves that it pays for, so a crash can only count too much. A charge that would
overspend the budget is refused before anything is written.

What is held against the budget is not the account's sum but the most that any image, or any patient, has cost that the
version holds: all charges of all accounts of the folder in which that image or patient is, whatever their version, unit
or split (``medsilo.privacy.budget.units`` tells where). Added up are:

* with the image as unit, charges for images as they are, and charges for patients as they are where each patient has
  one image. Where patients have several, blanking one image changes its patient's clipped gradient into another one,
  not into none: then all are added up as under replace-one, which is more;
* with the patient as unit, charges for patients as they are, and charges for images k times over for a patient with k
  images there (group privacy; see ``accounting.as_group``).

An account of which it is not known whom it holds counts for everyone (but see ``units.groups``). So do charges under
another adjacency than the account's own, added up as under replace-one. Within one version, the shard's word on whose
an image is stands: who is named twice in it counts as two there.

An account is a file of lines of canonical JSON, each with the hash of the line before it. A line that does not end was
never completed, so nothing that waited for it has happened. Several processes may share a folder: each charge is made
under its one lock, from what the files then hold.

A charge of which a journal proves that nothing left may be voided, by a further line that names it, the journal's owner
and the record; the charge's own line stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Adjacency, Event, GaussianRelease, Grouped, Guarantee, Unit
from medsilo.privacy.errors import BudgetError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import Appender
from medsilo.privacy.pages.wording import shown

if TYPE_CHECKING:
    from medsilo.privacy.budget.units import Content, Group, Members, Share, Units

_SLACK = 1e-9
_AGREEMENT = 1e-3
"""By how much two computations of an ε may differ: releases of the accountant round differently."""
_MOST_KINDS = 100
"""Of so many kinds of charges the sum is computed in a minute; an honest account has a few."""
_MOST_NAMED = 5
_SUFFIX = ".jsonl"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPLITS = ("train", "test")
_LOCK = "ledger.lock"
_WAY_OUT = (
    "Look whether the disk is well, and where the newest one may be: in the folder that `ledger:` named before, on a "
    "disk that is not mounted, where it was moved to. Only if it is lost, take its newest copy from a backup"
)
_held = threading.local()
"""The folders whose lock this thread holds."""
UPDATE = "SubmitUpdate"
"""The call by which what was trained leaves."""
LASTING = (GaussianRelease.kind,)
"""Kinds of charges that are never voided: an average may be kept beside the ledger, and then leave in another run."""


@dataclass(frozen=True)
class Budget:
    """The most that releases may cost an image or a patient: (ε, δ). ``of_run``: those of one run alone, each of its
    repeated rounds included; all releases ever by default."""

    epsilon: float
    delta: float
    of_run: bool = False


@dataclass(frozen=True)
class Purpose:
    """What a charge is for. ``phase`` tells several trainings of a round apart; ``round`` counts from 0."""

    federation: str
    run: str
    plan_sha256: str
    round: int
    phase: str

    @property
    def whole_run(self) -> Run:
        """The run, as this very plan has it."""
        return self.federation, self.run, self.plan_sha256


Run = tuple[str, str, str]
"""Federation, name and the plan's hash."""


@dataclass(frozen=True)
class Subject:
    """Whose account it is: a data set version by its fingerprint, a unit of privacy, a split of the data."""

    data_sha256: str
    unit: Unit
    split: str = "train"
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def describe(self) -> dict[str, Any]:
        """The subject as it stands in ledger and journal."""
        return {
            "data_sha256": self.data_sha256,
            "unit": self.unit,
            "split": self.split,
            "adjacency": self.adjacency.value,
        }

    @classmethod
    def read(cls, description: Mapping[str, Any]) -> Subject:
        """The subject of a description; raises ``ValueError`` or ``KeyError`` for anything else."""
        unit, data_sha256, split = description["unit"], description["data_sha256"], description["split"]
        if unit not in get_args(Unit):
            raise ValueError(f"{unit!r} is not a unit of privacy")
        # Both become a part of the ledger's path.
        if not _SHA256.fullmatch(data_sha256) or split not in _SPLITS:
            raise ValueError(f"{data_sha256!r:.80}, {split!r:.80} is no version and split of a data set")
        return cls(data_sha256, unit, split, Adjacency(description["adjacency"]))


@dataclass(frozen=True)
class Entry:
    """One charge. ``sha256`` is the hash of its line; ``index`` counts charges from 1. ``seal``: the hash of the file
    with the release's key (``medsilo.privacy.budget.sealed_keys``); empty where none was sealed."""

    subject: Subject
    index: int
    time: str
    purpose: Purpose
    event: Event
    sha256: str
    seal: str = ""

    def describe(self) -> dict[str, Any]:
        """The charge as it stands in the journal."""
        return {
            **self.subject.describe(),
            "index": self.index,
            "sha256": self.sha256,
            **vars(self.purpose),
            "event": accounting.describe(self.event),
        }


@dataclass(frozen=True)
class Void:
    """That a charge does not count: the journal of ``party`` proves it by the record with the number ``record``."""

    charge: str
    party: str
    record: int


@dataclass(frozen=True)
class Spending:
    """What the most-spent image (patient) of a version has cost.

    Attributes:
        guarantee: of all its charges together.
        accounts: those in which it is, with their numbers of charges; the version's own is the first.
        course: its charges by time, as it bears them.
        adjacency: under which they are added up.
    """

    guarantee: Guarantee
    accounts: Mapping[Subject, int]
    course: Sequence[Event | Grouped | None]
    adjacency: Adjacency

    @property
    def epsilon(self) -> float:
        """The privacy loss."""
        return self.guarantee.epsilon

    @property
    def alone(self) -> Guarantee | None:
        """The same with no more than the hospital's own share of noise that was shared out; None where none was."""
        own = [None if event is None else accounting.own_share(event) for event in self.course]
        if own == list(self.course):
            return None
        return replace(self.guarantee, epsilon=_cost(own, self.guarantee.delta, self.adjacency))

    @property
    def inherited(self) -> Mapping[Subject, int]:
        """The other accounts that count in, with their numbers of charges."""
        return {account: count for account, count in list(self.accounts.items())[1:] if count}

    def after(self, charges: int) -> float:
        """The ε after so many charges of the course."""
        return _cost(self.course[:charges], self.guarantee.delta, self.adjacency)


class Ledger:
    """A data set version's account in a folder. Its methods may be called from any thread and from several processes.

    ``contents``: what the version holds, split by split. Whoever charges gives it: other versions inherit by it.

    Raises ``BudgetError`` on opening, and from every method, if a file is not what was written.
    """

    def __init__(self, folder: Path, subject: Subject, contents: Mapping[str, Content] | None = None) -> None:
        self.folder = folder
        self.subject = subject
        self._contents = contents or {}
        self._others: dict[Path, Ledger] = {}
        self._groups: tuple[dict[Subject, Members | None], list[Group]] | None = None
        self.path = folder / _name_of(subject)
        self._entries: list[Entry] = []
        self._voids: dict[int, Void] = {}
        self._read_to = 0
        self._last = ""
        self._disk = Appender(folder)  # its errors are no BudgetErrors: those end the hospital's part in a run
        self._lock = threading.RLock()
        if self.path.exists():
            self.entries()

    def entries(self, *, voided: bool = False) -> Sequence[Entry]:
        """All charges that count, in order; with ``voided`` those that do not as well."""
        if not self.path.exists():
            # Not one that was there before: that is never deleted.
            if self._read_to:
                raise self._damaged("it is gone")
            return []
        with self._alone():
            file = os.open(self.path, os.O_RDONLY)
            try:
                self._take(file)
            finally:
                os.close(file)
            return list(self._entries) if voided else self._counting()

    def voids(self) -> Mapping[int, Void]:
        """The voids by the number of the charge, as of the last reading."""
        return dict(self._voids)

    def counting(self, run: Run | None = None) -> list[Entry]:
        """The charges of this account that are added up, in order; those for a run alone if it is named."""
        return [entry for entry in self.entries() if run is None or entry.purpose.whole_run == run]

    def of_run(self, run: Run) -> list[Entry]:
        """All charges for a run in accounts of this unit and split, of whichever version."""
        unit, split = self.subject.unit, self.subject.split
        with self._alone():
            accounts = [one for one in self._accounts() if (one.subject.unit, one.subject.split) == (unit, split)]
            return [entry for account in accounts for entry in account.counting(run)]

    def cost(self, delta: float) -> Guarantee:
        """What this account's charges alone cost together, at a δ."""
        events = [entry.event for entry in self.counting()]
        return Guarantee(_cost(events, delta, self.subject.adjacency), delta, *self._conditions)

    def guarantee(self, delta: float, *, extra: Iterable[Event] = ()) -> Guarantee:
        """What the most-spent image (patient) has cost, at a δ; ``extra``: with these events too."""
        return self.spending(delta, extra=extra).guarantee

    def spending(self, delta: float, *, extra: Iterable[Event] = (), run: Run | None = None) -> Spending:
        """What all charges together have cost the most-spent image (patient), at a δ. ``extra``: with these events of
        this account too; ``run``: the charges of that run alone."""
        with self._alone():
            return self._spending(delta, list(extra), run)

    def remember(self) -> None:
        """Makes durable whom the version holds, which a charge does too. Raises ``BudgetError`` if the key for it is
        lost, ``DiskError`` if it cannot be kept."""
        with self._alone():
            self._units.keep(self.subject.data_sha256, self._contents)

    def charge(self, event: Event, purpose: Purpose, budget: Budget, *, seal: str = "") -> Entry:
        """Charges an event; when this returns, the charge is durable. ``seal``: see ``Entry``.

        Raises ``BudgetError`` if that would overspend the budget (then nothing is charged), ``DiskError`` if the charge
        cannot be made durable (then it may be charged or not, and what it was for must not happen).
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            self._disk.check_usable()
            self._check_budget(event, purpose, budget)
            self._units.keep(self.subject.data_sha256, self._contents)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                return self._charge(file, event, purpose, seal)
            finally:
                os.close(file)

    def void(self, entry: Entry, *, party: str, record: int) -> None:
        """Makes a charge count no more; ``record`` of ``party``'s journal proves that nothing that it paid for left.

        Raises as ``charge`` does; and does nothing for a charge that is voided already.
        """
        with self._alone():
            self._disk.check_usable()
            file = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try:
                if self._take(file):
                    os.ftruncate(file, self._read_to)
                if entry.index not in self._voids:
                    void = {"kind": "void", "charge": entry.index, "sha256": entry.sha256}
                    self._write(file, {**void, "party": party, "record": record}, index=len(self._entries))
            finally:
                os.close(file)

    def check_holds(self, charges: Iterable[Mapping[str, Any]]) -> None:
        """Raises ``BudgetError`` unless the ledger holds every charge that a journal tells of.

        A ledger that was restored from an old backup would forget what has been released since.
        """
        told: dict[Subject, dict[int, Mapping[str, Any]]] = {}
        for charge in charges:
            told.setdefault(Subject.read(charge), {})[charge["index"]] = charge
        for subject, own in told.items():
            account = self if subject == self.subject else Ledger(self.folder, subject)
            entries = {entry.index: entry.sha256 for entry in account.entries(voided=True)}
            for index, charge in own.items():
                if entries.get(index) != charge["sha256"]:
                    raise BudgetError(
                        f"{account.path}: the journal tells of charge {index} (run {charge['run']}), which this "
                        "ledger does not hold: it is an older copy, or another one. What these images have cost is not "
                        f"known, and nothing is trained on them. {_WAY_OUT}"
                    )

    @property
    def _conditions(self) -> tuple[Unit, Adjacency]:
        return self.subject.unit, self.subject.adjacency

    @cached_property
    def _units(self) -> Units:
        from medsilo.privacy.budget.units import (
            Units,  # arrays take time to load, and who only reads journals does without
        )

        return Units(self.folder)

    def _accounts(self) -> list[Ledger]:
        """All of the folder, this one first; inside ``_alone``."""
        for path in _files(self.folder):
            if path != self.path and path not in self._others and (subject := _subject_of(path)) is not None:
                self._others[path] = Ledger(self.folder, subject)
        return [self, *self._others.values()]

    def _spending(self, delta: float, extra: list[Event], run: Run | None) -> Spending:
        accounts = {account.subject: account for account in self._accounts()}
        entries = {subject: account.counting(run) for subject, account in accounts.items()}
        found = [_borne(self.subject, group, entries, delta, extra) for group in self._grouped(accounts)]
        return max(found, key=lambda one: (one.epsilon, len(one.inherited)))

    def of_patients(self, delta: float) -> dict[str, Spending]:
        """What each patient of the version has cost, by name, the most-spent first; empty where its content is not
        given, or does not say whose the images are. The account's unit must be the patient."""
        from medsilo.privacy.budget.units import groups_of_patients

        content = self._contents.get(self.subject.split)
        if content is None or content.patients is None:
            return {}
        with self._alone():
            accounts = {account.subject: account for account in self._accounts()}
            entries = {subject: account.counting() for subject, account in accounts.items()}
            by_patient = groups_of_patients(self.subject, self._members(accounts))
            spent: dict[frozenset[tuple[Subject, Share]], Spending] = {}
            found = {}
            for name in sorted(set(content.patients.tolist())):
                group = by_patient[self._units.hash_of(name)]
                alike = frozenset(group.items())
                if alike not in spent:
                    spent[alike] = _borne(self.subject, group, entries, delta, [])
                found[name] = spent[alike]
        return dict(sorted(found.items(), key=lambda one: -one[1].epsilon))

    def _members(self, accounts: Iterable[Subject]) -> dict[Subject, Members | None]:
        return {
            one: self._units.find(
                one.data_sha256,
                one.split,
                self._contents.get(one.split) if one.data_sha256 == self.subject.data_sha256 else None,
            )
            for one in accounts
        }

    def _grouped(self, accounts: Mapping[Subject, Ledger]) -> list[Group]:
        """See ``units.groups``; reckoned anew when an account or its members are new."""
        if len(accounts) == 1:
            from medsilo.privacy.budget.units import Share

            return [{self.subject: Share()}]
        from medsilo.privacy.budget.units import groups

        members = self._members(accounts)
        if self._groups is None or self._groups[0] != members:
            self._groups = members, groups(self.subject, members)
        return self._groups[1]

    def _check_budget(self, event: Event, purpose: Purpose, budget: Budget) -> None:
        run = purpose.whole_run if budget.of_run else None
        after = self.spending(budget.delta, extra=[event], run=run)
        if after.epsilon <= budget.epsilon + _SLACK:
            return
        spent = self.spending(budget.delta, run=run)
        whose = f"run {purpose.run} promises" if budget.of_run else "the privacy budget of these images is"
        raise BudgetError(
            f"refused: {whose} ε = {budget.epsilon:g} at δ = {budget.delta:g} (unit {self.subject.unit}, adjacency "
            f"{self.subject.adjacency}, accountant {accounting.ACCOUNTANT}); {shown(spent.epsilon)} of it is spent, "
            f"and round {purpose.round + 1} of run {purpose.run} would make it {shown(after.epsilon)}."
            f"{told_of(after)} Nothing was charged, and nothing is trained or sent"
        )

    def _counting(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.index not in self._voids]

    def _charge(self, file: int, event: Event, purpose: Purpose, seal: str) -> Entry:
        if self._take(file):
            os.ftruncate(file, self._read_to)
        charge = {"kind": "charge", **vars(purpose), "event": accounting.describe(event)}
        self._write(file, {**charge, **({"seal": seal} if seal else {})}, index=len(self._entries) + 1)
        return self._entries[-1]

    def _write(self, file: int, content: Mapping[str, Any], *, index: int) -> None:
        """Appends a line, after the ledger's first one where there is none yet, and takes it in."""
        first, last = b"", self._last
        if self._read_to == 0:
            header = _line({"v": 1, "index": 0, "kind": "ledger", **self.subject.describe(), "previous": ""})
            first, last = header + b"\n", hashlib.sha256(header).hexdigest()
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = _line({"v": 1, "index": index, "time": now, **content, "previous": last})
        self._disk.append(file, first + line + b"\n")
        self._disk.sync(file, folder=self.folder if first else None)
        self._take(file)

    def _take(self, file: int) -> bool:
        """Takes in what was written since the last time; returns whether a torn line follows it."""
        if os.fstat(file).st_size < self._read_to:
            raise self._damaged("it is shorter than it was")
        os.lseek(file, self._read_to, os.SEEK_SET)
        *lines, rest = _read_all(file).split(b"\n")
        for line in lines:
            self._take_line(line)
            self._read_to += len(line) + 1
        return bool(rest)

    def _take_line(self, line: bytes) -> None:
        number = len(self._entries) + 1 if self._read_to else 0
        try:
            content = json.loads(line)
            if number and content["kind"] == "void":
                number -= 1  # charges are numbered, and this is none
            if content["v"] != 1 or content["index"] != number or content["previous"] != self._last:
                raise ValueError("it does not follow the line before it")
            sha256 = hashlib.sha256(line).hexdigest()
            if not self._read_to:
                if content["kind"] != "ledger" or Subject.read(content) != self.subject:
                    raise ValueError("it is of another data set, unit or split")
            elif content["kind"] == "void":
                self._take_void(content)
            else:
                purpose = Purpose(**{name: content[name] for name in Purpose.__dataclass_fields__})
                event, seal = accounting.read(content["event"]), str(content.get("seal", ""))
                self._entries.append(Entry(self.subject, number, content["time"], purpose, event, sha256, seal))
            self._last = sha256
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"line {number + 1} is damaged ({error})") from None

    def _take_void(self, content: Mapping[str, Any]) -> None:
        index, void = content["charge"], Void(content["sha256"], str(content["party"]), int(content["record"]))
        if index in self._voids or void.charge != {entry.index: entry.sha256 for entry in self._entries}.get(index):
            raise ValueError("it voids no charge that counts")
        self._voids[index] = void

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process reads or charges an account of the folder inside."""
        folders = _held.__dict__.setdefault("folders", set())
        if self.folder in folders or not self.folder.exists():
            yield
            return
        with self._lock:
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                folders.add(self.folder)
                yield
            finally:
                folders.discard(self.folder)
                os.close(lock)

    def _damaged(self, why: str) -> BudgetError:
        return BudgetError(
            f"{self.path}: {why}. What these images have cost is not known, so nothing is trained on them. {_WAY_OUT}"
        )


def ledgers(folder: Path) -> list[Ledger]:
    """All accounts of a folder; raises ``BudgetError`` for one that cannot be read."""
    return [Ledger(folder, subject) for path in _files(folder) if (subject := _subject_of(path)) is not None]


def told_of(spending: Spending) -> str:
    """Which other accounts count in, as a sentence after a space; nothing where there are none."""
    if not spending.inherited:
        return ""
    named = [
        f"{count} on data set {one.data_sha256[:16]} (unit {one.unit}, split {one.split})"
        for one, count in list(spending.inherited.items())[:_MOST_NAMED]
    ]
    more = len(spending.inherited) - len(named)
    return (
        f" In it are charges for the same images or patients in other accounts: {', '.join(named)}"
        f"{f' and {more} more' if more else ''}."
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))


def _subject_of(path: Path) -> Subject | None:
    """Whose account a file is; None for one whose first charge was never completed."""
    with path.open("rb") as file:
        header = file.readline()
    if not header.endswith(b"\n"):
        return None
    try:
        subject = Subject.read(json.loads(header))
    except (ValueError, KeyError, TypeError):
        raise BudgetError(f"{path}: line 1 is damaged. {_WAY_OUT}") from None
    if path.name != _name_of(subject):
        raise BudgetError(
            f"{path}: by its first line it is {_name_of(subject)}; give it that name back, or move a copy elsewhere"
        )
    return subject


def _name_of(subject: Subject) -> str:
    return f"{subject.data_sha256}-{subject.unit}-{subject.split}{_SUFFIX}"


def _borne(
    subject: Subject,
    group: Group,
    entries: Mapping[Subject, Sequence[Entry]],
    delta: float,
    extra: Iterable[Event],
) -> Spending:
    """What units have cost that are in all accounts of a group, as they bear its entries."""
    counting = {one: share for one, share in group.items() if entries[one]}
    adjacency = subject.adjacency
    if any(share.in_groups or one.adjacency != adjacency for one, share in counting.items()):
        adjacency = Adjacency.REPLACE_ONE
    borne = [
        (entry.time, accounting.as_group(entry.event, share.units))
        for one, share in counting.items()
        for entry in entries[one]
    ]
    course = [*(event for _, event in sorted(borne, key=lambda one: one[0])), *extra]
    spent = Guarantee(_cost(course, delta, adjacency), delta, subject.unit, subject.adjacency)
    return Spending(spent, {one: len(entries[one]) for one in group}, course, adjacency)


def _cost(events: Sequence[Event | Grouped | None], delta: float, adjacency: Adjacency) -> float:
    """The ε of the composition; without bound if one of the events has none."""
    known = [event for event in events if event is not None]
    return accounting.epsilon(known, delta=delta, adjacency=adjacency) if len(known) == len(events) else math.inf


def describe_spent(epsilon: float, delta: float) -> dict[str, Any]:
    """What charges have cost, as the journal tells it beside a charge: ``spent``, all of the account up to that one;
    ``unit_spent``, those that the most-spent image (patient) has in other accounts too. An ε without bound is null."""
    return {"epsilon": None if math.isinf(epsilon) else epsilon, "delta": delta, "accountant": accounting.ACCOUNTANT}


def read_spent(said: Any) -> tuple[float, float]:
    """ε and δ of what ``describe_spent`` gives; raises ``ValueError`` for anything else."""
    try:
        delta = float(said["delta"])
        epsilon = math.inf if said["epsilon"] is None else float(said["epsilon"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"what the charges have cost cannot be read ({error})") from None
    if not (0 < delta < 1 and epsilon >= 0):
        raise ValueError(f"what the charges have cost cannot be ε = {epsilon} at δ = {delta}")
    return epsilon, delta


@dataclass(frozen=True)
class Replayed:
    """One account, recomputed from the charges that a journal tells of.

    Attributes:
        subject: whose account.
        charges: how many were added up.
        spent: what they come to; None where they cannot be added up.
        untold: numbers of charges up to the last that the journal does not tell of.
        said: the ε that the journal's newest statement says, and the number of its record.
        of_unit: what the journal then says that the most-spent image (patient) has cost, by charges of other accounts
            too; None where it says nothing of others. It is the journal's word.
    """

    subject: Subject
    charges: int
    spent: Guarantee | None
    untold: tuple[int, ...]
    said: tuple[float, int]
    of_unit: float | None

    @property
    def agrees(self) -> bool:
        """Whether the statement is what the charges come to; so it counts where they cannot be added up."""
        if self.spent is None:
            return True
        said, found = self.said[0], self.spent.epsilon
        return said == found or abs(said - found) <= _AGREEMENT


class Charges:
    """Charges as a journal tells of them, each counted once however often it is told."""

    def __init__(self) -> None:
        self._events: dict[tuple[Subject, int], Event] = {}
        self._voided: dict[tuple[Subject, int], int] = {}
        self._said: dict[Subject, tuple[int, float, float, int, float | None]] = {}

    def add(self, charge: Any) -> None:
        """Raises ``ValueError`` for a charge that cannot be read, or that was told in another way before."""
        try:
            subject, index = Subject.read(charge), charge["index"]
            event = accounting.read(charge["event"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the privacy ledger's charge cannot be read ({error})") from None
        if type(index) is not int or index < 1:
            raise ValueError(f"the privacy ledger's charge has the number {index!r:.40}")
        if self._events.setdefault((subject, index), event) != event:
            raise ValueError(f"charge {index} of data set {subject.data_sha256[:16]} is told in two ways")

    def void(self, charge: Any, record: int) -> None:
        """From the record with this number on, a charge counts no more; raises ``ValueError`` for one that was not told
        or is voided already."""
        try:
            which = Subject.read(charge), charge["index"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the charge that is voided cannot be read ({error})") from None
        if which not in self._events or which in self._voided:
            raise ValueError(f"charge {which[1]!r:.40} of data set {which[0].data_sha256[:16]} is none to be voided")
        self._voided[which] = record

    def say(self, charge: Any, spent: Any, record: int, *, of_unit: Any = None) -> None:
        """Takes in what a record says that all charges up to its own have cost, and what the most-spent image has, if
        it says so; raises ``ValueError`` for what is no such statement, and for an image that has cost less."""
        try:
            subject = Subject.read(charge)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the privacy ledger's charge cannot be read ({error})") from None
        epsilon, delta = read_spent(spent)
        most = None
        if of_unit is not None:
            most, at = read_spent(of_unit)
            if at != delta or most < epsilon - _AGREEMENT:
                raise ValueError(
                    f"the most-spent image cannot have cost ε = {most} at δ = {at} where its account's charges have "
                    f"cost {epsilon} at δ = {delta}"
                )
        self._said[subject] = (charge["index"], epsilon, delta, record, most)

    def replay(self) -> list[Replayed]:
        """Every account of which the journal says what it has cost, recomputed up to its newest statement."""
        found = []
        for subject, (index, said, delta, record, most) in self._said.items():
            told = {n: event for (one, n), event in self._events.items() if one == subject and n <= index}
            # Only as many as there are gaps to name: the number of a charge is the journal's word.
            untold = tuple(itertools.islice((n for n in range(1, index + 1) if n not in told), _MOST_NAMED))
            told = {n: event for n, event in told.items() if self._voided.get((subject, n), record) >= record}
            spent = None
            if not untold and len(set(told.values())) <= _MOST_KINDS:
                epsilon = accounting.epsilon(told.values(), delta=delta, adjacency=subject.adjacency)
                spent = Guarantee(epsilon, delta, subject.unit, subject.adjacency)
            found.append(Replayed(subject, len(told), spent, untold, (said, record), most))
        return found

    def events(self) -> dict[Subject, list[Event]]:
        """The events of each account, in order."""
        found: dict[Subject, list[Event]] = {}
        for which, event in sorted(self._events.items(), key=lambda item: item[0][1]):
            if which not in self._voided:
                found.setdefault(which[0], []).append(event)
        return found


def _line(content: Mapping[str, Any]) -> bytes:
    return write_canonical(dict(content))


def _read_all(file: int) -> bytes:
    found = bytearray()
    while block := os.read(file, 1 << 20):
        found += block
    return bytes(found)
