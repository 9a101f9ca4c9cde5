"""A draft while it is written: its statements, and the records that each of them names."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.privacy.dossier.citations import Citation, Citing
from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.journal import read_lines
from medsilo.privacy.journal.merkle import MerkleTree, leaf_hash
from medsilo.privacy.journal.records import (
    ApprovalRecord,
    ConsentRecord,
    MessageRecord,
    Record,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    WithdrawalRecord,
    charges_of,
    read,
    run_of,
)
from medsilo.privacy.pages.blocks import Cited, Fact, Source
from medsilo.privacy.report.model import Report

Topic = tuple[str, ...]
"""What records are about: ``("record",)`` all of them, ``("kind", KIND)``, ``("sent",)``, ``("sent", RUN)``,
``("sent", RUN, CLASS)``, ``("received", RUN, CLASS)``, ``("peer", PARTY)``, ``("run", RUN)``, ``("roster", RUN)``,
``("data", SHA256)``, ``("charges",)``."""


_OF_RUNS = (MessageRecord, RefusalRecord, ApprovalRecord, WithdrawalRecord, RosterRecord, RunRecord)
"""What a draft that is limited to a run takes of that run alone, as the report does."""


@dataclass(frozen=True)
class Statement:
    """A sentence of a draft. ``figures``: what it says, for machines."""

    part: str
    text: str
    source: Source
    citations: tuple[str, ...]
    figures: dict[str, Any]


class Draft:
    """Takes statements one by one; one that states a fact of the record needs the records that prove it.

    Raises ``JournalError`` if the journal's records are not those that the report was made from.
    """

    def __init__(self, report: Report, journal: Path) -> None:
        self.report = report
        self.part = ""
        self.statements: list[Statement] = []
        self.named: dict[Citation, str] = {}
        """The citations in use and their names, in the order of their first use."""
        self._by_topic = _read(report, journal)

    def fact(self, text: str, *topics: Topic, **figures: Any) -> Fact:
        """A fact of the record; raises ``KeyError`` for a topic of which there is no record."""
        if not topics:
            raise KeyError(f"no records are named for: {text}")
        return self._add(text, "record", [self.citation(topic) for topic in dict.fromkeys(topics)], figures)

    def stated(self, what: str, answer: str) -> Fact:
        """What the hospital states of itself, or a blank where it has stated nothing."""
        return self._add(f"{what}: {answer}", "hospital") if answer else self.blank(what)

    def beside(self, text: str) -> Fact:
        """What stands beside the record, not in it, and is no evidence."""
        return self._add(text, "beside")

    def blank(self, what: str) -> Fact:
        """What is to be filled in by hand."""
        return self._add(what, "blank")

    def citation(self, topic: Topic) -> Citation:
        """The records of a topic; raises ``KeyError`` if there are none."""
        return self._by_topic[topic].citation()

    def has(self, *topic: str) -> bool:
        """Whether any record is of a topic."""
        return topic in self._by_topic

    def count(self, *topic: str) -> int:
        """How many records are of a topic."""
        return self.citation(topic).count if self.has(*topic) else 0

    @property
    def data_sets(self) -> list[str]:
        """The fingerprints of the data set's versions that a consent was recorded with."""
        return [topic[1] for topic in self._by_topic if topic[0] == "data" and topic[1]]

    def of(self, source: Source) -> int:
        """How many statements there are of a source."""
        return sum(statement.source == source for statement in self.statements)

    def _add(
        self, text: str, source: Source, citations: list[Citation] | None = None, figures: dict[str, Any] | None = None
    ) -> Fact:
        cited = [
            Cited(self.named.setdefault(one, f"records-{len(self.named) + 1}"), one.label) for one in citations or []
        ]
        names = tuple(one.anchor for one in cited)
        self.statements.append(Statement(self.part, text, source, names, figures or {}))
        return Fact(text, source, cited)


def _read(report: Report, journal: Path) -> dict[Topic, Citing]:
    found: dict[Topic, Citing] = {}
    tree = MerkleTree()
    for index, line in enumerate(itertools.islice(read_lines(journal), report.records)):
        tree.append(line)
        leaf = leaf_hash(line)
        for topic in _topics(read(json.loads(line)), report.limited_to):
            found.setdefault(topic, Citing()).take(index, leaf)
    if tree.root().hex() != report.root_sha256:
        raise JournalError(f"{journal}: its records were changed while they were read; give the command again")
    return found


def _topics(record: Record, only: str | None) -> Iterator[Topic]:
    yield ("record",)
    if charges_of(record):
        yield ("charges",)
    if isinstance(record, ConsentRecord):
        yield ("data", str(record.data_sha256 or ""))
    elif only is not None and isinstance(record, _OF_RUNS) and run_of(record) != only:
        return
    yield ("kind", str(record.kind))
    match record:
        case RunRecord():
            yield ("run", record.run)
        case RosterRecord():
            yield ("roster", record.run)
        case MessageRecord():
            run = record.run or ""
            yield ("peer", record.peer)
            yield (record.direction,)
            yield record.direction, run
            for name in record.classes:
                yield record.direction, run, name
