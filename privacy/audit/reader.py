"""Reads one party's evidence from its first record to its last, and checks all that it shows by itself."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from medsilo.privacy.audit.bundle import Evidence, Header, UnreadableError
from medsilo.privacy.audit.comparison import Comparison, Extent, Side
from medsilo.privacy.audit.dialogue import Dialogue
from medsilo.privacy.audit.findings import BrokenError, Finding, Verification
from medsilo.privacy.audit.permission import Permissions
from medsilo.privacy.audit.record_form import TIME, check_form, public_key
from medsilo.privacy.audit.testimony import Testimony, Witness
from medsilo.privacy.audit.times import Clockwork
from medsilo.privacy.budget.ledger import LASTING, UPDATE, Charges
from medsilo.privacy.door.receipts import Attestation
from medsilo.privacy.errors import JournalError, MedsiloError
from medsilo.privacy.exposure import SCHEMA_SHA256
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.envelope import ATTESTATION, from_json, key_id, unseal
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note, time_of, verify
from medsilo.privacy.journal.key_rotation import follow
from medsilo.privacy.journal.merkle import EMPTY_ROOT, MerkleTree, root_of
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.pages.wording import shown
from medsilo.privacy.secure_aggregation.mask_keys import check_recorded

_REMEMBERED = 1 << 13
"""How far an attestation's checkpoint may lie behind the record that holds it: others write records meanwhile."""
_MOST_REMARKS = 5
_MOST_UNCHECKED = 64
_JOINING = "Join"
KINDS = frozenset(
    {
        *("key", "key-rotation", "peer-key", "foreign-peer", "schema", "segment"),
        *("message", "refusal", "run", "consent", "approval", "withdrawal", "ledger", "roster", "void"),
    }
)
"""The kinds of records that this release knows."""
Along = Callable[[MerkleTree], Callable[[Mapping[str, Any]], None]]


