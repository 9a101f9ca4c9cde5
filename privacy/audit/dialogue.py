"""What one party's journal says of its exchange with one other party: ``audit verify``'s view of the receipts.

A ``Correspondence`` holds each signed word against the records, as the daemon does. This module asks what the daemon
cannot know while it runs: whether a word was left out that was due.

A message that was sent may stand without the other side's receipt, and the evidence be sound, only if

* the call was never answered: it was cut, or refused;
* it is an answer, and the other side, in all its later words, does not own to having received it (it was lost on the
  way, or was a session's last), nor has cosigned what only this answer showed it;
* it asked for a certificate or the plan (``Enrol`` and ``GetPlan``, before keys are known) and no word of the other
  side came later;
* the update was a repeated one, of which the other side needed the beginning only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medsilo.privacy.door.receipts import MOST_CALLS, Attestation, Correspondence, Direction, Key
from medsilo.privacy.errors import ReceiptError
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.journal.checkpoint import read_note

_BEFORE_KEYS = ("Enrol", "GetPlan")
_REMEMBERED = 4 * MOST_CALLS
"""Settled calls, and checkpoints, that a word under way at the same moment may still speak of."""


@dataclass
class _Call:
    """``began``: direction of its first message. ``sent``: indexes of the sent messages' records. ``word``: how many
    words of the other side had been received when the call's last record was written."""

    rpc: str
    began: Direction
    sent: array[int] = field(default_factory=lambda: array("Q"))
    answered: bool = False
    repeated: bool = False
    word: int = 0


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


class Dialogue:
    """``own`` and ``peer`` are identities."""

    def __init__(self, own: str, peer: str, *, checks: Checks = HERE) -> None:
        self.correspondence = Correspondence(own, peer, checks=checks)
        self._peer = peer
        self._calls: dict[str, _Call] = {}
        self._unlisted: dict[Key, int] = {}
        """What no own word has listed yet, with the index of its last record."""
        self._settled: OrderedDict[Key, None] = OrderedDict()
        self._seen_sizes: OrderedDict[int, None] = OrderedDict()
        self._shown: dict[int, list[str]] = {}
        """Calls in whose answers a size of the own journal was shown that the other side has not witnessed yet."""
        self._words = 0

    def take(self, record: Mapping[str, Any], own_key: bytes) -> Attestation | None:
        """Takes the next message's record; returns the attestation in it.

        Raises ``ReceiptError`` or ``JournalError`` if it contradicts what stands before, or leaves out what was due.
        """
        direction: Direction = record["direction"]
        call_id, index = record["call_id"], record["index"]
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = _Call(record["rpc"], direction)
        elif call.rpc != record["rpc"]:
            raise ReceiptError(f"call {call_id} was {call.rpc} before, and is {record['rpc']} here")
        document = self.correspondence.check(record, own_key=own_key)
        if document is not None and direction == "sent":
            self._check_given(document, call_id, call)
        settled = self.correspondence.take(record)
        if self.correspondence.frames(call_id, direction) != record["frame"] + 1:
            raise ReceiptError(f"it is message {record['frame']} of its call, and another was due")
        self._unlisted.pop((call_id, direction), None)  # in the order of their last records
        self._unlisted[call_id, direction] = index
        if direction == "sent":
            call.sent.append(index)
        elif call.began == "sent":
            call.answered = True
            call.repeated = call.repeated or "repeated" in record["fields"]
        call.word = self._words
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
        self.correspondence.check_cosignature()
        found = Outstanding()
        for call_id, (rpc, sent, vouched) in self.correspondence.unconfirmed().items():
            call = self._calls[call_id]
            found.calls += 1
            found.messages += sent - vouched
            if call.began == "received":
                continue
            if not call.answered:
                found.cut += 1
                continue
            if rpc in _BEFORE_KEYS and call.word == self._words:
                continue
            if call.repeated and vouched:
                found.repeated += 1
                continue
            index = call.sent[len(call.sent) - sent + vouched]
            if found.fault is None or index < found.fault[0]:
                later = ", nor later" if call.word < self._words else ""
                found.fault = (
                    index,
                    f"{self._peer} has answered it ({rpc}, call {call_id}) and given no receipt for it in the "
                    f"answer{later}: {vouched} of {sent} messages are acknowledged",
                )
        found.unsigned = len(self.correspondence.unsigned())
        return found

    def _check_given(self, document: Attestation, call_id: str, call: _Call) -> None:
        if (document.by, document.to) != (self.correspondence.own, self._peer):
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
            if self.correspondence.frames(item.call_id, item.direction) == item.messages:
                self._unlisted.pop((item.call_id, item.direction), None)
        if call.began == "received":
            self._shown.setdefault(read_note(document.checkpoint).size, []).append(call_id)

    def _received(self, document: Attestation) -> None:
        full = len(document.exchanges) >= MOST_CALLS
        self._words += not full
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
        return key in self._settled or self.correspondence.vouched(*key) > 0

    def _was_answered(self, call_id: str) -> bool:
        call = self._calls.get(call_id)
        return call is not None and call.answered

    def _is_known(self, key: Key) -> bool:
        return key in self._settled or self.correspondence.frames(*key) > 0

    def _settle(self, key: Key) -> None:
        self._settled[key] = None
        if len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)
        self._unlisted.pop(key, None)
        call_id = key[0]
        if not any(self.correspondence.frames(call_id, direction) for direction in ("sent", "received")):
            self._calls.pop(call_id, None)
