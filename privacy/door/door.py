"""The one door: every message passes here, byte for byte, in either direction.

Going out: leave out what is newer than the other side understands, serialise once, attribute every byte, check that
each exposure class may leave, write the record and fsync it; only then are the bytes handed over to be sent. Coming
in: attribute every byte (an unknown field is refused), check what the other side says of earlier messages, write
the record, then hand the message on. What was refused is a record too.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.door.gossip import Word
from medsilo.privacy.door.protocol import fitted
from medsilo.privacy.door.receipts import ReceiptState
from medsilo.privacy.errors import ConsentError, IdentityError, JournalError, MedsiloError, ReceiptError, RefusedError
from medsilo.privacy.exposure import SCHEMA_FILES, SCHEMA_SHA256, Attribution, Exposure, attribute
from medsilo.privacy.identity.cosignature import ED25519, NoteKey, signature_lines
from medsilo.privacy.identity.envelope import from_json, from_message, key_id, to_json, to_message
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.journal import Journal, read_journal, understanding
from medsilo.privacy.journal.key_rotation import follow
from medsilo.privacy.journal.records import (
    Direction,
    KeyRecord,
    KeyRotationRecord,
    MessageRecord,
    PeerKeyRecord,
    Record,
    RefusalRecord,
    SchemaRecord,
    content,
)
from medsilo.privacy.printable import check_texts, printable
from medsilo.protos.medsilo.v1 import journal_pb2
from medsilo.protos.nonces import NONCE_BYTES

_SUBJECT = attrgetter("peer", "rpc", "run", "round")
AUDIT_KEY_BYTES = 32
REMEMBER_AFTER = 5_000
"""Records that a start reads in well under a second."""
_LARGEST_SIZE = 2**53  # beyond it, JSON has no exact numbers


class Gate(Protocol):
    """Decides whether bytes of the given classes may leave now; raises ``ConsentError`` if not. While it is ``held``,
    all that it decides is of one moment, which is that of the records made meanwhile."""

    def check(self, classes: Iterable[Exposure]) -> None: ...

    def held(self) -> AbstractContextManager[None]: ...


@dataclass
class Call:
    """One RPC as the journal knows it. ``call_id`` is the nonce of the call's first message, as hex.

    ``attempt`` counts the tries of the same upload; ``round`` is None outside rounds. ``peer`` may be empty at first;
    then ``name_peer`` tells it from the first message. Once it is ``over`` nothing more is sent in it. ``common``: the
    classes of tensors that all silos of a round are given alike; of these the records tell a digest of the content, so
    that two silos can hold against each other what they were given.
    """

    rpc: str
    peer: str
    peer_certificate_sha256: str
    purpose: str
    run: str | None = None
    plan_sha256: str | None = None
    round: int | None = None
    attempt: int = 1
    call_id: str | None = None
    name_peer: Callable[[Message], str] | None = None
    common: frozenset[Exposure] = frozenset()
    contents: dict[Exposure, tuple[int, hashlib._Hash]] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=lambda: {"sent": 0, "received": 0})
    over: bool = False

    def describe(self) -> dict[str, Any]:
        """The part of a record that all the call's messages share."""
        return {
            "rpc": self.rpc,
            "call_id": self.call_id,
            "peer": self.peer,
            "peer_certificate_sha256": self.peer_certificate_sha256,
            "purpose": self.purpose,
            "run": self.run,
            "plan_sha256": self.plan_sha256,
            "round": self.round,
            "attempt": self.attempt,
        }


M = TypeVar("M", bound=Message)


