"""The evidence bundle: a journal, or a range of it, as one JSON file that proves itself.

The same journal always gives the same bytes: a record stands on a line of its own, as it was signed, so that a bundle
of any length is read line by line. ``docs/bundle.schema.json`` describes the form. What a bundle of a range leaves
out is stood for by the hashes of the perfect subtrees before and behind it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from medsilo.privacy import verify
from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.files.configuration import StrictModel
from medsilo.privacy.files.durable import replacing
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note
from medsilo.privacy.journal.journal import last_checkpoint, read_checkpoints, read_lines
from medsilo.privacy.journal.merkle import MerkleTree, perfect_subtrees
from medsilo.privacy.journal.records import (
    KeyRecord,
    KeyRotationRecord,
    MessageRecord,
    Record,
    SchemaRecord,
    read,
    round_of,
    run_of,
)
from medsilo.privacy.verify import bundle

VERSION = 1
_OPENING = "{"
_RECORDS = '"records":['
_CLOSING = "]}"


class UnreadableError(JournalError):
    """A file that is no bundle and no journal, or is cut off."""


class NothingFitsError(ConfigurationError):
    """No record is of the run and rounds that were asked for."""


class Subtree(StrictModel):
    """A perfect subtree of 2^level leaves, of which only the root is told."""

    level: int = Field(ge=0, le=62)
    root: str = Field(pattern=r"^[0-9a-f]{64}$")


class Header(StrictModel):
    """What a bundle says before its records."""

    v: int = Field(ge=VERSION, le=VERSION)
    party: str
    """A party's identity: spiffe://FEDERATION/ROLE/NAME."""
    federation: str
    origin: str
    """Name of the journal in its checkpoints."""
    size: int = Field(ge=1, lt=2**53)
    """Records of the journal that the checkpoint covers."""
    first: int = Field(ge=0, lt=2**53)
    """Index of the first record here."""
    count: int = Field(ge=1, lt=2**53)
    """Records here."""
    before: tuple[Subtree, ...] = Field(default=(), max_length=64)
    """What stands before the first record here."""
    behind: tuple[Subtree, ...] = Field(default=(), max_length=128)
    """What stands behind the last record here."""
    checkpoint: str
    public_key: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Of a range: the public audit key (Ed25519, hex) that signed the checkpoint. Of a whole journal: null, its first
    record names it."""
    schemas: tuple[tuple[str, ...], ...] = ()
    """Of a range: schemas that its messages need and that stand before it."""

    @property
    def whole(self) -> bool:
        """Whether every record of the journal is here."""
        return self.first == 0 and self.count == self.size


@dataclass
class Evidence:
    """Records to be verified, from a bundle or from a journal's folder. ``notes``: the journal's signed checkpoints, in
    about their order. ``lines``: the records' exact bytes."""

    source: Path
    header: bundle.Header | None
    lines: Iterator[bytes]
    notes: Iterator[str] = field(default_factory=lambda: iter(()))


@dataclass(frozen=True)
class Selection:
    """A range of a journal: the records from the first to the last one of these rounds (both included, from 0)."""

    run: str | None = None
    first_round: int | None = None
    last_round: int | None = None

    def fits(self, record: Record) -> bool:
        """Whether a record belongs to it."""
        run, number = run_of(record), round_of(record)
        if self.run is not None and run != self.run:
            return False
        if self.first_round is None and self.last_round is None:
            return run is not None
        return number is not None and (self.first_round or 0) <= number <= (
            number if self.last_round is None else self.last_round
        )


def export(journal: Path, target: Path, *, select: Selection | None = None) -> Header:
    """Writes the bundle of a journal, up to its last signed checkpoint; returns its header.

    Raises ``JournalError`` if there is no journal, nothing in it was signed yet, or it is not what was signed;
    ``NothingFitsError`` if nothing fits ``select``.
    """
    note = last_checkpoint(journal)
    checkpoint = read_note(note) if note else None
    if note is None or checkpoint is None or checkpoint.size == 0:
        raise JournalError(f"{journal}: there is no signed journal yet; the daemon begins one")
    try:
        header = _header(journal, note, checkpoint, select)
        with replacing(target) as file:
            file.write(f'{_OPENING}\n"header":'.encode() + write_canonical(header.model_dump(mode="json")) + b",\n")
            file.write(f"{_RECORDS}\n".encode())
            end = header.first + header.count
            tree = MerkleTree()
            for index, line in enumerate(itertools.islice(read_lines(journal), header.size)):
                tree.append(line)
                if header.first <= index < end:
                    file.write(line + (b",\n" if index + 1 < end else b"\n"))
            file.write(f"{_CLOSING}\n".encode())
            if (tree.size, tree.root()) != (checkpoint.size, checkpoint.root):
                raise ValueError("the records are not those that were signed")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise JournalError(
            f"{journal}: is damaged, and cannot be exported ({error}); `audit verify` says where. Keep the folder as "
            "evidence"
        ) from None
    return header


