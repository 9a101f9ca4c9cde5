"""The two-sided difference: what one side says it received, the other must say it sent, and the same bytes.

Both sides' messages are kept in a database on disk for it, however many there are.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from medsilo.privacy.audit.times import TOLERANCE_SECONDS, Times
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.records import MessageRecord

Side = Literal["own", "peer"]
_BATCH = 2000
_SAME = attrgetter("rpc", "message_type", "length", "fields", "classes")
"""What both sides must say of the same bytes."""
_PRAGMAS = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA temp_store=FILE;"
_SCHEMA = """
CREATE TABLE message (side, direction, call, frame, sha256, content, schema, word, seen, position, given, time);
CREATE TABLE root (side, size, root, PRIMARY KEY (side, size)) WITHOUT ROWID;
CREATE TABLE seen (side, size, root, position);
CREATE TABLE attested (side, call, messages);
"""
_INDICES = (
    "CREATE INDEX place ON message (side, direction, call, frame, sha256)",
    "CREATE INDEX attestation ON attested (side, call)",
)

# Whether the sender's evidence reaches as far as a message. Who asks makes one call after the other: what it signs next
# stands behind all that it sent before. Who answers has other parties' calls under way: what it signs meanwhile may
# stand before the record of an answer, so that only its own signed word on that answer tells that it was recorded.
_DUE = """
    m.seen < :extent AND (NOT :answers OR EXISTS (
        SELECT 1 FROM attested v WHERE v.side = m.side AND v.call = m.call AND v.messages > m.frame))
"""
_MISSING = """
    SELECT {what} FROM message m
    WHERE m.side = :receiver AND m.direction = 'received' AND {due} AND
        (SELECT COUNT(*) FROM message s WHERE s.side = :sender AND s.direction = 'sent' AND s.call = m.call
            AND s.frame = m.frame AND s.sha256 = m.sha256)
        < (SELECT COUNT(*) FROM message r WHERE r.side = :receiver AND r.direction = 'received' AND r.call = m.call
            AND r.frame = m.frame AND r.sha256 = m.sha256)
"""
_MISSING_BEFORE = _MISSING.format(what="m.position, m.call, m.frame", due=_DUE) + "ORDER BY m.position LIMIT 1"
_MISSING_SINCE = _MISSING.format(what="COUNT(*)", due=f"NOT ({_DUE})")
_OTHER_BYTES = """
    SELECT m.position, m.call, m.frame FROM message m
    WHERE m.side = :receiver AND m.direction = 'received'
        AND EXISTS (SELECT 1 FROM message s WHERE s.side = :sender AND s.direction = 'sent' AND s.call = m.call
            AND s.frame = m.frame)
        AND NOT EXISTS (SELECT 1 FROM message s WHERE s.side = :sender AND s.direction = 'sent' AND s.call = m.call
            AND s.frame = m.frame AND s.sha256 = m.sha256)
    ORDER BY m.position LIMIT 1
"""
_OTHER_WORDS = """
    SELECT m.position, s.position, m.call, m.frame, m.word IS NOT s.word FROM message m JOIN message s
        ON s.side = :sender AND s.direction = 'sent' AND s.call = m.call AND s.frame = m.frame AND s.sha256 = m.sha256
    WHERE m.side = :receiver AND m.direction = 'received'
        AND (m.word IS NOT s.word OR (m.schema = s.schema AND m.content != s.content) OR m.given != s.given)
    ORDER BY m.position LIMIT 1
"""
_NOT_ARRIVED = """
    SELECT COUNT(*) FROM message s WHERE s.side = :sender AND s.direction = 'sent'
        AND NOT EXISTS (SELECT 1 FROM message m WHERE m.side = :receiver AND m.direction = 'received'
            AND m.call = s.call AND m.frame = s.frame AND m.sha256 = s.sha256)
"""
_TIMES = """
    SELECT SUM(ABS(o.time - p.time) <= :tolerance), SUM(ABS(o.time - p.time) > :tolerance),
        MIN(CASE WHEN ABS(o.time - p.time) > :tolerance THEN o.position END)
    FROM message o JOIN message p ON p.side = :peer AND p.direction != o.direction AND p.call = o.call
        AND p.frame = o.frame AND p.sha256 = o.sha256
    WHERE o.side = :own
"""
_FORKED = """
    SELECT seen.size, seen.position FROM seen JOIN root ON root.side = :shown_by AND root.size = seen.size
    WHERE seen.side = :seen_by AND seen.root != root.root ORDER BY seen.size LIMIT 1
"""


@dataclass(frozen=True)
class Extent:
    """One side's evidence, as far as the comparison needs it. ``end``: index after its last record."""

    side: Side
    party: str
    end: int
    whole: bool

    @property
    def asks(self) -> bool:
        """Whether its party begins all calls, as hospitals do: what it receives are answers."""
        return is_silo(self.party)


@dataclass(frozen=True)
class Difference:
    """What does not agree. ``index``: the own record that shows it, or None where it is one of the other side's.
    ``others``: it says something against the other side's evidence alone."""

    what: str
    index: int | None = None
    others: bool = False


