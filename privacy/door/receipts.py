"""Receipts both ways: what two parties have exchanged, and what each has put its signature to.

Each request and each response carries its sender's *attestation*: a signed document that lists, call by call, what
the sender has received (a receipt) and sent (its signature over the exact bytes), with a checkpoint of its journal,
a proof that this journal continues the one that the other side saw last, and a cosignature under the other side's
last checkpoint. So either side can show later, to anyone, what the other has had and given, and neither can rewrite
its past unseen.

A ``ReceiptState`` is one party's side of that with one other party. It is a function of that party's own journal
records: the daemon feeds it as records are written, and again after a restart; the verifier has its own
(``medsilo.privacy.verify.receipts``). An answer is acknowledged in the next call, so a session's very last answer stays
without a receipt.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from securesystemslib import dsse

from medsilo.privacy.door.attestation import (
    MOST_CALLS,
    MOST_SHOWN,
    SHOWN_SINCE,
    Attestation,
    Consistency,
    Exchange,
    Witnessed,
    parse,
)
from medsilo.privacy.door.gossip import Heard, Word, check_shown
from medsilo.privacy.errors import ReceiptError, RefusedError
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.privacy.identity.envelope import ATTESTATION, from_json, key_id
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note, verify, verify_cosignature
from medsilo.privacy.journal.merkle import EMPTY_ROOT, check_consistency
from medsilo.privacy.journal.records import Direction, MessageRecord
from medsilo.protos.versions import OLDEST_VERSION

_WAY_OUT = (
    "look for the newer one where it was moved to, or in the folder that `state:` named before, and go on with that; a "
    "backup that holds no more records than this one does not help"
)
_OF_A_ROUND = ("GetTask", "SubmitUpdate")


class Log(Protocol):
    """A journal, as far as its owner's attestations need it."""

    def checkpoint(self, *, durable: bool = True) -> str: ...

    def consistency(self, first: int, second: int) -> list[bytes]: ...

    def cosign(self, note: str) -> str: ...

    def seal(self, document: Mapping[str, Any], payload_type: str) -> dsse.Envelope: ...


@dataclass
class _Messages:
    """A call's messages in one direction."""

    rpc: str
    digests: list[bytes] = field(default_factory=list)
    length: int = 0
    last_index: int = -1
    own_size: int | None = None
    """Size of the own checkpoint with which this was attested first; None before."""
    attested: int = 0
    """How many of the messages were attested then."""
    confirmed: int = 0
    """How many the other side has put its signature to; of what it sent, some may still be under way."""
    claim: Exchange | None = None
    """For what was received: the other side's word on what it sent in all, to be held against what still arrives."""

    def kept(self) -> dict[str, Any]:
        claim = None if self.claim is None else self.claim.model_dump(mode="json")
        found = {**vars(self), "digests": b"".join(self.digests).hex(), "claim": claim}
        found["vouched"] = found.pop("confirmed")
        return found

    @classmethod
    def restore(cls, kept: Mapping[str, Any]) -> _Messages:
        digests = bytes.fromhex(kept["digests"])
        claim = None if kept["claim"] is None else Exchange.model_validate(kept["claim"])
        found = {**kept, "digests": [digests[at : at + 32] for at in range(0, len(digests), 32)], "claim": claim}
        found["confirmed"] = found.pop("vouched")
        return cls(**found)

    def exchange(self, call_id: str, direction: Direction) -> Exchange:
        count = len(self.digests)
        return Exchange(
            rpc=self.rpc,
            call_id=call_id,
            direction=direction,
            messages=count,
            length=self.length,
            sha256=self.sha256(count),
            last_index=self.last_index,
        )

    def sha256(self, count: int) -> str:
        return hashlib.sha256(b"".join(self.digests[:count])).hexdigest()


Key = tuple[str, Direction]
_OTHER: dict[Direction, Direction] = {"sent": "received", "received": "sent"}


