"""The door for another system's protocol: its messages pass as Medsilo's own do, byte for byte, but without receipts.

What such a system sends has no exposure classes of its own. They are written into its schemas, which stand with them in
the journal, so that ``audit verify`` attributes every byte anew without the other system. The other side signs nothing;
the journal says so before the first message, and every report of it repeats that.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from medsilo.privacy.door.door import Call, Gate
from medsilo.privacy.errors import ConfigurationError, ConsentError, RefusedError
from medsilo.privacy.exposure import Attribution, Exposure, attribute
from medsilo.privacy.journal.journal import Journal, read_journal, understanding
from medsilo.privacy.journal.records import (
    Direction,
    ForeignPeerRecord,
    KeyRecord,
    MessageRecord,
    Record,
    RefusalRecord,
    RunRecord,
    SchemaRecord,
    content,
)
from medsilo.protos.medsilo.v1 import exposure_pb2
from medsilo.protos.nonces import NONCE_BYTES

_SIGNING_SECONDS = 60.0
"""A checkpoint is signed with each telling message, and else so often."""
_SILENT = frozenset({Exposure.PROTOCOL, Exposure.IDENTITY})


class ForeignSchema:
    """Another system's messages, with the exposure class of each field that may pass.

    Args:
        files: its ``FileDescriptorProto``s, serialised, each after those that it imports.
        exposures: the classes by field (``Message.field``, without the package). A message with a field that has none
            is refused.
        split: a field of bytes that each hold several classes; the journal has them as parts of it.

    Raises ``ConfigurationError`` for a field that the files do not have.
    """

    def __init__(self, files: Sequence[bytes], exposures: Mapping[str, Exposure], *, split: str) -> None:
        protos = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
        fields = {name: field for proto in protos for name, field in _fields("", proto.message_type)}
        for name, exposure in exposures.items():
            if name not in fields:
                raise ConfigurationError(f"the schemas have no field {name}")
            fields[name].options.Extensions[exposure_pb2.exposure] = exposure.number  # type: ignore[index]
        self._pool = descriptor_pool.DescriptorPool()
        for proto in protos:
            self._pool.Add(proto)
        kept = [exposure_pb2.DESCRIPTOR.serialized_pb, *(_with_parts(proto, split) for proto in protos)]
        self.files = [base64.b64encode(file).decode() for file in kept]
        self.sha256 = hashlib.sha256(b"".join(kept)).hexdigest()

    def make(self, name: str) -> Any:
        """An empty message by its full name."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))()

    def read(self, data: bytes, name: str) -> tuple[Any, Attribution]:
        """The message in exact bytes, and the attribution of each of them.

        Raises ``RefusedError`` for bytes that are no such message, or that belong to no annotated field.
        """
        message = self.make(name)
        try:
            message.ParseFromString(data)  # first: it limits how deeply messages are nested
        except DecodeError as error:
            raise RefusedError(f"it is not a {name}: {error}") from None
        return message, attribute(data, message.DESCRIPTOR)


