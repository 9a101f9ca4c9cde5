"""The tree over a party's records as they are read, and its owner's signatures that it is held against: those of its
attestations' documents, its segments' and its bundle's checkpoints."""

from __future__ import annotations

import hashlib
from typing import Any

from .bundle import Header
from .merkle import EMPTY_ROOT, MerkleTree, root_of
from .result import BrokenError, Result
from .signed import Checkpoint, Checks, follow, public_key, read_note, verify_note

REMEMBERED = 1 << 13
"""How far an attestation's checkpoint may lie behind the record that holds it: others write records meanwhile."""


class SignedTree:
    """Grows by one record's line after the other; ``result`` is told how much of it is signed.

    Its methods raise ``BrokenError``, or ``EvidenceError``, for what is not what was signed.
    """

    def __init__(self, result: Result, checks: Checks) -> None:
        self.records = MerkleTree()
        self.index: int | None = None
        """The number of the record that is being read; None before the first and after the last."""
        self.keys: list[tuple[int, bytes]] = []
        """(first size that it signs, key), in order."""
        self._checks, self._result = checks, result
        self._peaks: list[tuple[bytes, ...]] = [()] * REMEMBERED
        """Of the trees so far, by size: their roots are computed when they are asked for."""
        self._oldest_root = 0
        self._confirmed = 0
        """Size as of which a signature has confirmed the records."""
        self._origin = ""
        self._segment = (0, hashlib.sha256())

    @property
    def size(self) -> int:
        """How many records there are so far, those that a bundle leaves out among them."""
        return self.records.size

    def begin(self, header: Header | None) -> None:
        """Takes what a bundle's header stands for before its first record."""
        if header is not None:
            for level, root in header.before:
                self.records.append_subtree(level, root)
            self._oldest_root = header.first + 1
            if header.public_key is not None:
                self.keys.append((0, bytes.fromhex(header.public_key)))

    def append(self, line: bytes) -> None:
        """Takes the next record."""
        self.records.append(line)
        self._remember()

    def taken(self, line: bytes) -> None:
        """What the last record says has been taken in."""
        self._segment[1].update(line + b"\n")

    def end(self) -> None:
        """There are no more records."""

    def end_bundle(self, header: Header) -> None:
        """Takes what a bundle's header stands for behind its last record, and checks its checkpoint."""
        for level, root in header.behind:
            self.records.append_subtree(level, root)
        self._remember()
        self._origin = self._origin or _origin_of(header.party) or header.origin
        checkpoint = read_note(header.checkpoint)
        if header.origin != self._origin or checkpoint.size != header.size:
            raise BrokenError(None, "the checkpoint in its header is not the one over its records")
        self._check_note(header.checkpoint, checkpoint)
        self._sign(checkpoint)

    def key(self) -> bytes:
        """The key that signs now."""
        return self._key_for(self.size)

    def begin_keys(self, record: Any) -> None:
        """Takes the journal's first key."""
        if self.index != 0:
            raise BrokenError(self.index, "it names the journal's first key a second time, or too late")
        origin = record.origin
        if not isinstance(origin, str) or _origin_of(self._result.party) not in ("", origin):
            raise BrokenError(self.index, f"it names the journal {origin!r:.200}, which is not one of its owner")
        self._origin = origin
        self.keys.append((0, public_key(record.public_key)))

    def rotate(self, record: Any) -> None:
        """Takes a change of keys: the new one signs from the second checkpoint after its record on."""
        if not self.keys:
            raise BrokenError(self.index, "a key is changed before there is one")
        new = public_key(record.public_key)
        if follow(record.statement, record.self, self.keys[-1][1], self._checks) != new:
            raise BrokenError(self.index, "the signed change of keys is for another key")
        self.keys.append((record.index + 2, new))

    def take_segment(self, record: Any) -> None:
        """Takes the beginning of a new file."""
        first, digest = self._segment
        self._segment = (self.size - 1, hashlib.sha256())
        checkpoint = read_note(record.checkpoint)
        if record.first + record.records != record.index or checkpoint.size != record.index:
            raise BrokenError(self.index, "it does not join the segment before it")
        if not self._result.whole:
            return
        self._check_note(record.checkpoint, checkpoint)
        if (record.first, record.sha256) != (first, digest.hexdigest()):
            raise BrokenError(self.index, "it names another segment than the one that stands before it")

    def check_shown(self, note: str) -> None:
        """Checks a checkpoint that was shown to witnesses, as far as what it covers is here."""
        checkpoint = read_note(note)
        if checkpoint.size > self.size:
            raise BrokenError(self.index, f"its checkpoint is over {checkpoint.size} records, which stand behind it")
        if self._result.whole:
            self._check_note(note, checkpoint)
        elif checkpoint.size >= self._oldest_root:
            self._check_root(checkpoint)

    def check_given(self, note: str, call_id: str) -> None:  # noqa: ARG002 who reads a journal's folder needs it
        """Checks the checkpoint in an own attestation; its signature is the one of the document around it."""
        self._check_root(read_note(note))

    def _remember(self) -> None:
        self._peaks[self.records.size % REMEMBERED] = self.records.peaks

    def _check_note(self, note: str, checkpoint: Checkpoint) -> None:
        verify_note(note, self._key_for(checkpoint.size), self._checks)
        self._check_root(checkpoint)

    def _check_root(self, checkpoint: Checkpoint) -> None:
        size = checkpoint.size
        if self._origin and checkpoint.origin != self._origin:
            raise BrokenError(self.index, f"a checkpoint of {checkpoint.origin} stands in the journal {self._origin}")
        if size and not max(self._oldest_root, self.size - REMEMBERED + 1) <= size <= self.size:
            raise BrokenError(self.index, f"the checkpoint over {size} records is out of its place")
        if checkpoint.root != (root_of(self._peaks[size % REMEMBERED]) if size else EMPTY_ROOT):
            before = self._confirmed
            what = f"one of the records {before} to {size - 1} is not the one that was signed"
            raise BrokenError(before, what, until=size - 1)
        self._confirmed = max(self._confirmed, size)

    def _sign(self, checkpoint: Checkpoint) -> None:
        self._result.signed, self._result.root = checkpoint.size, checkpoint.root.hex()

    def _key_for(self, size: int) -> bytes:
        found = [key for first, key in self.keys if first <= size]
        if not found:
            raise BrokenError(self.index, "the journal does not begin with its public key")
        return found[-1]


def _origin_of(party: str) -> str:
    """The name of a party's journal; empty for what is no identity of a party."""
    scheme, _, rest = party.partition("://")
    return f"medsilo/{rest}" if scheme == "spiffe" else ""
