"""The files that a journal's records stand in, and the tree over all of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.merkle import TILE, ProvingTree
from medsilo.privacy.journal.start import Held, KeptFile, mark_of

RECORDS = "records.jsonl"
_BLOCK = 1 << 16
WAY_OUT = (
    "keep this copy as evidence, look with `audit verify` where it parts from what was signed, and check the disk. "
    "Only then put back the newest copy, if it holds as many records: others take an older journal for a rewritten past"
)


class Segments:
    """The records of a journal as far as they have been read or written: each is a line of one of its files, of which
    only the last is written to, and a leaf of one tree."""

    def __init__(self, directory: Path) -> None:
        self.tree = ProvingTree(self.read)
        self.kept: list[KeptFile] = []
        """Of all files but the last."""
        self.places: list[tuple[int, int]] = []
        """Where each tile of the tree begins: the number of its file, and how far into it."""
        self._paths: list[Path] = []
        self.begin(directory / RECORDS)

    def begin(self, path: Path) -> None:
        """What follows stands in another file."""
        self._paths.append(path)
        self.first = self.tree.size
        """The first record of the last file."""
        self.end = 0
        """How many bytes of the last file are known."""
        self._hash = hashlib.sha256()

    def grow(self, line: bytes) -> None:
        """Takes the next record of the last file."""
        if self.tree.size % TILE == 0:
            self.places.append((len(self._paths) - 1, self.end))
        self.tree.append(line)
        self.end += len(line) + 1
        self._hash.update(line + b"\n")

    def sha256(self) -> str:
        """Of the last file, as far as it is known."""
        return self._hash.hexdigest()

    def rename(self, path: Path) -> None:
        """The last file has that name."""
        self._paths[-1] = path

    def keep(self) -> None:
        """The last file is no longer written to."""
        path = self._paths[-1]
        self.kept.append(
            KeptFile(name=path.name, first=self.first, size=self.end, sha256=self.sha256(), mark=mark_of(path))
        )

    def files(self) -> tuple[KeptFile, ...]:
        """All files, as far as they are known."""
        return (*self.kept, KeptFile(name=RECORDS, first=self.first, size=self.end, sha256=self.sha256()))

    def take_up(self, held: Held) -> None:
        """Begins where a start leaves off."""
        start = held.start
        for root in start.tiles:
            self.tree.append_tile(bytes.fromhex(root))
        for line in held.newest:
            self.tree.append(line)
        self._paths, self.places = held.files, list(start.places)
        self.kept = [*start.files[:-1]]
        self.first, self.end, self._hash = start.files[-1].first, start.files[-1].size, held.hash

    def read(self, first: int, count: int) -> list[bytes]:
        """Records ``first`` to ``first + count`` as they stand in the files."""
        number, offset = self.places[first // TILE]
        skip = first % TILE
        found: list[bytes] = []
        while len(found) < skip + count:
            with self._paths[number].open("rb") as file:
                file.seek(offset)
                found += [line.removesuffix(b"\n") for line in itertools.islice(file, skip + count - len(found))]
            number, offset = number + 1, 0
        return found[skip:]


def segments(directory: Path) -> list[Path]:
    """The records' files, oldest first. A segment that was just set aside and is still the newest file counts once."""
    newest = directory / RECORDS
    older = sorted(directory.glob("records-*.jsonl"))
    if older and newest.exists() and older[-1].samefile(newest):
        older.pop()
    return [*older, newest]


def lines_of(path: Path, offset: int = 0) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file from an offset on, each with whether it was completed; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def cut_torn_line(path: Path) -> None:
    """Removes a last line that a crash cut short: nothing that waited for it has happened."""
    if not path.exists():
        return
    size = whole = path.stat().st_size
    with path.open("rb") as file:
        while whole:
            begin = max(whole - _BLOCK, 0)
            file.seek(begin)
            if (end := file.read(whole - begin).rfind(b"\n")) >= 0:
                whole = begin + end + 1
                break
            whole = begin
    if whole < size:
        os.truncate(path, whole)


def parse(line: bytes, index: int, directory: Path) -> dict[str, Any]:
    """The JSON object of a record's line; raises ``JournalError`` unless it is the one with that number."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("index") != index or not isinstance(record.get("kind"), str):
        raise JournalError(f"{directory / RECORDS}: record {index} is damaged; {WAY_OUT}")
    return record