class Door:
    """The door of one party. ``identity`` is its own URI; ``gate`` decides what may leave.

    What was exchanged with each other party is kept in ``ReceiptState``s, as far as one side's word is still due.
    ``archive`` keeps what is sent, if the party wants that. ``paid_by`` gives the privacy ledger's charges that
    paid for what a call sends; they stand with its first message.
    """

    def __init__(
        self, journal: Journal, *, identity: str, federation: str, gate: Gate, archive: SentArchive | None = None
    ) -> None:
        self.journal = journal
        self._archive = archive
        self.identity = identity
        self.federation = federation
        self.gate = gate
        self._receipt_states: dict[str, ReceiptState] = {}
        self._adding = threading.Lock()
        self._rotations: list[journal_pb2.Envelope] = []
        self._schemas: set[str] = set()
        """Those that the journal holds."""
        self.paid_by: Callable[[Call], list[Any]] = lambda _: []
        with understanding(journal.directory):
            self._resume()

    def through(self, gate: Gate) -> Door:
        """The same door with another gate."""
        door = copy.copy(self)
        door.gate = gate
        return door

    def receipt_state(self, peer: str) -> ReceiptState:
        """What is exchanged with another party, by its identity."""
        with self._adding:
            if (known := self._receipt_states.get(peer)) is None:
                known = self._receipt_states[peer] = ReceiptState(self.identity, peer)
            return known

    def enrol(self, peer: str, public_key: bytes, rotations: Sequence[journal_pb2.Envelope] = ()) -> None:
        """Takes a party's audit key (Ed25519, 32 bytes) the first time, and holds it to that key from then on.

        ``rotations``: the party's changes of key, each signed with the key before. Raises as ``check_key`` does.
        """
        state = self.receipt_state(peer)
        with state.lock:
            if (chain := _chain(peer, state.peer_key, public_key, rotations)) is None:
                return
            self.note(PeerKeyRecord(peer=peer, public_key=public_key.hex(), rotations=chain))
            state.peer_key = public_key

    def check_key(self, peer: str, public_key: bytes, rotations: Sequence[journal_pb2.Envelope] = ()) -> None:
        """Raises ``RefusedError`` for what is no audit key, and ``IdentityError`` for another key than the one enrolled
        without a chain of changes that leads to it."""
        _chain(peer, self.receipt_state(peer).peer_key, public_key, rotations)

    def attest(self, peer: str, *, since: int | None = None, durable: bool = False) -> journal_pb2.Envelope:
        """This party's signed word for another on what was exchanged and not yet acknowledged.

        ``since``: size of the journal here that the other side says it has seen. What it states is on disk once the
        message that carries it is released, or with ``durable`` when this returns. Raises ``ReceiptError`` (see
        ``ReceiptState.attest``).
        """
        others = self._words(peer)
        return to_message(self.receipt_state(peer).attest(self.journal, since=since, durable=durable, others=others))

    def _words(self, peer: str) -> list[Word]:
        """What others than ``peer`` have signed for to have been shown of this journal, under its present key."""
        if not is_silo(peer):
            return []
        with self._adding:
            states = [state for name, state in self._receipt_states.items() if name != peer]
        words = [word for state in states if (word := state.word()) is not None]
        own = NoteKey(self.journal.origin, ED25519, self.journal.public_key)
        return [word for word in words if any(blob[:4] == own.hash for _, blob in signature_lines(word.note))]

    def check_earlier_receipt(self, envelope: journal_pb2.Envelope, call: Call) -> None:
        """Raises ``ReceiptError`` unless the other side has signed there for an earlier call of the same RPC, run and
        round: for all its messages, byte for byte as the journal here has them."""
        document = self.receipt_state(call.peer).check_signed(from_message(envelope))
        given = {item.call_id: item for item in document.exchanges if item.direction == "received"}
        sent: dict[str, list[bytes]] = {}
        for record in read_journal(self.journal.directory):
            if not isinstance(record, MessageRecord) or record.direction != "sent" or record.call_id not in given:
                continue
            if _SUBJECT(record) == _SUBJECT(call) and record.call_id != call.call_id:
                sent.setdefault(record.call_id, []).append(bytes.fromhex(record.sha256))
        for call_id, digests in sent.items():
            if given[call_id].sha256 == hashlib.sha256(b"".join(digests)).hexdigest():
                return
        raise ReceiptError(
            f"{call.peer} says that it has had {call.rpc} (round {call.round}) before, and its receipt for that is for "
            "nothing that was sent to it; nothing more is sent. Ask its operator why, and keep both journals"
        )

    def rotations(self) -> list[journal_pb2.Envelope]:
        """This party's changes of its audit key, oldest first."""
        return list(self._rotations)

    def check_receipt(self, call: Call) -> None:
        """Raises ``ReceiptError`` unless the other side has acknowledged all that was sent in a call."""
        self.receipt_state(call.peer).check_receipt(call.call_id or "")

    def has_parted(self, peer: str) -> bool:
        """Whether another party has put its signature to what came from it in rounds, and has no call open."""
        return self.receipt_state(peer).parted()

    def ended(self, call: Call) -> None:
        """A call has ended, in whatever way; a thread that still streams its messages is stopped at the next."""
        if not call.peer:
            return
        state = self.receipt_state(call.peer)
        with state.lock:
            call.over = True
            if call.call_id is not None:
                state.end(call.call_id)

    def note(self, record: Record) -> int:
        """Records something that is not a message (a consent, a joined run); returns the record's index."""
        return self.journal.append([{**self._party(), **content(record)}])[0]

    def release(self, messages: Sequence[Message], call: Call) -> list[bytes]:
        """The exact bytes to send, one item a message, all of them recorded and durable.

        What is newer than the other side understands is left out (``medsilo.privacy.door.protocol``). Raises
        ``ConsentError`` or ``RefusedError`` if any of them may not leave; then none does, and the refusal is a record.
        Raises ``MedsiloError`` if the call is over; then nothing is recorded either.
        """
        sealed, records = [], []
        version = self.receipt_state(call.peer).version
        with self.gate.held():
            for message in messages:
                data = message.SerializeToString()
                try:
                    if (older := fitted(message, version, call.peer, call.rpc)) is not message:
                        message, data = older, older.SerializeToString()
                    attribution = attribute(data, message.DESCRIPTOR)
                    self.gate.check(attribution.classes)
                    records.append(self._record(data, message, attribution, call, "sent"))
                except (ConsentError, RefusedError) as error:
                    self._refuse(data, message, call, "sent", error)
                    error.recorded = True
                    raise
                sealed.append(data)
            with self.receipt_state(call.peer).lock:
                _check_not_over(call)
                self._append(records, call)
        if self._archive is not None:
            for record, data in zip(records, sealed, strict=True):
                self._archive.keep(record.call_id, record.frame, data)
        return sealed

    def admit(self, data: bytes, kind: type[M], call: Call, *, durable: bool = False) -> M:
        """The message in received bytes, recorded.

        ``durable`` waits for the record to reach the disk; what acknowledges the message needs that, and a signed
        checkpoint gives it too. Raises ``RefusedError`` for bytes that the schema does not account for, and for texts
        with control characters.
        """
        message = kind()
        with ExitStack() as held:
            try:
                attribution = attribute(data, kind.DESCRIPTOR)
                message.ParseFromString(data)
                check_texts(message)
                record = self._record(data, message, attribution, call, "received")
                state = self.receipt_state(call.peer)
                held.enter_context(state.lock)
                state.check(record)
            except (RefusedError, DecodeError) as error:
                self._refuse(data, message, call, "received", error)
                refused = RefusedError(f"{call.rpc}: the message is not acceptable: {error}")
                refused.recorded = True
                raise refused from None
            except (ReceiptError, JournalError) as error:
                self._refuse(data, message, call, "received", error)
                denied = error if isinstance(error, ReceiptError) else ReceiptError(f"{call.rpc}: {error}")
                denied.recorded = True
                raise denied from None
            self._append([record], call, durable=durable)
        return message

    def turn_away(self, data: bytes, kind: type[Message], call: Call, error: MedsiloError) -> None:
        """Records that received bytes were refused before they were looked at as a message of ``call.peer``: whoever
        sent them has not shown to be that party, so they are nothing that was exchanged with it."""
        self._refuse(data, kind(), call, "received", error)
        error.recorded = True

    def remember(self, *, after: int = REMEMBER_AFTER) -> None:
        """Saves the next start from reading what the journal holds now, if it would read so many records."""
        if len(self.journal) - self.journal.remembered >= after:
            self.journal.remember(self._memory)

    def _memory(self) -> dict[str, Any]:
        with self._adding:
            receipt_states = dict(self._receipt_states)
        kept = {}
        for peer, state in receipt_states.items():
            with state.lock:  # its records are taken as they are written
                kept[peer] = {"until": len(self.journal), **state.kept()}
        return {
            "schemas": sorted(self._schemas),
            "rotations": [to_json(from_message(envelope)) for envelope in self._rotations],
            "correspondences": kept,
        }

    def _recall(self) -> dict[str, int] | None:
        """Takes up what the journal's start has kept; returns up to which record that covers each state, None
        if there is no start, or one of another release."""
        memory = self.journal.memory
        if memory is None:
            return None
        try:
            until = {peer: int(kept["until"]) for peer, kept in memory["correspondences"].items()}
            found = {peer: ReceiptState(self.identity, peer) for peer in until}
            for peer, state in found.items():
                state.restore(memory["correspondences"][peer])
            rotations = [to_message(from_json(envelope)) for envelope in memory["rotations"]]
            schemas = set(memory["schemas"])
        except (KeyError, TypeError, ValueError, AttributeError, JournalError):
            return None
        if max(until.values(), default=0) > len(self.journal):
            return None
        self._receipt_states, self._rotations, self._schemas = found, rotations, schemas
        return until

    def _append(self, records: Sequence[MessageRecord], call: Call, *, durable: bool = True) -> None:
        state = self.receipt_state(call.peer)
        indexes = self.journal.append([content(record) for record in records], durable=durable)
        for index, record in zip(indexes, records, strict=True):
            state.take(record, index)

    def _resume(self) -> None:
        """Takes up what the journal says, and begins a new journal with what is needed to read it."""
        until = self._recall()
        begun = until is not None
        for record in self.journal.read(self.journal.read_from if until is not None else 0):
            match record:
                case MessageRecord() | PeerKeyRecord() if until and record.index < until.get(record.peer, 0):
                    continue
                case MessageRecord():
                    self.receipt_state(record.peer).take(record, record.index)
                case PeerKeyRecord():
                    self.receipt_state(record.peer).peer_key = bytes.fromhex(record.public_key)
                case KeyRecord():
                    begun = True
                case KeyRotationRecord():
                    self._rotations.append(to_message(from_json(record.statement)))
                case SchemaRecord():
                    self._schemas.add(record.schema_sha256)
        for state in self._receipt_states.values():
            state.all_ended()
        if not begun:
            self.note(KeyRecord(public_key=self.journal.public_key.hex(), origin=self.journal.origin))
        if SCHEMA_SHA256 not in self._schemas:
            self._schemas.add(SCHEMA_SHA256)
            files = [base64.b64encode(file.serialized_pb).decode() for file in SCHEMA_FILES]
            self.note(SchemaRecord(schema_sha256=SCHEMA_SHA256, files=files))

    def _record(
        self, data: bytes, message: Message, attribution: Attribution, call: Call, direction: Direction
    ) -> MessageRecord:
        own_nonce = _nonce_of(message)
        if not call.peer and call.name_peer:
            call.peer = call.name_peer(message)
        if call.call_id is None:
            state = self.receipt_state(call.peer)
            with state.lock:
                _check_not_over(call)
                state.begin(own_nonce.hex())
                call.call_id = own_nonce.hex()
        frame = call.frames[direction]
        call.frames[direction] += 1
        more: dict[str, Any] = {}
        for exposure in call.common.intersection(attribution.classes):
            more["content"] = _told_content(_content(message), exposure, call)
        if tensors := _manifest(message):
            more["tensors"] = tensors
        if (envelope := _attestation(message)) is not None:
            more["attestation"] = to_json(from_message(envelope))
        return MessageRecord(
            **self._party(),
            **call.describe(),
            direction=direction,
            frame=frame,
            message_type=message.DESCRIPTOR.full_name,
            schema_sha256=SCHEMA_SHA256,
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            fields=attribution.fields,
            classes={exposure.value: count for exposure, count in attribution.classes.items()},
            ledger=self.paid_by(call) if direction == "sent" and frame == 0 else [],
            **more,
        )

    def _refuse(self, data: bytes, message: Message, call: Call, direction: Direction, error: Exception) -> None:
        more: dict[str, Any] = {}
        if (envelope := _attestation(message)) is not None:  # one that was not believed is evidence as well
            more["attestation"] = to_json(from_message(envelope))
        record = RefusalRecord(
            **call.describe(),
            direction=direction,
            message_type=message.DESCRIPTOR.full_name,
            schema_sha256=SCHEMA_SHA256,
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            reason=printable(str(error), lines=True),
            **more,
        )
        self.note(record)

    def _party(self) -> dict[str, Any]:
        return {"federation": self.federation, "self": self.identity}