class ReceiptState:
    """One party's side of what it exchanges with one other party.

    ``own`` and ``peer`` are identities (URIs). ``peer_key`` is the other's audit key once it is known, ``version`` what
    the other understands. ``checks``: where signatures in attestations are checked. Its methods may be called from any
    thread.
    """

    def __init__(self, own: str, peer: str, *, checks: Checks = HERE) -> None:
        self._checks = checks
        self.own = own
        self.peer = peer
        self.peer_key: bytes | None = None
        self.version = OLDEST_VERSION
        """The protocol version that the two speak; the oldest until the other has named its own."""
        self.seen = Checkpoint("", 0, EMPTY_ROOT)
        """The other's last checkpoint that was verified."""
        self.seen_note = ""
        self.acknowledged = 0
        """Size of the own journal as of the last checkpoint that the other side is known to have verified."""
        self.cosignature = ""
        """The other's line under that checkpoint."""
        self.named: Mapping[str, str] = {}
        """SHA-256 of hospitals' audit keys, by identity, as the consent names them."""
        self.heard: dict[str, Heard] = {}
        """What other hospitals have signed for to have been shown of the other's journal, as the other has told."""
        self._told: dict[str, int] = {}
        """Of how many records of the own journal the other was told that another hospital was shown them."""
        self._word: Word | None = None
        """What the other side has signed last to have been shown of the own journal, and by which key."""
        self._notes: dict[int, str] = {}
        self.lock = threading.RLock()
        """Held from ``check`` to ``take``, so that no other attestation comes between."""
        self._open: dict[Key, _Messages] = {}
        self._in_progress: set[str] = set()
        self._complete: dict[Key, int] = {}
        """What both have put their signatures to, with the size of the own checkpoint that is to be witnessed yet."""
        self._checked: tuple[Any, Attestation] | None = None

    def begin(self, call_id: str) -> None:
        """A call has begun: what is sent in it is attested when it has ended.

        Raises ``RefusedError`` if another call of that id is not settled yet.
        """
        with self.lock:
            if call_id in self._in_progress or any((call_id, d) in self._open for d in _OTHER):
                raise RefusedError(
                    f"call {call_id} has been made before: a message was played again, or a nonce reused"
                )
            self._in_progress.add(call_id)

    def end(self, call_id: str) -> None:
        """A call has ended, in whatever way."""
        with self.lock:
            self._in_progress.discard(call_id)

    def all_ended(self) -> None:
        """No call is under way: after a restart."""
        with self.lock:
            self._in_progress.clear()

    def check(self, record: MessageRecord) -> Attestation | None:
        """Checks the attestation in a message's record, before the record counts; returns it.

        Raises ``ReceiptError`` if it is not acceptable or contradicts the own records.
        """
        with self.lock:
            if record.direction == "received":
                self._check_claim(record)
            if record.attestation is None:
                return None
            envelope = from_json(record.attestation)
            if record.direction == "sent":
                document = parse(envelope)
                for item in document.exchanges:
                    messages = self._open.get((item.call_id, item.direction))
                    if messages is not None:
                        _compare(item, messages, "this party's own attestation")
            else:
                document = self._check_received(envelope)
            self._checked = record.attestation, document
        return document

    def take(self, record: MessageRecord, index: int) -> None:
        """Takes a message's record, which has that number in the own journal, and what a checked attestation in it
        says."""
        with self.lock:
            direction: Direction = record.direction
            key = (record.call_id, direction)
            messages = self._open.setdefault(key, _Messages(record.rpc))
            messages.digests.append(bytes.fromhex(record.sha256))
            messages.length += record.length
            messages.last_index = index
            self._complete.pop(key, None)
            if record.attestation is None:
                return
            if self._checked is not None and self._checked[0] is record.attestation:
                document = self._checked[1]
            else:
                document = parse(from_json(record.attestation))
            self._checked = None
            if direction == "received":
                self._received(document)
            else:
                self._given(document)

    def attest(
        self,
        log: Log,
        *,
        since: int | None = None,
        durable: bool = False,
        others: Sequence[Word] = (),
    ) -> dsse.Envelope:
        """The own word on all that the other side does not have it for yet.

        Args:
            log: the own journal.
            durable: wait until the records are on disk, and do not leave that to the message that carries this.
            since: size of the own journal that the other side says it saw last; by default what it is known to have.
            others: what others have signed for to have been shown of the own journal.

        Raises ``ReceiptError`` if the other side has seen more than this journal holds.
        """
        with self.lock:
            note = log.checkpoint(durable=durable)
            size = read_note(note).size
            if since is not None:
                if since > size:
                    raise ReceiptError(
                        f"{self.peer} has seen {since} records of this journal, which holds {size}: it was put back to "
                        f"an earlier state; {_WAY_OUT}"
                    )
                if since != self.acknowledged:
                    self.acknowledged, self.cosignature = since, ""  # its line under that comes with its next message
            witnessed = None
            if self.seen.size:
                witnessed = Witnessed(size=self.seen.size, cosignature=log.cosign(self.seen_note))
            document = Attestation(
                by=self.own,
                to=self.peer,
                exchanges=self._due(size),
                checkpoint=note,
                consistency=Consistency(
                    size=self.acknowledged, proof=tuple(h.hex() for h in log.consistency(self.acknowledged, size))
                ),
                witnessed=witnessed,
                shown=tuple(word.shown(log.consistency(word.size, size)) for word in self._news(others)),
            )
            return log.seal(document.content(), ATTESTATION)

    def word(self) -> Word | None:
        """The other side's word on the own journal: the last checkpoint that it signed to have seen; None before."""
        # Without the lock: while a message of its is being written nobody waits for that, and what it said last stands.
        said = self._word
        return said if said is not None and said.key == self.peer_key else None

    def _note_word(self) -> None:
        if self.cosignature and self.acknowledged in self._notes:
            self._word = Word(self.peer, self.peer_key or b"", self._notes[self.acknowledged], self.cosignature)

    def _news(self, others: Sequence[Word]) -> list[Word]:
        """Of others' words those that tell the other side most, as many as one attestation holds."""
        if self.version < SHOWN_SINCE:
            return []
        newer = [word for word in others if word.size > self._told.get(word.party, 0)]
        chosen = sorted(newer, key=lambda word: self._told.get(word.party, 0) - word.size)[:MOST_SHOWN]
        self._told.update({word.party: word.size for word in chosen})
        return chosen

    def _due(self, size: int) -> tuple[Exchange, ...]:
        """What this party has not attested to the other side yet, of the own journal's first ``size`` records."""
        exchanges: list[Exchange] = []
        # Newest first: the call under way has to be in it, however many old ones wait.
        for (call_id, direction), messages in reversed(self._open.items()):
            # What came in a call that another thread still answers is told as well: the answer to it may be lost,
            # and the other side then holds this attestation, not that one.
            waits = direction == "sent" and call_id in self._in_progress
            count = len(messages.digests)
            known = messages.attested == count and (messages.own_size or 0) <= self.acknowledged
            if waits or known or messages.last_index >= size or len(exchanges) >= MOST_CALLS:
                continue
            exchanges.append(messages.exchange(call_id, direction))
        return tuple(exchanges)

    def check_receipt(self, call_id: str) -> None:
        """Raises ``ReceiptError`` unless the other side has acknowledged all that was sent in a call."""
        with self.lock:
            sent = self._open.get((call_id, "sent"))
            if sent is not None and sent.confirmed < len(sent.digests):
                raise ReceiptError(
                    f"{self.peer} has answered without a receipt for what was sent to it ({sent.rpc}, call {call_id}: "
                    f"{sent.confirmed} of {len(sent.digests)} messages acknowledged); nothing more is sent. Ask its "
                    "operator why, and keep both journals"
                )

    def check_signed(self, envelope: dsse.Envelope) -> Attestation:
        """The attestation of an envelope that the other side signed for this party; raises ``ReceiptError``."""
        if self.peer_key is None:
            raise ReceiptError(f"{self.peer} gives its word on journals before its audit key is known")
        document = parse(envelope, self.peer_key, self._checks)
        if (document.by, document.to) != (self.peer, self.own):
            raise ReceiptError(f"an attestation by {document.by} to {document.to} came from {self.peer}")
        return document

    def unsigned(self) -> list[str]:
        """Calls that have ended and for whose received messages the other side has not yet given its signature."""
        with self.lock:
            return [
                call_id
                for (call_id, direction), messages in self._open.items()
                if direction == "received"
                and call_id not in self._in_progress
                and messages.confirmed < len(messages.digests)
            ]

    def parted(self) -> bool:
        """Whether the other side has no call under way and has signed for all tasks and updates.

        What is left is its last word (Attest), for which nothing follows, or that it did not take part.
        """
        with self.lock:
            return not self._in_progress and all(
                direction == "sent" or messages.rpc not in _OF_A_ROUND or messages.confirmed >= len(messages.digests)
                for (_, direction), messages in self._open.items()
            )

    def kept(self) -> dict[str, Any]:
        """All that it holds, as JSON, but for the calls under way; ``restore`` takes it up again."""
        with self.lock:
            return {
                "peer_key": None if self.peer_key is None else self.peer_key.hex(),
                "seen": self.seen_note,
                "acknowledged": self.acknowledged,
                "cosignature": self.cosignature,
                "notes": list(self._notes.values()),
                "open": [[*key, messages.kept()] for key, messages in self._open.items()],
                "complete": [[*key, size] for key, size in self._complete.items()],
            }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Takes up what ``kept`` gave, in a state that has taken nothing yet."""
        with self.lock:
            self.peer_key = None if kept["peer_key"] is None else bytes.fromhex(kept["peer_key"])
            if kept["seen"]:
                self.seen, self.seen_note = read_note(kept["seen"]), kept["seen"]
            self.acknowledged, self.cosignature = kept["acknowledged"], kept["cosignature"]
            self._notes = {read_note(note).size: note for note in kept["notes"]}
            self._note_word()
            self._open = {(call, direction): _Messages.restore(one) for call, direction, one in kept["open"]}
            self._complete = {(call, direction): size for call, direction, size in kept["complete"]}

    def unconfirmed(self) -> dict[str, tuple[str, int, int]]:
        """Calls whose sent messages lack a receipt: (RPC, messages sent, messages acknowledged) by call."""
        with self.lock:
            return {
                call_id: (messages.rpc, len(messages.digests), messages.confirmed)
                for (call_id, direction), messages in self._open.items()
                if direction == "sent" and messages.confirmed < len(messages.digests)
            }

    def _given(self, document: Attestation) -> None:
        size = read_note(document.checkpoint).size
        self._notes[size] = document.checkpoint
        for item in document.exchanges:
            messages = self._open.get((item.call_id, item.direction))
            if messages is not None and (messages.own_size is None or messages.attested < item.messages):
                messages.own_size, messages.attested = size, item.messages
                self._note_complete((item.call_id, item.direction), messages)

    def _note_complete(self, key: Key, messages: _Messages) -> None:
        held = len(messages.digests)
        if messages.own_size is not None and messages.attested == held == messages.confirmed:
            self._complete[key] = messages.own_size

    def _check_received(self, envelope: dsse.Envelope) -> Attestation:
        document = self.check_signed(envelope)
        note = read_note(document.checkpoint)
        verify(document.checkpoint, self.peer_key or b"")
        if self.seen.size and note.origin != self.seen.origin:
            raise ReceiptError(f"{self.peer} shows the journal {note.origin}; it was {self.seen.origin} before")
        _check_continues(self.peer, self.seen, note, document.consistency)
        if (witnessed := document.witnessed) is not None:
            if (own := self._notes.get(witnessed.size)) is None:
                if witnessed.size > (shown := max(self._notes, default=0)):
                    raise ReceiptError(
                        f"{self.peer} has seen {witnessed.size} records of this journal, from which it was shown no "
                        f"more than {shown}: it was put back to an earlier state; {_WAY_OUT}"
                    )
                raise ReceiptError(
                    f"{self.peer} witnesses a checkpoint over {witnessed.size} records that it was not shown from here"
                )
            verify_cosignature(witnessed.cosignature, own, note.origin, self.peer_key or b"")
        for told in document.shown:
            key = key_id(bytes.fromhex(told.public_key))
            if self.named.get(told.party, key) != key:
                # A key that the consent does not name is nobody's word. Its rosters are refused, by the rule's name.
                continue
            self.heard[told.party] = check_shown(
                told,
                own=self.own,
                peer=self.peer,
                peer_key=self.peer_key or b"",
                here=document.checkpoint,
            )
        for item in document.exchanges:
            messages = self._open.get((item.call_id, _OTHER[item.direction]))
            if messages is not None:
                _check_exchange(self.peer, item, messages)
            elif item.direction == "received":
                raise ReceiptError(
                    f"{self.peer} acknowledges {item.rpc} (call {item.call_id}), which was not sent to it by this "
                    "journal: it was put back to an earlier state, or another has sent under this name. Nothing more "
                    f"is sent. Ask the operator of {self.peer}, and keep both journals. If it was put back, {_WAY_OUT}"
                )
        return document

    def _check_claim(self, record: MessageRecord) -> None:
        """A message that comes after its sender's word on the whole call has to be what that word is for."""
        messages = self._open.get((record.call_id, "received"))
        held = len(messages.digests) if messages else 0
        claim = messages.claim if messages else None
        if record.frame != held or (claim is not None and held >= claim.messages):
            raise ReceiptError(
                f"{record.rpc} (call {record.call_id}): message {record.frame} came from {self.peer}, which "
                f"has signed for no more than {held}"
            )
        if messages is not None and claim is not None and held + 1 == claim.messages:
            digests = [*messages.digests, bytes.fromhex(record.sha256)]
            if hashlib.sha256(b"".join(digests)).hexdigest() != claim.sha256:
                raise ReceiptError(
                    f"the signature of {self.peer} is not for the bytes that came after it: {claim.rpc}, call "
                    f"{claim.call_id}, {claim.messages} messages"
                )

    def _received(self, document: Attestation) -> None:
        self.seen, self.seen_note = read_note(document.checkpoint), document.checkpoint
        for item in document.exchanges:
            key = (item.call_id, _OTHER[item.direction])
            messages = self._open.get(key)
            if messages is not None:
                if item.direction == "sent" and item.messages >= messages.confirmed:
                    messages.claim = item
                messages.confirmed = max(messages.confirmed, item.messages)
                self._note_complete(key, messages)
        if document.witnessed is not None:
            self._witnessed(document.witnessed)

    def _witnessed(self, witnessed: Witnessed) -> None:
        if witnessed.size < self.acknowledged:
            return
        self.acknowledged = witnessed.size
        self.cosignature = witnessed.cosignature
        self._note_word()
        self._notes = {size: note for size, note in self._notes.items() if size >= witnessed.size}
        done = [key for key, size in self._complete.items() if size <= witnessed.size]
        for key in done:
            del self._open[key], self._complete[key]


