"""What was sent, kept at the sender's own wish: encrypted with a key of its own, and never part of the proof.

The journal holds the hash of every message; a kept message shows what stood in it. Deleting kept messages, or the key,
takes nothing from the journal.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from medsilo.privacy.errors import DataError, IdentityError

_NONCE = 12
_LENGTH = 8
_LONGEST = 64 << 20
_DAY = 86_400.0


class SentArchive:
    """Sealed messages in ``folder``, a file a call; AES-256-GCM, bound to their call and place in it.

    ``key_file``: 32 random bytes, made when there is none; ``IdentityError`` if others can read it.
    """

    def __init__(self, folder: Path, key_file: Path) -> None:
        self._folder = folder
        self._key_file = key_file
        if not key_file.exists():
            key_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                os.fsync(file.fileno())
        if key_file.stat().st_mode & 0o077:
            raise IdentityError(f"{key_file}: others can read it; `chmod 600 {key_file}`")
        key = key_file.read_bytes()
        if len(key) != 32:
            raise IdentityError(
                f"{key_file}: is not a key of 32 bytes. Move it away, and the same command makes another. What was "
                "kept so far cannot be opened then (the journal still tells of it), unless a backup has the old key"
            )
        self._cipher = AESGCM(key)

    def keep(self, call_id: str, frame: int, data: bytes) -> None:
        """Keeps the next message of a call."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        nonce = secrets.token_bytes(_NONCE)
        sealed = nonce + self._cipher.encrypt(nonce, data, _place(call_id, frame))
        with os.fdopen(os.open(self._path(call_id), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(len(sealed).to_bytes(_LENGTH, "big") + sealed)

    def read(self, call_id: str) -> Iterator[bytes]:
        """A call's kept messages, in order; none if they were deleted.

        Raises ``DataError`` for a file that is cut off, changed, or was kept with another key.
        """
        path = self._path(call_id)
        if not path.exists():
            return
        with path.open("rb") as file:
            frame = 0
            while length := file.read(_LENGTH):
                size = int.from_bytes(length, "big")
                sealed = file.read(size) if _NONCE < size <= _LONGEST else b""
                try:
                    if not _NONCE < len(sealed) == size:
                        raise InvalidTag
                    yield self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _place(call_id, frame))
                except InvalidTag:
                    raise DataError(
                        f"{path}: message {frame} cannot be opened: the file is damaged or cut off, or was kept with "
                        f"another key than {self._key_file}"
                    ) from None
                frame += 1

    def delete_older(self, days: float) -> int:
        """Deletes calls that are older; returns how many."""
        limit = time.time() - days * _DAY
        old = [path for path in self._folder.glob("*.sealed") if path.stat().st_mtime < limit]
        for path in old:
            path.unlink()
        return len(old)

    def _path(self, call_id: str) -> Path:
        return self._folder / f"{call_id}.sealed"


def _place(call_id: str, frame: int) -> bytes:
    return f"medsilo sent {call_id} {frame}".encode()
