"""What a journal's next start need not read again: ``start.json`` beside the records.

It is a cache, signed with the party's audit key, and nobody depends on it: the tree as of a signed checkpoint (the
roots of its tiles), where in the files each tile begins, the files' sizes and hashes, and what the journal's owner
wants to know again. A start holds it against the checkpoint and the files; where anything does not fit, all is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError

from medsilo.privacy.errors import JournalError
from medsilo.privacy.files.configuration import StrictModel
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.envelope import from_json, seal, to_json, unseal
from medsilo.privacy.journal.checkpoint import Checkpoint, verify
from medsilo.privacy.journal.merkle import TILE, TILE_LEVEL, MerkleTree

START = "start.json"
_TYPE = "application/vnd.medsilo.journal-start+json"
_BLOCK = 1 << 20
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeptFile(StrictModel):
    """One file of records. ``size`` and ``sha256``: of what the start covers. ``mark``: inode and times of a file that
    is no longer written to; as long as they are these, nobody has written to it."""

    name: str
    first: int = Field(ge=0)
    size: int = Field(ge=0)
    sha256: _Hex32
    mark: str = ""


class Start(StrictModel):
    """The content. ``checkpoint``: the signed note; ``checkpoint_at``: where its line begins in ``checkpoints.jsonl``.
    ``tiles``: roots of all whole tiles; ``places``: file and offset where each tile begins, the last one's too.
    ``memory``: the owner's."""

    v: Literal[1] = 1
    checkpoint: str
    checkpoint_at: int = Field(ge=0)
    keys: tuple[tuple[int, _Hex32], ...]
    party: dict[str, Any]
    files: tuple[KeptFile, ...] = Field(min_length=1)
    tiles: tuple[_Hex32, ...]
    places: tuple[tuple[int, int], ...]
    memory: dict[str, Any]


@dataclass
class Held:
    """A start that fits what is on disk. ``newest``: the leaves of the last tile, which is not whole. ``hash``: over
    the last of its files, ``files[-1]``, as far as the start covers it."""

    start: Start
    checkpoint: Checkpoint
    files: list[Path]
    newest: list[bytes]
    hash: hashlib._Hash


def mark_of(path: Path) -> str:
    """What changes with every change of a file."""
    found = path.stat()
    return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def write_start(directory: Path, start: Start, key: Ed25519PrivateKey) -> None:
    """Replaces the start; raises ``OSError`` where the disk does not take it."""
    sealed = seal(start.model_dump(mode="json"), _TYPE, key)
    write_atomically(directory / START, json.dumps(to_json(sealed)).encode(), mode=0o600)


def read_start(
    directory: Path, files: list[Path], *, public_key: bytes, origin: str, line_at: Callable[[int], bytes]
) -> Held | None:
    """The start, if it fits the files; None if there is none, or anything is wrong with it: then all is to be read.

    ``files``: the records' files as they are now, oldest first. ``line_at``: gives the line of the checkpoints' file
    that begins at an offset.
    """
    try:
        envelope = from_json(json.loads((directory / START).read_bytes()))
        start = Start.model_validate_json(json.dumps(unseal(envelope, _TYPE, public_key)))
        checkpoint = verify(start.checkpoint, public_key)
        if checkpoint.origin != origin or json.loads(line_at(start.checkpoint_at))["checkpoint"] != start.checkpoint:
            return None
        return _hold(start, checkpoint, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError, JournalError):
        return None


def _hold(start: Start, checkpoint: Checkpoint, files: list[Path]) -> Held | None:
    kept = start.files
    if len(files) < len(kept) or len(start.tiles) != checkpoint.size // TILE:
        return None
    if len(start.places) != -(-checkpoint.size // TILE) or any(one.first > checkpoint.size for one in kept):
        return None
    own = files[: len(kept)]
    for path, one in zip(own[:-1], kept[:-1], strict=True):
        if path.name != one.name or path.stat().st_size != one.size:
            return None
        if mark_of(path) != one.mark and _digest(path, one.size).hexdigest() != one.sha256:
            return None
    # The last one has been set aside since, or is still written to.
    if own[-1].name not in (kept[-1].name, f"records-{kept[-1].first:012d}.jsonl"):
        return None
    digest = _digest(own[-1], kept[-1].size)
    if digest.hexdigest() != kept[-1].sha256:
        return None
    newest = list(_rest(start, checkpoint.size, own))
    tree = MerkleTree()
    for root in start.tiles:
        tree.append_subtree(TILE_LEVEL, bytes.fromhex(root))
    for line in newest:
        tree.append(line)
    if (tree.size, tree.root()) != (checkpoint.size, checkpoint.root):
        return None
    return Held(start, checkpoint, own, newest, digest)


def _rest(start: Start, size: int, files: list[Path]) -> Iterator[bytes]:
    """The leaves after the whole tiles."""
    left = size % TILE
    if not left:
        return
    number, offset = start.places[-1]
    for path in files[number:]:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                yield line.removesuffix(b"\n")
                left -= 1
                if not left:
                    return
        offset = 0


def _digest(path: Path, size: int) -> hashlib._Hash:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while size and (block := file.read(min(size, _BLOCK))):
            found.update(block)
            size -= len(block)
    if size:
        raise ValueError(f"{path} is shorter than it was")
    return found
