"""Who may write to a journal that several coordinators can open, one of them at a time.

A lock on a file is kept by a process that hangs, for as long as it hangs. So a coordinator that has taken the lease of
one that does not answer takes the journal too: it names itself in the file ``writer`` and goes on in copies of the
files that are written to. The one before it finds another name there, before it writes and again before anything that
it wrote counts; and what it writes in between goes to files that have no place in the folder any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from medsilo.privacy.errors import LeaseLostError
from medsilo.privacy.files.durable import fsync_folder, write_atomically

WRITER = "writer"
_SCRATCH = ".writing-"


class Writer:
    """One process' leave to write in a journal's folder. ``allowed``: raises while the process may not lead."""

    def __init__(self, folder: Path, allowed: Callable[[], None]) -> None:
        self._folder = folder
        self._allowed = allowed
        self._name = self._read()

    def check(self) -> None:
        """Raises ``LeaseLostError`` if another process writes here now, and whatever ``allowed`` raises."""
        self._allowed()
        if self._read() != self._name:
            raise LeaseLostError(
                f"{self._folder}: another coordinator has taken over this journal while this one did not answer; this "
                "one writes nothing more. Started again, it waits to take over in its turn"
            )

    def take_over(self, names: Iterable[str]) -> None:
        """Takes the folder from the process that has it; ``names``: the files that are written to."""
        self._allowed()
        before, self._name = self._name, secrets.token_hex(16)
        write_atomically(self._folder / WRITER, self._name.encode(), mode=0o600)
        # From here on nothing that the other process writes counts for it. Without its folder for drafts it can put no
        # file into the place of one of these either.
        shutil.rmtree(self._folder / f"{_SCRATCH}{before}", ignore_errors=True)
        for name in names:
            copy = self._folder / f".{name}.taken"
            copy.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                with (self._folder / name).open("rb") as file, open(copy, "xb", opener=_private) as to:
                    shutil.copyfileobj(file, to, 1 << 20)
                    to.flush()
                    os.fsync(to.fileno())
                was = (self._folder / name).stat()
                copy.replace(self._folder / name)
                for other in self._folder.iterdir():  # the name that it was just getting as a file set aside
                    if os.path.samestat(other.stat(), was):
                        other.unlink()
        fsync_folder(self._folder)

    def drafts(self) -> Path:
        """A folder for files that are to take the place of others here; it is gone once another has taken over."""
        return self._folder / f"{_SCRATCH}{self._name}"

    def begin(self) -> None:
        """Makes the folder for drafts."""
        self.drafts().mkdir(mode=0o700, exist_ok=True)

    def end(self) -> None:
        """Removes it."""
        shutil.rmtree(self.drafts(), ignore_errors=True)

    def _read(self) -> str:
        try:
            return (self._folder / WRITER).read_text()
        except FileNotFoundError:
            return ""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
