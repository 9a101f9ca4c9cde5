"""The messages of C2SP's tlog-witness: what is asked of a witness (``add-checkpoint``)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from medsilo.privacy.errors import JournalError, MedsiloError
from medsilo.privacy.journal.checkpoint import MOST_SIGNS, Checkpoint, read_note

PATH = "add-checkpoint"
SIZE_TYPE = "text/x.tlog.size"
"""The media type of the answer that tells the last size that was cosigned."""
MOST_PROOF = 63
"""Lines of a consistency proof."""
LARGEST_REQUEST = MOST_SIGNS + 8192
_HASH_BYTES = 32
_LARGEST = 2**53


class MalformedError(MedsiloError):
    """What is asked is not in the protocol's form."""


@dataclass(frozen=True)
class AddCheckpoint:
    """A request to cosign a checkpoint. ``old``: the size that the witness is thought to have cosigned last, 0 for
    none. ``proof``: that the checkpoint continues it (RFC 6962). ``note``: the signed checkpoint."""

    old: int
    proof: tuple[bytes, ...]
    note: str

    @property
    def checkpoint(self) -> Checkpoint:
        """What is to be cosigned."""
        return read_note(self.note)

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """The request's bytes in its three parts: the line with the old size, the proof with the empty line that ends
        it, the note."""
        lines = "".join(f"{base64.b64encode(node).decode()}\n" for node in self.proof)
        return f"old {self.old}\n".encode(), f"{lines}\n".encode(), self.note.encode()

    @classmethod
    def read(cls, data: bytes) -> AddCheckpoint:
        """Raises ``MalformedError`` for what is no such request."""
        try:
            head, gap, note = data.decode().partition("\n\n")
            first, *rest = head.split("\n")
            word, _, number = first.partition(" ")
            if word != "old" or not gap:
                raise ValueError("it does not begin with the old size")
            old = int(number)
            if str(old) != number or not 0 <= old < _LARGEST:
                raise ValueError("the old size is not a number")
            if len(rest) > MOST_PROOF:
                raise ValueError(f"a proof has {MOST_PROOF} lines at most")
            proof = tuple(base64.b64decode(line, validate=True) for line in rest)
            if any(len(node) != _HASH_BYTES for node in proof):
                raise ValueError("a line of the proof is no hash")
            size = read_note(note).size
        except (ValueError, binascii.Error, JournalError) as error:
            raise MalformedError(f"this is no request to add a checkpoint: {error}") from None
        if old > size:
            raise MalformedError(f"the old size {old} is larger than the checkpoint's, {size}")
        return cls(old, proof, note)


def read_size(body: bytes) -> int:
    """The size in an answer of the type ``SIZE_TYPE``; raises ``MalformedError`` for anything else."""
    text = body.decode("ascii", "replace").removesuffix("\n")
    if not (text.isascii() and text.isdigit()) or len(text) > 16 or str(int(text)) != text:
        raise MalformedError("the witness tells no size that it has cosigned")
    return int(text)


def joined(note: str, lines: Sequence[str]) -> str:
    """A signed note with further signature lines."""
    return note + "".join(f"{line}\n" for line in lines)
