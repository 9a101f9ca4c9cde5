"""The journal: an append-only log of what a party sent, received, refused and agreed to.

Each record is one line of canonical JSON (RFC 8785) and one leaf of an RFC 6962 Merkle tree; signed checkpoints
stand beside it. Canonical JSON has no line breaks inside, so a line that does not end was never completed, and
nothing that depended on it has happened.

Files in the journal's folder: ``records.jsonl``, ``checkpoints.jsonl``, and earlier segments of the records,
``records-FIRST.jsonl`` by the index of their first record. A new segment begins with a record that names the one
before it, with its hash and the signed checkpoint over all before; there is one tree over all segments. ``start.json``
saves the next start from reading it all (``journal_start``).
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib import dsse

from medsilo.privacy.errors import JournalError, JournalInUseError, StoreError
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.files.durable import Appender, fsync_folder
from medsilo.privacy.identity.envelope import from_json, seal
from medsilo.privacy.journal.checkpoint import Checkpoint, cosign, read_note, verify
from medsilo.privacy.journal.merkle import TILE, ProvingTree, check_consistency
from medsilo.privacy.journal.start import Held, KeptFile, Start, mark_of, read_start, write_start
from medsilo.privacy.journal.writer import Writer

log = logging.getLogger(__name__)

RECORDS = "records.jsonl"
CHECKPOINTS = "checkpoints.jsonl"
SEGMENT_BYTES = 256 << 20
"""From this size on, a segment is ended with the next checkpoint."""
_BLOCK = 1 << 16
_WAY_OUT = (
    "keep this copy as evidence, look with `audit verify` where it parts from what was signed, and check the disk. "
    "Only then put back the newest copy, if it holds as many records: others take an older journal for a rewritten past"
)


class Journal:
    """An open journal. One process at a time may have it open; its methods may be called from any thread.

    ``origin`` names the journal in its checkpoints, for example ``medsilo/FEDERATION/silo/hospital1``.
    ``allowed`` raises while this process may not write, which then nothing does; ``take_over`` takes the journal from a
    process that has it open and may not write any more (``writer``).

    Raises ``JournalError`` on opening if another process has it, or if what is on disk is not what was signed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        key: Ed25519PrivateKey,
        origin: str,
        segment_bytes: int = SEGMENT_BYTES,
        allowed: Callable[[], None] = lambda: None,
        take_over: bool = False,
    ) -> None:
        self.directory = directory
        self.origin = origin
        self._segment_bytes = segment_bytes
        self._key = key
        self._disk = Appender(directory)
        self._signed_size, self._signed, self._last_line, self._last_bytes = -1, "", "", 0
        self._unwritten: list[tuple[int, bytes]] = []
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = Writer(directory, allowed)
        self._file = self._open_newest()
        try:
            self._lock_file(take_over=take_over)
            self._writer.check()
            self._writer.begin()
            self._tree = ProvingTree(self._read_lines)
            self._files: list[Path] = []
            self._kept: list[KeptFile] = []
            """Of all files but the last."""
            self._tiles: list[tuple[int, int]] = []
            self._keys: list[tuple[int, bytes]] = [(0, self.public_key)]
            """(first size that it signs, key), in order."""
            self.memory: Mapping[str, Any] | None = None
            """What ``remember`` was given, if the journal was not read from its beginning; and with it:"""
            self.read_from = 0
            """The first record that this start has read."""
            self.remembered = 0
            """How many records the next start need not read."""
            self._party: dict[str, Any] = {}
            self._begin_file(directory / RECORDS)
            with understanding(directory):
                lost = self._recover()
            self._checkpoints = os.open(directory / CHECKPOINTS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except BaseException:
            os.close(self._file)
            raise
        fsync_folder(directory)
        self._disk.sync(self._file)  # what was read may have been on its way to the disk when the last process ended
        self._append_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._durable = self._tree.size
        for size, note in sorted(lost.items()):
            self._unwritten.append((size, self._chained(size, note)))
        if lost:
            self._write_checkpoints()
            self._disk.sync(self._checkpoints)

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

    @property
    def signed(self) -> int:
        """How many records the last signed checkpoint covers."""
        return max(self._signed_size, 0)

    def append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> range:
        """Appends records, in order; returns their indexes.

        Each record gets its ``index``, ``time`` (UTC) and the form's version ``v``. With ``durable`` the call
        returns only when they would survive a power cut; concurrent callers share one fsync.
        """
        with self._append_lock:
            self._writer.check()
            first = self._tree.size
            time = _now()
            lines = [
                write_canonical({"v": 1, "index": first + offset, "time": time, **record})
                for offset, record in enumerate(records)
            ]
            self._disk.append(self._file, b"".join(line + b"\n" for line in lines))
            for line in lines:
                self._grow(line)
            if records and not self._party:
                self._party = _party_of(records[0])
            size = self._tree.size
        if durable:
            self._sync(size)
            self._writer.check()
        return range(first, size)

    def checkpoint(self, *, durable: bool = True) -> str:
        """Signs a checkpoint over all records, keeps it, and returns the signed note.

        Checkpoints stand in the order of their sizes, each with the hash of the line before it; none is written before
        its records are durable. Without ``durable`` neither is yet: that comes with the next durable record, before
        which the note must not leave.
        """
        durable = durable or self._end >= self._segment_bytes
        self._writer.check()
        with self._checkpoint_lock:
            with self._append_lock:
                current = Checkpoint(self.origin, self._tree.size, self._tree.root())
            note = self._sign(current, durable=durable)
            self._writer.check()
            with self._append_lock:
                if self._end >= self._segment_bytes and self._tree.size == current.size:
                    self._end_segment()
        return note

    def remember(self, memory: Callable[[], Mapping[str, Any]]) -> None:
        """Saves the next start from reading what is here now.

        ``memory``: gives what the journal's owner would find out by reading it, as JSON; it may cover records that come
        meanwhile, and the next start gives it back as ``memory``. It is a cache: a disk that does not take it is a line
        in the log.
        """
        self._writer.check()
        with self._checkpoint_lock:
            with self._append_lock:
                self.remembered = self._tree.size
                current = Checkpoint(self.origin, self._tree.size, self._tree.root())
                kept = KeptFile(name=RECORDS, first=self._first, size=self._end, sha256=self._hash.hexdigest())
                files, tiles, places = (*self._kept, kept), self._tree.tiles(), tuple(self._tiles)
            self._sign(current, durable=True)
            checkpoint, at = self._signed, os.fstat(self._checkpoints).st_size - self._last_bytes
        start = Start(
            checkpoint=checkpoint,
            checkpoint_at=at,
            keys=tuple((first, key.hex()) for first, key in self._keys),
            party=self._party,
            files=files,
            tiles=tuple(root.hex() for root in tiles),
            places=places,
            memory=dict(memory()),
        )
        self._sync(self._tree.size)  # what the memory covers
        self._writer.check()
        try:
            write_start(self.directory, start, self._key)
        except OSError as error:
            log.warning("the next start has to read the whole journal: %s", error)

    def records(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """The records from ``first`` on; raises ``JournalError`` naming the first one that cannot be read."""
        index = first
        while index < self._tree.size:
            for line in self._read_lines(index, min(TILE, self._tree.size - index)):
                yield _parse(line, index, self.directory)
                index += 1

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The proof that the journal of ``second`` records begins with the one of ``first``."""
        with self._append_lock:
            return self._tree.consistency(first, second)

    def cosign(self, note: str) -> str:
        """This party's signature line as the witness of another's checkpoint."""
        return cosign(note, self.origin, self._key, int(datetime.now(UTC).timestamp()))

    def seal(self, document: Mapping[str, Any], payload_type: str) -> dsse.Envelope:
        """A document signed with this party's audit key."""
        return seal(document, payload_type, self._key)

    def close(self) -> None:
        """Signs a last checkpoint (not over what a failing disk may have lost, and not where another process writes
        now) and lets go of the files."""
        try:
            if self._disk.usable:
                with suppress(StoreError):
                    self.checkpoint()
        finally:
            self._writer.end()
            os.close(self._checkpoints)
            os.close(self._file)

    def _sign(self, current: Checkpoint, *, durable: bool) -> str:
        """The note over a checkpoint, which has its place in the file of checkpoints."""
        if current.size != self._signed_size:
            line = self._chained(current.size, current.sign(self._key))
            with self._sync_lock:
                self._unwritten.append((current.size, line))
        note = self._signed
        if durable:
            self._sync(current.size)
            with self._sync_lock:
                self._write_checkpoints()
                self._disk.sync(self._checkpoints)
        return note

    def _end_segment(self) -> None:
        """Sets the records so far aside and goes on in a new file, which says so in its first record."""
        segment = self.directory / f"records-{self._first:012d}.jsonl"
        # The new file stands beside the old one, and is linked to it, before it takes its place.
        line = self._link(segment)
        partial = self._writer.drafts() / RECORDS
        partial.unlink(missing_ok=True)
        newest = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(newest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._disk.append(newest, line + b"\n")
            self._disk.sync(newest)
            segment.unlink(missing_ok=True)  # left by a crash in this place: another name of the newest file
            os.link(self.directory / RECORDS, segment)
            partial.replace(self.directory / RECORDS)
            fsync_folder(self.directory)
        except BaseException:
            os.close(newest)
            raise
        os.close(self._file)
        self._file = newest
        self._files[-1] = segment
        self._keep_file()
        self._begin_file(self.directory / RECORDS)
        self._grow(line)
        self._durable = self._tree.size

    def _chained(self, size: int, note: str) -> bytes:
        """The line that a checkpoint gets in its file."""
        line = write_canonical({"checkpoint": note, "previous": self._last_line})
        self._signed_size, self._signed, self._last_line = size, note, hashlib.sha256(line).hexdigest()
        self._last_bytes = len(line) + 1
        return line

    def _link(self, segment: Path) -> bytes:
        record = {
            "v": 1,
            "index": self._tree.size,
            "time": _now(),
            "kind": "segment",
            **self._party,
            "file": segment.name,
            "first": self._first,
            "records": self._tree.size - self._first,
            "sha256": self._hash.hexdigest(),
            "checkpoint": self._signed,
        }
        return write_canonical(record)

    def _keep_file(self) -> None:
        """The last file is no longer written to."""
        path, digest = self._files[-1], self._hash.hexdigest()
        self._kept.append(
            KeptFile(name=path.name, first=self._first, size=self._end, sha256=digest, mark=mark_of(path))
        )

    def _begin_file(self, path: Path) -> None:
        self._files.append(path)
        self._first = self._tree.size
        self._end = 0
        self._hash = hashlib.sha256()

    def _grow(self, line: bytes) -> None:
        if self._tree.size % TILE == 0:
            self._tiles.append((len(self._files) - 1, self._end))
        self._tree.append(line)
        self._end += len(line) + 1
        self._hash.update(line + b"\n")

    def _read_lines(self, first: int, count: int) -> list[bytes]:
        """Records ``first`` to ``first + count`` as they stand in the files."""
        number, offset = self._tiles[first // TILE]
        skip = first % TILE
        found: list[bytes] = []
        while len(found) < skip + count:
            with self._files[number].open("rb") as file:
                file.seek(offset)
                found += [line.removesuffix(b"\n") for line in itertools.islice(file, skip + count - len(found))]
            number, offset = number + 1, 0
        return found[skip:]

    def _sync(self, size: int) -> None:
        with self._sync_lock:
            if self._durable >= size:
                return
            reached = self._tree.size
            self._disk.sync(self._file)
            self._durable = max(self._durable, reached)
            self._write_checkpoints()

    def _write_checkpoints(self) -> None:
        """Writes the checkpoints whose records are durable."""
        while self._unwritten and self._unwritten[0][0] <= self._durable:
            self._disk.append(self._checkpoints, self._unwritten[0][1] + b"\n")
            self._unwritten.pop(0)

    def _open_newest(self) -> int:
        return os.open(self.directory / RECORDS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def _lock_file(self, *, take_over: bool) -> None:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not take_over:
                    raise JournalInUseError(
                        f"{self.directory}: another process has this journal open; stop it first (one daemon per state "
                        "folder)"
                    ) from None
                self._writer.take_over((RECORDS, CHECKPOINTS))
            else:
                # Who had it may have gone on in another file before letting go.
                if os.path.samestat(os.fstat(self._file), (self.directory / RECORDS).stat()):
                    return
            os.close(self._file)
            self._file = self._open_newest()

    def _recover(self) -> dict[int, str]:
        """Reads what is there, from where the last process left a start; returns the checkpoints that a crash kept from
        their file, by size.

        A checkpoint is written after the records that it covers and the message that carries it: it stands in that
        message's record.
        """
        files = segments(self.directory)
        held = read_start(
            self.directory, files, public_key=self.public_key, origin=self.origin, line_at=self._checkpoint_at
        )
        offset, checkpoints = 0, _chain(self.directory)
        if held is not None:
            offset, checkpoints = self._take_up(held)
        keys = self._keys
        lost: dict[int, str] = {}
        ahead = self._next_note(checkpoints)
        for number, path in enumerate(files[len(self._kept) :]):
            if number:
                self._keep_file()
                self._begin_file(path)
            else:
                self._files[-1] = path
            for line, complete in _lines(path, 0 if number else offset):
                while ahead is not None and read_note(ahead).size <= self._tree.size:
                    self._check_note(ahead, keys)
                    ahead = self._next_note(checkpoints)
                if not complete:
                    break
                record = _parse(line, self._tree.size, self.directory)
                self._party = self._party or _party_of(record)
                match record.get("kind"):
                    case "key":
                        keys[:] = [(0, bytes.fromhex(record["public_key"]))]
                    case "key-rotation":
                        keys.append((record["index"] + 2, bytes.fromhex(record["public_key"])))
                    case "message" if ahead is None and record["direction"] == "sent" and "attestation" in record:
                        note = json.loads(from_json(record["attestation"]).payload)["checkpoint"]
                        lost[read_note(note).size] = note
                self._grow(line)
        while ahead is not None and read_note(ahead).size <= self._tree.size:
            self._check_note(ahead, keys)
            ahead = self._next_note(checkpoints)
        if ahead is not None:
            raise JournalError(
                f"{self.directory / RECORDS}: holds {self._tree.size} records, but a checkpoint over "
                f"{read_note(ahead).size} was signed; {_WAY_OUT}"
            )
        if self._tree.size and keys[-1][1] != self.public_key:
            raise JournalError(
                f"{self.directory}: this journal is signed with another audit key. If a change of keys was "
                "interrupted, give the same command (`keys --rotate`) again; if not, look where audit.key of this "
                "journal was moved to, and put it in its place. Only if it is lost, take it from a backup"
            )
        for name in (RECORDS, CHECKPOINTS):
            _cut_torn_line(self.directory / name)
        lost = {size: note for size, note in lost.items() if size > self._signed_size}
        for size, note in lost.items():
            checkpoint = verify(note, [key for first, key in keys if first <= size][-1])
            proof = self._tree.consistency(size, self._tree.size)
            if not check_consistency(size, checkpoint.root, self._tree.size, self._tree.root(), proof):
                raise self._not_signed(size)
        return lost

    def _take_up(self, held: Held) -> tuple[int, Iterator[tuple[str, bytes]]]:
        """Begins where a start leaves off; returns how far the last of its files is known, and the checkpoints from the
        start's own on."""
        start = held.start
        for root in start.tiles:
            self._tree.append_tile(bytes.fromhex(root))
        for line in held.newest:
            self._tree.append(line)
        self._files, self._tiles = held.files, list(start.places)
        self._kept = [*start.files[:-1]]
        self._first, self._end, self._hash = start.files[-1].first, start.files[-1].size, held.hash
        self._keys[:] = [(first, bytes.fromhex(key)) for first, key in start.keys]
        self._party, self.memory = start.party, start.memory
        self.read_from = self.remembered = held.checkpoint.size
        return self._end, _chain(self.directory, start.checkpoint_at)

    def _checkpoint_at(self, offset: int) -> bytes:
        return next(_lines(self.directory / CHECKPOINTS, offset))[0]

    def _next_note(self, checkpoints: Iterator[tuple[str, bytes]]) -> str | None:
        note, line = next(checkpoints, (None, b""))
        if note is not None:
            self._signed_size, self._signed = read_note(note).size, note
            self._last_line, self._last_bytes = hashlib.sha256(line).hexdigest(), len(line) + 1
        return note

    def _check_note(self, note: str, keys: Sequence[tuple[int, bytes]]) -> None:
        size = read_note(note).size
        checkpoint = verify(note, [key for first, key in keys if first <= size][-1])
        if size < self._tree.size:
            raise JournalError(
                f"{self.directory / CHECKPOINTS}: the checkpoint over {size} records is out of its place"
            )
        if checkpoint.root != self._tree.root():
            raise self._not_signed(size)

    def _not_signed(self, size: int) -> JournalError:
        return JournalError(
            f"{self.directory / RECORDS}: the first {size} records are not those that were signed; {_WAY_OUT}"
        )


def read_records(directory: Path) -> Iterator[dict[str, Any]]:
    """The complete records of a journal, in order, without opening it for writing.

    Raises ``JournalError`` naming the first record that cannot be read.
    """
    for index, line in enumerate(read_lines(directory)):
        yield _parse(line, index, directory)


@contextmanager
def understanding(directory: Path) -> Iterator[None]:
    """Makes a ``JournalError`` of what a record that is not in form does to those who read it inside."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise JournalError(
            f"{directory / RECORDS}: a record is not in form ({type(error).__name__}: {error!s:.200}); `audit verify` "
            f"says which; {_WAY_OUT}"
        ) from error


def read_lines(directory: Path) -> Iterator[bytes]:
    """The complete records of a journal as they stand in its files, in order."""
    for path in segments(directory):
        for line, complete in _lines(path):
            if not complete:
                break  # being written at this moment: what follows in the file is the rest of it, and no record
            yield line


def current_key(directory: Path) -> bytes | None:
    """The public audit key that a journal names last; None if it names none."""
    found = None
    with understanding(directory):
        for record in read_records(directory):
            if record["kind"] in ("key", "key-rotation"):
                found = bytes.fromhex(record["public_key"])
    return found


def last_checkpoint(directory: Path) -> str | None:
    """The signed note over the most records."""
    return max(read_checkpoints(directory), key=lambda note: read_note(note).size, default=None)


def read_checkpoints(directory: Path) -> Iterator[str]:
    """The signed notes of a journal, oldest first; raises ``JournalError`` where a line is damaged or missing."""
    return (note for note, _ in _chain(directory))


def _chain(directory: Path, offset: int | None = None) -> Iterator[tuple[str, bytes]]:
    """The notes, as ``read_checkpoints``, with their lines. ``offset``: where the first of them begins; what it follows
    is then not looked at."""
    previous = None if offset else ""
    for number, (line, complete) in enumerate(_lines(directory / CHECKPOINTS, offset or 0)):
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


def segments(directory: Path) -> list[Path]:
    """The records' files, oldest first. A segment that was just set aside and is still the newest file counts once."""
    newest = directory / RECORDS
    older = sorted(directory.glob("records-*.jsonl"))
    if older and newest.exists() and older[-1].samefile(newest):
        older.pop()
    return [*older, newest]


def _party_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("federation", "self") if name in record}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, bool]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def _parse(line: bytes, index: int, directory: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("index") != index or not isinstance(record.get("kind"), str):
        raise JournalError(f"{directory / RECORDS}: record {index} is damaged; {_WAY_OUT}")
    return record


def _cut_torn_line(path: Path) -> None:
    """Removes a last line that a crash cut short: nothing that waited for it has happened."""
    if not path.exists():
        return
    size = whole = path.stat().st_size
    with path.open("rb") as file:
        while whole:
            begin = max(whole - _BLOCK, 0)
            file.seek(begin)
            if (end := file.read(whole - begin).rfind(b"\n")) >= 0:
                whole = begin + end + 1
                break
            whole = begin
    if whole < size:
        os.truncate(path, whole)
