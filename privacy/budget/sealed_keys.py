"""Secret keys of private releases that are under way, so that a round that a crash cut short is repeated exactly.

Everything that a release draws (noise, samples, changes of images) follows from a key of 32 random bytes. It is sealed
in a file before the ledger is charged, and the charge's line holds the file's hash; so a repetition finds out whether
what it would do is what was paid for. If it reads the same as before, it draws the same again: one release, charged
once. If not, the key is never used again: the same noise on other numbers would show how they differ.

The files are the silo's alone (0600), and go when the coordinator's receipt for the round's update has come.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from medsilo.privacy.budget.ledger import Purpose, Subject
from medsilo.privacy.budget.noise import KEY_BYTES
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import fsync_folder, write_atomically

_SUFFIX = ".json"


@dataclass(frozen=True)
class Paid:
    """A release that is paid for. ``charge``: the hash of the ledger's line; ``key``: of all that the release draws."""

    charge: str
    key: bytes


def unsealed() -> Paid:
    """For what no ledger is charged for and nobody repeats, such as simulation: a key of its own."""
    return Paid("", secrets.token_bytes(KEY_BYTES))


@dataclass(frozen=True)
class SealedKey:
    """A key; ``reads``: the hash of all that the release is made from besides it; ``sha256``: of its file, which tells
    nothing of the key."""

    key: bytes
    reads: str
    sha256: str


class SealedKeys:
    """The keys of one silo's part in one run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, subject: Subject, purpose: Purpose) -> SealedKey | None:
        """The newest key for a purpose; None where there is none, or none that can be read."""
        try:
            data = self._path(subject, purpose).read_bytes()
            content = json.loads(data)
            found = SealedKey(bytes.fromhex(content["key"]), content["reads"], hashlib.sha256(data).hexdigest())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return found if len(found.key) == KEY_BYTES else None

    def seal(self, subject: Subject, purpose: Purpose, reads: str) -> SealedKey:
        """A new key in place of an older one; it is durable when this returns."""
        key = secrets.token_bytes(KEY_BYTES)
        data = write_canonical({**subject.describe(), **asdict(purpose), "reads": reads, "key": key.hex()})
        if not self.folder.exists():
            self.folder.mkdir(parents=True, mode=0o700)
            fsync_folder(self.folder.parent)
        write_atomically(self._path(subject, purpose), data, mode=0o600)
        return SealedKey(key, reads, hashlib.sha256(data).hexdigest())

    def settle(self, round_number: int) -> None:
        """Deletes the keys of a round and of those before it: nothing of them is ever drawn again."""
        gone = [path for path in self.folder.glob(f"*{_SUFFIX}") if int(path.name.split("-")[0]) <= round_number]
        for path in gone:
            path.unlink()
        if gone:
            fsync_folder(self.folder)

    def _path(self, subject: Subject, purpose: Purpose) -> Path:
        name = hashlib.sha256(write_canonical({**subject.describe(), **asdict(purpose)})).hexdigest()
        return self.folder / f"{purpose.round:06d}-{name}{_SUFFIX}"