def _check_not_over(call: Call) -> None:
    if call.over:
        raise MedsiloError(f"{call.rpc} has ended; nothing more is sent in it")


def _nonce_of(message: Message) -> bytes:
    """The message's own nonce, or that of the frame inside it."""
    if "nonce" in message.DESCRIPTOR.fields_by_name:
        value: bytes = message.nonce  # type: ignore[attr-defined]
    else:
        frame = message.WhichOneof("frame")
        value = getattr(message, frame).nonce if frame else b""
    if len(value) != NONCE_BYTES:
        raise RefusedError(f"{message.DESCRIPTOR.full_name} has no nonce of {NONCE_BYTES} bytes")
    return value


def _content(message: Message) -> Any:
    """The message, or the frame inside it."""
    frame = message.WhichOneof("frame") if "frame" in message.DESCRIPTOR.oneofs_by_name else None
    return getattr(message, frame) if frame else message


def _told_content(chunk: Message, exposure: Exposure, call: Call) -> dict[str, Any]:
    """The digest of a class's tensors as far as the call has brought them: without the nonces, which differ."""
    length, digest = call.contents.get(exposure) or (0, hashlib.sha256())
    data: bytes = getattr(chunk, exposure.chunk_field)
    digest.update(data)
    length += len(data)
    call.contents[exposure] = length, digest
    return {"class": exposure.value, "bytes": length, "sha256": digest.hexdigest()}


