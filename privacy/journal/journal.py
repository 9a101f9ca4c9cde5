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
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.durable import Appender, fsync_folder
from medsilo.privacy.identity.envelope import seal
from medsilo.privacy.journal.chain import CHECKPOINTS, Chain, read_chain
from medsilo.privacy.journal.checkpoint import Checkpoint, cosign, read_note
from medsilo.privacy.journal.merkle import TILE
from medsilo.privacy.journal.records import (
    KeyRecord,
    KeyRotationRecord,
    Record,
    SegmentRecord,
    content,
    read,
)
from medsilo.privacy.journal.recovery import Recovery, party_of
from medsilo.privacy.journal.segments import RECORDS, WAY_OUT, Segments, lines_of, parse, segments
from medsilo.privacy.journal.start import Start, write_start
from medsilo.privacy.journal.writer import Writer

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
"""From this size on, a segment is ended with the next checkpoint."""


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
        self._chain = Chain()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = Writer(directory, allowed)
        self._file = self._open_newest()
        try:
            self._lock_file(take_over=take_over)
            self._writer.check()
            self._writer.begin()
            self._segments = Segments(directory)
            self._tree = self._segments.tree
            recovery = Recovery(directory, self._segments, self._chain, public_key=self.public_key, origin=origin)
            with understanding(directory):
                lost = recovery.run()
            self._keys, self._party, self.memory = recovery.keys, recovery.party, recovery.memory
            self.read_from = recovery.read_from
            """The first record that this start has read."""
            self.remembered = recovery.read_from
            """How many records the next start need not read."""
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
            self._chain.unwritten.append(self._chain.add(size, note))
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
        return max(self._chain.size, 0)

    def append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> range:
        """Appends records, in order; returns their indexes.

        Each record gets its ``index``, ``time`` (UTC) and the form's version ``v``. With ``durable`` the call
        returns only when they would survive a power cut; concurrent callers share one fsync.
        """
        with self._append_lock:
            self._writer.check()
            first = self._tree.size
            time = _now()
            lines = [_line(record, index, time) for index, record in enumerate(records, first)]
            self._disk.append(self._file, b"".join(line + b"\n" for line in lines))
            for line in lines:
                self._segments.grow(line)
            if records and not self._party:
                self._party = party_of(records[0])
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
        durable = durable or self._segments.end >= self._segment_bytes
        self._writer.check()
        with self._checkpoint_lock:
            with self._append_lock:
                current = Checkpoint(self.origin, self._tree.size, self._tree.root())
            note = self._sign(current, durable=durable)
            self._writer.check()
            with self._append_lock:
                if self._segments.end >= self._segment_bytes and self._tree.size == current.size:
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
                files, tiles, places = self._segments.files(), self._tree.tiles(), tuple(self._segments.places)
            self._sign(current, durable=True)
            checkpoint, at = self._chain.note, os.fstat(self._checkpoints).st_size - self._chain.line_bytes
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

    def read(self, first: int = 0) -> Iterator[Record]:
        """The records from ``first`` on; raises ``JournalError`` naming the first one that cannot be read."""
        return map(read, self.records(first))

    def records(self, first: int = 0) -> Iterator[dict[str, Any]]:
        """As ``read``, as JSON objects."""
        index = first
        while index < self._tree.size:
            for line in self._segments.read(index, min(TILE, self._tree.size - index)):
                yield parse(line, index, self.directory)
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
        if current.size != self._chain.size:
            line = self._chain.add(current.size, current.sign(self._key))
            with self._sync_lock:
                self._chain.unwritten.append(line)
        note = self._chain.note
        if durable:
            self._sync(current.size)
            with self._sync_lock:
                self._write_checkpoints()
                self._disk.sync(self._checkpoints)
        return note

    def _end_segment(self) -> None:
        """Sets the records so far aside and goes on in a new file, which says so in its first record."""
        segment = self.directory / f"records-{self._segments.first:012d}.jsonl"
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
        self._segments.rename(segment)
        self._segments.keep()
        self._segments.begin(self.directory / RECORDS)
        self._segments.grow(line)
        self._durable = self._tree.size

    def _link(self, segment: Path) -> bytes:
        record = SegmentRecord(
            **self._party,
            file=segment.name,
            first=self._segments.first,
            records=self._tree.size - self._segments.first,
            sha256=self._segments.sha256(),
            checkpoint=self._chain.note,
        )
        return _line(content(record), self._tree.size, _now())

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
        while self._chain.unwritten and self._chain.unwritten[0][0] <= self._durable:
            self._disk.append(self._checkpoints, self._chain.unwritten[0][1] + b"\n")
            self._chain.unwritten.pop(0)

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


def read_journal(directory: Path) -> Iterator[Record]:
    """The complete records of a journal, in order, without opening it for writing.

    Raises ``JournalError`` naming the first record that cannot be read.
    """
    return map(read, read_records(directory))


def read_records(directory: Path) -> Iterator[dict[str, Any]]:
    """As ``read_journal``, as JSON objects."""
    for index, line in enumerate(read_lines(directory)):
        yield parse(line, index, directory)


@contextmanager
def understanding(directory: Path) -> Iterator[None]:
    """Makes a ``JournalError`` of what a record that is not in form does to those who read it inside."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise JournalError(
            f"{directory / RECORDS}: a record is not in form ({type(error).__name__}: {error!s:.200}); `audit verify` "
            f"says which; {WAY_OUT}"
        ) from error


def read_lines(directory: Path) -> Iterator[bytes]:
    """The complete records of a journal as they stand in its files, in order."""
    for path in segments(directory):
        for line, complete in lines_of(path):
            if not complete:
                break  # being written at this moment: what follows in the file is the rest of it, and no record
            yield line


def current_key(directory: Path) -> bytes | None:
    """The public audit key that a journal names last; None if it names none."""
    found = None
    with understanding(directory):
        for record in read_journal(directory):
            if isinstance(record, KeyRecord | KeyRotationRecord):
                found = bytes.fromhex(record.public_key)
    return found


def last_checkpoint(directory: Path) -> str | None:
    """The signed note over the most records."""
    return max(read_checkpoints(directory), key=lambda note: read_note(note).size, default=None)


def read_checkpoints(directory: Path) -> Iterator[str]:
    """The signed notes of a journal, oldest first; raises ``JournalError`` where a line is damaged or missing."""
    return (note for note, _ in read_chain(directory))


def _line(record: Mapping[str, Any], index: int, time: str) -> bytes:
    return write_canonical({"v": 1, "index": index, "time": time, **record})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
