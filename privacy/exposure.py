"""What each byte of a message exposes: exposure classes, and the attribution of serialised messages to them.

The attribution reads the exact bytes that go over the wire, not the message object: protobuf keeps fields that
it does not know through parsing and serialising, so only the bytes tell what really leaves.

>>> from medsilo.protos.medsilo.v1 import coordinator_pb2
>>> message = coordinator_pb2.GetPlanRequest(nonce=bytes(16), silo="hospital1", protocol_version=1)
>>> attribute(message.SerializeToString(), message.DESCRIPTOR).classes
{<Exposure.PROTOCOL: 'PROTOCOL'>: 20, <Exposure.IDENTITY: 'IDENTITY'>: 11}
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from medsilo.privacy.errors import RefusedError
from medsilo.protos.medsilo.v1 import (
    coordinator_pb2,
    enrolment_pb2,
    exposure_pb2,
    journal_pb2,
    plan_pb2,
    tensor_pb2,
    witness_pb2,
)

_SCHEMAS = (exposure_pb2, tensor_pb2, journal_pb2, plan_pb2, coordinator_pb2, enrolment_pb2, witness_pb2)
SCHEMA_FILES: tuple[FileDescriptor, ...] = tuple(module.DESCRIPTOR for module in _SCHEMAS)
SCHEMA_SHA256 = hashlib.sha256(b"".join(file.serialized_pb for file in SCHEMA_FILES)).hexdigest()
"""SHA-256 over the schemas' descriptors: which annotation a record's attribution was made with."""


class Exposure(StrEnum):
    """An exposure class, spelled as in consents, plans, journals and reports."""

    PROTOCOL = "PROTOCOL"
    IDENTITY = "IDENTITY"
    INITIAL_MODEL = "INITIAL_MODEL"
    MODEL_PARAMETERS_EXTRACTOR = "MODEL_PARAMETERS_EXTRACTOR"
    MODEL_PARAMETERS_CLASSIFIER = "MODEL_PARAMETERS_CLASSIFIER"
    RUNNING_STATISTICS = "RUNNING_STATISTICS"
    CLASSIFIER_GRADIENT = "CLASSIFIER_GRADIENT"
    DATA_IDENTIFIER = "DATA_IDENTIFIER"
    PROTOTYPES = "PROTOTYPES"
    SAMPLE_COUNT = "SAMPLE_COUNT"
    LABEL_COUNTS = "LABEL_COUNTS"
    LOCAL_METRICS = "LOCAL_METRICS"
    DERIVED_ACCURACY = "DERIVED_ACCURACY"
    PEER_DERIVED = "PEER_DERIVED"
    MODEL_GRADIENT = "MODEL_GRADIENT"
    PARAMETER_MASK = "PARAMETER_MASK"
    PEER_RATINGS = "PEER_RATINGS"
    PEER_MODELS = "PEER_MODELS"
    PUBLIC_DATA = "PUBLIC_DATA"
    MASKED_UPDATE = "MASKED_UPDATE"
    PEER_INITIAL_MODEL = "PEER_INITIAL_MODEL"
    FEATURE_MOMENTS = "FEATURE_MOMENTS"
    SEALED_MODEL = "SEALED_MODEL"
    MODEL_DISTANCES = "MODEL_DISTANCES"
    OPENING_SHARES = "OPENING_SHARES"
    MIXING_WEIGHTS = "MIXING_WEIGHTS"
    SEALED_MIXTURE = "SEALED_MIXTURE"
    CHECKPOINT = "CHECKPOINT"

    @property
    def number(self) -> exposure_pb2.ExposureClass:
        """The class's number on the wire."""
        return cast("exposure_pb2.ExposureClass", exposure_pb2.ExposureClass.Value(f"EXPOSURE_CLASS_{self.name}"))

    @property
    def chunk_field(self) -> str:
        """The field of ``TensorChunk`` that carries bytes of this class."""
        return self.name.lower()

    @classmethod
    def from_number(cls, number: int) -> Exposure:
        """The class of a wire number; raises ``RefusedError`` for a number that the schema does not know."""
        try:
            name = exposure_pb2.ExposureClass.Name(number)
            return cls[name.removeprefix("EXPOSURE_CLASS_")]
        except (ValueError, KeyError):
            raise RefusedError(f"exposure class {number} is not one of this version's schema") from None


MODEL = (Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER)
"""A whole model's trainable parameters."""

STARTS = (Exposure.INITIAL_MODEL, Exposure.PEER_INITIAL_MODEL)
"""What a silo may be given to start from."""

UNDER_ROSTER = frozenset({Exposure.MASKED_UPDATE, Exposure.SEALED_MODEL})
"""What is sent for a roster of silos, which is on record before."""

