"""Signed checkpoints of a journal, in the form of C2SP's tlog-checkpoint (a signed note with Ed25519).

A checkpoint is text: origin, size, root (base64), an empty line, and signature lines, of which one is the owner's.
Whoever holds one can later hold the journal's owner to every record before it. The other side's cosignature (C2SP's
tlog-cosignature) says that it has seen the checkpoint, and that it continues the one it saw before.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.checking import HERE, Checks, check_signature
from medsilo.privacy.identity.cosignature import COSIGNATURE, ED25519, cosign, cosigned_text, key_hash

__all__ = ["MOST_SIGNS", "Checkpoint", "cosign", "read_note", "time_of", "verify", "verify_cosignature"]
_LARGEST_SIZE = 2**53
_ROOT_BYTES = 32
_MOST_SIGNATURES = 64
MOST_SIGNS = 16_000
"""How long a note may be: with the owner's signature there is room for those of all its witnesses."""


@dataclass(frozen=True)
class Checkpoint:
    """A journal's size and root hash at one moment; ``origin`` names the journal."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """The part that is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    def sign(self, key: Ed25519PrivateKey) -> str:
        """The signed note."""
        public = key.public_key().public_bytes_raw()
        signature = key_hash(self.origin, public, ED25519) + key.sign(self.text().encode())
        return f"{self.text()}\n— {self.origin} {base64.b64encode(signature).decode()}\n"


@lru_cache(maxsize=256)
def read_note(note: str) -> Checkpoint:
    """The checkpoint of a note, its signature unseen; raises ``JournalError`` if it is malformed."""
    lines = note.split("\n", 5)
    try:
        if len(lines) < 5 or lines[3]:
            raise ValueError("it does not have the three lines of a checkpoint and a signature")
        checkpoint = Checkpoint(lines[0], int(lines[1]), base64.b64decode(lines[2], validate=True))
        if not note.startswith(checkpoint.text() + "\n"):
            raise ValueError("it is not in canonical form")
        if not 0 <= checkpoint.size < _LARGEST_SIZE or len(checkpoint.root) != _ROOT_BYTES or not checkpoint.origin:
            raise ValueError("it does not name a journal, its size and its root hash")
    except (ValueError, binascii.Error) as error:
        raise JournalError(f"the checkpoint cannot be used: {error}") from None
    return checkpoint


def verify(note: str, public_key: bytes, *, checks: Checks = HERE) -> Checkpoint:
    """The checkpoint of a signed note; raises ``JournalError`` if it is malformed or has no signature of its origin's
    with that key that holds.

    A note may carry any signatures besides, within reason: of witnesses, with other keys, of kinds unknown here. As
    C2SP's signed-note has it they are no concern of who does not know them; but nothing else may stand there.
    """
    checkpoint = read_note(note)
    owner = key_hash(checkpoint.origin, public_key, ED25519)
    try:
        found = [blob for name, blob in _signatures(note[len(checkpoint.text()) + 1 :]) if name == checkpoint.origin]
        if not found:
            raise ValueError(f"it has no signature by {checkpoint.origin}")
        own = [blob[4:] for blob in found if blob[:4] == owner]
        if not own:
            raise ValueError("it was not signed with this key")
        for signature in own:
            checks.signature(public_key, signature, checkpoint.text().encode())
    except (ValueError, binascii.Error) as error:
        raise JournalError(f"the checkpoint cannot be used: {error}") from None
    except InvalidSignature:
        raise JournalError(f"the checkpoint's signature does not hold for {checkpoint.origin}") from None
    return checkpoint


def verify_cosignature(line: str, note: str, name: str, public_key: bytes) -> int:
    """When the witness saw the note, in seconds since 1970; raises ``JournalError`` if it did not sign this."""
    try:
        blob = _signature_of(name, line)
        if blob[:4] != key_hash(name, public_key, COSIGNATURE) or len(blob) != 76:
            raise ValueError("it was not made with this key")
        time = int.from_bytes(blob[4:12], "big")
        check_signature(public_key, blob[12:], cosigned_text(note, time))
    except (ValueError, binascii.Error) as error:
        raise JournalError(f"the cosignature of {name} cannot be used: {error}") from None
    except InvalidSignature:
        raise JournalError(f"the cosignature of {name} is not for this checkpoint") from None
    return time


def time_of(line: str) -> int:
    """The time that a cosignature line names, in seconds since 1970, whoever has signed it; raises ``JournalError``."""
    try:
        _, blob = _signature_line(line)
        if len(blob) != 76:
            raise ValueError("it has another length")
    except (ValueError, binascii.Error) as error:
        raise JournalError(f"a cosignature cannot be used: {error}") from None
    return int.from_bytes(blob[4:12], "big")


def _signatures(lines: str) -> list[tuple[str, bytes]]:
    """(name, key hash and signature) of a note's signature lines; raises ``ValueError`` for anything that is none."""
    if len(lines) > MOST_SIGNS:
        raise ValueError(f"it has {len(lines)} characters of signatures; {MOST_SIGNS} are the most")
    if not lines.endswith("\n"):
        raise ValueError("it does not end with a signature")
    found = [_signature_line(line) for line in lines[:-1].split("\n")]
    if len(found) > _MOST_SIGNATURES:
        raise ValueError(f"it has {len(found)} signatures; {_MOST_SIGNATURES} are the most")
    return found


def _signature_of(name: str, line: str) -> bytes:
    """What stands in the signature line of that name; raises ``ValueError`` if it is none."""
    found, blob = _signature_line(line)
    if found != name:
        raise ValueError(f"it has no signature by {name}")
    return blob


def _signature_line(line: str) -> tuple[str, bytes]:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.rpartition(" ")
    if dash != "—" or not name:
        raise ValueError("it has a line that is no signature")
    blob = base64.b64decode(encoded, validate=True)
    if base64.b64encode(blob).decode() != encoded or len(blob) < 5:
        raise ValueError("its signature is not in canonical base64")
    return name, blob