def _attestation(message: Message) -> journal_pb2.Envelope | None:
    content = _content(message)
    if "attestation" not in content.DESCRIPTOR.fields_by_name or not content.HasField("attestation"):
        return None
    envelope: journal_pb2.Envelope = content.attestation
    return envelope


def _chain(
    peer: str, known: bytes | None, public_key: bytes, rotations: Sequence[journal_pb2.Envelope]
) -> list[dict[str, Any]] | None:
    """The rotations that lead from the known key, if any, to the new one; None if it is the known one.

    Raises as ``Door.check_key`` does.
    """
    if len(public_key) != AUDIT_KEY_BYTES:
        raise RefusedError(f"the audit key has {len(public_key)} bytes; an Ed25519 public key has {AUDIT_KEY_BYTES}")
    if known is None:
        return []
    if known == public_key:
        return None
    found: list[dict[str, Any]] = []
    for envelope in map(from_message, rotations):
        try:
            known = follow(envelope, peer, known)
        except JournalError:
            continue
        found.append(to_json(envelope))
    if known != public_key:
        raise IdentityError(
            f"{peer} was enrolled with the audit key {key_id(known)[:16]}… and now shows another, "
            f"{key_id(public_key)[:16]}…, without a signed change of keys. A key is changed with `keys --rotate`; a "
            "party that has lost its key joins under a new name"
        )
    return found


def _manifest(message: Message) -> list[Mapping[str, Any]]:
    header = _content(message)
    for part in getattr(header, "parts", ()):
        for tensor in part.tensors:
            if any(size >= _LARGEST_SIZE for size in tensor.shape):
                raise RefusedError(f"tensor {tensor.name!r} has a size of 2^53 or more")
    return [
        {
            "class": Exposure.from_number(part.exposure_class).value,
            "name": tensor.name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
        }
        for part in getattr(header, "parts", ())
        for tensor in part.tensors
    ]
