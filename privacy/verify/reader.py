"""Reads one party's evidence from its first record to its last, and checks all that it shows by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .attestation import Attestation, read_attestation
from .bundle import Header, open_bundle
from .form import HEX16, HEX32, Good, matching, text, whole
from .permission import Permissions
from .receipts import Receipts
from .result import BrokenError, EvidenceError, Result, UnreadableError
from .schema import StoredSchema
from .signed import HERE, Checkpoint, Checks, key_id, payload_of
from .tree import SignedTree

MOST_REMARKS = 5
"""Of one kind in one result."""
_JOINING = "Join"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)


class Record:
    """A record: its attributes are the JSON object's; what that lacks is None."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.__dict__ = content

    def __getattr__(self, name: str) -> None:
        return None


class Reader:
    """Reads one party's evidence. ``result`` says what was found.

    ``header``: a bundle's, or None for a journal's own folder. ``lines``: the records' exact bytes. ``checks``: where
    signatures and canonical form are checked. ``audit verify`` overrides what it adds to.
    """

    def __init__(self, header: Header | None, lines: Iterable[bytes], result: Result, checks: Checks = HERE) -> None:
        self.header, self.result = header, result
        self._lines, self._checks = lines, checks
        self._tree = SignedTree(result, checks)
        self._receipts = Receipts(result, checks)
        self._permissions = Permissions("")
        self._schemas: dict[str, StoredSchema] = {}
        self._unused: set[str] = set()
        self._unknown: set[str] = set()
        self._backwards = 0
        """The first record whose time is before that of the one before it."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The owner's audit keys, in their order."""
        return tuple(key for _, key in self._tree.keys)

    def read(self, key: bytes | None) -> None:
        """Reads it all; ``key``: the owner's, if it is known."""
        result = self.result
        try:
            self._read()
            if key is not None and self.keys[-1] != key:
                known = f"{key_id(key)[:16]}…, the one that was given"
                raise BrokenError(None, f"it is signed with the audit key {result.key[:16]}…, not with {known}")
        except BrokenError as error:
            result.problem, result.index, result.until = error.what, error.index, error.until

    def _read(self) -> None:
        header, result, tree = self.header, self.result, self._tree
        try:
            if header is not None:
                self._begin(header)
            tree.begin(header)
            for line in self._lines:
                self._take_line(line)
            tree.end()
            tree.index = None
            if header is not None:
                self._end(header)
        except (BrokenError, UnreadableError):
            raise
        except EvidenceError as error:
            raise BrokenError(tree.index, str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"it is not in the form of a record ({type(error).__name__}: {error!s:.200})"
            raise BrokenError(tree.index, what) from None
        if not result.records:
            raise BrokenError(None, "it holds no record")
        if not result.signed:
            raise BrokenError(None, "none of it is signed, so it proves nothing yet")
        result.key = key_id(self.keys[-1])
        self._conclude()

    def _take_line(self, line: bytes) -> None:
        self._tree.index = self._tree.size
        record = self._parse(line, self._tree.index)
        self._tree.append(line)
        self._take(record)
        self.result.records += 1
        self._tree.taken(line)

    def _begin(self, header: Header) -> None:
        self.result.whole = header.whole
        try:
            header.check()
            for files in header.schemas:
                schema = self._schema(files)
                self._schemas[schema.sha256] = schema
            if len(self._schemas) < len(header.schemas) or list(self._schemas) != sorted(self._schemas):
                raise ValueError("its schemas are not in order")
            self._unused = set(self._schemas)
        except (ValueError, EvidenceError) as error:
            raise BrokenError(None, f"the header does not hold together: {error}") from None
        if not header.whole:
            self.result.remarks.append(
                f"It is a range: records {header.first} to {header.first + header.count - 1} of {header.size}. "
                "Receipts, and changes of keys, are checked in a bundle of the whole journal. The key is the one that "
                "the range names: hold it against the owner's audit.pub (--key)."
            )

    def _end(self, header: Header) -> None:
        result, size = self.result, self._tree.size
        if size != header.first + header.count:
            raise BrokenError(None, f"it announces {header.count} records and holds {size - header.first}")
        if (header.party, header.federation) != (result.party, result.federation):
            whose = f"{result.party} in {result.federation}"
            raise BrokenError(None, f"its header names {header.party} in {header.federation}, its records {whose}")
        self._tree.end_bundle(header)
        if self._unused:
            raise BrokenError(None, "its header holds a schema that no record of the range uses")

    def _parse(self, line: bytes, place: int) -> Any:
        held = self._checks.document(line)
        if not isinstance(held, dict):
            raise ValueError("it is not a JSON object")
        _check_head(held, place)
        result = self.result
        party, federation, time = held["self"], held["federation"], held["time"]
        if result.last_time is None:
            result.party, result.federation, result.first_time = party, federation, time
            self._permissions.party = party
        elif (party, federation) != (result.party, result.federation):
            whose = f"{result.party:.200} in {result.federation:.200}"
            raise BrokenError(place, f"it is a record of {party:.200} in {federation:.200}, in a journal of {whose}")
        elif time < result.last_time:
            self._backwards = self._backwards or place
        result.last_time = time
        result.kinds[held["kind"]] = result.kinds.get(held["kind"], 0) + 1
        return self._record(held)

    def _record(self, held: dict[str, Any]) -> Any:
        return Record(held)

    def _schema(self, files: Iterable[str]) -> StoredSchema:
        return StoredSchema(tuple(files))

    def _take(self, record: Any) -> None:
        match record.kind:
            case "message":
                self._take_message(record)
            case "refusal":
                if not isinstance(record.reason, str):
                    raise TypeError("a refusal's reason should be text")
                self.result.refused += 1
            case "consent":
                self._permissions.consented(record)
            case "withdrawal":
                self._permissions.withdrawn(record)
                self._receipts.withdrawn(record)
            case "roster":
                self._permissions.masked(record)
            case "schema":
                schema = self._schema(record.files)
                if schema.sha256 != record.schema_sha256:
                    raise BrokenError(record.index, "the stored schema does not have the hash that it is named by")
                self._schemas[schema.sha256] = schema
            case "segment":
                self._tree.take_segment(record)
            case "cosigned":
                self._tree.check_shown(record.checkpoint)
                self._receipts.cosigned(record)
            case "approval" | "ledger":
                pass
            case kind if kind not in _OF_WHOLE:
                if len(self._unknown) < MOST_REMARKS:
                    self._unknown.add(kind[:40])
            case kind if self.result.whole:
                self._take_of_whole(kind, record)

    def _take_of_whole(self, kind: str, record: Any) -> None:
        """Takes a record that can only be checked where all before it are known."""
        match kind:
            case "run":
                self._permissions.joined(record)
            case "key":
                self._tree.begin_keys(record)
            case "key-rotation":
                self._tree.rotate(record)
            case "peer-key":
                self._receipts.enrol(record)
            case "foreign-peer":
                self._receipts.excuse(record)

    def _take_message(self, record: Any) -> Attestation | None:
        """Checks a message's record; returns the attestation in it."""
        _check_form(vars(record))
        result, sent = self.result, record.direction == "sent"
        classes = self._attribute(record)
        if sent:
            self._permissions.check(record, classes, whole=result.whole)
            for name, count in classes.items():
                result.left[name] = result.left.get(name, 0) + count
        if record.rpc == _JOINING:
            self._receipts.joined(record)
        result.sent += sent
        result.received += not sent
        if not result.whole:
            if record.attestation is None:
                return None
            return read_attestation(self._checks.document(payload_of(record.attestation)[1]))
        if self._receipts.is_excused(record):
            return None
        receipts = self._receipts.of(record.peer)
        before = receipts.seen
        document = receipts.take(record, self._tree.key())
        if sent and document is not None:
            self._tree.check_given(document.checkpoint, record.call_id)
        self._exchanged(record, before, document)
        return document

    def _exchanged(self, record: Any, before: Checkpoint, document: Attestation | None) -> None:
        """Called for each message; ``before``: the other side's checkpoint that was seen before it."""

    def _attribute(self, record: Any) -> dict[str, int]:
        """Attributes the message's bytes anew from the stored schema: no byte may be without a class."""
        schema = self._schemas.get(record.schema_sha256)
        if schema is None:
            raise BrokenError(record.index, f"its schema {record.schema_sha256[:16]}… is not in the journal")
        self._unused.discard(record.schema_sha256)
        classes = schema.classes(record.message_type, record.fields)
        if missing := record.length - sum(classes.values()):
            raise BrokenError(record.index, f"{missing} of its {record.length} bytes are unaccounted for")
        if record.classes != classes:
            raise BrokenError(record.index, "its exposure classes are not those of its fields")
        return classes

    def _conclude(self) -> None:
        result = self.result
        if self._backwards:
            result.remarks.append(f"The clock went back at record {self._backwards}: its time is before the last one.")
        if self._unknown:
            kinds = ", ".join(sorted(self._unknown))
            what = f"Of kinds that this release does not know ({kinds}) only place and signature were checked."
            result.remarks.append(what)
        if result.whole:
            self._receipts.conclude()


_OF_WHOLE = frozenset({"run", "key", "key-rotation", "peer-key", "foreign-peer", "void"})


def verify_bundle(path: str | Path, *, key: bytes | None = None) -> Result:
    """Verifies a bundle; ``key``: the public audit key (Ed25519, 32 bytes) that the owner is known to have now.

    Raises ``UnreadableError`` for what is no bundle at all; everything else is in the result.
    """
    header, lines = open_bundle(Path(path))
    reader = Reader(header, lines, Result(str(path)))
    reader.read(key)
    return reader.result


def _check_head(held: Mapping[str, Any], place: int) -> None:
    """Checks what every record has; ``place``: the number that it should have."""
    index, time = held["index"], held["time"]
    if type(index) is not int or index != place:
        raise BrokenError(place, f"it calls itself record {index!r:.40}")
    if type(held["v"]) is not int or held["v"] != 1:
        raise BrokenError(place, f"its form is version {held['v']!r:.40}, which this release does not know")
    if not (isinstance(held["self"], str) and isinstance(held["federation"], str) and isinstance(held["kind"], str)):
        raise TypeError("self, federation and kind should be text")
    if not isinstance(time, str) or _TIME.fullmatch(time) is None:
        raise BrokenError(place, f"its time {time!r:.40} is not in the form 2026-01-31T12:00:00.000Z")


def _check_form(held: Mapping[str, Any]) -> None:
    """Raises ``KeyError`` or ``ValueError`` unless a message's record is in form."""
    if held["direction"] not in ("sent", "received"):
        raise ValueError("a message is sent or received")
    for names, good, what in _MESSAGE:
        for name in names:
            if not good(held[name]):
                raise ValueError(f"{name} should be {what}")


_MESSAGE: Sequence[tuple[Sequence[str], Good, str]] = (
    (("call_id",), matching(HEX16), "32 hexadecimal digits"),
    (("sha256", "schema_sha256"), matching(HEX32), "64 hexadecimal digits"),
    (("frame", "length"), whole(0), "a whole number"),
    (("rpc", "peer", "message_type"), text(), "text"),
    (("plan_sha256", "run"), lambda value: isinstance(value, str | None), "text or null"),
    (("round",), lambda value: type(value) in (int, type(None)), "a whole number or null"),
    (("fields", "classes"), lambda value: isinstance(value, dict), "an object"),
)
