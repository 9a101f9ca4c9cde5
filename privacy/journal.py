"""The journal: an append-only log of what a party sent, received, refused and agreed to.

Each record is one line of canonical JSON (RFC 8785) and one leaf of an RFC 6962 Merkle tree; signed checkpoints
stand beside it. Canonical JSON has no line breaks inside, so a line that does not end was never completed, and
nothing that depended on it has happened.

Files in the journal's folder: ``records.jsonl`` and ``checkpoints.jsonl``.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.checkpoint import Checkpoint, verify
from privacy.durable import fsync_folder
from privacy.errors import JournalError
from privacy.merkle import MerkleTree

RECORDS = "records.jsonl"
CHECKPOINTS = "checkpoints.jsonl"


class Journal:
    """An open journal. One process at a time may have it open; its methods may be called from any thread.

    ``origin`` names the journal in its checkpoints, for example ``medsilo/FEDERATION/silo/hospital1``.
    Raises ``JournalError`` on opening if another process has it, or if what is on disk is not what was signed.
    """

    def __init__(self, directory: Path, *, key: Ed25519PrivateKey, origin: str) -> None:
        self.directory = directory
        self.origin = origin
        self._key = key
        self._broken = ""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(directory / RECORDS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._lock_file()
            self._tree = MerkleTree()
            self._recover()
            self._checkpoints = os.open(directory / CHECKPOINTS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except BaseException:
            os.close(self._file)
            raise
        fsync_folder(directory)
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._durable = self._tree.size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def public_key(self) -> bytes:
        """The key that checks the checkpoints' signatures: Ed25519, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def __len__(self) -> int:
        return self._tree.size

    def append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> range:
        """Appends records, in order; returns their indexes.

        Each record gets its ``index``, ``time`` (UTC) and the form's version ``v``. With ``durable`` the call
        returns only when they would survive a power cut; concurrent callers share one fsync.
        """
        with self._append_lock:
            first = self._tree.size
            time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            lines = [
                rfc8785.dumps({"v": 1, "index": first + offset, "time": time, **record})
                for offset, record in enumerate(records)
            ]
            self._write(self._file, b"".join(line + b"\n" for line in lines))
            for line in lines:
                self._tree.append(line)
            size = self._tree.size
        if durable:
            self._sync(size)
        return range(first, size)

    def checkpoint(self) -> str:
        """Makes all records durable, signs a checkpoint over them, keeps it, and returns the signed note."""
        with self._append_lock:
            current = Checkpoint(self.origin, self._tree.size, self._tree.root())
        self._sync(current.size)
        note = current.sign(self._key)
        with self._sync_lock:
            self._write(self._checkpoints, rfc8785.dumps({"checkpoint": note}) + b"\n")
            self._fsync(self._checkpoints)
        return note

    def close(self) -> None:
        """Signs a last checkpoint (not over what a failing disk may have lost) and lets go of the files."""
        try:
            if not self._broken:
                self.checkpoint()
        finally:
            os.close(self._checkpoints)
            os.close(self._file)

    def _sync(self, size: int) -> None:
        with self._sync_lock:
            if self._durable >= size:
                return
            reached = self._tree.size
            self._fsync(self._file)
            self._durable = max(self._durable, reached)

    def _fsync(self, file: int) -> None:
        try:
            os.fsync(file)
        except OSError as error:
            # What a failed fsync leaves on disk is unknown, and a second one may report success all the same.
            self._broken = f"the disk failed to keep records ({error.strerror})"
            raise self._unusable() from error

    def _unusable(self) -> JournalError:
        return JournalError(
            f"{self.directory}: {self._broken}; nothing is sent without a record. Check the disk and start again"
        )

    def _write(self, file: int, data: bytes) -> None:
        if self._broken:
            raise self._unusable()
        end = os.fstat(file).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            # Half a line would spoil the next one.
            os.ftruncate(file, end)
            raise JournalError(
                f"{self.directory}: cannot write the journal ({error.strerror}); nothing is sent without a record. "
                "Free some space and start again"
            ) from error

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(
                f"{self.directory}: another process has this journal open; stop it first (one daemon per state folder)"
            ) from None

    def _recover(self) -> None:
        signed = {}
        public = self.public_key
        for note in read_checkpoints(self.directory):
            checkpoint = verify(note, public)
            signed[checkpoint.size] = checkpoint.root
        for line, complete in _lines(self.directory / RECORDS):
            if not complete:
                break
            _parse(line, self._tree.size, self.directory)
            self._tree.append(line)
            root = signed.pop(self._tree.size, None)
            if root is not None and root != self._tree.root():
                raise JournalError(
                    f"{self.directory / RECORDS}: the first {self._tree.size} records are not those that were "
                    "signed; restore the file from a backup, and keep this copy as evidence"
                )
        signed.pop(0, None)
        if signed:
            raise JournalError(
                f"{self.directory / RECORDS}: holds {self._tree.size} records, but a checkpoint over "
                f"{max(signed)} was signed; restore the file from a backup, and keep this copy as evidence"
            )
        for name in (RECORDS, CHECKPOINTS):
            _cut_torn_line(self.directory / name)


def read_records(directory: Path) -> Iterator[dict[str, Any]]:
    """The complete records of a journal, in order, without opening it for writing.

    Raises ``JournalError`` naming the first record that cannot be read.
    """
    for index, (line, complete) in enumerate(_lines(directory / RECORDS)):
        if complete:
            yield _parse(line, index, directory)


def read_lines(directory: Path) -> Iterator[bytes]:
    """The complete records of a journal as they were hashed: the Merkle tree's leaves, in order."""
    return (line for line, complete in _lines(directory / RECORDS) if complete)


def read_checkpoints(directory: Path) -> Iterator[str]:
    """The signed notes of a journal, oldest first."""
    for line, complete in _lines(directory / CHECKPOINTS):
        if complete:
            try:
                yield str(json.loads(line)["checkpoint"])
            except (ValueError, KeyError, TypeError):
                raise JournalError(f"{directory / CHECKPOINTS}: a line is not a checkpoint") from None


def verify_records(directory: Path, public_key: bytes) -> tuple[int, int]:
    """Checks a journal's records against its own signed checkpoints.

    Returns (number of records, number covered by the latest checkpoint); raises ``JournalError`` naming what is
    broken.
    """
    signed = {c.size: c.root for c in (verify(note, public_key) for note in read_checkpoints(directory))}
    tree = MerkleTree()
    covered = 0
    for line, complete in _lines(directory / RECORDS):
        if not complete:
            break
        _parse(line, tree.size, directory)
        tree.append(line)
        if tree.size in signed:
            if signed[tree.size] != tree.root():
                raise JournalError(f"a record between {covered} and {tree.size - 1} is not the one that was signed")
            covered = tree.size
    if max(signed, default=0) > tree.size:
        raise JournalError(f"records {tree.size} to {max(signed) - 1} were signed and are gone")
    return tree.size, covered


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def _parse(line: bytes, index: int, directory: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("index") != index:
        raise JournalError(
            f"{directory / RECORDS}: record {index} is damaged; restore the file from a backup, and keep this copy "
            "as evidence"
        )
    return record


def _cut_torn_line(path: Path) -> None:
    """Removes a last line that a crash cut short: nothing that waited for it has happened."""
    whole = sum(len(line) + 1 for line, complete in _lines(path) if complete)
    if path.exists() and path.stat().st_size > whole:
        os.truncate(path, whole)
