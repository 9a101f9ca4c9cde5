"""The tree over a party's records, held against what a journal's folder has besides: its own list of checkpoints."""

from __future__ import annotations

from collections import deque

from medsilo.privacy.audit.bundle import Evidence
from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.checking import Checks
from medsilo.privacy.verify import tree
from medsilo.privacy.verify.bundle import Header
from medsilo.privacy.verify.result import BrokenError, EvidenceError, Result
from medsilo.privacy.verify.signed import Checkpoint, read_note, verify_note

_MOST_UNCHECKED = 64
_REMEMBERED = tree.REMEMBERED


class SignedTree(tree.SignedTree):
    """As the verifier's, of a bundle or of a journal's folder."""

    def __init__(self, evidence: Evidence, result: Result, checks: Checks) -> None:
        super().__init__(result, checks)
        self._listed = evidence.header is None
        """Whether the journal's own list of checkpoints is at hand."""
        self._notes = evidence.notes
        self._ahead: tuple[str, Checkpoint] | None = None
        """The next of that list."""
        self._checkpoint_here = bytearray(_REMEMBERED)
        """For each tree that is remembered, whether the journal's own list of checkpoints holds one over it."""
        self._unchecked: deque[str] = deque()
        """Checkpoints whose signatures have not been checked yet."""
        self._unlisted: dict[str, tuple[int, int | None]] = {}
        """Calls in which a checkpoint was shown that the journal's own list lacks: (its size, the message's index)."""

    @property
    def origin(self) -> str:
        """The journal's name in its checkpoints."""
        return self._origin

    @property
    def unlisted(self) -> int:
        """How many checkpoints a crash kept from the journal's own list."""
        return len(self._unlisted)

    def begin(self, header: Header | None) -> None:
        """As the verifier's."""
        super().begin(header)
        self._ahead = self._next_note()

    def taken(self, line: bytes) -> None:
        """What the last record says has been taken in: now the checkpoints that end with it."""
        super().taken(line)
        while self._ahead is not None and self._ahead[1].size <= self.size:
            self._take_note(*self._ahead)
            self._ahead = self._next_note()

    def end(self) -> None:
        """There are no more records."""
        if self._ahead is not None and self._ahead[1].size > self.size:
            raise BrokenError(None, f"records {self.size} to {self._ahead[1].size - 1} were signed and are gone")
        for note in self._unchecked:
            self._check_signature(note)

    def check_given(self, note: str, call_id: str) -> None:
        """As the verifier's; and that the list holds the checkpoint."""
        super().check_given(note, call_id)
        checkpoint = read_note(note)
        if self._listed and not self._checkpoint_here[checkpoint.size % _REMEMBERED]:
            # A crash may have kept it from the list, and the message from leaving.
            self._unlisted[call_id] = checkpoint.size, self.index
        if note in self._unchecked:
            self._unchecked.remove(note)

    def check_answered(self, call_id: str) -> None:
        """A message has come in a call: the own attestation in it has left."""
        if call_id in self._unlisted:
            raise self._not_listed(call_id)

    def _next_note(self) -> tuple[str, Checkpoint] | None:
        try:
            note = next(self._notes, None)
            return None if note is None else (note, read_note(note))
        except (JournalError, EvidenceError) as error:
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
            verify_note(note, self._key_for(read_note(note).size), self._checks)
        except EvidenceError as error:
            what = error.what if isinstance(error, BrokenError) else str(error)
            raise BrokenError(None, f"the checkpoint over {read_note(note).size} records: {what}") from None

    def _not_listed(self, call_id: str) -> BrokenError:
        size, index = self._unlisted[call_id]
        return BrokenError(
            index,
            f"its attestation shows a checkpoint over {size} records that is not among the journal's checkpoints",
        )

    def _remember(self) -> None:
        super()._remember()
        self._checkpoint_here[self.size % _REMEMBERED] = 0
