"""Reads one party's evidence from its first record to its last, and checks all that it shows by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from medsilo.privacy.audit.bundle import Evidence, Header, UnreadableError
from medsilo.privacy.audit.comparison import Comparison, Extent, Side
from medsilo.privacy.audit.findings import MOST_REMARKS, BrokenError, Finding, Verification, count_of
from medsilo.privacy.audit.permission import Permissions
from medsilo.privacy.audit.receipts import Receipts
from medsilo.privacy.audit.record_form import check_bytes, check_form, check_head, check_roster
from medsilo.privacy.audit.signed_tree import SignedTree
from medsilo.privacy.audit.spending import Spending
from medsilo.privacy.audit.testimony import Testimony, Witness
from medsilo.privacy.audit.times import Clockwork
from medsilo.privacy.audit.witnesses import Asked, Witnesses
from medsilo.privacy.door.attestation import Attestation
from medsilo.privacy.errors import JournalError, MedsiloError
from medsilo.privacy.exposure import SCHEMA_SHA256
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.envelope import ATTESTATION, from_json, key_id, unseal
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.checkpoint import read_note, time_of, verify
from medsilo.privacy.journal.merkle import MerkleTree
from medsilo.privacy.journal.records import (
    ConsentRecord,
    CosignedRecord,
    ForeignPeerRecord,
    KeyRecord,
    KeyRotationRecord,
    LedgerRecord,
    MessageRecord,
    OtherRecord,
    PeerKeyRecord,
    Record,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    SchemaRecord,
    SegmentRecord,
    VoidRecord,
    WithdrawalRecord,
    read,
)
from medsilo.privacy.journal.stored_schema import StoredSchema

_JOINING = "Join"
Along = Callable[[MerkleTree], Callable[[Record], None]]


class EvidenceReader:
    """Reads one party's evidence. ``result`` says what was found.

    ``checks``: where its signatures are checked. ``along``: who takes its records as they are read. ``asked``: the
    witnesses whose word it is to have.
    """

    def __init__(
        self,
        evidence: Evidence,
        side: Side,
        *,
        checks: Checks = HERE,
        along: Along | None = None,
        asked: Asked | None = None,
    ) -> None:
        self.result = Verification(str(evidence.source))
        self.header = evidence.header
        self.side: Side = side
        self._checks = checks
        first = next(evidence.lines, None)
        self._lines: Iterator[bytes] = itertools.chain(() if first is None else (first,), evidence.lines)
        self.announced = _announced(first)
        self._tree = SignedTree(evidence, self.result, checks)
        self._along = None if along is None else along(self._tree.records)
        self._receipts = Receipts(self.result, checks)
        self._permissions = Permissions("")
        self._spending = Spending()
        self._schemas: dict[str, StoredSchema] = {}
        self._unused: set[str] = set()
        self._comparison: Comparison | None = None
        self._compared = ""
        self._testimony: Testimony | None = None
        self._seen = 0
        self._backwards = 0
        """The first record whose time is before that of the one before it."""
        begins = self.header.first if self.header is not None else 0
        self._clockwork = Clockwork(begins)
        self._witnesses = Witnesses(asked, begins)
        self._outlived = ""
        self._unknown: set[str] = set()

    def compare_with(self, comparison: Comparison, party: str) -> None:
        """While it is read, gives the comparison what was exchanged with that party."""
        self._comparison, self._compared = comparison, party

    def testify(self, testimony: Testimony) -> None:
        """While it is read, gives away what others told its party, to be held against what they told another one."""
        self._testimony = testimony

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The owner's audit keys, in their order."""
        return tuple(key for _, key in self._tree.keys)

    def witness(self) -> Witness:
        """Whose testimony it is."""
        return Witness(self.side, self.result.party, self.keys)

    def verify(self, key: bytes | None) -> Verification:
        """Reads it all; ``key``: the owner's, if it is known."""
        result = self.result
        try:
            self._read()
            if key is not None and self.keys[-1] != key:
                raise BrokenError(
                    None,
                    f"it is signed with the audit key {result.key[:16]}…, not with {key_id(key)[:16]}…, the one that "
                    "was given",
                )
        except BrokenError as error:
            result.problem, result.index, result.until = error.what, error.index, error.until
        return result

    def extent(self) -> Extent:
        """What the comparison needs to know of it."""
        end = self.header.size if self.header is not None else self.result.records
        return Extent(self.side, self.result.party, end, self.result.whole)

    @property
    def heard(self) -> bool:
        """Whether it holds signed times of any other side."""
        return self._clockwork.heard

    def key_of(self, peer: str) -> bytes | None:
        """The other party's audit key, as this one came to know it last."""
        return self._receipts.key_of(peer)

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
        except MedsiloError as error:
            raise BrokenError(tree.index, str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BrokenError(
                tree.index, f"it is not in the form of a record ({type(error).__name__}: {error!s:.200})"
            ) from None
        if not result.records:
            raise BrokenError(None, "it holds no record")
        if not result.signed:
            raise BrokenError(None, "none of it is signed, so it proves nothing yet")
        result.key = key_id(self.keys[-1])
        if self._comparison is not None:
            self._comparison.flush()
        self._conclude()

    def _take_line(self, line: bytes) -> None:
        self._tree.index = self._tree.size
        record = self._parse(line, self._tree.index)
        self._tree.append(line)
        self._tell_root()
        self._clockwork.take(record.time)
        self._witnesses.line(record.time, self._tree)
        self._take(record)
        self.result.records += 1
        if self._along is not None:
            self._along(record)
        self._tree.taken(line)

    def _begin(self, header: Header) -> None:
        self.result.whole = header.whole
        try:
            header.check()
            for files in header.schemas:
                schema = StoredSchema(files)
                self._schemas[schema.sha256] = schema
            if len(self._schemas) < len(header.schemas) or list(self._schemas) != sorted(self._schemas):
                raise ValueError("its schemas are not in order")
            self._unused = set(self._schemas)
        except (ValueError, JournalError) as error:
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
            raise BrokenError(
                None,
                f"its header names {header.party} in {header.federation}, its records {result.party} in "
                f"{result.federation}",
            )
        self._tree.end_bundle(header)
        self._witnesses.end(header, self._tree)
        self._tell_root()
        if self._unused:
            raise BrokenError(None, "its header holds a schema that no record of the range uses")

    def _tell_root(self) -> None:
        if self._comparison is not None:
            self._comparison.root(self.side, self._tree.size, self._tree.records.root())

    def _parse(self, line: bytes, place: int) -> Record:
        held = self._checks.document(line)
        if not isinstance(held, dict):
            raise ValueError("it is not a JSON object")
        check_head(held, place)
        result = self.result
        party, federation, time = held["self"], held["federation"], held["time"]
        if result.last_time is None:
            result.party, result.federation, result.first_time = party, federation, time
            self._permissions.party = party
        elif (party, federation) != (result.party, result.federation):
            raise BrokenError(
                place,
                f"it is a record of {party:.200} in {federation:.200}, in a journal of {result.party:.200} in "
                f"{result.federation:.200}",
            )
        elif time < result.last_time:
            self._backwards = self._backwards or place
        result.last_time = time
        return read(held)

    def _take(self, record: Record) -> None:
        match record:
            case MessageRecord():
                self._take_message(record)
            case RefusalRecord():
                self._take_refusal(record)
            case LedgerRecord():
                self._spending.charged(record)
            case ConsentRecord():
                self._permissions.consented(record)
            case WithdrawalRecord():
                self._permissions.withdrawn(record)
                self._receipts.withdrawn(record)
            case RosterRecord():
                self._permissions.masked(record)
                if is_silo(record.self):
                    check_roster(record, self.keys if self.result.whole else ())
                    if self._testimony is not None:
                        self._testimony.roster(self.side, record)
            case SchemaRecord():
                schema = StoredSchema(record.files)
                if schema.sha256 != record.schema_sha256:
                    raise BrokenError(record.index, "the stored schema does not have the hash that it is named by")
                self._schemas[schema.sha256] = schema
            case SegmentRecord():
                self._tree.take_segment(record)
            case CosignedRecord():
                self._witnesses.take(record, self._tree)
                self._receipts.witnessed(record)
            case OtherRecord() if len(self._unknown) < MOST_REMARKS:
                self._unknown.add(record.kind[:40])
            case _ if self.result.whole:
                self._take_of_whole(record)

    def _take_of_whole(self, record: Record) -> None:
        """Takes a record that can only be checked where all before it are known."""
        match record:
            case VoidRecord():
                self.result.remarks.append(self._spending.voided(record))
            case RunRecord():
                self._permissions.joined(record)
                if self._testimony is not None:
                    self._testimony.plan(self.side, record)
            case KeyRecord():
                self._tree.begin_keys(record)
            case KeyRotationRecord():
                self._tree.rotate(record)
            case PeerKeyRecord():
                key = self._receipts.enrol(record)
                if self._testimony is not None:
                    self._testimony.key(self.side, record.peer, key, record.rotations)
            case ForeignPeerRecord():
                self._receipts.excuse(record)

    def _take_message(self, record: MessageRecord) -> None:
        check_form(record)
        self._spending.message(record)
        result, sent = self.result, record.direction == "sent"
        classes = self._attribute(record)
        if sent:
            self._permissions.check(record, classes, whole=result.whole)
            self._check_expiry(record)
        if record.rpc == _JOINING:
            self._receipts.joined(record)
        result.sent += sent
        result.received += not sent
        document = None
        if not result.whole:
            if record.attestation is not None:
                document = Attestation.model_validate(read_canonical(from_json(record.attestation).payload))
        elif not self._receipts.is_excused(record):
            document = self._take_receipts(record)
        if self._testimony is not None:
            self._testimony.given(self.side, record)
        self._compare(record, document)

    def _compare(self, record: MessageRecord, document: Attestation | None) -> None:
        sent = record.direction == "sent"
        if self._comparison is not None and record.peer == self._compared:
            if document is not None and not sent:
                shown = read_note(document.checkpoint)
                self._seen = shown.size
                self._comparison.seen(self.side, shown.size, shown.root, record.index)
                for item in document.exchanges:
                    if item.direction == "sent":
                        self._comparison.attested(self.side, item.call_id, item.messages)
            self._comparison.message(self.side, record, self._seen, self._clockwork.latest)

    def _take_receipts(self, record: MessageRecord) -> Attestation | None:
        """Holds a message, and the attestation in it, against what stands before; returns the attestation."""
        receipts = self._receipts.of(record.peer)
        before = receipts.state.seen
        document = receipts.take(record, self._tree.key())
        if record.direction == "sent":
            if document is not None:
                self._tree.check_given(document, record.call_id)
            return document
        self._tree.check_answered(record.call_id)
        if document is None:
            return None
        if self._testimony is not None:
            self._testimony.checkpoint(self.side, record.peer, before, document, record.index)
        if (witnessed := document.witnessed) is not None:
            # What the other side signed the document with covers the line in it.
            self._clockwork.signed(record.peer, witnessed.size, time_of(witnessed.cosignature))
        return document

    def _check_expiry(self, record: MessageRecord) -> None:
        """A consent may have ended by the other side's clock, whatever the record's own time is."""
        if not self._outlived and (after := self._clockwork.after(record.peer)):
            self._outlived = self._permissions.outlived(record, after)
            if self._outlived:
                self.result.findings.append(Finding("contradiction", self._outlived, record.index))

    def _attribute(self, record: MessageRecord) -> dict[str, int]:
        """Attributes the message's bytes anew from the stored schema: no byte may be without a class."""
        name = record.schema_sha256
        schema = self._schemas.get(name)
        if schema is None:
            raise BrokenError(record.index, f"its schema {name[:16]}… is not in the journal")
        self._unused.discard(name)
        return check_bytes(record, schema)

    def _take_refusal(self, record: RefusalRecord) -> None:
        if not isinstance(record.reason, str):
            raise TypeError("a refusal's reason should be text")
        self.result.refused += 1
        envelope, peer = record.attestation, record.peer
        if envelope is None or record.direction != "received":
            return
        said = f"Record {record.index}: a message of {peer!s:.200} was refused: {record.reason:.500}."
        if sum(remark.startswith("Record ") for remark in self.result.remarks) < MOST_REMARKS:
            self.result.remarks.append(said)
        known = self.key_of(peer) if isinstance(peer, str) else None
        if self._comparison is None or peer != self._compared or known is None:
            return
        try:
            document = Attestation.model_validate(unseal(from_json(envelope), ATTESTATION, known))
            shown = verify(document.checkpoint, known)
        except (JournalError, ValueError):
            return  # not the other side's attestation, or none that it can be held to
        self._comparison.seen(self.side, shown.size, shown.root, record.index)

    def _conclude(self) -> None:
        result, tree = self.result, self._tree
        result.unsigned = tree.size - result.signed if self.header is None else 0
        if result.unsigned:
            result.remarks.append(
                f"Too fresh to be signed: the newest {count_of(result.unsigned, 'record')}. Nothing shows yet whether "
                "anything there was changed or removed. The daemon signs with its next message, or within seconds; "
                "look again then."
            )
        result.tell_times(self._clockwork.conclude())
        self._witnesses.conclude(result, tree)
        if tree.unlisted:
            result.remarks.append(
                f"A crash kept {count_of(tree.unlisted, 'checkpoint')} from the journal's list, and what shows "
                "them from leaving. The daemon puts that right when it starts."
            )
        if self._backwards:
            result.remarks.append(f"The clock went back at record {self._backwards}: its time is before the last one.")
        if self._unknown:
            result.remarks.append(
                f"Of kinds that this release does not know ({', '.join(sorted(self._unknown))}) only place and "
                "signature were checked."
            )
        others = sorted(set(self._schemas) - {SCHEMA_SHA256})
        if others:
            names = ", ".join(name[:16] + "…" for name in others[:MOST_REMARKS])
            result.remarks.append(
                f"Messages were attributed with the schema {names} that the journal holds; it is not this release's: "
                "compare it with the release that the party ran."
            )
        if result.whole:
            self._receipts.conclude()
            result.remarks += self._spending.recount()


def _announced(line: bytes | None) -> str:
    """Whose journal it is, by its first record; that this is so, its verification shows."""
    try:
        party = read(read_canonical(line or b"")).self
    except (ValueError, TypeError, KeyError, AttributeError):
        return ""
    return party if isinstance(party, str) else ""
