"""``audit verify``: whether a journal, or a bundle of it, is what its owner signed, and agrees with the other side's.

It needs neither keys nor daemons: what it checks with is in the evidence. It reads record by record, and its memory
does not grow with the journal's length but with the number of calls whose receipts are still due.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rfc8785
from google.protobuf import descriptor_pb2

from privacy.bundle import Evidence, open_evidence
from privacy.checkpoint import read_note, verify, verify_cosignature
from privacy.envelope import ATTESTATION, ROTATION, from_json, key_id, unseal
from privacy.errors import JournalError, MedsiloError, ReceiptError
from privacy.exposure import Exposure, expand, field_exposures
from privacy.merkle import MerkleTree
from privacy.receipts import Attestation, Correspondence

_REMEMBERED_ROOTS = 1 << 16
_WHEN_WITHDRAWN = frozenset({Exposure.PROTOCOL, Exposure.IDENTITY})


class BrokenError(MedsiloError):
    """Evidence that does not hold. ``index``: the first bad record, or None where no single record is to blame."""

    exit_code = 1

    def __init__(self, index: int | None, what: str) -> None:
        super().__init__(what if index is None else f"record {index}: {what}")
        self.index = index
        self.what = what


@dataclass
class Verification:
    """What was verified, and found.

    ``key``: SHA-256 of the public audit key that signed last. ``signed``: records covered by the last checkpoint.
    ``remarks``: what is in order and should be known all the same. ``problem`` is empty if the evidence is sound;
    ``index``: the first bad record's.
    """

    source: str
    party: str = ""
    federation: str = ""
    key: str = ""
    records: int = 0
    signed: int = 0
    whole: bool = True
    root: str = ""
    first_time: str | None = None
    last_time: str | None = None
    sent: int = 0
    received: int = 0
    acknowledged: int = 0
    remarks: list[str] = field(default_factory=list)
    problem: str = ""
    index: int | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing was found against it."""
        return not self.problem

    def sentences(self) -> list[str]:
        """The result in words."""
        if not self.sound:
            where = "" if self.index is None else f" The first bad record is number {self.index}."
            return [f"The record is NOT sound: {self.problem}.{where}", *self.remarks]
        extent = f"All {self.records} records are" if self.whole else f"The {self.records} records of this stretch are"
        return [
            f"{extent} in place and unchanged: they give the root that {self.party} signed with the audit key "
            f"{self.key[:16]}….",
            *(
                [f"{self.acknowledged} of {self.sent} messages sent have the other side's signed receipt."]
                if self.whole
                else []
            ),
            *self.remarks,
        ]


def verify_evidence(path: Path, *, peer: Path | None = None, key: bytes | None = None) -> Verification:
    """Verifies a bundle or a journal's folder, and against the other side's if ``peer`` is given.

    Args:
        path: the bundle, or the folder.
        peer: the other side's.
        key: the public audit key (Ed25519, 32 bytes) that the owner is known to have now.

    Raises ``UnreadableError`` for what is no evidence at all; everything else is in the result.
    """
    with _ledger() as ledger:
        result = _verify(open_evidence(path), ledger, "own", key)
        if peer is None or not result.sound:
            return result
        other = _verify(open_evidence(peer), ledger, "peer", None)
        if not other.sound:
            result.problem = f"the other side's evidence {peer} is not sound: {other.problem}"
        else:
            _compare(ledger, result, other)
    return result


def _verify(evidence: Evidence, ledger: sqlite3.Connection, side: str, key: bytes | None) -> Verification:
    result = Verification(str(evidence.source))
    reader = _Reader(evidence, result, ledger, side)
    try:
        reader.read()
        if key is not None and reader.keys[-1][1] != key:
            raise BrokenError(None, f"it is signed with the audit key {result.key[:16]}…, not with {key_id(key)[:16]}…")
    except BrokenError as error:
        result.problem, result.index = error.what, error.index
    return result


