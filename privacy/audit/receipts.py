"""What one party's journal says of its exchange with the others: ``audit verify``'s view of the receipts.

A ``ReceiptState`` holds each attestation against the records, as the daemon does. This module asks what the daemon
cannot know while it runs: whether a receipt was left out that was due.

A message that was sent may stand without the other side's receipt, and the evidence be sound, only if

* the call was never answered: it was cut, or refused;
* it is an answer, and the other side, in all its later attestations, does not own to having received it (it was lost
  on the way, or was a session's last), nor has cosigned what only this answer showed it;
* it asked for a certificate or the plan (``Enrol`` and ``GetPlan``, before keys are known) and no attestation of the
  other side came later;
* the update was a repeated one, of which the other side needed the beginning only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from medsilo.privacy.audit.findings import MOST_REMARKS, BrokenError, Verification, count_of
from medsilo.privacy.audit.record_form import public_key
from medsilo.privacy.audit.times import moment
from medsilo.privacy.door.attestation import MOST_CALLS, Attestation
from medsilo.privacy.door.receipts import Key, ReceiptState
from medsilo.privacy.errors import JournalError, ReceiptError
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.envelope import from_json
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.key_rotation import follow
from medsilo.privacy.journal.records import (
    WITNESS_PEER,
    CosignedRecord,
    Direction,
    ForeignPeerRecord,
    MessageRecord,
    PeerKeyRecord,
    WithdrawalRecord,
)

_BEFORE_KEYS = ("Enrol", "GetPlan")
_REMEMBERED = 4 * MOST_CALLS
"""Settled calls, and checkpoints, that an attestation under way at the same moment may still speak of."""


@dataclass
class _Call:
    """``began``: direction of its first message. ``sent``: indexes of the sent messages' records. ``attested``: how
    many attestations of the other side had been received when the call's last record was written."""

    rpc: str
    began: Direction
    sent: array[int] = field(default_factory=lambda: array("Q"))
    answered: bool = False
    repeated: bool = False
    attested: int = 0


@dataclass
class Outstanding:
    """What has no signature of the other side at the end, by calls and messages.

    ``fault``: the first record whose receipt is missing though it was due, and why.
    """

    calls: int = 0
    messages: int = 0
    cut: int = 0
    repeated: int = 0
    unsigned: int = 0
    fault: tuple[int, str] | None = None


