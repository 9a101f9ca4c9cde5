"""Reads one party's evidence with the verifier, and checks what needs more than a bundle and its signatures: rosters'
certificates, the privacy ledger, times, and what the comparison with other evidence is to know."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from medsilo.privacy.audit.bundle import Evidence, UnreadableError
from medsilo.privacy.audit.comparison import Comparison, Extent, Side
from medsilo.privacy.audit.findings import Finding, Verification
from medsilo.privacy.audit.record_form import check_roster
from medsilo.privacy.audit.signed_tree import SignedTree
from medsilo.privacy.audit.spending import Spending
from medsilo.privacy.audit.testimony import Testimony, Witness
from medsilo.privacy.audit.times import TOLERANCE_SECONDS, Clockwork, moment
from medsilo.privacy.audit.witnesses import Asked, Witnesses
from medsilo.privacy.door.attestation import Shown
from medsilo.privacy.door.gossip import Heard, check_shown
from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.exposure import SCHEMA_SHA256
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.checkpoint import time_of
from medsilo.privacy.journal.merkle import MerkleTree
from medsilo.privacy.journal.records import (
    CosignedRecord,
    LedgerRecord,
    MessageRecord,
    PeerKeyRecord,
    Record,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    VoidRecord,
    read,
)
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.verify import BrokenError, EvidenceError, Reader
from medsilo.privacy.verify.attestation import Attestation, read_attestation
from medsilo.privacy.verify.bundle import Header
from medsilo.privacy.verify.reader import MOST_REMARKS
from medsilo.privacy.verify.result import count_of
from medsilo.privacy.verify.signed import ATTESTATION, Checkpoint, read_note, unseal, verify_note

Along = Callable[[MerkleTree], Callable[[Record], None]]


class EvidenceReader(Reader):
    """Reads one party's evidence. ``result`` says what was found.

    ``checks``: where its signatures are checked. ``along``: who takes its records as they are read. ``asked``: the
    witnesses whose word it is to have.
    """

    result: Verification
    _tree: SignedTree

    def __init__(
        self,
        evidence: Evidence,
        side: Side,
        *,
        checks: Checks = HERE,
        along: Along | None = None,
        asked: Asked | None = None,
    ) -> None:
        first = next(evidence.lines, None)
        self.announced = _announced(first)
        lines = itertools.chain(() if first is None else (first,), evidence.lines)
        result = Verification(str(evidence.source))
        super().__init__(evidence.header, lines, result, checks=checks)
        self._tree = SignedTree(evidence, result, checks)
        self.side: Side = side
        self._along = None if along is None else along(self._tree.records)
        self._spending = Spending()
        self._comparison: Comparison | None = None
        self._compared = ""
        self._testimony: Testimony | None = None
        self._seen = 0
        begins = self.header.first if self.header is not None else 0
        self._clockwork = Clockwork(begins)
        self._witnesses = Witnesses(asked, begins)
        self._others: dict[str, dict[str, Heard]] = {}
        """What other hospitals had been shown of a coordinator's journal, by the coordinator and the hospital."""
        self._outlived = False

    def compare_with(self, comparison: Comparison, party: str) -> None:
        """While it is read, gives the comparison what was exchanged with that party."""
        self._comparison, self._compared = comparison, party

    def testify(self, testimony: Testimony) -> None:
        """While it is read, gives away what others told its party, to be held against what they told another one."""
        self._testimony = testimony

    def witness(self) -> Witness:
        """Whose testimony it is."""
        return Witness(self.side, self.result.party, self.keys)

    def extent(self) -> Extent:
        """What the comparison needs to know of it."""
        end = self.header.size if self.header is not None else self.result.records
        return Extent(self.side, self.result.party, end, self.result.whole)

    def verify(self, key: bytes | None) -> Verification:
        """Reads it all; ``key``: the owner's, if it is known."""
        self.read(key)
        return self.result

    @property
    def heard(self) -> bool:
        """Whether it holds signed times of any other side."""
        return self._clockwork.heard

    def key_of(self, peer: str) -> bytes | None:
        """The other party's audit key, as this one came to know it last."""
        return self._receipts.key_of(peer)

    def _read(self) -> None:
        try:
            super()._read()
        except UnreadableError:
            raise
        except MedsiloError as error:
            raise BrokenError(self._tree.index, str(error)) from None

    def _end(self, header: Header) -> None:
        super()._end(header)
        self._witnesses.end(header.checkpoint, self._tree)
        self._tell_root()

    def _tell_root(self) -> None:
        if self._comparison is not None:
            self._comparison.root(self.side, self._tree.size, self._tree.records.root())

    def _record(self, held: dict[str, object]) -> Record:
        return read(held)

    def _schema(self, files: Iterable[str]) -> StoredSchema:
        return StoredSchema(tuple(files))

    def _take(self, record: Record) -> None:
        self._tell_root()
        self._clockwork.take(record.time)
        self._witnesses.line(record.time, self._tree)
        super()._take(record)
        match record:
            case RefusalRecord():
                self._take_refusal(record)
            case CosignedRecord():
                self._witnesses.take(record)
            case LedgerRecord():
                self._spending.charged(record)
            case RosterRecord() if is_silo(record.self):
                check_roster(record, self.keys if self.result.whole else ())
                if self._testimony is not None:
                    self._testimony.roster(self.side, record)
        if self._along is not None:
            self._along(record)

    def _take_of_whole(self, kind: str, record: Record) -> None:
        super()._take_of_whole(kind, record)
        match record:
            case VoidRecord():
                self.result.remarks.append(self._spending.voided(record))
            case RunRecord() if self._testimony is not None:
                self._testimony.plan(self.side, record)
            case PeerKeyRecord() if self._testimony is not None:
                self._testimony.key(self.side, record.peer, self.key_of(record.peer) or b"", record.rotations)

    def _take_message(self, record: MessageRecord) -> Attestation | None:
        document = super()._take_message(record)
        self._spending.message(record)
        if record.direction == "sent":
            self._check_expiry(record)
        if self._testimony is not None:
            self._testimony.given(self.side, record)
        self._compare(record, document)
        return document

    def _exchanged(self, record: MessageRecord, before: Checkpoint, document: Attestation | None) -> None:
        if record.direction == "sent":
            return
        self._tree.check_answered(record.call_id)
        if document is None:
            return
        if self._testimony is not None:
            self._testimony.checkpoint(self.side, record.peer, before, document, record.index)
        for told in map(Shown.model_validate, document.shown):
            self._others.setdefault(record.peer, {})[told.party] = check_shown(
                told,
                own=record.self,
                peer=record.peer,
                peer_key=self.key_of(record.peer) or b"",
                here=document.checkpoint,
            )
        if (witnessed := document.witnessed) is not None:
            # What the other side signed the document with covers the line in it.
            self._clockwork.signed(record.peer, witnessed.size, time_of(witnessed.cosignature))

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

    def _check_expiry(self, record: MessageRecord) -> None:
        """A consent may have ended by the other side's clock, whatever the record's own time is."""
        if self._outlived or not (after := self._clockwork.after(record.peer)):
            return
        ends = self._permissions.ends(record.rpc)
        if ends is not None and after > ends.timestamp() + TOLERANCE_SECONDS:
            self._outlived = True
            what = (
                f"record {record.index} says that it left at {record.time}, within the consent, and the consent had "
                f"ended by what {record.peer} had signed before, at {moment(after)}: one of the two clocks is wrong, "
                "or was set wrong"
            )
            self.result.findings.append(Finding("contradiction", what, record.index))

    def _take_refusal(self, record: RefusalRecord) -> None:
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
            document = read_attestation(unseal(envelope, ATTESTATION, known, HERE))
            shown = read_note(document.checkpoint)
            verify_note(document.checkpoint, known, HERE)
        except (EvidenceError, ValueError):
            return  # not the other side's attestation, or none that it can be held to
        self._comparison.seen(self.side, shown.size, shown.root, record.index)

    def _conclude(self) -> None:
        if self._comparison is not None:
            self._comparison.flush()
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
        for peer, heard in self._others.items():
            told = "; ".join(
                f"{party:.200}, its first {one.size} records, at {moment(one.time)}"
                for party, one in sorted(heard.items())[:MOST_REMARKS]
            )
            result.remarks.append(
                f"What {count_of(len(heard), 'other hospital')} had been shown of the journal of {peer:.200} was heard "
                f"in their own signed words, and it is the one that was shown here: {told}."
            )
        if tree.unlisted:
            result.remarks.append(
                f"A crash kept {count_of(tree.unlisted, 'checkpoint')} from the journal's list, and what shows "
                "them from leaving. The daemon puts that right when it starts."
            )
        super()._conclude()
        others = sorted(set(self._schemas) - {SCHEMA_SHA256})
        if others:
            names = ", ".join(name[:16] + "…" for name in others[:MOST_REMARKS])
            result.remarks.append(
                f"Messages were attributed with the schema {names} that the journal holds; it is not this release's: "
                "compare it with the release that the party ran."
            )
        if result.whole:
            result.remarks += self._spending.recount()


def _announced(line: bytes | None) -> str:
    """Whose journal it is, by its first record; that this is so, its verification shows."""
    try:
        party = read(read_canonical(line or b"")).self
    except (ValueError, TypeError, KeyError, AttributeError):
        return ""
    return party if isinstance(party, str) else ""