class Comparison:
    """Takes both sides' messages as they are read, then says where they differ."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        self._connection = connection
        self._messages: list[tuple[Any, ...]] = []
        self._roots: list[tuple[Any, ...]] = []

    def message(self, side: Side, record: MessageRecord, seen: int, time: float) -> None:
        """Takes a message's record. ``seen``: how many of the other side's records its signed words had covered.
        ``time``: the record's, in seconds since 1970."""
        # Records are canonical JSON: what is equal has its keys in the same order.
        content = json.dumps([*_SAME(record), record.tensors])
        attestation = record.attestation
        word = None if attestation is None else json.dumps(attestation)
        given = record.content  # journals of earlier releases have none
        self._messages.append(
            (
                side,
                record.direction,
                bytes.fromhex(record.call_id),
                record.frame,
                bytes.fromhex(record.sha256),
                _digest(content),
                record.schema_sha256,
                None if word is None else _digest(word),
                seen,
                record.index,
                None if given is None else _digest(json.dumps(given)),
                time,
            )
        )
        if len(self._messages) >= _BATCH:
            self.flush()

    def root(self, side: Side, size: int, root: bytes) -> None:
        """Takes the root of a side's first ``size`` records."""
        self._roots.append((side, size, root))
        if len(self._roots) >= _BATCH:
            self.flush()

    def seen(self, side: Side, size: int, root: bytes, position: int) -> None:
        """Takes what the other side has signed for this one, by the record in which it came."""
        self._connection.execute("INSERT INTO seen VALUES (?, ?, ?, ?)", (side, size, root, position))

    def attested(self, side: Side, call: str, messages: int) -> None:
        """Takes how many messages of a call the other side has signed for having sent."""
        self._connection.execute("INSERT INTO attested VALUES (?, ?, ?)", (side, bytes.fromhex(call), messages))

    def flush(self) -> None:
        """Writes what has been taken."""
        self._connection.executemany("INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", self._messages)
        self._connection.executemany("INSERT OR IGNORE INTO root VALUES (?, ?, ?)", self._roots)
        self._messages.clear()
        self._roots.clear()

    def exchanged(self) -> bool:
        """Whether either side has a message of the other."""
        return self._first("SELECT 1 FROM message LIMIT 1") is not None

    def differ(self, own: Extent, peer: Extent) -> Difference | None:
        """The first difference, if there is one; a later history that is withheld before anything else."""
        for index in _INDICES:
            self._connection.execute(index)
        for reader, shower in ((own, peer), (peer, own)):
            found = self._first("SELECT MAX(size) FROM seen WHERE side = ?", reader.side)[0] or 0
            if found > shower.end:
                return Difference(
                    f"{shower.party} has shown {reader.party} a journal of {found} records, and its evidence holds "
                    f"{shower.end}: later records are withheld or gone, or the bundle is older than the other one "
                    "(then export it again)",
                    others=shower is peer,
                )
            fork = self._first(_FORKED, seen_by=reader.side, shown_by=shower.side)
            if fork is not None:
                return Difference(
                    f"{shower.party} shows another history than the one that {reader.party} was shown: its first "
                    f"{fork[0]} records do not give the root that it signed for {reader.party} (record {fork[1]} of "
                    f"{reader.party})",
                    fork[1] if reader is own else None,
                )
        for receiver, sender in ((peer, own), (own, peer)):
            found = self._difference(receiver, sender)
            if found is not None:
                return found
        return None

    def not_arrived(self, sender: Extent, receiver: Extent) -> int:
        """How many sent messages the other side has no record of."""
        return int(self._first(_NOT_ARRIVED, sender=sender.side, receiver=receiver.side)[0])

    def newer(self, receiver: Extent, sender: Extent) -> int:
        """How many messages came after their sender had signed the last of its records here, which lack them, as far as
        anything tells that they ought to be there."""
        found = self._first(
            _MISSING_SINCE,
            receiver=receiver.side,
            sender=sender.side,
            extent=sender.end,
            answers=receiver.asks,
        )
        return int(found[0]) if sender.whole else 0

    def times(self, own: Extent, peer: Extent, records: int) -> Times:
        """The times of the own messages, held against those in the other side's journal, which nobody has signed."""
        found = self._first(_TIMES, own=own.side, peer=peer.side, tolerance=TOLERANCE_SECONDS)
        confirmed, contradicted, first = found[0] or 0, found[1] or 0, found[2]
        result = Times(confirmed, contradicted, records - confirmed - contradicted, signed=False)
        if first is not None:
            result.first_contradicted = first
            result.contradiction = f"{peer.party} has that message at a time of its own, which is another"
        return result

    def _difference(self, receiver: Extent, sender: Extent) -> Difference | None:
        sides = {"receiver": receiver.side, "sender": sender.side}

        def at(position: int, call: bytes, frame: int) -> str:
            return f"(its record {position}, call {call.hex()}, message {frame})"

        def index(position: int) -> int | None:
            return position if receiver.side == "own" else None

        found = self._first(_OTHER_BYTES, **sides)
        if found is not None:
            return Difference(
                f"{receiver.party} received other bytes {at(*found)} than {sender.party} says it sent in their place",
                index(found[0]),
            )
        if sender.whole:
            found = self._first(_MISSING_BEFORE, **sides, extent=sender.end, answers=receiver.asks)
            if found is not None:
                return Difference(
                    f"{receiver.party} received a message {at(*found)} that {sender.party} has no record of sending",
                    index(found[0]),
                )
        found = self._first(_OTHER_WORDS, **sides)
        if found is None:
            return None
        what = "what its sender signed with it" if found[4] else "what stood in it"
        return Difference(
            f"{receiver.party} and {sender.party} say different things of {what}: call {found[2].hex()}, message "
            f"{found[3]}, record {found[0]} of {receiver.party}, record {found[1]} of {sender.party}",
            found[0] if receiver.side == "own" else found[1],
        )

    def _first(self, query: str, *values: object, **named: object) -> Any:
        return self._connection.execute(query, named or values).fetchone()


@contextmanager
def comparing() -> Iterator[sqlite3.Connection]:
    """A database for a comparison, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="medsilo-verify-") as folder:
        connection = sqlite3.connect(Path(folder) / "messages.db", isolation_level=None)
        try:
            connection.executescript(_PRAGMAS + "BEGIN;")
            yield connection
        finally:
            connection.close()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