def open_evidence(path: Path) -> Evidence:
    """A bundle, or a journal's folder; raises ``UnreadableError`` for anything else."""
    if path.is_dir():
        if not any(path.glob("records*.jsonl")):
            raise UnreadableError(f"{path}: is not a journal's folder: there is no records.jsonl")
        return Evidence(path, None, read_lines(path), read_checkpoints(path))
    try:
        header, lines = bundle.open_bundle(path)
        return Evidence(path, header, _readable(lines))
    except verify.UnreadableError as error:
        raise UnreadableError(str(error)) from None


def read_evidence(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a bundle or of a journal's folder, one by one, in order. They are read, not verified:
    ``verify_evidence`` says whether they are what was signed.

    Raises ``UnreadableError`` for what is neither, or a line that is no record.

    >>> from medsilo import read_evidence
    >>> sent = [r for r in read_evidence("demo/hospital1-evidence.json") if r.get("direction") == "sent"]
    >>> sum(r["length"] for r in sent) == sum(n for r in sent for n in r["classes"].values())  # each byte has its class
    True
    """
    for number, line in enumerate(open_evidence(Path(path)).lines):
        try:
            record = read_canonical(line)
            if not isinstance(record, dict):
                raise ValueError("it is not a JSON object")
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"{path}: line {number} of its records is none: {error!s:.200}") from None
        yield record


def _readable(lines: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except verify.UnreadableError as error:
        raise UnreadableError(str(error)) from None


def _header(journal: Path, note: str, checkpoint: Checkpoint, select: Selection | None) -> Header:
    size = checkpoint.size
    begin = read(json.loads(next(read_lines(journal))))
    extent = _Extent(0, size) if select is None else _extent(journal, size, select)
    before, behind = _left_out(journal, extent.first, extent.end, size)
    return Header(
        v=VERSION,
        party=begin.self,
        federation=begin.federation,
        origin=checkpoint.origin,
        size=size,
        first=extent.first,
        count=extent.end - extent.first,
        before=before,
        behind=behind,
        checkpoint=note,
        public_key=extent.public_key,
        schemas=extent.schemas,
    )


@dataclass(frozen=True)
class _Extent:
    """``public_key``: the one that signed the checkpoint. ``schemas``: those before it that its messages need."""

    first: int
    end: int
    public_key: str | None = None
    schemas: tuple[tuple[str, ...], ...] = ()


def _extent(journal: Path, size: int, select: Selection) -> _Extent:
    first = last = None
    key = ""
    schemas: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    since: set[str] = set()
    for index, line in enumerate(itertools.islice(read_lines(journal), size)):
        record = read(json.loads(line))
        fits = select.fits(record)
        if fits:
            first = index if first is None else first
            last = index
        if first is not None and isinstance(record, MessageRecord):
            since.add(record.schema_sha256)
        if fits:
            used |= since
            since.clear()
        match record:
            case KeyRecord():
                key = record.public_key
            case KeyRotationRecord() if index + 2 <= size:
                key = record.public_key
            case SchemaRecord() if first is None:
                schemas[record.schema_sha256] = tuple(record.files)
    if first is None or last is None:
        raise NothingFitsError(f"{journal}: no signed record is of that run and those rounds")
    if (first, last + 1) == (0, size):
        return _Extent(0, size)
    needed = tuple(files for name, files in sorted(schemas.items()) if name in used)
    return _Extent(first, last + 1, key, needed)


def _left_out(journal: Path, first: int, end: int, size: int) -> tuple[tuple[Subtree, ...], tuple[Subtree, ...]]:
    """The perfect subtrees before ``first`` and from ``end`` to ``size``."""
    spans = [*perfect_subtrees(0, first), *perfect_subtrees(end, size)]
    found: list[Subtree] = []
    tree = MerkleTree()
    for index, line in enumerate(read_lines(journal)):
        if len(found) == len(spans):
            break
        start, level = spans[len(found)]
        if index < start:
            continue
        tree.append(line)
        if tree.size == 1 << level:
            found.append(Subtree(level=level, root=tree.root().hex()))
            tree = MerkleTree()
    behind = sum(start >= end for start, _ in spans)
    return tuple(found[: len(found) - behind]), tuple(found[len(found) - behind :])


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex: what a report names its bundle by."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
