"""What one party's journal says of its exchange with the others, held against their attestations.

An attestation must be signed, list what the records say, continue the checkpoint before it, and leave out nothing that
was due. A message that was sent may stand without the other side's receipt, and the evidence be sound, only if

* the call was never answered: it was cut, or refused;
* it is an answer, and the other side, in all its later attestations, does not own to having received it (it was lost
  on the way, or was a session's last), nor has cosigned what only this answer showed it;
* it asked for a certificate or the plan (``Enrol`` and ``GetPlan``, before keys are known) and no attestation of the
  other side came later;
* the update was a repeated one, of which the other side needed the beginning only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .attestation import MOST_CALLS, Attestation, Consistency, Exchange, Witnessed, read_attestation
from .merkle import EMPTY_ROOT, check_consistency
from .permission import WITNESS_PEER
from .result import BrokenError, EvidenceError, Result, count_of
from .signed import ATTESTATION, Checkpoint, Checks, follow, public_key, read_note, unseal, verify_cosignature

_BEFORE_KEYS = ("Enrol", "GetPlan")
_REMEMBERED = 4 * MOST_CALLS
"""Settled calls, and checkpoints, that an attestation under way at the same moment may still speak of."""
_OTHER = {"sent": "received", "received": "sent"}
_Key = tuple[str, str]
"""A call's id, and a direction."""


@dataclass
class _Messages:
    """A call's messages in one direction. ``attested``: how many an own attestation has listed, and ``own_size``: of
    the checkpoint in it. ``confirmed``: how many the other side has put its signature to; ``claim``: its word on all
    that it sent."""

    rpc: str
    digests: list[bytes] = field(default_factory=list)
    length: int = 0
    own_size: int | None = None
    attested: int = 0
    confirmed: int = 0
    claim: Exchange | None = None

    def sha256(self, count: int) -> str:
        return hashlib.sha256(b"".join(self.digests[:count])).hexdigest()

    def compare(self, item: Exchange, whose: str) -> None:
        held = len(self.digests)
        if (
            item.messages > held
            or item.rpc != self.rpc
            or self.sha256(item.messages) != item.sha256
            or (item.messages == held and item.length != self.length)
        ):
            what = f"{item.rpc}, call {item.call_id}, {item.messages} messages"
            raise EvidenceError(f"{whose} is not for the bytes in the record: {what}")


@dataclass
class _Call:
    """``began``: direction of its first message. ``sent``: indexes of the sent messages' records. ``attested``: how
    many attestations of the other side had been received when the call's last record was written."""

    rpc: str
    began: str
    sent: list[int] = field(default_factory=list)
    answered: bool = False
    repeated: bool = False
    attested: int = 0


@dataclass
class Outstanding:
    """What has no signature of the other side at the end, by calls and messages. ``fault``: the first record whose
    receipt is missing though it was due, and why."""

    calls: int = 0
    messages: int = 0
    cut: int = 0
    repeated: int = 0
    unsigned: int = 0
    fault: tuple[int, str] | None = None