class EvidenceReader:
    """Reads one party's evidence. ``result`` says what was found.

    ``checks``: where its signatures are checked. ``along``: who takes its records as they are read.
    """

    def __init__(self, evidence: Evidence, side: Side, *, checks: Checks = HERE, along: Along | None = None) -> None:
        self._checks = checks
        self.result = Verification(str(evidence.source))
        self.header = evidence.header
        self._charges = Charges()
        self._charged: dict[str, tuple[int, dict[str, Any]]] = {}
        """Charges by their hash: the record that told of each when it was made, and what that says."""
        self._failed: set[str] = set()
        """Those whose training failed by what came out of it."""
        self._last_update = -1
        """The last record of an update that was sent."""
        self.side: Side = side
        self.keys: list[tuple[int, bytes]] = []
        """(first size that it signs, key), in order."""
        self._notes = evidence.notes
        first = next(evidence.lines, None)
        self._lines: Iterator[bytes] = itertools.chain(() if first is None else (first,), evidence.lines)
        self.announced = _announced(first)
        self._tree = MerkleTree()
        self._along = None if along is None else along(self._tree)
        self._peaks: list[tuple[bytes, ...]] = [()] * _REMEMBERED
        """Of the trees so far, by size: their roots are computed when they are asked for."""
        self._checkpoint_here = bytearray(_REMEMBERED)
        """For each of them, whether the journal's own list of checkpoints holds one over it."""
        self._oldest_root = 0
        self._confirmed = 0
        """Size as of which a signature has confirmed the records."""
        self._unchecked: deque[str] = deque()
        """Checkpoints whose signatures have not been checked yet."""
        self._unlisted: dict[str, tuple[int, int | None]] = {}
        """Calls in which a checkpoint was shown that the journal's own list lacks: (its size, the message's index)."""
        self._dialogues: dict[str, Dialogue] = {}
        self._foreign: dict[str, tuple[str, int]] = {}
        """Parties that sign no receipts: what they speak, and how many messages were sent to them."""
        self._schemas: dict[str, StoredSchema] = {}
        self._unused: set[str] = set()
        self._permissions = Permissions("")
        self._origin = ""
        self._segment = (0, hashlib.sha256())
        self._index: int | None = None
        self._comparison: Comparison | None = None
        self._compared = ""
        self._testimony: Testimony | None = None
        self._seen = 0
        self._backwards = 0
        """The first record whose time is before that of the one before it."""
        self._clockwork = Clockwork(self.header.first if self.header is not None else 0)
        self._outlived = ""
        self._unknown: set[str] = set()
        self._withdrawn: set[str] = set()
        """Hospitals that have withdrawn and not joined since: nothing more is exchanged with them."""

    def compare_with(self, comparison: Comparison, party: str) -> None:
        """While it is read, gives the comparison what was exchanged with that party."""
        self._comparison, self._compared = comparison, party

    def testify(self, testimony: Testimony) -> None:
        """While it is read, gives away what others told its party, to be held against what they told another one."""
        self._testimony = testimony

    def witness(self) -> Witness:
        """Whose testimony it is."""
        return Witness(self.side, self.result.party, tuple(key for _, key in self.keys))

    def verify(self, key: bytes | None) -> Verification:
        """Reads it all; ``key``: the owner's, if it is known."""
        result = self.result
        try:
            self._read()
            if key is not None and self.keys[-1][1] != key:
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

    def contradict_times(self) -> None:
        """Makes a finding of times that are contradicted."""
        times = self.result.times
        if times.contradicted:
            what = (
                f"the times of {_count_of(times.contradicted, 'record')} are not those of whom {self.result.party} "
                f"exchanged them with; one of the clocks is wrong, or was set wrong. The first is record "
                f"{times.first_contradicted}: {times.contradiction}"
            )
            self.result.findings.append(Finding("contradiction", what, times.first_contradicted))
        for peer in times.alone[:_MOST_REMARKS]:
            self.result.remarks.append(
                f"The clock of {peer} contradicts times that others confirm: it counts for nothing."
            )

    def key_of(self, peer: str) -> bytes | None:
        """The other party's audit key, as this one came to know it last."""
        return self._dialogues[peer].correspondence.peer_key if peer in self._dialogues else None

    def _read(self) -> None:
        header, result = self.header, self.result
        try:
            if header is not None:
                self._begin(header)
            self._read_records()
            self._index = None
            if header is not None:
                self._end(header)
        except (BrokenError, UnreadableError):
            raise
        except MedsiloError as error:
            raise BrokenError(self._index, str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BrokenError(
                self._index, f"it is not in the form of a record ({type(error).__name__}: {error!s:.200})"
            ) from None
        if not result.records:
            raise BrokenError(None, "it holds no record")
        if not result.signed:
            raise BrokenError(None, "none of it is signed, so it proves nothing yet")
        result.key = key_id(self.keys[-1][1])
        if self._comparison is not None:
            self._comparison.flush()
        self._conclude()

    def _read_records(self) -> None:
        result = self.result
        ahead = self._next_note()
        for line in self._lines:
            self._index = self._tree.size
            record = self._parse(line)
            self._tree.append(line)
            self._remember()
            self._clockwork.take(record["time"])
            self._take(record)
            self._segment[1].update(line + b"\n")
            result.records += 1
            if self._along is not None:
                self._along(record)
            while ahead is not None and ahead[1].size <= self._tree.size:
                self._take_note(*ahead)
                ahead = self._next_note()
        if ahead is not None and ahead[1].size > self._tree.size:
            gone = f"records {self._tree.size} to {ahead[1].size - 1} were signed and are gone"
            raise BrokenError(None, gone)
        for note in self._unchecked:
            self._check_signature(note)

    def _take_note(self, note: str, checkpoint: Checkpoint) -> None:
        if self._unlisted:
            raise self._not_listed(next(iter(self._unlisted)))
        if checkpoint.size <= self.result.signed and self.result.signed:
            raise BrokenError(None, f"the checkpoint over {checkpoint.size} records is out of its place")
        self._check_root(checkpoint)
        self._sign(checkpoint)
        self._checkpoint_here[checkpoint.size % _REMEMBERED] = 1
        # Most checkpoints stand in an attestation as well, a few records on, whose signature then serves for both.
        self._unchecked.append(note)
        if len(self._unchecked) > _MOST_UNCHECKED:
            self._check_signature(self._unchecked.popleft())

    def _check_signature(self, note: str) -> None:
        try:
            verify(note, self._key_for(read_note(note).size), checks=self._checks)
        except JournalError as error:
            raise BrokenError(None, f"the checkpoint over {read_note(note).size} records: {error}") from None

    def _next_note(self) -> tuple[str, Checkpoint] | None:
        try:
            note = next(self._notes, None)
            return None if note is None else (note, read_note(note))
        except JournalError as error:
            raise BrokenError(None, str(error)) from None
        except RecursionError:
            raise BrokenError(None, "a line of its checkpoints is nested too deeply") from None

    def _begin(self, header: Header) -> None:
        result = self.result
        result.whole = header.whole
        try:
            header.check()
            for subtree in header.before:
                self._tree.append_subtree(subtree.level, bytes.fromhex(subtree.root))
            self._oldest_root = header.first + 1
            for files in header.schemas:
                schema = StoredSchema(files)
                self._schemas[schema.sha256] = schema
            if len(self._schemas) < len(header.schemas) or list(self._schemas) != sorted(self._schemas):
                raise ValueError("its schemas are not in order")
            self._unused = set(self._schemas)
            if header.public_key is not None:
                self.keys.append((0, bytes.fromhex(header.public_key)))
        except (ValueError, JournalError) as error:
            raise BrokenError(None, f"the header does not hold together: {error}") from None
        if not header.whole:
            result.remarks.append(
                f"It is a stretch: records {header.first} to {header.first + header.count - 1} of {header.size}. "
                "Receipts, and changes of keys, are checked in a bundle of the whole journal. The key is the one that "
                "the stretch names: hold it against the owner's audit.pub (--key)."
            )

    def _end(self, header: Header) -> None:
        result = self.result
        if self._tree.size != header.first + header.count:
            raise BrokenError(None, f"it announces {header.count} records and holds {self._tree.size - header.first}")
        if (header.party, header.federation) != (result.party, result.federation):
            raise BrokenError(
                None,
                f"its header names {header.party} in {header.federation}, its records {result.party} in "
                f"{result.federation}",
            )
        for subtree in header.behind:
            self._tree.append_subtree(subtree.level, bytes.fromhex(subtree.root))
        self._remember()
        self._origin = self._origin or _origin_of(header.party) or header.origin
        checkpoint = read_note(header.checkpoint)
        if header.origin != self._origin or checkpoint.size != header.size:
            raise BrokenError(None, "the checkpoint in its header is not the one over its records")
        self._check_note(header.checkpoint, checkpoint)
        self._sign(checkpoint)
        if self._unused:
            raise BrokenError(None, "its header holds a schema that no record of the stretch uses")

    def _parse(self, line: bytes) -> dict[str, Any]:
        record = self._checks.document(line)
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        index = record["index"]
        if type(index) is not int or index != self._index:
            raise BrokenError(self._index, f"it calls itself record {index!r:.40}")
        if type(record["v"]) is not int or record["v"] != 1:
            raise BrokenError(self._index, f"its form is version {record['v']!r:.40}, which this release does not know")
        result = self.result
        party, federation, time = record["self"], record["federation"], record["time"]
        if not (isinstance(party, str) and isinstance(federation, str) and isinstance(record["kind"], str)):
            raise TypeError("self, federation and kind should be text")
        if not isinstance(time, str) or TIME.fullmatch(time) is None:
            raise BrokenError(self._index, f"its time {time!r:.40} is not in the form 2026-01-31T12:00:00.000Z")
        if result.last_time is None:
            result.party, result.federation, result.first_time = party, federation, time
            self._permissions.party = party
        elif (party, federation) != (result.party, result.federation):
            raise BrokenError(
                self._index,
                f"it is a record of {party:.200} in {federation:.200}, in a journal of {result.party:.200} in "
                f"{result.federation:.200}",
            )
        elif time < result.last_time:
            self._backwards = self._backwards or index
        result.last_time = time
        return record

    def _remember(self) -> None:
        size = self._tree.size
        self._peaks[size % _REMEMBERED] = self._tree.peaks
        self._checkpoint_here[size % _REMEMBERED] = 0
        if self._comparison is not None:
            self._comparison.root(self.side, size, self._tree.root())

    def _root(self, size: int) -> bytes | None:
        """The root over the first ``size`` records, if it is remembered."""
        if size == 0:
            return EMPTY_ROOT
        if not max(self._oldest_root, self._tree.size - _REMEMBERED + 1) <= size <= self._tree.size:
            return None
        return root_of(self._peaks[size % _REMEMBERED])

    def _take(self, record: dict[str, Any]) -> None:
        whole = self.result.whole
        match record["kind"]:
            case "message":
                self._take_message(record)
            case "refusal":
                self._take_refusal(record)
            case "ledger":
                self._charges.add(record["charge"])
                if "spent" in record:
                    most = record.get("unit_spent")
                    self._charges.say(record["charge"], record["spent"], record["index"], of_unit=most)
                    self._charged[record["charge"]["sha256"]] = record["index"], record["charge"]
                if "failed" in record:
                    self._failed.add(record["charge"]["sha256"])
            case "void" if whole:
                self._void(record)
            case "consent":
                self._permissions.consented(record)
            case "withdrawal":
                self._permissions.withdrawn(record)
                self._withdrawn.add(record.get("silo", record["self"]))
            case "roster":
                self._permissions.masked(record)
                if "/silo/" in record["self"]:
                    check_recorded(record, [key for _, key in self.keys] if whole else ())
                    if self._testimony is not None:
                        self._testimony.roster(self.side, record)
            case "run" if whole:
                self._permissions.joined(record)
                if self._testimony is not None:
                    self._testimony.plan(self.side, record)
            case "schema":
                schema = StoredSchema(record["files"])
                if schema.sha256 != record["schema_sha256"]:
                    raise BrokenError(self._index, "the stored schema does not have the hash that it is named by")
                self._schemas[schema.sha256] = schema
            case "key" if whole:
                self._begin_keys(record)
            case "key-rotation" if whole:
                self._rotate(record)
            case "peer-key" if whole:
                self._enrol(record)
            case "foreign-peer" if whole:
                self._take_foreign(record)
            case "segment":
                self._take_segment(record, whole=whole)
            case kind if kind not in KINDS and len(self._unknown) < _MOST_REMARKS:
                self._unknown.add(kind[:40])

    def _void(self, record: dict[str, Any]) -> None:
        """A charge counts no more only where nothing that it paid for can have left (see ``Account``)."""
        charge = record["charge"]
        told, made = self._charged.get(charge["sha256"], (None, None))
        if told is None or (told, made) != (record["charged"], charge):
            raise BrokenError(self._index, "it voids a charge, and the journal does not tell that this one was made")
        if charge["sha256"] in self._failed:
            raise BrokenError(
                self._index, f"it voids the charge of record {told}, whose training failed by its outcome"
            )
        if self._last_update > told:
            raise BrokenError(
                self._index,
                f"it voids the charge of record {told}, but record {self._last_update} sent an update since",
            )
        if charge["event"]["kind"] in LASTING:
            raise BrokenError(self._index, "it voids the charge of an average, which may be kept and sent in any run")
        self._charges.void(charge, record["index"])
        self.result.remarks.append(
            f"Charge {charge['index']} of data set {charge['data_sha256'][:16]} ({charge['split']} split, round "
            f"{charge['round'] + 1} of run {charge['run']}) was voided: no update was sent between record {told}, "
            f"which tells of it, and record {record['index']}."
        )

    def _take_message(self, record: dict[str, Any]) -> None:
        check_form(record)
        if record["rpc"] == UPDATE and record["direction"] == "sent":
            self._last_update = record["index"]
        for charge in record["ledger"]:
            self._charges.add(charge)
        result, whole = self.result, self.result.whole
        sent = record["direction"] == "sent"
        classes = self._attribute(record)
        if sent:
            self._permissions.check(record, classes, whole=whole)
            self._check_expiry(record)
        if record["rpc"] == _JOINING:
            self._withdrawn -= {record["self"], record["peer"]}
        result.sent += sent
        result.received += not sent
        document = None
        if whole and record["peer"] in self._foreign:
            self._take_unsigned(record)
        elif whole:
            dialogue = self._dialogue(record["peer"])
            before = dialogue.correspondence.seen
            document = dialogue.take(record, self._key_for(self._tree.size))
            if document is not None and sent:
                self._check_given(document, record["call_id"])
            elif not sent and record["call_id"] in self._unlisted:
                raise self._not_listed(record["call_id"])
            if document is not None and not sent and self._testimony is not None:
                self._testimony.checkpoint(self.side, record["peer"], before, document, record["index"])
            if document is not None and not sent and (witnessed := document.witnessed) is not None:
                # What the other side signed the document with covers the line in it.
                self._clockwork.signed(record["peer"], witnessed.size, time_of(witnessed.cosignature))
        elif record.get("attestation") is not None:
            document = Attestation.model_validate(read_canonical(from_json(record["attestation"]).payload))
        if self._testimony is not None:
            self._testimony.given(self.side, record)
        if self._comparison is not None and record["peer"] == self._compared:
            if document is not None and not sent:
                shown = read_note(document.checkpoint)
                self._seen = shown.size
                self._comparison.seen(self.side, shown.size, shown.root, record["index"])
                for item in document.exchanges:
                    if item.direction == "sent":
                        self._comparison.vouched(self.side, item.call_id, item.messages)
            self._comparison.message(self.side, record, self._seen, self._clockwork.latest)

    def _check_expiry(self, record: Mapping[str, Any]) -> None:
        """A consent may have ended by the other side's clock, whatever the record's own time is."""
        if not self._outlived and (after := self._clockwork.after(record["peer"])):
            self._outlived = self._permissions.outlived(record, after)
            if self._outlived:
                self.result.findings.append(Finding("contradiction", self._outlived, self._index))

    def _take_foreign(self, record: Mapping[str, Any]) -> None:
        """A party signs no receipts, and says so before anything was exchanged with it, or never."""
        peer, protocol = record["peer"], record["protocol"]
        if not (isinstance(peer, str) and isinstance(protocol, str)):
            raise TypeError("peer and protocol should be text")
        if peer in self._dialogues:
            raise BrokenError(self._index, f"it excuses {peer:.200} from receipts, with which was exchanged before")
        self._foreign.setdefault(peer, (protocol, 0))

    def _take_unsigned(self, record: Mapping[str, Any]) -> None:
        """Each message is a call's only one in its direction, and nobody's word is in it."""
        if record.get("attestation") is not None or record["frame"] != 0:
            raise BrokenError(self._index, f"it is not a message to or from {record['peer']:.200}, which signs nothing")
        protocol, sent = self._foreign[record["peer"]]
        self._foreign[record["peer"]] = protocol, sent + (record["direction"] == "sent")

    def _check_given(self, document: Attestation, call_id: str) -> None:
        """Checks the checkpoint in an own attestation; its signature is the one of the document around it."""
        checkpoint = read_note(document.checkpoint)
        self._check_root(checkpoint)
        if self.header is None and not self._checkpoint_here[checkpoint.size % _REMEMBERED]:
            # A crash may have kept it from the list, and the message from leaving.
            self._unlisted[call_id] = checkpoint.size, self._index
        if document.checkpoint in self._unchecked:
            self._unchecked.remove(document.checkpoint)

    def _not_listed(self, call_id: str) -> BrokenError:
        size, index = self._unlisted[call_id]
        return BrokenError(
            index,
            f"its attestation shows a checkpoint over {size} records that is not among the journal's checkpoints",
        )

    def _attribute(self, record: Mapping[str, Any]) -> dict[str, int]:
        """Attributes the message's bytes anew from the stored schema: no byte may be without a class."""
        name = record["schema_sha256"]
        schema = self._schemas.get(name)
        if schema is None:
            raise BrokenError(self._index, f"its schema {name[:16]}… is not in the journal")
        self._unused.discard(name)
        classes = schema.classes(record["message_type"], record["fields"])
        missing = record["length"] - sum(classes.values())
        if missing:
            raise BrokenError(self._index, f"{missing} of its {record['length']} bytes are unaccounted for")
        if record["classes"] != classes:
            raise BrokenError(self._index, "its exposure classes are not those of its fields")
        return classes

    def _take_refusal(self, record: Mapping[str, Any]) -> None:
        if not isinstance(record["reason"], str):
            raise TypeError("a refusal's reason should be text")
        self.result.refused += 1
        envelope, peer = record.get("attestation"), record.get("peer")
        if envelope is None or record.get("direction") != "received":
            return
        said = f"Record {self._index}: a message of {peer!s:.200} was refused: {record['reason']:.500}."
        if sum(remark.startswith("Record ") for remark in self.result.remarks) < _MOST_REMARKS:
            self.result.remarks.append(said)
        known = self.key_of(peer) if isinstance(peer, str) else None
        if self._comparison is None or peer != self._compared or known is None:
            return
        try:
            document = Attestation.model_validate(unseal(from_json(envelope), ATTESTATION, known))
            shown = verify(document.checkpoint, known)
        except (JournalError, ValueError):
            return  # not the other side's word, or none that it can be held to
        self._comparison.seen(self.side, shown.size, shown.root, record["index"])

    def _take_segment(self, record: Mapping[str, Any], *, whole: bool) -> None:
        first, digest = self._segment
        self._segment = (self._tree.size - 1, hashlib.sha256())
        checkpoint = read_note(record["checkpoint"])
        if record["first"] + record["records"] != record["index"] or checkpoint.size != record["index"]:
            raise BrokenError(self._index, "it does not join the segment before it")
        if not whole:
            return
        self._check_note(record["checkpoint"], checkpoint)
        if (record["first"], record["sha256"]) != (first, digest.hexdigest()):
            raise BrokenError(self._index, "it names another segment than the one that stands before it")

    def _check_note(self, note: str, checkpoint: Checkpoint) -> None:
        verify(note, self._key_for(checkpoint.size))
        self._check_root(checkpoint)

    def _check_root(self, checkpoint: Checkpoint) -> None:
        size = checkpoint.size
        if self._origin and checkpoint.origin != self._origin:
            raise BrokenError(self._index, f"a checkpoint of {checkpoint.origin} stands in the journal {self._origin}")
        root = self._root(size)
        if root is None:
            raise BrokenError(self._index, f"the checkpoint over {size} records is out of its place")
        if root != checkpoint.root:
            before = self._confirmed
            raise BrokenError(
                before, f"one of the records {before} to {size - 1} is not the one that was signed", until=size - 1
            )
        self._confirmed = max(self._confirmed, size)

    def _sign(self, checkpoint: Checkpoint) -> None:
        self.result.signed, self.result.root = checkpoint.size, checkpoint.root.hex()

    def _key_for(self, size: int) -> bytes:
        found = [key for first, key in self.keys if first <= size]
        if not found:
            raise BrokenError(self._index, "the journal does not begin with its public key")
        return found[-1]

    def _begin_keys(self, record: Mapping[str, Any]) -> None:
        if self._index != 0:
            raise BrokenError(self._index, "it names the journal's first key a second time, or too late")
        origin = record["origin"]
        if not isinstance(origin, str) or _origin_of(self.result.party) not in ("", origin):
            raise BrokenError(self._index, f"it names the journal {origin!r:.200}, which is not one of its owner")
        self._origin = origin
        self.keys.append((0, public_key(record["public_key"])))

    def _rotate(self, record: Mapping[str, Any]) -> None:
        if not self.keys:
            raise BrokenError(self._index, "a key is changed before there is one")
        known, new = self.keys[-1][1], public_key(record["public_key"])
        if follow(from_json(record["statement"]), record["self"], known) != new:
            raise BrokenError(self._index, "the signed change of keys is for another key")
        self.keys.append((record["index"] + 2, new))

    def _enrol(self, record: Mapping[str, Any]) -> None:
        if record["peer"] in self._foreign:
            raise BrokenError(self._index, f"{record['peer']} has a key, and was said to sign nothing")
        correspondence = self._dialogue(record["peer"]).correspondence
        new = public_key(record["public_key"])
        known = correspondence.peer_key
        for statement in record["rotations"]:
            known = follow(from_json(statement), record["peer"], known or b"")
        if known is not None and known != new:
            raise BrokenError(self._index, f"{record['peer']} has another audit key without a signed change")
        correspondence.peer_key = new
        if self._testimony is not None:
            self._testimony.key(self.side, record["peer"], new, record["rotations"])

    def _dialogue(self, peer: str) -> Dialogue:
        found = self._dialogues.get(peer)
        if found is None:
            if not isinstance(peer, str):
                raise TypeError("peer should be text")
            found = self._dialogues[peer] = Dialogue(self.result.party, peer, checks=self._checks)
        return found

    def _conclude(self) -> None:
        result = self.result
        result.unsigned = self._tree.size - result.signed if self.header is None else 0
        if result.unsigned:
            result.remarks.append(
                f"Too fresh to be signed: the newest {_count_of(result.unsigned, 'record')}. Nothing shows yet whether "
                "anything there was changed or removed. The daemon signs with its next message, or within seconds; "
                "look again then."
            )
        result.times = self._clockwork.conclude()
        self.contradict_times()
        if self._unlisted:
            result.remarks.append(
                f"A crash kept {_count_of(len(self._unlisted), 'checkpoint')} from the journal's list, and what shows "
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
            names = ", ".join(name[:16] + "…" for name in others[:_MOST_REMARKS])
            result.remarks.append(
                f"Messages were attributed with the schema {names} that the journal holds; it is not this release's: "
                "compare it with the release that the party ran."
            )
        if result.whole:
            self._count()
            self._recount_privacy()

    def _recount_privacy(self) -> None:
        """Adds the privacy ledger's charges up again, and holds the sum against what the journal says of it."""
        try:
            accounts = self._charges.replay()
        except (ValueError, ArithmeticError, MemoryError) as error:
            raise BrokenError(None, f"the privacy ledger's charges cannot be added up ({error!s:.200})") from None
        for account in accounts:
            said, record = account.said
            whose = f"data set {account.subject.data_sha256[:16]} ({account.subject.split} split)"
            if account.spent is None:
                why = (
                    f"charge {', '.join(map(str, account.untold))} is not told of here"
                    if account.untold
                    else "they are of too many kinds"
                )
                self.result.remarks.append(f"The privacy loss of {whose} cannot be recomputed: {why}.")
            elif not account.agrees:
                raise BrokenError(
                    record,
                    f"it says that the charges for {whose} come to ε = {shown(said)}; recomputed, the "
                    f"{_count_of(account.charges, 'charge')} come to {account.spent}",
                )
            else:
                self.result.remarks.append(
                    f"The privacy loss of {whose}, recomputed from {_count_of(account.charges, 'charge')}, is "
                    f"{account.spent}, as the journal says."
                )
            if account.of_unit is not None:
                self.result.remarks.append(
                    f"With charges for other versions, units or splits, the {account.subject.unit} of {whose} that has "
                    f"cost most has cost ε = {shown(account.of_unit)}: so the journal says. Which charges those are "
                    "only the ledger tells."
                )

    def _count(self) -> None:
        result = self.result
        try:
            outstanding = {peer: dialogue.outstanding() for peer, dialogue in self._dialogues.items()}
        except JournalError as error:
            raise BrokenError(None, str(error)) from None
        found = outstanding.values()
        faults = [item.fault for item in found if item.fault is not None]
        if faults:
            raise BrokenError(*min(faults))
        missing = sum(item.messages for item in found)
        unsigned_for = sum(sent for _, sent in self._foreign.values())
        result.acknowledged = result.sent - missing - unsigned_for
        for peer, (protocol, sent) in self._foreign.items():
            result.remarks.append(
                f"{peer:.200} speaks {protocol:.200} and signs no receipts: that the {_count_of(sent, 'message')} to "
                f"it arrived, and that there were no others, is the word of {result.party} alone. This journal can be "
                "held against nobody else's."
            )
        if missing:
            calls, cut = sum(item.calls for item in found), sum(item.cut for item in found)
            repeated = sum(item.repeated for item in found)
            ways = {
                "cut or refused": cut,
                "with an update that was there already": repeated,
                "answered here, and the other side has not said that the answer arrived": calls - cut - repeated,
            }
            result.remarks.append(
                f"{_count_of(missing, 'message')} in {_count_of(calls, 'call')} without a receipt, and none was due: "
                + "; ".join(f"{_count_of(count, 'call')} {way}" for way, count in ways.items() if count)
                + ". They count as having left."
            )
        for withdrawn, ending in (
            (False, "that comes with its next message."),
            (True, "as the consent was withdrawn, and nothing more is exchanged, that stays open."),
        ):
            unsigned = sum(
                item.unsigned
                for peer, item in outstanding.items()
                if withdrawn == bool(self._withdrawn & {result.party, peer})
            )
            if unsigned:
                result.remarks.append(
                    f"The other side has not signed yet for what it sent in {_count_of(unsigned, 'call')}: {ending}"
                )


def _count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _origin_of(party: str) -> str:
    """The name of a party's journal; empty for what is no identity of a party."""
    scheme, _, rest = party.partition("://")
    return f"medsilo/{rest}" if scheme == "spiffe" else ""


def _announced(line: bytes | None) -> str:
    """Whose journal it is, by its first record; that this is so, its verification shows."""
    try:
        party = read_canonical(line or b"")["self"]
    except (ValueError, TypeError, KeyError):
        return ""
    return party if isinstance(party, str) else ""