class ForeignDoor:
    """One party's door to one other party that does not speak Medsilo.

    ``protocol``: what it speaks, in words. Messages are single requests and single answers. Its methods may be called
    from any thread.
    """

    def __init__(
        self, journal: Journal, schema: ForeignSchema, *, identity: str, federation: str, peer: str, protocol: str
    ) -> None:
        self.journal = journal
        self.schema = schema
        self.peer = peer
        self.rounds: dict[str, set[int]] = {}
        """Rounds of each run of which something was sent."""
        self.plans: dict[str, Mapping[str, Any]] = {}
        """The last plan of each run on record."""
        self._party = {"federation": federation, "self": identity}
        self._signing = threading.Lock()
        self._signed = time.monotonic()
        with understanding(journal.directory):
            self._resume(protocol)

    def note(self, record: Record) -> None:
        """Records something that is not a message."""
        self.journal.append([{**self._party, **content(record)}])

    def release(
        self,
        message: Message,
        call: Call,
        gate: Gate,
        *,
        parts: tuple[str, Mapping[Exposure, int]] | None = None,
        tensors: Sequence[Mapping[str, Any]] = (),
        head: Callable[[int], bytes] = lambda _: b"",
    ) -> bytes:
        """The exact bytes to send, recorded and durable.

        ``parts``: a field of bytes, by its path, and how many of its bytes are of which class. ``tensors``: which ones
        this message, or those that follow it, carry. ``head``: what goes before the bytes on the wire, by how many they
        are; it is in what is returned.

        Raises ``ConsentError`` or ``RefusedError`` if it may not leave; then the refusal is a record.
        """
        data = message.SerializeToString(deterministic=True)
        with gate.held():
            try:
                _, attribution = self.schema.read(data, message.DESCRIPTOR.full_name)
                if parts is not None:
                    attribution = _split(attribution, *parts)
                gate.check(attribution.classes)
            except (ConsentError, RefusedError) as error:
                self.refuse(data, message.DESCRIPTOR.full_name, call, "sent", str(error))
                error.recorded = True
                raise
            begin = head(len(data))
            more: dict[str, Any] = {"tensors": list(tensors)} if tensors else {}
            more |= {"head_sha256": hashlib.sha256(begin).hexdigest(), "head_length": len(begin)}
            self.note(self._record(data, message.DESCRIPTOR.full_name, attribution, call, "sent", **more))
        self._sign(telling=not attribution.classes.keys() <= _SILENT)
        return begin + data

    def admit(self, data: bytes, name: str, call: Call) -> Any:
        """The message in received bytes, recorded; raises ``RefusedError`` for what the schema does not account for."""
        try:
            message, attribution = self.schema.read(data, name)
        except RefusedError as error:
            self.refuse(data, name, call, "received", str(error))
            error.recorded = True
            raise
        self.note(self._record(data, name, attribution, call, "received"))
        return message

    def refuse(self, data: bytes, name: str, call: Call, direction: Direction, reason: str) -> None:
        """Records that a message was refused, and why."""
        record = RefusalRecord(
            **call.describe(),
            direction=direction,
            message_type=name,
            schema_sha256=self.schema.sha256,
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            reason=reason,
        )
        self.note(record)
        self._sign(telling=True)

    def call(self, rpc: str, certificate_sha256: str, purpose: str, **of_run: Any) -> Call:
        """A new call; the other system's messages have no nonces, so it gets a random name."""
        return Call(rpc, self.peer, certificate_sha256, purpose, call_id=secrets.token_hex(NONCE_BYTES), **of_run)

    def _record(
        self, data: bytes, name: str, attribution: Attribution, call: Call, direction: Direction, **more: Any
    ) -> MessageRecord:
        return MessageRecord(
            **call.describe(),
            direction=direction,
            frame=0,
            message_type=name,
            schema_sha256=self.schema.sha256,
            sha256=hashlib.sha256(data).hexdigest(),
            length=len(data),
            fields=attribution.fields,
            classes={exposure.value: count for exposure, count in attribution.classes.items()},
            ledger=[],
            **more,
        )

    def _sign(self, *, telling: bool) -> None:
        with self._signing:
            now = time.monotonic()
            if telling or now - self._signed > _SIGNING_SECONDS:
                self.journal.checkpoint()
                self._signed = now

    def _resume(self, protocol: str) -> None:
        begun, said, schemas = False, None, set()
        for record in read_journal(self.journal.directory):
            match record:
                case MessageRecord():
                    if record.direction == "sent" and record.run is not None and record.round is not None:
                        self.rounds.setdefault(record.run, set()).add(record.round)
                case KeyRecord():
                    begun = True
                case ForeignPeerRecord():
                    said = record.protocol if record.peer == self.peer else said
                case SchemaRecord():
                    schemas.add(record.schema_sha256)
                case RunRecord():
                    self.plans[record.run] = record.plan
        if not begun:
            self.note(KeyRecord(public_key=self.journal.public_key.hex(), origin=self.journal.origin))
        if said != protocol:
            self.note(ForeignPeerRecord(peer=self.peer, protocol=protocol))
        if self.schema.sha256 not in schemas:
            self.note(SchemaRecord(schema_sha256=self.schema.sha256, files=self.schema.files))


def _fields(
    scope: str, messages: Iterable[descriptor_pb2.DescriptorProto]
) -> Iterable[tuple[str, descriptor_pb2.FieldDescriptorProto]]:
    for message in messages:
        name = f"{scope}{message.name}."
        yield from ((name + field.name, field) for field in message.field)
        yield from _fields(name, message.nested_type)


def _with_parts(proto: descriptor_pb2.FileDescriptorProto, split: str) -> bytes:
    """The file as the journal keeps it: the split field has a part for each class."""
    found = dict(_fields("", proto.message_type)).get(split)
    if found is None:
        return proto.SerializeToString(deterministic=True)
    kept = descriptor_pb2.FileDescriptorProto.FromString(proto.SerializeToString(deterministic=True))
    field = dict(_fields("", kept.message_type))[split]
    parts = kept.message_type.add(name="PartsOf" + "".join(word.title() for word in field.name.split("_")))
    field.type, field.type_name = field.TYPE_MESSAGE, f".{kept.package}.{parts.name}"
    for exposure in Exposure:
        part = parts.field.add(
            name=exposure.chunk_field,
            number=exposure.number,
            type=field.TYPE_BYTES,
            label=field.LABEL_OPTIONAL,
        )
        part.options.Extensions[exposure_pb2.exposure] = exposure.number  # type: ignore[index]
    return kept.SerializeToString(deterministic=True)


def _split(attribution: Attribution, path: str, parts: Mapping[Exposure, int]) -> Attribution:
    """The attribution with a field's content in parts; its tag and length stay its own."""
    fields, classes = dict(attribution.fields), dict(attribution.classes)
    content = sum(parts.values())
    if content > fields.get(path, 0):
        raise RefusedError(f"{path} has fewer bytes than its parts")
    fields[path] -= content
    classes[Exposure.PROTOCOL] -= content
    for exposure, count in parts.items():
        if count:
            fields[f"{path}.{exposure.chunk_field}"] = count
            classes[exposure] = classes.get(exposure, 0) + count
    return Attribution(fields, classes)