class PeerReceipts:
    """The receipts between a party and one other. ``own`` and ``peer`` are identities; ``key``: the other's audit key
    once it is known; ``seen``: its last checkpoint."""

    def __init__(self, own: str, peer: str, checks: Checks) -> None:
        self._own, self._peer, self._checks = own, peer, checks
        self.key: bytes | None = None
        self.seen = Checkpoint("", 0, EMPTY_ROOT)
        self._acknowledged = 0
        """Size of the own checkpoint that the other side has cosigned last; with the line, and the key it had."""
        self._cosignature, self._cosigned_with = "", b""
        self._notes: dict[int, str] = {}
        self._open: dict[_Key, _Messages] = {}
        self._complete: dict[_Key, int] = {}
        """What both have put their signatures to, with the size of the own checkpoint that is to be witnessed yet."""
        self._calls: dict[str, _Call] = {}
        self._unlisted: dict[_Key, int] = {}
        """What no own attestation has listed yet, with the index of its last record."""
        self._settled: OrderedDict[_Key, None] = OrderedDict()
        self._seen_sizes: OrderedDict[int, None] = OrderedDict()
        self._shown: dict[int, list[str]] = {}
        """Calls in whose answers a size of the own journal was shown that the other side has not witnessed yet."""
        self._attestations = 0

    def take(self, record: Any, own_key: bytes) -> Attestation | None:
        """Takes the next message's record; returns the attestation in it.

        Raises ``EvidenceError`` if it contradicts what stands before, or leaves out what was due.
        """
        direction, call_id, index = record.direction, record.call_id, record.index
        call = self._calls.setdefault(call_id, _Call(record.rpc, direction))
        if call.rpc != record.rpc:
            raise EvidenceError(f"call {call_id} was {call.rpc} before, and is {record.rpc} here")
        document = self._check(record, call, own_key)
        messages = self._open.setdefault((call_id, direction), _Messages(record.rpc))
        messages.digests.append(bytes.fromhex(record.sha256))
        messages.length += record.length
        self._complete.pop((call_id, direction), None)
        settled = []
        if document is not None:
            settled = self._heard(document) if direction == "received" else self._said(document)
        if self._frames(call_id, direction) != record.frame + 1:
            raise EvidenceError(f"it is message {record.frame} of its call, and another was due")
        self._unlisted.pop((call_id, direction), None)  # in the order of their last records
        self._unlisted[call_id, direction] = index
        if direction == "sent":
            call.sent.append(index)
        elif call.began == "sent":
            call.answered = True
            call.repeated = call.repeated or "repeated" in record.fields
        call.attested = self._attestations
        if document is not None:
            if direction == "sent":
                self._given(document, call_id, call)
            else:
                self._received(document)
        for key in settled:
            self._settle(key)
        return document

    def outstanding(self) -> Outstanding:
        """What lacks the other side's signature now that the journal has ended.

        Raises ``EvidenceError`` if its last cosignature does not hold: that one covers all before it.
        """
        if self._cosignature:
            note = self._notes[self._acknowledged]
            verify_cosignature(self._cosignature, note, self.seen.origin, self._cosigned_with, self._checks)
        found = Outstanding()
        for (call_id, direction), messages in self._open.items():
            sent, attested = len(messages.digests), messages.confirmed
            if attested >= sent:
                continue
            if direction == "received":
                found.unsigned += 1
                continue
            call = self._calls[call_id]
            found.calls += 1
            found.messages += sent - attested
            if call.began == "received":
                continue
            if not call.answered:
                found.cut += 1
            elif messages.rpc in _BEFORE_KEYS and call.attested == self._attestations:
                continue
            elif call.repeated and attested:
                found.repeated += 1
            else:
                index = call.sent[len(call.sent) - sent + attested]
                if found.fault is None or index < found.fault[0]:
                    later = ", nor later" if call.attested < self._attestations else ""
                    found.fault = (
                        index,
                        f"{self._peer} has answered it ({messages.rpc}, call {call_id}) and given no receipt for it in "
                        f"the answer{later}: {attested} of {sent} messages are acknowledged",
                    )
        return found

    def _check(self, record: Any, call: _Call, own_key: bytes) -> Attestation | None:
        """Checks the attestation in a message's record, before the record counts; returns it."""
        if record.direction == "received":
            self._check_claim(record)
        if record.attestation is None:
            return None
        if record.direction == "received":
            if self.key is None:
                raise EvidenceError(f"{self._peer} gives its word on journals before its audit key is known")
            return self._check_received(
                read_attestation(unseal(record.attestation, ATTESTATION, self.key, self._checks))
            )
        document = read_attestation(unseal(record.attestation, ATTESTATION, own_key, self._checks))
        for item in document.exchanges:
            if (messages := self._open.get((item.call_id, item.direction))) is not None:
                messages.compare(item, "this party's own attestation")
        self._check_given(document, record.call_id, call)
        return document

    def _check_claim(self, record: Any) -> None:
        """A message that comes after its sender's word on the whole call has to be what that word is for."""
        messages = self._open.get((record.call_id, "received"), _Messages(""))
        held, claim = len(messages.digests), messages.claim
        if record.frame != held or (claim is not None and held >= claim.messages):
            what = f"message {record.frame} came from {self._peer}, which has signed for no more than {held}"
            raise EvidenceError(f"{record.rpc} (call {record.call_id}): {what}")
        if claim is not None and held + 1 == claim.messages:
            digests = [*messages.digests, bytes.fromhex(record.sha256)]
            if hashlib.sha256(b"".join(digests)).hexdigest() != claim.sha256:
                what = f"{claim.rpc}, call {claim.call_id}, {claim.messages} messages"
                raise EvidenceError(f"the signature of {self._peer} is not for the bytes that came after it: {what}")

    def _check_received(self, document: Attestation) -> Attestation:
        """The checkpoint in it counts as signed by the document around it."""
        peer = self._peer
        if (document.by, document.to) != (peer, self._own):
            raise EvidenceError(f"an attestation by {document.by} to {document.to} came from {peer}")
        note = read_note(document.checkpoint)
        if self.seen.size and note.origin != self.seen.origin:
            raise EvidenceError(f"{peer} shows the journal {note.origin}; it was {self.seen.origin} before")
        self._check_continues(note, document.consistency)
        witnessed = document.witnessed
        if witnessed is not None and witnessed.size not in self._notes:
            what = f"a checkpoint over {witnessed.size} records that it was not shown from here"
            raise EvidenceError(f"{peer} witnesses {what}")
        for item in document.exchanges:
            messages = self._open.get((item.call_id, _OTHER[item.direction]))
            held = 0 if messages is None else len(messages.digests)
            if messages is None and item.direction == "received":
                what = f"{item.rpc} (call {item.call_id})"
                raise EvidenceError(f"{peer} acknowledges {what}, which was not sent to it by this journal")
            if messages is None:
                continue
            if item.direction == "received":
                # What was sent and did not arrive is no contradiction; what arrived has to be what was sent.
                messages.compare(item, f"the receipt of {peer}")
            elif item.messages == held:
                messages.compare(item, f"the signature of {peer}")
            elif item.messages < held:
                what = f"{held} messages came from {peer}, which owns up to {item.messages}"
                raise EvidenceError(f"{item.rpc} (call {item.call_id}): {what}")
        return document

    def _check_continues(self, note: Checkpoint, given: Consistency) -> None:
        seen, peer = self.seen, self._peer
        if note.size < seen.size:
            what = f"{note.size} records; {seen.size} were seen before"
            raise EvidenceError(
                f"{peer} shows a journal of {what}: its past was rewritten or put back to an earlier state"
            )
        if given.size != seen.size:
            raise EvidenceError(f"{peer} proves its journal from {given.size} records, not from {seen.size}")
        if not check_consistency(seen.size, seen.root, note.size, note.root, [bytes.fromhex(n) for n in given.proof]):
            what = f"{note.size} records does not continue the one with {seen.size} that it showed before"
            raise EvidenceError(f"the journal of {peer} with {what}: its past was rewritten")

    def _check_given(self, document: Attestation, call_id: str, call: _Call) -> None:
        if (document.by, document.to) != (self._own, self._peer):
            raise EvidenceError(f"its attestation is by {document.by:.200} to {document.to:.200}")
        # The own cosignature is the other side's to check: it stands in its journal as well.
        if document.witnessed is not None and document.witnessed.size not in self._seen_sizes:
            raise EvidenceError("it witnesses a checkpoint that the other side had not shown")
        listed = {(item.call_id, item.direction): None for item in document.exchanges}
        for key in listed:
            if key not in self._unlisted and key not in self._settled and not self._frames(*key):
                raise EvidenceError(f"its attestation speaks of call {key[0]}, which is not in the journal")
        if len(document.exchanges) >= MOST_CALLS:
            return
        size = read_note(document.checkpoint).size
        # A party that calls makes one call after the other: before it asks anew, the answered ones have ended. A party
        # that answers may have others under way, but owes a receipt for what it is answering.
        for key, index in self._unlisted.items():
            if index >= size:
                break
            answered = key[0] in self._calls and self._calls[key[0]].answered
            owed = answered if call.began == "sent" else key == (call_id, "received")
            if owed and key not in listed:
                raise EvidenceError(f"its attestation leaves out call {key[0]} ({key[1]}), which had ended")

    def _said(self, document: Attestation) -> list[_Key]:
        size = read_note(document.checkpoint).size
        self._notes[size] = document.checkpoint
        for item in document.exchanges:
            key = (item.call_id, item.direction)
            messages = self._open.get(key)
            if messages is not None and (messages.own_size is None or messages.attested < item.messages):
                messages.own_size, messages.attested = size, item.messages
                self._note_complete(key, messages)
        return []

    def _heard(self, document: Attestation) -> list[_Key]:
        """Returns what is settled: both sides have put their signatures to it, and know that of each other."""
        self.seen = read_note(document.checkpoint)
        for item in document.exchanges:
            key = (item.call_id, _OTHER[item.direction])
            if (messages := self._open.get(key)) is not None:
                if item.direction == "sent" and item.messages >= messages.confirmed:
                    messages.claim = item
                messages.confirmed = max(messages.confirmed, item.messages)
                self._note_complete(key, messages)
        witnessed = document.witnessed
        return [] if witnessed is None or witnessed.size < self._acknowledged else self._witnessed(witnessed)

    def _witnessed(self, witnessed: Witnessed) -> list[_Key]:
        self._acknowledged = witnessed.size
        self._cosignature, self._cosigned_with = witnessed.cosignature, self.key or b""
        self._notes = {size: note for size, note in self._notes.items() if size >= witnessed.size}
        done = [key for key, size in self._complete.items() if size <= witnessed.size]
        for key in done:
            del self._open[key], self._complete[key]
        return done

    def _note_complete(self, key: _Key, messages: _Messages) -> None:
        if messages.own_size is not None and messages.attested == len(messages.digests) == messages.confirmed:
            self._complete[key] = messages.own_size

    def _given(self, document: Attestation, call_id: str, call: _Call) -> None:
        for item in document.exchanges:
            if self._frames(item.call_id, item.direction) == item.messages:
                self._unlisted.pop((item.call_id, item.direction), None)
        if call.began == "received":
            self._shown.setdefault(read_note(document.checkpoint).size, []).append(call_id)

    def _received(self, document: Attestation) -> None:
        full = len(document.exchanges) >= MOST_CALLS
        self._attestations += not full
        self._seen_sizes[read_note(document.checkpoint).size] = None
        if len(self._seen_sizes) > _REMEMBERED:
            self._seen_sizes.popitem(last=False)
        if document.witnessed is None:
            return
        size = document.witnessed.size
        calls = self._shown.get(size, [])
        if calls and not full and not any(self._is_owned_to(call_id) for call_id in calls):
            what = f"what only the answer to call {calls[0]} showed it ({size} records)"
            raise EvidenceError(f"{self._peer} has cosigned {what}, and does not acknowledge that answer")
        self._shown = {shown: found for shown, found in self._shown.items() if shown > size}

    def _is_owned_to(self, call_id: str) -> bool:
        """Whether the other side has acknowledged an answer, at least its beginning."""
        messages = self._open.get((call_id, "sent"))
        return (call_id, "sent") in self._settled or (messages is not None and messages.confirmed > 0)

    def _frames(self, call_id: str, direction: str) -> int:
        """How many messages of a call that is not settled were taken in that direction."""
        messages = self._open.get((call_id, direction))
        return 0 if messages is None else len(messages.digests)

    def _settle(self, key: _Key) -> None:
        self._settled[key] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        self._unlisted.pop(key, None)
        if not any(self._frames(key[0], direction) for direction in _OTHER):
            self._calls.pop(key[0], None)


