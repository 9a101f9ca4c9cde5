"""How a journal is taken up where the last process left it: read, held against what was signed, and mended where a
crash cut a line short."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import from_json
from medsilo.privacy.journal.chain import CHECKPOINTS, Chain, read_chain
from medsilo.privacy.journal.checkpoint import read_note, verify
from medsilo.privacy.journal.merkle import check_consistency
from medsilo.privacy.journal.records import KeyRecord, KeyRotationRecord, MessageRecord, read
from medsilo.privacy.journal.segments import RECORDS, WAY_OUT, Segments, cut_torn_line, lines_of, parse, segments
from medsilo.privacy.journal.start import read_start


class Recovery:
    """Reads what is there into ``segments`` and ``chain``; raises ``JournalError`` if it is not what was signed."""

    def __init__(self, directory: Path, segments: Segments, chain: Chain, *, public_key: bytes, origin: str) -> None:
        self._directory = directory
        self._segments = segments
        self._chain = chain
        self._public_key = public_key
        self._origin = origin
        self.keys: list[tuple[int, bytes]] = [(0, public_key)]
        """(first size that it signs, key), in order."""
        self.party: dict[str, Any] = {}
        """What each record says of its journal's owner."""
        self.memory: Mapping[str, Any] | None = None
        """What ``Journal.remember`` was given, if the journal was not read from its beginning."""
        self.read_from = 0
        """The first record that this start has read."""

    def run(self) -> dict[int, str]:
        """Reads what is there, from where the last process left a start; returns the checkpoints that a crash kept from
        their file, by size.

        A checkpoint is written after the records that it covers and the message that carries it: it stands in that
        message's record.
        """
        files = segments(self._directory)
        offset, checkpoints = self._begin_from_start(files)
        lost: dict[int, str] = {}
        ahead = self._chain.follow(checkpoints)
        for number, path in enumerate(files[len(self._segments.kept) :]):
            if number:
                self._segments.keep()
                self._segments.begin(path)
            else:
                self._segments.rename(path)
            for line, complete in lines_of(path, 0 if number else offset):
                while ahead is not None and read_note(ahead).size <= self._segments.tree.size:
                    self._check_note(ahead)
                    ahead = self._chain.follow(checkpoints)
                if not complete:
                    break
                found = parse(line, self._segments.tree.size, self._directory)
                self.party = self.party or party_of(found)
                match read(found):
                    case KeyRecord() as record:
                        self.keys[:] = [(0, bytes.fromhex(record.public_key))]
                    case KeyRotationRecord() as record:
                        self.keys.append((record.index + 2, bytes.fromhex(record.public_key)))
                    case MessageRecord(direction="sent") as record if ahead is None and record.attestation is not None:
                        note = json.loads(from_json(record.attestation).payload)["checkpoint"]
                        lost[read_note(note).size] = note
                self._segments.grow(line)
        while ahead is not None and read_note(ahead).size <= self._segments.tree.size:
            self._check_note(ahead)
            ahead = self._chain.follow(checkpoints)
        if ahead is not None:
            raise JournalError(
                f"{self._directory / RECORDS}: holds {self._segments.tree.size} records, but a checkpoint over "
                f"{read_note(ahead).size} was signed; {WAY_OUT}"
            )
        if self._segments.tree.size and self.keys[-1][1] != self._public_key:
            raise JournalError(
                f"{self._directory}: this journal is signed with another audit key. If a change of keys was "
                "interrupted, give the same command (`keys --rotate`) again; if not, look where audit.key of this "
                "journal was moved to, and put it in its place. Only if it is lost, take it from a backup"
            )
        for name in (RECORDS, CHECKPOINTS):
            cut_torn_line(self._directory / name)
        return self._checked(lost)

    def _begin_from_start(self, files: list[Path]) -> tuple[int, Iterator[tuple[str, bytes]]]:
        """Takes up the start that the last process left, if it did; returns how far the last of its files is known, and
        the checkpoints from the start's own on."""
        held = read_start(
            self._directory, files, public_key=self._public_key, origin=self._origin, line_at=self._checkpoint_at
        )
        if held is None:
            return 0, read_chain(self._directory)
        self._segments.take_up(held)
        self.keys[:] = [(first, bytes.fromhex(key)) for first, key in held.start.keys]
        self.party, self.memory = held.start.party, held.start.memory
        self.read_from = held.checkpoint.size
        return self._segments.end, read_chain(self._directory, held.start.checkpoint_at)

    def _checked(self, lost: dict[int, str]) -> dict[int, str]:
        """Those of the checkpoints that are not in their file; raises ``JournalError`` for one of another past."""
        lost = {size: note for size, note in lost.items() if size > self._chain.size}
        for size, note in lost.items():
            checkpoint = verify(note, [key for first, key in self.keys if first <= size][-1])
            proof = self._segments.tree.consistency(size, self._segments.tree.size)
            if not check_consistency(
                size, checkpoint.root, self._segments.tree.size, self._segments.tree.root(), proof
            ):
                raise self._not_signed(size)
        return lost

    def _checkpoint_at(self, offset: int) -> bytes:
        return next(lines_of(self._directory / CHECKPOINTS, offset))[0]

    def _check_note(self, note: str) -> None:
        size = read_note(note).size
        checkpoint = verify(note, [key for first, key in self.keys if first <= size][-1])
        if size < self._segments.tree.size:
            raise JournalError(
                f"{self._directory / CHECKPOINTS}: the checkpoint over {size} records is out of its place"
            )
        if checkpoint.root != self._segments.tree.root():
            raise self._not_signed(size)

    def _not_signed(self, size: int) -> JournalError:
        return JournalError(
            f"{self._directory / RECORDS}: the first {size} records are not those that were signed; {WAY_OUT}"
        )


def party_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of its journal's owner."""
    return {name: record[name] for name in ("federation", "self") if name in record}
