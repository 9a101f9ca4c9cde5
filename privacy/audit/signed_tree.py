"""The tree over a party's records as they are read, and every signature of its owner that it is held against: the
journal's own list of checkpoints, those in its attestations, its segments' and a bundle's."""

from __future__ import annotations

import hashlib
from collections import deque

from medsilo.privacy.audit.bundle import Evidence, Header
from medsilo.privacy.audit.findings import BrokenError, Verification
from medsilo.privacy.audit.record_form import public_key
from medsilo.privacy.door.attestation import Attestation
from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.checking import Checks
from medsilo.privacy.identity.envelope import from_json
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note, verify
from medsilo.privacy.journal.key_rotation import follow
from medsilo.privacy.journal.merkle import EMPTY_ROOT, MerkleTree, root_of
from medsilo.privacy.journal.records import KeyRecord, KeyRotationRecord, SegmentRecord

_REMEMBERED = 1 << 13
"""How far an attestation's checkpoint may lie behind the record that holds it: others write records meanwhile."""
_MOST_UNCHECKED = 64


class SignedTree:
    """Grows by one record's line after the other; ``result`` is told how much of it is signed.

    Its methods raise ``BrokenError``, or ``JournalError``, for what is not what was signed.
    """

    def __init__(self, evidence: Evidence, result: Verification, checks: Checks) -> None:
        self.records = MerkleTree()
        self.index: int | None = None
        """The number of the record that is being read; None before the first and after the last."""
        self.keys: list[tuple[int, bytes]] = []
        """(first size that it signs, key), in order."""
        self._checks = checks
        self._result = result
        self._listed = evidence.header is None
        """Whether the journal's own list of checkpoints is at hand."""
        self._notes = evidence.notes
        self._ahead: tuple[str, Checkpoint] | None = None
        """The next of that list."""
        self._peaks: list[tuple[bytes, ...]] = [()] * _REMEMBERED
        """Of the trees so far, by size: their roots are computed when they are asked for."""
        self._checkpoint_here = bytearray(_REMEMBERED)
        """For each of them, whether the journal's own list of checkpoints holds one over it."""
        self._oldest_root = 0
        self._confirmed = 0
        """Size as of which a signature has confirmed the records."""
        self._unchecked: deque[str] = deque()
        """Checkpoints whose signatures have not been checked yet."""
        self._unlisted: dict[str, tuple[int, int | None]] = {}
        """Calls in which a checkpoint was shown that the journal's own list lacks: (its size, the message's index)."""
        self._origin = ""
        self._segment = (0, hashlib.sha256())

    @property
    def size(self) -> int:
        """How many records there are so far, those that a bundle leaves out among them."""
        return self.records.size

    @property
    def origin(self) -> str:
        """The journal's name in its checkpoints."""
        return self._origin

    @property
    def unlisted(self) -> int:
        """How many checkpoints a crash kept from the journal's own list."""
        return len(self._unlisted)

    def begin(self, header: Header | None) -> None:
        """Takes what a bundle's header stands for before its first record."""
        if header is not None:
            for subtree in header.before:
                self.records.append_subtree(subtree.level, bytes.fromhex(subtree.root))
            self._oldest_root = header.first + 1
            if header.public_key is not None:
                self.keys.append((0, bytes.fromhex(header.public_key)))
        self._ahead = self._next_note()

    def append(self, line: bytes) -> None:
        """Takes the next record."""
        self.records.append(line)
        self._remember()

    def taken(self, line: bytes) -> None:
        """What the last record says has been taken in: now the checkpoints that end with it."""
        self._segment[1].update(line + b"\n")
        while self._ahead is not None and self._ahead[1].size <= self.size:
            self._take_note(*self._ahead)
            self._ahead = self._next_note()

    def end(self) -> None:
        """There are no more records."""
        if self._ahead is not None and self._ahead[1].size > self.size:
            raise BrokenError(None, f"records {self.size} to {self._ahead[1].size - 1} were signed and are gone")
        for note in self._unchecked:
            self._check_signature(note)

    def end_bundle(self, header: Header) -> None:
        """Takes what a bundle's header stands for behind its last record, and checks its checkpoint."""
        for subtree in header.behind:
            self.records.append_subtree(subtree.level, bytes.fromhex(subtree.root))
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

    def begin_keys(self, record: KeyRecord) -> None:
        """Takes the journal's first key."""
        if self.index != 0:
            raise BrokenError(self.index, "it names the journal's first key a second time, or too late")
        origin = record.origin
        if not isinstance(origin, str) or _origin_of(self._result.party) not in ("", origin):
            raise BrokenError(self.index, f"it names the journal {origin!r:.200}, which is not one of its owner")
        self._origin = origin
        self.keys.append((0, public_key(record.public_key)))

    def rotate(self, record: KeyRotationRecord) -> None:
        """Takes a change of keys."""
        if not self.keys:
            raise BrokenError(self.index, "a key is changed before there is one")
        known, new = self.keys[-1][1], public_key(record.public_key)
        if follow(from_json(record.statement), record.self, known) != new:
            raise BrokenError(self.index, "the signed change of keys is for another key")
        self.keys.append((record.index + 2, new))

    def take_segment(self, record: SegmentRecord) -> None:
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
            raise BrokenError(
                self.index, f"it holds a checkpoint over {checkpoint.size} records, which stand behind it"
            )
        if self._result.whole:
            self._check_note(note, checkpoint)
        elif checkpoint.size >= self._oldest_root:
            self._check_root(checkpoint)

    def check_given(self, document: Attestation, call_id: str) -> None:
        """Checks the checkpoint in an own attestation; its signature is the one of the document around it."""
        checkpoint = read_note(document.checkpoint)
        self._check_root(checkpoint)
        if self._listed and not self._checkpoint_here[checkpoint.size % _REMEMBERED]:
            # A crash may have kept it from the list, and the message from leaving.
            self._unlisted[call_id] = checkpoint.size, self.index
        if document.checkpoint in self._unchecked:
            self._unchecked.remove(document.checkpoint)

    def check_answered(self, call_id: str) -> None:
        """A message has come in a call: the own attestation in it has left."""
        if call_id in self._unlisted:
            raise self._not_listed(call_id)

    def _next_note(self) -> tuple[str, Checkpoint] | None:
        try:
            note = next(self._notes, None)
            return None if note is None else (note, read_note(note))
        except JournalError as error:
            raise BrokenError(None, str(error)) from None
        except RecursionError:
            raise BrokenError(None, "a line of its checkpoints is nested too deeply") from None

    def _take_note(self, note: str, checkpoint: Checkpoint) -> None:
        if self._unlisted:
            raise self._not_listed(next(iter(self._unlisted)))
        if checkpoint.size <= self._result.signed and self._result.signed:
            raise BrokenError(None, f"the checkpoint over {checkpoint.size} records is out of its place")
        self._check_root(checkpoint)
        self._sign(checkpoint)
        self._checkpoint_here[checkpoint.size % _REMEMBERED] = 1
        # Most checkpoints stand in an attestation as well, a few records on, whose signature then serves for both.
        self._unchecked.append(note)
        if len(self._unchecked) > _MOST_UNCHECKED:
            self._check_signature(self._unchecked.popleft())

    def _check_signature(self, note: str) -> None:
        try:
            verify(note, self._key_for(read_note(note).size), checks=self._checks)
        except JournalError as error:
            raise BrokenError(None, f"the checkpoint over {read_note(note).size} records: {error}") from None

    def _not_listed(self, call_id: str) -> BrokenError:
        size, index = self._unlisted[call_id]
        return BrokenError(
            index,
            f"its attestation shows a checkpoint over {size} records that is not among the journal's checkpoints",
        )

    def _remember(self) -> None:
        place = self.records.size % _REMEMBERED
        self._peaks[place] = self.records.peaks
        self._checkpoint_here[place] = 0

    def _root(self, size: int) -> bytes | None:
        """The root over the first ``size`` records, if it is remembered."""
        if size == 0:
            return EMPTY_ROOT
        if not max(self._oldest_root, self.size - _REMEMBERED + 1) <= size <= self.size:
            return None
        return root_of(self._peaks[size % _REMEMBERED])

    def _check_note(self, note: str, checkpoint: Checkpoint) -> None:
        verify(note, self._key_for(checkpoint.size))
        self._check_root(checkpoint)

    def _check_root(self, checkpoint: Checkpoint) -> None:
        size = checkpoint.size
        if self._origin and checkpoint.origin != self._origin:
            raise BrokenError(self.index, f"a checkpoint of {checkpoint.origin} stands in the journal {self._origin}")
        root = self._root(size)
        if root is None:
            raise BrokenError(self.index, f"the checkpoint over {size} records is out of its place")
        if root != checkpoint.root:
            before = self._confirmed
            raise BrokenError(
                before, f"one of the records {before} to {size - 1} is not the one that was signed", until=size - 1
            )
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