BLIND_UPLINK = frozenset({Exposure.SEALED_MODEL, Exposure.MODEL_DISTANCES, Exposure.OPENING_SHARES})
"""What a silo sends where mixtures are blind."""

BLIND_DOWNLINK = frozenset({Exposure.MIXING_WEIGHTS, Exposure.SEALED_MIXTURE, Exposure.OPENING_SHARES})
"""What it is given there."""

MADE_OF_UPDATES = frozenset(
    {
        Exposure.PEER_DERIVED,
        Exposure.PEER_MODELS,
        Exposure.DERIVED_ACCURACY,
        Exposure.PEER_INITIAL_MODEL,
        Exposure.MIXING_WEIGHTS,
        Exposure.SEALED_MIXTURE,
    }
)
"""What a coordinator makes of updates, or passes on of them. It leaves no silo, and tells about those who sent them."""

TENSOR_CLASSES: tuple[Exposure, ...] = tuple(
    exposure for exposure in Exposure if exposure.chunk_field in tensor_pb2.TensorChunk.DESCRIPTOR.fields_by_name
)
"""The classes that travel as tensors, each in its own field of ``TensorChunk``."""

MEANING: dict[Exposure, str] = {
    Exposure.PROTOCOL: "Round numbers, versions, the names and shapes of what is sent. Nothing about patients.",
    Exposure.IDENTITY: "The hospital's name, certificate and public keys. Nothing about patients.",
    Exposure.INITIAL_MODEL: "A starting model that no hospital's images have made: random numbers, or public weights "
    "that the plan names.",
    Exposure.MODEL_PARAMETERS_EXTRACTOR: "The part of the trained model that turns an image into features. It was "
    "shaped by patients' images; with effort, properties of single images can sometimes be inferred from it.",
    Exposure.MODEL_PARAMETERS_CLASSIFIER: "The model's last layer, which names the tissue. How often each class "
    "occurs in the hospital can be estimated from it.",
    Exposure.RUNNING_STATISTICS: "Averages and variances of features over the hospital's images.",
    Exposure.CLASSIFIER_GRADIENT: "The direction in which the last layer was changed: the shares of the classes in "
    "the hospital's data can be read off it.",
    Exposure.DATA_IDENTIFIER: "An average brightness profile of the hospital's images.",
    Exposure.PROTOTYPES: "The average features of each class in the hospital's data.",
    Exposure.SAMPLE_COUNT: "How many training images the hospital used.",
    Exposure.LABEL_COUNTS: "How many training images of each class the hospital used.",
    Exposure.LOCAL_METRICS: "How well the model did on the hospital's own test images (accuracy, loss).",
    Exposure.DERIVED_ACCURACY: "How well the hospital's model did on the coordinator's public images.",
    Exposure.PEER_DERIVED: "Mixtures made from several hospitals' contributions, handed back to hospitals.",
    Exposure.MODEL_GRADIENT: "The average direction in which the hospital's images would change the whole model: as "
    "telling as the model itself, the shares of the classes included.",
    Exposure.PARAMETER_MASK: "Which of the model's numbers matter most to the hospital's images, yes or no for each.",
    Exposure.PEER_RATINGS: "How much other hospitals' models helped on the hospital's own images.",
    Exposure.PEER_MODELS: "Other hospitals' trained models as they are, not mixed: each hospital that takes part sees "
    "single models of the others, and can try on them what one can try on a model.",
    Exposure.PUBLIC_DATA: "Fingerprints of the coordinator's public images, so that the hospital can check that none "
    "of them is its own. Nothing about its patients.",
    Exposure.MASKED_UPDATE: "The hospital's trained model under masks: by itself it looks like random numbers. Added "
    "to those of the other hospitals of the round it gives their sum, which is all that the coordinator can read.",
    Exposure.PEER_INITIAL_MODEL: "A starting model made of hospitals' models, the outcome of an earlier run for "
    "example: it was shaped by those hospitals' images, and reaches every hospital of this run.",
    Exposure.FEATURE_MOMENTS: "Sums over the hospital's images of the products of each two features, and of each "
    "feature with each class: how its images vary, and how that goes with the findings. No model was trained.",
    Exposure.SEALED_MODEL: "The hospital's trained model, sealed: it looks like random numbers. The coordinator can "
    "mix such models without reading them, and each hospital can open the mixture that is made for it, and no other.",
    Exposure.MODEL_DISTANCES: "Random numbers from which, together with another hospital's, the coordinator works out "
    "how far the two hospitals' models lie apart: one number for each pair of hospitals, and nothing else.",
    Exposure.OPENING_SHARES: "What other hospitals need to open their mixtures, each hidden from all but one. It is "
    "sent after this hospital has checked how much of its model each of them gets.",
    Exposure.MIXING_WEIGHTS: "How much of whose model goes into each hospital's mixture: numbers that the coordinator "
    "makes of distances between models, and shows to every hospital of the run.",
    Exposure.SEALED_MIXTURE: "A mixture of several hospitals' models, which only the hospital that it is made for can "
    "open.",
    Exposure.CHECKPOINT: "For witnesses that the hospital has named: the name of its journal, how many records it "
    "holds, and a hash over them. Nothing about patients; it shows when the hospital takes part in something.",
}
"""Each class in words for someone who does not know what a gradient is."""


