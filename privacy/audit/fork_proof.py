"""Proof that a party signed two histories of one journal: a small file that anyone can check, with nothing else.

It holds two *views*, each a signed checkpoint with the proof (RFC 6962) that it continues an earlier size. Such a proof
binds the signed root to hashes over ranges of the records. Where two views have different hashes over one range,
or different roots over one size, no journal gives both: whoever holds the key has signed for two. ``docs/audit.md``
says how to check it by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from medsilo.privacy.audit.bundle import UnreadableError
from medsilo.privacy.errors import JournalError
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.files.configuration import StrictModel
from medsilo.privacy.files.durable import replacing
from medsilo.privacy.identity.envelope import from_json, key_id
from medsilo.privacy.journal.checkpoint import MOST_SIGNS, Checkpoint, verify
from medsilo.privacy.journal.key_rotation import successors
from medsilo.privacy.journal.merkle import check_consistency, proven_subtrees

FORM = "medsilo-two-histories"
_LARGEST = 4 << 20
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class View(StrictModel):
    """A checkpoint as one hospital was shown it (``shown_to``: whoever wrote the file says so). ``size``, ``root``: of
    the one that was shown to it before, which ``proof`` shows it to continue; 0 and the hash of nothing where it was
    the first."""

    shown_to: str = Field(max_length=1000)
    checkpoint: str = Field(max_length=MOST_SIGNS + 1000)
    size: int = Field(ge=0, lt=2**53)
    root: _Hex32
    proof: tuple[_Hex32, ...] = Field(max_length=128)

    def subtrees(self, checkpoint: Checkpoint) -> dict[tuple[int, int], bytes]:
        """Hashes over records start to end that the checkpoint, whose signature is checked, is bound to; raises
        ``JournalError`` if the proof does not hold."""
        found = {(0, checkpoint.size): checkpoint.root}
        root, proof = bytes.fromhex(self.root), [bytes.fromhex(node) for node in self.proof]
        if not check_consistency(self.size, root, checkpoint.size, checkpoint.root, proof):
            raise JournalError(
                f"the proof from {self.size} to {checkpoint.size} records does not hold for the signed root"
            )
        if 0 < self.size < checkpoint.size:
            found |= proven_subtrees(self.size, root, checkpoint.size, proof)
            found[0, self.size] = root
        return found


class ForkProof(StrictModel):
    """The file. ``public_key``: a key of ``party``; ``rotations``: its signed changes to later ones, each from that one
    or from one that is led to before. (Towards each of two hospitals it may have changed its key otherwise.)"""

    form: Literal["medsilo-two-histories"] = "medsilo-two-histories"
    v: Literal[1] = 1
    party: str = Field(max_length=1000)
    public_key: _Hex32
    rotations: tuple[dict[str, Any], ...] = Field(default=(), max_length=100)
    views: tuple[View, View]

    def check(self, key: bytes | None = None) -> Fork:
        """What it proves; raises ``JournalError`` if it proves nothing. ``key``: one that the party is known to have or
        to have had (Ed25519, 32 bytes)."""
        statements = [from_json(statement) for statement in self.rotations]
        keys, used = successors(statements, self.party, bytes.fromhex(self.public_key))
        if len(used) < len(statements):
            raise JournalError("it holds a change of keys that no key of the party has signed")
        if key is not None and key not in keys:
            raise JournalError(
                f"it is signed with the audit key {key_id(keys[-1])[:16]}…, not with {key_id(key)[:16]}…, the one that "
                "was given"
            )
        subtrees, sizes = [], []
        for view in self.views:
            checkpoint = _signed(view.checkpoint, keys)
            if f"spiffe://{checkpoint.origin.removeprefix('medsilo/')}" != self.party:
                raise JournalError(f"the checkpoint is of the journal {checkpoint.origin}, not of {self.party}")
            subtrees.append(view.subtrees(checkpoint))
            sizes.append(checkpoint.size)
        one, other = subtrees
        different = [span for span in one if span in other and one[span] != other[span]]
        if not different:
            raise JournalError("the two views do not contradict each other: they prove nothing")
        start, end = min(different, key=lambda span: (span[1] - span[0], span))
        return Fork(self.party, key_id(keys[0]), start, end, (sizes[0], sizes[1]))

    def write(self, path: Path) -> None:
        """Writes the file, in canonical JSON (RFC 8785)."""
        with replacing(path) as file:
            file.write(write_canonical(self.model_dump(mode="json")) + b"\n")


@dataclass(frozen=True)
class Fork:
    """What is proven. ``key``: SHA-256 of the key; the two differ within records ``start`` to ``end`` - 1, and are
    the ones that were signed with checkpoints over so many records: ``sizes``."""

    party: str
    key: str
    start: int
    end: int
    sizes: tuple[int, int]

    def sentence(self) -> str:
        """It in one sentence."""
        one, other = self.sizes
        if one == other == self.end and not self.start:
            what = f"two different roots for the first {one} records of its journal"
        else:
            where = f"record {self.start}" if self.end == self.start + 1 else f"records {self.start} to {self.end - 1}"
            what = (
                f"two histories of its journal, in checkpoints over {one} and over {other} records that differ in "
                f"{where}"
            )
        return f"{self.party} has signed {what}, with the audit key whose fingerprint begins with {self.key[:16]}"


def read_fork_proof(path: Path) -> ForkProof | None:
    """The proof in a file; None for a file that is something else.

    Raises ``UnreadableError`` for one that calls itself a proof and cannot be read.
    """
    try:
        with path.open("rb") as file:
            if not file.read(64).startswith(b'{"form":"' + FORM.encode()):
                return None
            file.seek(0)
            content = file.read(_LARGEST)
        return ForkProof.model_validate(read_canonical(content.removesuffix(b"\n")))
    except OSError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        raise UnreadableError(f"{path}: is no proof: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise UnreadableError(f"{path}: is no proof as `audit verify --proof` writes it") from None


def _signed(note: str, keys: list[bytes]) -> Checkpoint:
    failure = JournalError("the checkpoint is signed by nobody")
    for key in keys:
        try:
            return verify(note, key)
        except JournalError as error:
            failure = error
    raise failure
