"""The one door: every message passes here, byte for byte, in either direction.

Going out: serialise once, attribute every byte, check that each exposure class may leave, write the record and
fsync it; only then are the bytes handed over to be sent. Coming in: attribute every byte (an unknown field is
refused), write the record, then parse. What was refused is a record too.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from privacy.errors import ConsentError, RefusedError
from privacy.exposure import SCHEMA_SHA256, Attribution, Exposure, attribute
from privacy.journal import Journal

NONCE_BYTES = 16
_LARGEST_SIZE = 2**53  # beyond it, JSON has no exact numbers


def nonce() -> bytes:
    """Sixteen random bytes for a message: its hash then tells nothing of what else is in it."""
    return secrets.token_bytes(NONCE_BYTES)


class Gate(Protocol):
    """Decides whether bytes of the given classes may leave now; raises ``ConsentError`` if not."""

    def check(self, classes: Iterable[Exposure]) -> None: ...


class Tally:
    """Counts a call's messages in one direction, and hashes their hashes."""

    def __init__(self) -> None:
        self.messages = 0
        self.length = 0
        self.last_index = -1
        self._digest = hashlib.sha256()

    def add(self, digest: bytes, length: int) -> int:
        """Takes the next message; returns its number in the call."""
        self._digest.update(digest)
        self.length += length
        self.messages += 1
        return self.messages - 1

    @property
    def sha256(self) -> bytes:
        """SHA-256 over the messages' SHA-256 digests."""
        return self._digest.digest()


@dataclass
class Call:
    """One RPC as the journal knows it. ``call_id`` is the nonce of the call's first message, as hex.

    ``attempt`` counts the tries of the same upload; ``round`` is None outside rounds.
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
    sent: Tally = field(default_factory=Tally)
    received: Tally = field(default_factory=Tally)

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
    """The door of one party. ``identity`` is its own URI; ``gate`` decides what may leave."""

    def __init__(self, journal: Journal, *, identity: str, federation: str, gate: Gate) -> None:
        self.journal = journal
        self.identity = identity
        self.federation = federation
        self.gate = gate

    def through(self, gate: Gate) -> Door:
        """The same door with another gate."""
        return Door(self.journal, identity=self.identity, federation=self.federation, gate=gate)

    def note(self, kind: str, **content: Any) -> int:
        """Records something that is not a message (a consent, a joined run); returns the record's index."""
        return self.journal.append([{"kind": kind, **self._party(), **content}])[0]

    def release(self, messages: Sequence[Message], call: Call) -> list[bytes]:
        """The exact bytes to send, one item a message, all of them recorded and durable.

        Raises ``ConsentError`` or ``RefusedError`` if any of them may not leave; then none does, and the refusal
        is a record.
        """
        sealed, records = [], []
        for message in messages:
            data = message.SerializeToString()
            try:
                attribution = attribute(data, message.DESCRIPTOR)
                self.gate.check(attribution.classes)
                records.append(self._record(data, message, attribution, call, "sent"))
            except (ConsentError, RefusedError) as error:
                self._refuse(data, message.DESCRIPTOR.full_name, call, "sent", error)
                raise
            sealed.append(data)
        call.sent.last_index = self.journal.append(records)[-1]
        return sealed

    def admit(self, data: bytes, kind: type[M], call: Call, *, durable: bool = False) -> M:
        """The message in received bytes, recorded.

        ``durable`` waits for the record to reach the disk; what acknowledges the message needs that, and a signed
        checkpoint gives it too. Raises ``RefusedError`` for bytes that the schema does not account for.
        """
        message = kind()
        try:
            attribution = attribute(data, kind.DESCRIPTOR)
            message.ParseFromString(data)
            record = self._record(data, message, attribution, call, "received")
        except (RefusedError, DecodeError) as error:
            self._refuse(data, kind.DESCRIPTOR.full_name, call, "received", error)
            raise RefusedError(f"{call.rpc}: the message is not acceptable: {error}") from None
        call.received.last_index = self.journal.append([record], durable=durable)[0]
        return message

    def _record(
        self, data: bytes, message: Message, attribution: Attribution, call: Call, direction: str
    ) -> dict[str, Any]:
        own_nonce = _nonce_of(message)
        if call.call_id is None:
            call.call_id = own_nonce.hex()
        digest = hashlib.sha256(data)
        tally = call.sent if direction == "sent" else call.received
        record = {
            "kind": "message",
            **self._party(),
            **call.describe(),
            "direction": direction,
            "frame": tally.add(digest.digest(), len(data)),
            "message_type": message.DESCRIPTOR.full_name,
            "schema_sha256": SCHEMA_SHA256,
            "sha256": digest.hexdigest(),
            "length": len(data),
            "fields": attribution.fields,
            "classes": {exposure.value: count for exposure, count in attribution.classes.items()},
            "ledger": [],
        }
        if tensors := _manifest(message):
            record["tensors"] = tensors
        return record

    def _refuse(self, data: bytes, message_type: str, call: Call, direction: str, error: Exception) -> None:
        self.note(
            "refusal",
            **call.describe(),
            direction=direction,
            message_type=message_type,
            schema_sha256=SCHEMA_SHA256,
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            reason=str(error),
        )

    def _party(self) -> dict[str, Any]:
        return {"federation": self.federation, "self": self.identity}


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


def _manifest(message: Message) -> list[Mapping[str, Any]]:
    frame = message.WhichOneof("frame") if "frame" in message.DESCRIPTOR.oneofs_by_name else None
    header = getattr(message, frame) if frame else message
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