def expand(names: Iterable[str]) -> frozenset[Exposure]:
    """Exposure classes by name; ``MODEL_PARAMETERS`` stands for extractor and classifier.

    Raises ``ValueError`` naming the first unknown name and the known ones.
    """
    classes: set[Exposure] = set()
    for name in names:
        if name == "MODEL_PARAMETERS":
            classes.update(MODEL)
        elif name in Exposure.__members__:
            classes.add(Exposure[name])
        else:
            known = ["MODEL_PARAMETERS", *Exposure]
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else f"the classes are {', '.join(known)}"
            raise ValueError(f"{name!r} is not an exposure class; {hint}")
    return frozenset(classes)


class Attribution(NamedTuple):
    """Bytes of one serialised message per field path and per exposure class; either sums to its length."""

    fields: dict[str, int]
    classes: dict[Exposure, int]


@dataclass(frozen=True)
class _Field:
    name: str
    exposure: Exposure
    wire_types: frozenset[int]
    child: Descriptor | None


_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPE = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _DELIMITED,
    FieldDescriptor.TYPE_BYTES: _DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: _DELIMITED,
}


def exposure_of(field: FieldDescriptor) -> Exposure | None:
    """The class that a field's annotation gives, or None where it has none."""
    number: int = field.GetOptions().Extensions[exposure_pb2.exposure]  # type: ignore[index]
    return Exposure.from_number(number) if number else None


@cache
def field_exposure(message_type: str, path: str) -> Exposure:
    """The class of a field path (``chunk.nonce``) of a message by its full name, as the schema annotates it."""
    message: Any = next(
        file.message_types_by_name[name]
        for file in SCHEMA_FILES
        for name in file.message_types_by_name
        if f"{file.package}.{name}" == message_type
    )
    *parents, last = path.split(".")
    for name in parents:
        message = message.fields_by_name[name].message_type
    return _table(message)[message.fields_by_name[last].number].exposure


@cache
def _table(message: Descriptor) -> dict[int, _Field]:
    table = {}
    for field in message.fields:
        exposure = exposure_of(field)
        if exposure is None:
            raise RefusedError(f"field {field.full_name} has no exposure class in the schema; it cannot be sent")
        wire_type = _WIRE_TYPE.get(field.type, _VARINT)
        packed = {_DELIMITED} if field.is_repeated and wire_type != _DELIMITED else set()
        table[field.number] = _Field(field.name, exposure, frozenset({wire_type} | packed), field.message_type)
    return table


def attribute(data: bytes, message: Any) -> Attribution:
    """Attributes every byte of a serialised message to a field and its exposure class.

    ``message`` is the message type's descriptor. A field's tag and length count as the field's own bytes. Raises
    ``RefusedError`` for a byte that belongs to no annotated field of the schema: an unknown field, a wrong wire type,
    a length beyond the end.
    """
    fields: dict[str, int] = {}
    classes: dict[Exposure, int] = {}
    _walk(memoryview(data), 0, len(data), message, "", fields, classes)
    return Attribution(fields, classes)


def _walk(
    data: memoryview,
    position: int,
    end: int,
    message: Descriptor,
    prefix: str,
    fields: dict[str, int],
    classes: dict[Exposure, int],
) -> None:
    table = _table(message)
    while position < end:
        start = position
        tag, position = _varint(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        field = table.get(number)
        if field is None:
            raise RefusedError(f"unknown field {number} in {message.full_name} at byte {start}")
        if wire_type not in field.wire_types:
            raise RefusedError(f"field {message.full_name}.{field.name} has wire type {wire_type} at byte {start}")
        stop = position
        if wire_type == _VARINT:
            _, stop = _varint(data, position, end)
        elif wire_type == _DELIMITED:
            length, position = _varint(data, position, end)
            stop = position + length
        else:
            stop += 8 if wire_type == _FIXED64 else 4
        if stop > end:
            raise RefusedError(f"field {message.full_name}.{field.name} runs past the end of the message")
        path = prefix + field.name
        own = (position if field.child else stop) - start
        fields[path] = fields.get(path, 0) + own
        classes[field.exposure] = classes.get(field.exposure, 0) + own
        if field.child:
            _walk(data, position, stop, field.child, path + ".", fields, classes)
        position = stop


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise RefusedError(f"a number is cut short or too long at byte {position}")