class Receipts:
    """The receipts between a party and all others; ``result``: whose party it is, and who is told what is missing."""

    def __init__(self, result: Result, checks: Checks) -> None:
        self._result, self._checks = result, checks
        self._peers: dict[str, PeerReceipts] = {}
        self._foreign: dict[str, tuple[str, int]] = {}
        """Parties that sign no receipts: what they speak, and how many messages were sent to them."""
        self._asked = self._cosigned = 0
        """Checkpoints that were sent to witnesses, and that they cosigned."""
        self._withdrawn: set[str] = set()
        """Hospitals that have withdrawn and not joined since: nothing more is exchanged with them."""

    def key_of(self, peer: str) -> bytes | None:
        """The other party's audit key, as this one came to know it last."""
        return self._peers[peer].key if peer in self._peers else None

    def of(self, peer: str) -> PeerReceipts:
        """Those with one other party."""
        found = self._peers.get(peer)
        if found is None:
            if not isinstance(peer, str):
                raise TypeError("peer should be text")
            found = self._peers[peer] = PeerReceipts(self._result.party, peer, self._checks)
        return found

    def enrol(self, record: Any) -> bytes:
        """Takes the audit key by which another party came to be known; returns it."""
        if record.peer in self._foreign:
            raise BrokenError(record.index, f"{record.peer} has a key, and was said to sign nothing")
        receipts, new = self.of(record.peer), public_key(record.public_key)
        known = receipts.key
        for statement in record.rotations:
            known = follow(statement, record.peer, known or b"", self._checks)
        if known is not None and known != new:
            raise BrokenError(record.index, f"{record.peer} has another audit key without a signed change")
        receipts.key = new
        return new

    def excuse(self, record: Any) -> None:
        """A party signs no receipts, and says so before anything was exchanged with it, or never."""
        peer, protocol = record.peer, record.protocol
        if not (isinstance(peer, str) and isinstance(protocol, str)):
            raise TypeError("peer and protocol should be text")
        if peer in self._peers:
            raise BrokenError(record.index, f"it excuses {peer:.200} from receipts, with which was exchanged before")
        self._foreign.setdefault(peer, (protocol, 0))

    def is_excused(self, record: Any) -> bool:
        """Whether no receipt is due for a message, which is then counted: it is the only one of its call in its
        direction, and holds no attestation."""
        if record.peer.startswith(WITNESS_PEER):
            if record.attestation is not None or record.frame != 0 or record.direction != "sent":
                raise BrokenError(record.index, f"it is not a question to the witness {record.peer:.200}")
            self._asked += 1
            return True
        if record.peer not in self._foreign:
            return False
        if record.attestation is not None or record.frame != 0:
            raise BrokenError(record.index, f"it is not a message to or from {record.peer:.200}, which signs nothing")
        protocol, sent = self._foreign[record.peer]
        self._foreign[record.peer] = protocol, sent + (record.direction == "sent")
        return True

    def cosigned(self, record: Any) -> None:
        """Witnesses have cosigned a checkpoint that was sent to them."""
        self._cosigned += len(record.witnesses)

    def withdrawn(self, record: Any) -> None:
        """A consent has ended: what is missing to a receipt then may stay missing."""
        self._withdrawn.add(record.self if record.silo is None else record.silo)

    def joined(self, record: Any) -> None:
        """A hospital joins, anew if it had withdrawn."""
        self._withdrawn -= {record.self, record.peer}

    def conclude(self) -> None:
        """Says what lacks the other sides' signatures now that the journal has ended; raises ``BrokenError`` for a
        receipt that was due."""
        result = self._result
        try:
            outstanding = {peer: receipts.outstanding() for peer, receipts in self._peers.items()}
        except EvidenceError as error:
            raise BrokenError(None, str(error)) from None
        found = outstanding.values()
        if faults := [item.fault for item in found if item.fault is not None]:
            raise BrokenError(*min(faults))
        missing = sum(item.messages for item in found)
        result.acknowledged = result.sent - missing - sum(sent for _, sent in self._foreign.values())
        if unanswered := max(self._asked - self._cosigned, 0):
            result.acknowledged -= unanswered
            result.remarks.append(
                f"Of {count_of(self._asked, 'question')} to witnesses {unanswered} were not answered by a cosignature."
            )
        for peer, (protocol, sent) in self._foreign.items():
            result.remarks.append(
                f"{peer:.200} speaks {protocol:.200} and signs no receipts: that the {count_of(sent, 'message')} to "
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
                f"{count_of(missing, 'message')} in {count_of(calls, 'call')} without a receipt, and none was due: "
                + "; ".join(f"{count_of(count, 'call')} {way}" for way, count in ways.items() if count)
                + ". They count as having left."
            )
        gone = {peer for peer in outstanding if self._withdrawn & {result.party, peer}}
        open_ended = "as the consent was withdrawn, and nothing more is exchanged, that stays open."
        for peers, ending in ((outstanding.keys() - gone, "that comes with its next message."), (gone, open_ended)):
            if unsigned := sum(outstanding[peer].unsigned for peer in peers):
                what = f"what it sent in {count_of(unsigned, 'call')}"
                result.remarks.append(f"The other side has not signed yet for {what}: {ending}")
