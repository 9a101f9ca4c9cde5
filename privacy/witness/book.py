"""What a witness keeps: the size and root of each log that it has cosigned last, and nothing else.

A log's line is on disk before its cosignature is given, so that after a power cut the witness never signs less than it
has signed before, nor anything else in its place.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.errors import JournalError, JournalInUseError, MedsiloError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.cosignature import COSIGNATURE, CosignatureError, NoteKey, cosign, signed_by
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.merkle import EMPTY_ROOT, check_consistency
from medsilo.privacy.witness.protocol import AddCheckpoint

_ENDING = ".checkpoint"


class UnknownLogError(MedsiloError):
    """A checkpoint of a log that the witness does not serve."""


class UnsignedError(MedsiloError):
    """A checkpoint that none of its log's keys has signed."""


class ConflictError(MedsiloError):
    """A request that begins elsewhere than the witness is; ``size``: that it has cosigned last."""

    def __init__(self, size: int, what: str) -> None:
        super().__init__(what)
        self.size = size


class InconsistentError(MedsiloError):
    """A proof that does not show that the checkpoint continues the one cosigned last."""


@dataclass(frozen=True)
class Held:
    """The checkpoint of a log that was cosigned last."""

    size: int
    root: bytes


class Book:
    """The state of a witness, in a folder of its own. One process at a time has it.

    ``name``, ``key``: as which it cosigns. ``logs``: the keys that sign the logs that it serves; a log may have
    several, as keys are changed. ``clock``: tells the time, in seconds since 1970. Its methods may be called from any
    thread.
    """

    def __init__(
        self, folder: Path, name: str, key: Ed25519PrivateKey, logs: Iterable[NoteKey], clock: Callable[[], float]
    ) -> None:
        self.key = NoteKey(name, COSIGNATURE, key.public_key().public_bytes_raw())
        self._folder = folder
        self._private = key
        self._clock = clock
        self._logs: dict[str, list[NoteKey]] = {}
        for log in logs:
            self._logs.setdefault(log.name, []).append(log)
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = {origin: self._read(origin) for origin in self._logs}
        except BlockingIOError:
            os.close(self._handle)
            raise JournalInUseError(f"{folder}: another witness has this folder; stop it first") from None
        except BaseException:
            os.close(self._handle)
            raise

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._handle)

    @property
    def origins(self) -> list[str]:
        """The logs that are served."""
        return sorted(self._logs)

    def add(self, request: AddCheckpoint) -> str:
        """The cosignature line for a checkpoint, which is on disk as the last one of its log.

        Raises ``UnknownLogError``, ``UnsignedError``, ``ConflictError`` or ``InconsistentError``.
        """
        checkpoint = request.checkpoint
        keys = self._logs.get(checkpoint.origin)
        if keys is None:
            raise UnknownLogError(f"the log {checkpoint.origin:.200} is not served here")
        try:
            if not any(signed_by(request.note, key) for key in keys):
                raise UnsignedError(f"none of the keys of {checkpoint.origin} has signed this checkpoint")
        except CosignatureError as error:
            raise UnsignedError(str(error)) from None
        with self._lock:
            held = self._held[checkpoint.origin]
            if request.old != held.size:
                raise ConflictError(held.size, f"the last checkpoint here is over {held.size} records")
            if checkpoint.size == held.size and checkpoint.root != held.root:
                raise ConflictError(held.size, f"another root over {held.size} records was cosigned before")
            if not check_consistency(held.size, held.root, checkpoint.size, checkpoint.root, request.proof):
                raise InconsistentError("the proof does not show that it continues the last checkpoint")
            if checkpoint.size > held.size:
                write_atomically(self._path(checkpoint.origin), checkpoint.text().encode(), mode=0o600)
                self._held[checkpoint.origin] = Held(checkpoint.size, checkpoint.root)
        return cosign(request.note, self.key.name, self._private, int(self._clock()))

    def last(self, origin: str) -> str:
        """The last checkpoint of a log, cosigned anew with the time now: the witness's word on where the log is at
        least. Raises ``UnknownLogError``."""
        with self._lock:
            held = self._held.get(origin)
        if held is None or not held.size:
            raise UnknownLogError(f"no checkpoint of {origin:.200} was cosigned here")
        note = f"{Checkpoint(origin, held.size, held.root).text()}\n"
        return f"{note}{cosign(note, self.key.name, self._private, int(self._clock()))}\n"

    def _path(self, origin: str) -> Path:
        return self._folder / f"{hashlib.sha256(origin.encode()).hexdigest()}{_ENDING}"

    def _read(self, origin: str) -> Held:
        path = self._path(origin)
        if not path.exists():
            return Held(0, EMPTY_ROOT)
        text = path.read_text(encoding="utf-8")
        try:
            lines = text.split("\n")
            size, root = int(lines[1]), base64.b64decode(lines[2], validate=True)
            if Checkpoint(origin, size, root).text() != text or len(root) != len(EMPTY_ROOT):
                raise ValueError
        except (ValueError, IndexError):
            raise JournalError(
                f"{path}: is not the last checkpoint of {origin} as this witness wrote it; put back its newest copy. A "
                "witness that begins anew could cosign a second history"
            ) from None
        return Held(size, root)