class PeerReceipts:
    """The receipts between a party and one other. ``own`` and ``peer`` are identities."""

    def __init__(self, own: str, peer: str, *, checks: Checks = HERE) -> None:
        self.state = ReceiptState(own, peer, checks=checks)
        self._peer = peer
        self._calls: dict[str, _Call] = {}
        self._unlisted: dict[Key, int] = {}
        """What no own attestation has listed yet, with the index of its last record."""
        self._settled: OrderedDict[Key, None] = OrderedDict()
        self._seen_sizes: OrderedDict[int, None] = OrderedDict()
        self._shown: dict[int, list[str]] = {}
        """Calls in whose answers a size of the own journal was shown that the other side has not witnessed yet."""
        self._attestations = 0

    def take(self, record: MessageRecord, own_key: bytes) -> Attestation | None:
        """Takes the next message's record; returns the attestation in it.

        Raises ``ReceiptError`` or ``JournalError`` if it contradicts what stands before, or leaves out what was due.
        """
        direction: Direction = record.direction
        call_id, index = record.call_id, record.index
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = _Call(record.rpc, direction)
        elif call.rpc != record.rpc:
            raise ReceiptError(f"call {call_id} was {call.rpc} before, and is {record.rpc} here")
        document = self.state.check(record, own_key=own_key)
        if document is not None and direction == "sent":
            self._check_given(document, call_id, call)
        settled = self.state.take(record, index)
        if self.state.frames(call_id, direction) != record.frame + 1:
            raise ReceiptError(f"it is message {record.frame} of its call, and another was due")
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

        Raises ``JournalError`` if its last cosignature does not hold.
        """
        self.state.check_cosignature()
        found = Outstanding()
        for call_id, (rpc, sent, attested) in self.state.unconfirmed().items():
            call = self._calls[call_id]
            found.calls += 1
            found.messages += sent - attested
            if call.began == "received":
                continue
            if not call.answered:
                found.cut += 1
                continue
            if rpc in _BEFORE_KEYS and call.attested == self._attestations:
                continue
            if call.repeated and attested:
                found.repeated += 1
                continue
            index = call.sent[len(call.sent) - sent + attested]
            if found.fault is None or index < found.fault[0]:
                later = ", nor later" if call.attested < self._attestations else ""
                found.fault = (
                    index,
                    f"{self._peer} has answered it ({rpc}, call {call_id}) and given no receipt for it in the "
                    f"answer{later}: {attested} of {sent} messages are acknowledged",
                )
        found.unsigned = len(self.state.unsigned())
        return found

    def _check_given(self, document: Attestation, call_id: str, call: _Call) -> None:
        if (document.by, document.to) != (self.state.own, self._peer):
            raise ReceiptError(f"its attestation is by {document.by:.200} to {document.to:.200}")
        # The own cosignature is the other side's to check: it stands in its journal as well.
        witnessed = document.witnessed
        if witnessed is not None and witnessed.size not in self._seen_sizes:
            raise ReceiptError("it witnesses a checkpoint that the other side had not shown")
        listed = {(item.call_id, item.direction) for item in document.exchanges}
        for key in listed:
            if key not in self._unlisted and not self._is_known(key):
                raise ReceiptError(f"its attestation speaks of call {key[0]}, which is not in the journal")
        if len(document.exchanges) >= MOST_CALLS:
            return
        size = read_note(document.checkpoint).size
        # A party that calls makes one call after the other: before it asks anew, the answered ones have ended. A party
        # that answers may have others under way, but owes a receipt for what it is answering.
        for key, index in self._unlisted.items():
            if index >= size:
                break
            owed = self._was_answered(key[0]) if call.began == "sent" else key == (call_id, "received")
            if owed and key not in listed:
                raise ReceiptError(f"its attestation leaves out call {key[0]} ({key[1]}), which had ended")

    def _given(self, document: Attestation, call_id: str, call: _Call) -> None:
        for item in document.exchanges:
            if self.state.frames(item.call_id, item.direction) == item.messages:
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
            raise ReceiptError(
                f"{self._peer} has cosigned what only the answer to call {calls[0]} showed it ({size} records), and "
                "does not acknowledge that answer"
            )
        self._shown = {shown: found for shown, found in self._shown.items() if shown > size}

    def _is_owned_to(self, call_id: str) -> bool:
        """Whether the other side has acknowledged an answer, at least its beginning."""
        key: Key = (call_id, "sent")
        return key in self._settled or self.state.confirmed(*key) > 0

    def _was_answered(self, call_id: str) -> bool:
        call = self._calls.get(call_id)
        return call is not None and call.answered

    def _is_known(self, key: Key) -> bool:
        return key in self._settled or self.state.frames(*key) > 0

    def _settle(self, key: Key) -> None:
        self._settled[key] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        self._unlisted.pop(key, None)
        call_id = key[0]
        if not any(self.state.frames(call_id, direction) for direction in ("sent", "received")):
            self._calls.pop(call_id, None)


class Receipts:
    """The receipts between a party and all others; ``result``: whose party it is, and who is told what is missing."""

    def __init__(self, result: Verification, checks: Checks) -> None:
        self._result = result
        self._checks = checks
        self._peers: dict[str, PeerReceipts] = {}
        self._foreign: dict[str, tuple[str, int]] = {}
        """Parties that sign no receipts: what they speak, and how many messages were sent to them."""
        self._asked = self._cosigned = 0
        """Checkpoints that were sent to witnesses, and that they cosigned."""
        self._withdrawn: set[str] = set()
        """Hospitals that have withdrawn and not joined since: nothing more is exchanged with them."""

    def key_of(self, peer: str) -> bytes | None:
        """The other party's audit key, as this one came to know it last."""
        return self._peers[peer].state.peer_key if peer in self._peers else None

    def of(self, peer: str) -> PeerReceipts:
        """Those with one other party."""
        found = self._peers.get(peer)
        if found is None:
            if not isinstance(peer, str):
                raise TypeError("peer should be text")
            found = self._peers[peer] = PeerReceipts(self._result.party, peer, checks=self._checks)
        return found

    def enrol(self, record: PeerKeyRecord) -> bytes:
        """Takes the audit key by which another party came to be known; returns it."""
        if record.peer in self._foreign:
            raise BrokenError(record.index, f"{record.peer} has a key, and was said to sign nothing")
        state = self.of(record.peer).state
        new = public_key(record.public_key)
        known = state.peer_key
        for statement in record.rotations:
            known = follow(from_json(statement), record.peer, known or b"")
        if known is not None and known != new:
            raise BrokenError(record.index, f"{record.peer} has another audit key without a signed change")
        state.peer_key = new
        return new

    def excuse(self, record: ForeignPeerRecord) -> None:
        """A party signs no receipts, and says so before anything was exchanged with it, or never."""
        peer, protocol = record.peer, record.protocol
        if not (isinstance(peer, str) and isinstance(protocol, str)):
            raise TypeError("peer and protocol should be text")
        if peer in self._peers:
            raise BrokenError(record.index, f"it excuses {peer:.200} from receipts, with which was exchanged before")
        self._foreign.setdefault(peer, (protocol, 0))

    def is_excused(self, record: MessageRecord) -> bool:
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

    def witnessed(self, record: CosignedRecord) -> None:
        """Witnesses have cosigned a checkpoint that was sent to them."""
        self._cosigned += len(record.witnesses)

    def withdrawn(self, record: WithdrawalRecord) -> None:
        """A consent has ended: what is missing to a receipt then may stay missing."""
        self._withdrawn.add(record.self if record.silo is None else record.silo)

    def joined(self, record: MessageRecord) -> None:
        """A hospital joins, anew if it had withdrawn."""
        self._withdrawn -= {record.self, record.peer}

    def conclude(self) -> None:
        """Says what lacks the other sides' signatures now that the journal has ended; raises ``BrokenError`` for a
        receipt that was due."""
        result = self._result
        try:
            outstanding = {peer: receipts.outstanding() for peer, receipts in self._peers.items()}
        except JournalError as error:
            raise BrokenError(None, str(error)) from None
        found = outstanding.values()
        faults = [item.fault for item in found if item.fault is not None]
        if faults:
            raise BrokenError(*min(faults))
        missing = sum(item.messages for item in found)
        result.acknowledged = result.sent - missing - sum(sent for _, sent in self._foreign.values())
        for peer, receipts in self._peers.items():
            heard = receipts.state.heard
            if heard:
                told = "; ".join(
                    f"{party:.200}, its first {one.size} records, at {moment(one.time)}"
                    for party, one in sorted(heard.items())[:MOST_REMARKS]
                )
                result.remarks.append(
                    f"What {count_of(len(heard), 'other hospital')} had been shown of the journal of {peer:.200} was "
                    f"heard in their own signed words, and it is the one that was shown here: {told}."
                )
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
                    f"The other side has not signed yet for what it sent in {count_of(unsigned, 'call')}: {ending}"
                )
