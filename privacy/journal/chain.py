"""The journal's own list of its signed checkpoints: a line each, with the hash of the line before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from medsilo.privacy.errors import JournalError
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.segments import lines_of

CHECKPOINTS = "checkpoints.jsonl"


class Chain:
    """The list as far as it has been read or made."""

    def __init__(self) -> None:
        self.size = -1
        """How many records the last checkpoint covers; -1 before the first."""
        self.note = ""
        """It, signed."""
        self.line_bytes = 0
        """How long its line is in the file."""
        self._last_line = ""
        self.unwritten: list[tuple[int, bytes]] = []
        """The lines that are not in the file yet, each with the size that it covers."""

    def follow(self, checkpoints: Iterator[tuple[str, bytes]]) -> str | None:
        """Takes the next note of those in the file; None at its end."""
        note, line = next(checkpoints, (None, b""))
        if note is not None:
            self._end_with(read_note(note).size, note, line)
        return note

    def add(self, size: int, note: str) -> tuple[int, bytes]:
        """The line of a new checkpoint, with its size."""
        line = write_canonical({"checkpoint": note, "previous": self._last_line})
        self._end_with(size, note, line)
        return size, line

    def _end_with(self, size: int, note: str, line: bytes) -> None:
        self.size, self.note = size, note
        self._last_line, self.line_bytes = hashlib.sha256(line).hexdigest(), len(line) + 1


def read_chain(directory: Path, offset: int | None = None) -> Iterator[tuple[str, bytes]]:
    """The notes of a journal, oldest first, with their lines; raises ``JournalError`` where one is damaged or missing.

    ``offset``: where the first of them begins; what it follows is then not looked at.
    """
    previous = None if offset else ""
    for number, (line, complete) in enumerate(lines_of(directory / CHECKPOINTS, offset or 0)):
        if not complete:
            return
        try:
            content = read_canonical(line)
            note, before = content["checkpoint"], content["previous"]
            previous = before if previous is None else previous
            good = isinstance(note, str) and content == {"checkpoint": note, "previous": previous}
        except (ValueError, KeyError, TypeError):
            good, before = False, previous
        if not good:
            what = "is damaged" if before == previous else "does not follow the line before it"
            which = f"line {number + 1}" if not offset else f"line {number + 1} after byte {offset}"
            raise JournalError(f"{directory / CHECKPOINTS}: {which} {what}")
        previous = hashlib.sha256(line).hexdigest()
        yield note, line
