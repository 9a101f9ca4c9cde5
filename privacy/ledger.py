"""The privacy ledger: what a data set's releases have cost so far, across runs, federations and restarts.

There is one for each version of a data set (its fingerprint), unit of privacy and split. A charge is on disk before the
step is taken or the byte leaves that it pays for, so a crash can only count too much. A charge that would overspend the
budget is refused before anything is written.

A ledger is a file of lines of canonical JSON, each with the hash of the line before it. A line that does not end was
never completed, so nothing that waited for it has happened. Several processes may share a ledger: each charge is made
under a lock, from what the file then holds.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from privacy import accounting
from privacy.accounting import Adjacency, Event, Guarantee, Unit, shown
from privacy.canonical import write_canonical
from privacy.durable import Appender
from privacy.errors import BudgetError

_SLACK = 1e-9
_AGREEMENT = 1e-3
"""By how much two computations of an ε may differ: releases of the accountant round differently."""
_MOST_KINDS = 100
"""Of so many kinds of charges the sum is computed in a minute; an honest account has a few."""
_MOST_NAMED = 5
_SUFFIX = ".jsonl"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Budget:
    """The most that all releases of a ledger may cost: (ε, δ)."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Purpose:
    """What a charge is for. ``phase`` tells several trainings of a round apart; ``round`` counts from 0."""

    federation: str
    run: str
    plan_sha256: str
    round: int
    phase: str


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
    """One charge. ``sha256`` is the hash of its line; ``index`` counts from 1, the ledger's first line being 0."""

    subject: Subject
    index: int
    time: str
    purpose: Purpose
    event: Event
    sha256: str

    def describe(self) -> dict[str, Any]:
        """The charge as it stands in the journal."""
        return {
            **self.subject.describe(),
            "index": self.index,
            "sha256": self.sha256,
            **vars(self.purpose),
            "event": accounting.describe(self.event),
        }


class Ledger:
    """A data set's account in a folder. Its methods may be called from any thread and from several processes.

    Raises ``BudgetError`` on opening, and from every method, if the file is not what was written.
    """

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder = folder
        self.subject = subject
        self.path = folder / f"{subject.data_sha256}-{subject.unit}-{subject.split}{_SUFFIX}"
        self._entries: list[Entry] = []
        self._read_to = 0
        self._last = ""
        self._disk = Appender(folder)  # its errors are no BudgetErrors: those end the hospital's part in a run
        self._lock = threading.Lock()
        if self.path.exists():
            self.entries()

    def entries(self) -> Sequence[Entry]:
        """All charges, in order."""
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
            return list(self._entries)

    def guarantee(self, delta: float, *, extra: Iterable[Event] = ()) -> Guarantee:
        """What all charges cost together, at a δ; ``extra``: with these events too."""
        events = [*(entry.event for entry in self.entries()), *extra]
        spent = accounting.epsilon(events, delta=delta, adjacency=self.subject.adjacency)
        return Guarantee(spent, delta, self.subject.unit, self.subject.adjacency)

    def charge(self, event: Event, purpose: Purpose, budget: Budget) -> Entry:
        """Charges an event; when this returns, the charge is durable.

        Raises ``BudgetError`` if that would overspend the budget (then nothing is charged), ``DiskError`` if the charge
        cannot be made durable (then it may be charged or not, and what it was for must not happen).
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            self._disk.check_usable()
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                return self._charge(file, event, purpose, budget)
            finally:
                os.close(file)

    def check_holds(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Raises ``BudgetError`` unless the ledger holds every charge that a journal's records speak of.

        A ledger that was restored from an old backup would forget what has been released since.
        """
        entries = {entry.index: entry.sha256 for entry in self.entries()}
        for charge in charges(records):
            if Subject.read(charge) == self.subject and entries.get(charge["index"]) != charge["sha256"]:
                raise BudgetError(
                    f"{self.path}: the journal tells of charge {charge['index']} (run {charge['run']}), which this "
                    "ledger does not hold: it is an older copy, or another one. Restore the newest; without it, what "
                    "these images have cost is not known, and nothing is trained on them"
                )

    def _charge(self, file: int, event: Event, purpose: Purpose, budget: Budget) -> Entry:
        if self._take(file):
            os.ftruncate(file, self._read_to)
        events = [*(entry.event for entry in self._entries), event]
        after = accounting.epsilon(events, delta=budget.delta, adjacency=self.subject.adjacency)
        if after > budget.epsilon + _SLACK:
            spent = accounting.epsilon(events[:-1], delta=budget.delta, adjacency=self.subject.adjacency)
            raise BudgetError(
                f"refused: the privacy budget of these images is ε = {budget.epsilon:g} at δ = {budget.delta:g} (unit "
                f"{self.subject.unit}, adjacency {self.subject.adjacency}, accountant {accounting.ACCOUNTANT}); "
                f"{shown(spent)} of it is spent, and round {purpose.round + 1} of run {purpose.run} would make it "
                f"{shown(after)}. Nothing was charged, and nothing is trained or sent"
            )
        content = b""
        line = self._last
        if self._read_to == 0:
            header = _line({"v": 1, "index": 0, "kind": "ledger", **self.subject.describe(), "previous": ""})
            content, line = header + b"\n", hashlib.sha256(header).hexdigest()
        charge = _line(
            {
                "v": 1,
                "index": len(self._entries) + 1,
                "kind": "charge",
                "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                **vars(purpose),
                "event": accounting.describe(event),
                "previous": line,
            }
        )
        self._disk.append(file, content + charge + b"\n")
        self._disk.sync(file, folder=self.folder if content else None)
        self._take(file)
        return self._entries[-1]

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
            if content["v"] != 1 or content["index"] != number or content["previous"] != self._last:
                raise ValueError("it does not follow the line before it")
            sha256 = hashlib.sha256(line).hexdigest()
            if number == 0:
                if content["kind"] != "ledger" or Subject.read(content) != self.subject:
                    raise ValueError("it is of another data set, unit or split")
            else:
                purpose = Purpose(**{name: content[name] for name in Purpose.__dataclass_fields__})
                event = accounting.read(content["event"])
                self._entries.append(Entry(self.subject, number, content["time"], purpose, event, sha256))
            self._last = sha256
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(f"line {number + 1} is damaged ({error})") from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process reads or charges inside."""
        with self._lock:
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)

    def _damaged(self, why: str) -> BudgetError:
        return BudgetError(
            f"{self.path}: {why}. What these images have cost is not known, so nothing is trained on them; restore the "
            "ledger's newest copy"
        )


def ledgers(folder: Path) -> list[Ledger]:
    """All ledgers of a folder; raises ``BudgetError`` for one that cannot be read."""
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with path.open("rb") as file:
            header = file.readline()
        if not header.endswith(b"\n"):
            continue  # its first charge was never completed
        try:
            found.append(Ledger(folder, Subject.read(json.loads(header))))
        except (ValueError, KeyError, TypeError):
            raise BudgetError(f"{path}: line 1 is damaged; restore the ledger's newest copy") from None
    return found


def charges(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The charges that a journal's records speak of: records of their own, and those that messages name."""
    for record in records:
        if record["kind"] == "ledger":
            yield record["charge"]
        elif record["kind"] == "message":
            yield from record["ledger"]