class _Reader:
    """Reads one party's evidence."""

    def __init__(self, evidence: Evidence, result: Verification, ledger: sqlite3.Connection, side: str) -> None:
        self._evidence = evidence
        self._result = result
        self._ledger = ledger
        self._side = side
        self._header = evidence.header
        self._tree = MerkleTree()
        self._roots: dict[int, bytes] = {}
        self._order: deque[int] = deque()
        self._correspondences: dict[str, Correspondence] = {}
        self._schemas: dict[str, dict[str, dict[str, Exposure]]] = {}
        self._consent: frozenset[Exposure] | None = None
        self._origin = ""
        self._answered: set[str] = set()
        self._rows: list[tuple[Any, ...]] = []
        self.keys: list[tuple[int, bytes]] = []
        """(first size that it signs, key), in order."""
        self._index: int | None = None

    def read(self) -> None:
        header, result = self._header, self._result
        if header is not None:
            self._begin(header)
        notes = self._evidence.notes
        ahead = next(notes, None)
        try:
            for line in self._evidence.lines:
                self._index = self._tree.size
                record = self._parse(line)
                self._tree.append(line)
                self._remember()
                self._take(record)
                result.records += 1
                while ahead is not None and read_note(ahead).size <= self._tree.size:
                    if read_note(ahead).size <= result.signed:
                        raise BrokenError(
                            None, f"the checkpoint over {read_note(ahead).size} records is out of its place"
                        )
                    self._check_note(ahead)
                    ahead = next(notes, None)
            self._index = None
            if ahead is not None:
                raise BrokenError(
                    None, f"records {self._tree.size} to {read_note(ahead).size - 1} were signed and are gone"
                )
            if header is not None:
                self._end(header)
            if not result.records:
                raise BrokenError(None, "it holds no record")
            if not result.signed:
                raise BrokenError(None, "no checkpoint of it is signed")
        except BrokenError:
            raise
        except (JournalError, ReceiptError) as error:
            raise BrokenError(self._index, str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BrokenError(
                self._index, f"it is not in the form of a record ({type(error).__name__}: {error})"
            ) from None
        if result.signed < self._tree.size and header is None:
            newer = self._tree.size - result.signed
            result.remarks.append(
                f"The newest {newer} records are not signed yet; the daemon signs with its next message."
            )
        result.key = key_id(self.keys[-1][1])
        self._flush()
        self._count()

    def _begin(self, header: Any) -> None:
        result = self._result
        result.whole = header.whole
        try:
            size = 0
            for subtree in header.before:
                self._tree.append_subtree(subtree.level, bytes.fromhex(subtree.root))
                size += 1 << subtree.level
            if (
                size != header.first
                or header.first + header.count + sum(1 << subtree.level for subtree in header.behind) != header.size
            ):
                raise ValueError("its parts do not make up the journal")
            if header.whole != (header.public_key is None) or (header.whole and header.schemas):
                raise ValueError("a stretch names its key and schemas, a whole journal has them in its records")
            for files in header.schemas:
                sha256, schema = _schema(files)
                self._schemas[sha256] = schema
            if header.public_key is not None:
                self.keys.append((0, bytes.fromhex(header.public_key)))
        except (KeyError, TypeError, ValueError, JournalError) as error:
            raise BrokenError(None, f"the header does not hold together: {error}") from None
        if not header.whole:
            result.remarks.append(
                f"It is a stretch: records {header.first} to {header.first + header.count - 1} of {header.size}. "
                "Receipts are checked in a bundle of the whole journal."
            )

    def _end(self, header: Any) -> None:
        if self._tree.size != header.first + header.count:
            raise BrokenError(None, f"it announces {header.count} records and holds {self._tree.size - header.first}")
        if (header.party, header.federation) != (self._result.party, self._result.federation):
            raise BrokenError(None, f"its header names {header.party}, its records {self._result.party}")
        for subtree in header.behind:
            self._tree.append_subtree(subtree.level, bytes.fromhex(subtree.root))
        self._remember()
        self._origin = self._origin or header.origin
        self._check_note(header.checkpoint)
        if header.origin != self._origin or self._result.signed != header.size:
            raise BrokenError(None, "the checkpoint in its header is not the one over its records")

    def _parse(self, line: bytes) -> dict[str, Any]:
        record = _read_record(line)
        if record["index"] != self._index:
            raise BrokenError(self._index, f"it calls itself record {record['index']}")
        if record["v"] != 1:
            raise BrokenError(self._index, f"its form is version {record['v']}, which this release does not know")
        result = self._result
        party, federation = record["self"], record["federation"]
        if not result.party:
            result.party, result.federation = party, federation
        elif (party, federation) != (result.party, result.federation):
            raise BrokenError(self._index, f"it is a record of {party}, in a journal of {result.party}")
        result.first_time = result.first_time or record["time"]
        result.last_time = record["time"]
        return record

    def _remember(self) -> None:
        self._roots[self._tree.size] = self._tree.root()
        self._order.append(self._tree.size)
        if len(self._order) > _REMEMBERED_ROOTS:
            del self._roots[self._order.popleft()]
        if self._side == "peer":
            seen = self._ledger.execute(
                "SELECT root FROM seen WHERE peer = ? AND size = ?", (self._result.party, self._tree.size)
            ).fetchone()
            if seen is not None and seen[0] != self._roots[self._tree.size]:
                raise BrokenError(
                    None,
                    f"it is another history than the one that was shown: its first {self._tree.size} records do not "
                    "give the root that its owner signed for the other side",
                )

    def _take(self, record: dict[str, Any]) -> None:
        match record["kind"]:
            case "message":
                self._take_message(record)
            case "refusal":
                if record.get("direction") == "received" and record.get("attestation") is not None:
                    self._result.remarks.append(
                        f"Record {self._index}: a message of {record['peer']} was refused: {record['reason']}."
                    )
            case _:
                self._take_other(record)

    def _take_other(self, record: Mapping[str, Any]) -> None:
        if not self._result.whole and record["kind"] in ("key", "key-rotation", "peer-key"):
            return
        match record["kind"]:
            case "key":
                if self.keys:
                    raise BrokenError(self._index, "it names the journal's first key a second time")
                self._origin = record["origin"]
                self.keys.append((0, bytes.fromhex(record["public_key"])))
            case "key-rotation":
                self._rotate(record)
            case "peer-key":
                self._enrol(record)
            case "schema":
                sha256, schema = _schema(record["files"])
                if sha256 != record["schema_sha256"]:
                    raise BrokenError(self._index, "the stored schema does not have the hash that it is named by")
                self._schemas[sha256] = schema
            case "consent":
                self._consent = expand(tuple(record["consent"]["exposures"]))
            case "withdrawal":
                self._consent = _WHEN_WITHDRAWN

    def _take_message(self, record: dict[str, Any]) -> None:
        self._attribute(record)
        self._result.sent += record["direction"] == "sent"
        self._result.received += record["direction"] == "received"
        if not self._result.whole:
            return
        peer, call_id, direction = record["peer"], record["call_id"], record["direction"]
        correspondence = self._correspondence(peer)
        correspondence.check(record)
        envelope = record.get("attestation")
        if envelope is not None:
            self._check_attestation(record, envelope, correspondence)
        correspondence.take(record)
        if correspondence.frames(call_id, direction) != record["frame"] + 1:
            raise BrokenError(self._index, f"it is message {record['frame']} of its call, and another was due")
        self._rows.append((self._side, peer, call_id, direction, record["frame"], record["sha256"], self._index))
        if len(self._rows) >= 1000:
            self._flush()

    def _attribute(self, record: Mapping[str, Any]) -> None:
        """Attributes the message's bytes anew from the stored schema: no byte may be without a class."""
        schema = self._schemas.get(record["schema_sha256"])
        if schema is None:
            raise BrokenError(self._index, f"its schema {record['schema_sha256'][:16]}… is not in the journal")
        paths = schema.get(record["message_type"])
        if paths is None:
            raise BrokenError(self._index, f"its schema has no message {record['message_type']}")
        classes: dict[str, int] = {}
        for path, count in record["fields"].items():
            if path not in paths:
                raise BrokenError(self._index, f"field {path} of {record['message_type']} has no exposure class")
            if type(count) is not int or count < 0:
                raise BrokenError(self._index, f"field {path} has {count} bytes")
            name = paths[path].value
            classes[name] = classes.get(name, 0) + count
        if sum(classes.values()) != record["length"]:
            raise BrokenError(
                self._index,
                f"{record['length'] - sum(classes.values())} of its {record['length']} bytes are unaccounted for",
            )
        if {name: count for name, count in record["classes"].items() if count} != {
            n: c for n, c in classes.items() if c
        }:
            raise BrokenError(self._index, "its exposure classes are not those of its fields")
        if record["direction"] == "sent" and self._consent is not None and "/silo/" in record["self"]:
            extra = [name for name in classes if Exposure(name) not in self._consent]
            if extra:
                raise BrokenError(self._index, f"{', '.join(extra)} left without consent")

    def _check_attestation(self, record: Mapping[str, Any], envelope: Any, correspondence: Correspondence) -> None:
        if record["direction"] == "sent":
            key = self._key_for(self._tree.size)
            document = Attestation.model_validate(unseal(from_json(envelope), ATTESTATION, key))
            if document.by != record["self"] or document.to != record["peer"]:
                raise BrokenError(self._index, f"its attestation is by {document.by} to {document.to}")
            self._check_note(document.checkpoint, last=False)
            witnessed = document.witnessed
            if witnessed is not None and (
                witnessed.size != correspondence.seen.size
                or not verify_cosignature(witnessed.cosignature, correspondence.seen_note, self._origin, key)
            ):
                raise BrokenError(self._index, "it witnesses a checkpoint that the other side had not shown")
            return
        if self._side == "own":
            payload = json.loads(from_json(envelope).payload)
            shown = read_note(payload["checkpoint"])
            self._ledger.execute(
                "INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (record["peer"], shown.size, shown.root)
            )

    def _check_note(self, note: str, *, last: bool = True) -> None:
        size = read_note(note).size
        checkpoint = verify(note, self._key_for(size))
        if self._origin and checkpoint.origin != self._origin:
            raise BrokenError(self._index, f"a checkpoint of {checkpoint.origin} stands in the journal {self._origin}")
        root = self._roots.get(size)
        if root is None and size:
            raise BrokenError(self._index, f"the checkpoint over {size} records is out of its place")
        if size and root != checkpoint.root:
            before = self._result.signed
            raise BrokenError(before, f"one of the records {before} to {size - 1} is not the one that was signed")
        if last and size > self._result.signed:
            self._result.signed, self._result.root = size, checkpoint.root.hex()

    def _key_for(self, size: int) -> bytes:
        found = [key for first, key in self.keys if first <= size]
        if not found:
            raise BrokenError(self._index, "the journal does not begin with its public key")
        return found[-1]

    def _rotate(self, record: Mapping[str, Any]) -> None:
        if not self.keys:
            raise BrokenError(self._index, "a key is changed before there is one")
        new = bytes.fromhex(record["public_key"])
        document = unseal(from_json(record["statement"]), ROTATION, self.keys[-1][1])
        unseal(from_json(record["statement"]), ROTATION, new)
        if (document["party"], document["new_key"]) != (record["self"], record["public_key"]):
            raise BrokenError(self._index, "the signed change of keys is for another party or key")
        self.keys.append((record["index"] + 2, new))

    def _enrol(self, record: Mapping[str, Any]) -> None:
        correspondence = self._correspondence(record["peer"])
        new = bytes.fromhex(record["public_key"])
        known = correspondence.peer_key
        for statement in record["rotations"]:
            document = unseal(from_json(statement), ROTATION, known or b"")
            known = bytes.fromhex(document["new_key"])
        if known is not None and known != new:
            raise BrokenError(self._index, f"{record['peer']} has another audit key without a signed change")
        correspondence.peer_key = new

    def _correspondence(self, peer: str) -> Correspondence:
        if peer not in self._correspondences:
            self._correspondences[peer] = Correspondence(self._result.party, peer)
        return self._correspondences[peer]

    def _flush(self) -> None:
        self._ledger.executemany("INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?)", self._rows)
        self._rows.clear()

    def _count(self) -> None:
        missing = calls = 0
        for correspondence in self._correspondences.values():
            for rpc, sent, vouched in correspondence.unconfirmed().values():
                missing += sent - vouched
                calls += 1
                del rpc
        self._result.acknowledged = self._result.sent - missing if self._result.whole else 0
        if missing:
            self._result.remarks.append(
                f"{missing} messages in {calls} calls have no receipt: the last answers of a session, or calls that "
                "were cut. They count as having left."
            )


def _compare(ledger: sqlite3.Connection, own: Verification, other: Verification) -> None:
    """The two-sided difference: what one side says it received, the other must say it sent."""

    def first(query: str, *values: object) -> Any:
        return ledger.execute(query, values).fetchone()

    if own.federation != other.federation:
        own.problem = f"the evidence is of the federations {own.federation} and {other.federation}"
        return
    pair = (own.party, other.party)
    count = first("SELECT COUNT(*) FROM message WHERE side = 'own' AND peer = ?", other.party)[0]
    if not count:
        own.problem = f"{own.party} has exchanged nothing with {other.party}"
        return
    query = """
        SELECT m.position, m.call_id, m.frame FROM message m LEFT JOIN message o
        ON o.side = ? AND o.peer = ? AND o.call_id = m.call_id AND o.frame = m.frame AND o.direction = 'sent'
        WHERE m.side = ? AND m.peer = ? AND m.direction = 'received' AND (o.sha256 IS NULL OR o.sha256 != m.sha256)
        ORDER BY m.position LIMIT 1
    """
    found = first(query, "own", pair[1], "peer", pair[0])
    if found is not None:
        own.problem = (
            f"{other.party} received a message (its record {found[0]}, call {found[1]}, frame {found[2]}) that "
            f"{own.party} has no record of sending"
        )
        return
    found = first(query, "peer", pair[0], "own", pair[1])
    if found is not None:
        own.index = found[0]
        which = f"call {found[1]}, frame {found[2]}"
        own.problem = f"{own.party} received a message ({which}) that {other.party} has no record of sending"
        return
    lost = first(
        """SELECT COUNT(*) FROM message m LEFT JOIN message o
        ON o.side = 'peer' AND o.peer = ? AND o.call_id = m.call_id AND o.frame = m.frame AND o.direction = 'received'
        WHERE m.side = 'own' AND m.peer = ? AND m.direction = 'sent' AND o.sha256 IS NULL""",
        *pair,
    )[0]
    own.remarks.append(
        f"The journals of {own.party} and {other.party} agree on every message that both have"
        + (f"; {lost} that were sent did not arrive." if lost else ".")
    )
    ahead = first("SELECT MAX(size) FROM seen WHERE peer = ?", other.party)[0] or 0
    if ahead > other.signed:
        own.problem = (
            f"{other.party} has shown a journal of {ahead} records, and its evidence holds {other.signed}: later "
            "records are withheld or gone"
        )


@contextmanager
def _ledger() -> Iterator[sqlite3.Connection]:
    """Where messages are kept for the comparison: on disk, however many there are."""
    with tempfile.TemporaryDirectory(prefix="medsilo-verify-") as folder:
        connection = sqlite3.connect(Path(folder) / "messages.db", isolation_level=None)
        connection.executescript(
            """PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN;
            CREATE TABLE message (side, peer, call_id, direction, frame, sha256, position,
                PRIMARY KEY (side, peer, call_id, direction, frame)) WITHOUT ROWID;
            CREATE TABLE seen (peer, size, root, PRIMARY KEY (peer, size)) WITHOUT ROWID;"""
        )
        try:
            yield connection
        finally:
            connection.close()


def _read_record(line: bytes) -> dict[str, Any]:
    """The record on a line; raises ``ValueError`` if it is not a JSON object in canonical form."""
    fractions: list[str] = []

    def fraction(text: str) -> float:
        fractions.append(text)
        return float(text)

    record = json.loads(line, parse_float=fraction)
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    # Without fractions, and with the keys that records have, Python's JSON is RFC 8785's, and ten times as fast.
    canonical = (
        rfc8785.dumps(record)
        if fractions
        else json.dumps(record, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    )
    if canonical != line:
        raise ValueError("it is not in canonical form (RFC 8785)")
    return record


def _schema(stored: Sequence[str]) -> tuple[str, dict[str, dict[str, Exposure]]]:
    """A stored schema's hash, and the classes of all field paths of all its messages, by message type and path."""
    files = [base64.b64decode(text, validate=True) for text in stored]
    protos = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
    return hashlib.sha256(b"".join(files)).hexdigest(), field_exposures(protos)