class OutOfStepError(ReceiptError):
    """The other side proves its journal from another checkpoint than the last one seen: after a cut call."""


def _check_continues(peer: str, seen: Checkpoint, note: Checkpoint, given: Consistency) -> None:
    if note.size < seen.size:
        raise ReceiptError(
            f"{peer} shows a journal of {note.size} records; {seen.size} were seen before: its past was "
            "rewritten or put back to an earlier state"
        )
    if given.size != seen.size:
        raise OutOfStepError(f"{peer} proves its journal from {given.size} records, not from {seen.size}")
    proof = [bytes.fromhex(node) for node in given.proof]
    if not check_consistency(seen.size, seen.root, note.size, note.root, proof):
        raise ReceiptError(
            f"the journal of {peer} with {note.size} records does not continue the one with {seen.size} "
            "that it showed before: its past was rewritten"
        )


def _check_exchange(peer: str, item: Exchange, messages: _Messages) -> None:
    held = len(messages.digests)
    if item.direction == "received":
        # What was sent and did not arrive is no contradiction; what arrived has to be what was sent.
        _compare(item, messages, f"the receipt of {peer}")
    elif item.messages == held:
        _compare(item, messages, f"the signature of {peer}")
    elif item.messages < held:
        raise ReceiptError(
            f"{item.rpc} (call {item.call_id}): {held} messages came from {peer}, which owns up to {item.messages}"
        )


def _compare(item: Exchange, messages: _Messages, whose: str) -> None:
    whole = item.messages == len(messages.digests)
    if (
        item.messages > len(messages.digests)
        or item.rpc != messages.rpc
        or messages.sha256(item.messages) != item.sha256
        or (whole and item.length != messages.length)
    ):
        raise ReceiptError(
            f"{whose} is not for the bytes in the record: {item.rpc}, call {item.call_id}, {item.messages} messages"
        )