def describe_spent(epsilon: float, delta: float) -> dict[str, Any]:
    """What all charges up to one have cost, as the journal tells it beside that charge; an ε without bound is null."""
    return {"epsilon": None if math.isinf(epsilon) else epsilon, "delta": delta, "accountant": accounting.ACCOUNTANT}


@dataclass(frozen=True)
class Replayed:
    """One account, recomputed from the charges that a journal tells of.

    Attributes:
        subject: whose account.
        charges: how many were added up.
        spent: what they come to; None where they cannot be added up.
        untold: numbers of charges up to the last that the journal does not tell of.
        said: the ε that the journal's newest statement says, and the number of its record.
    """

    subject: Subject
    charges: int
    spent: Guarantee | None
    untold: tuple[int, ...]
    said: tuple[float, int]

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
        self._said: dict[Subject, tuple[int, float, float, int]] = {}

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

    def say(self, charge: Any, spent: Any, record: int) -> None:
        """Takes in what a record says that all charges up to its own have cost; raises ``ValueError`` for what is no
        such statement."""
        try:
            subject, delta = Subject.read(charge), float(spent["delta"])
            epsilon = math.inf if spent["epsilon"] is None else float(spent["epsilon"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"what the charges have cost cannot be read ({error})") from None
        if not (0 < delta < 1 and epsilon >= 0):
            raise ValueError(f"what the charges have cost cannot be ε = {epsilon} at δ = {delta}")
        self._said[subject] = (charge["index"], epsilon, delta, record)

    def replay(self) -> list[Replayed]:
        """Every account of which the journal says what it has cost, recomputed up to its newest statement."""
        found = []
        for subject, (index, said, delta, record) in self._said.items():
            told = {n: event for (one, n), event in self._events.items() if one == subject and n <= index}
            # Only as many as there are gaps to name: the number of a charge is the journal's word.
            untold = tuple(itertools.islice((n for n in range(1, index + 1) if n not in told), _MOST_NAMED))
            spent = None
            if not untold and len(set(told.values())) <= _MOST_KINDS:
                epsilon = accounting.epsilon(told.values(), delta=delta, adjacency=subject.adjacency)
                spent = Guarantee(epsilon, delta, subject.unit, subject.adjacency)
            found.append(Replayed(subject, len(told), spent, untold, (said, record)))
        return found

    def events(self) -> dict[Subject, list[Event]]:
        """The events of each account, in order."""
        found: dict[Subject, list[Event]] = {}
        for (subject, _), event in sorted(self._events.items(), key=lambda item: item[0][1]):
            found.setdefault(subject, []).append(event)
        return found


def replay(records: Iterable[Mapping[str, Any]]) -> dict[Subject, list[Event]]:
    """The events of each data set's account, from a journal's records alone (see ``Charges``)."""
    told = Charges()
    for charge in charges(records):
        told.add(charge)
    return told.events()


def _line(content: Mapping[str, Any]) -> bytes:
    return write_canonical(dict(content))


def _read_all(file: int) -> bytes:
    found = bytearray()
    while block := os.read(file, 1 << 20):
        found += block
    return bytes(found)
