"""What the attribution of bytes to exposure classes promises."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MEANING, Exposure, attribute, expand, field_exposure
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2, plan_pb2, tensor_pb2

KINDS: tuple[type[Message], ...] = (
    wire.GetPlanRequest,
    wire.GetPlanResponse,
    wire.JoinRequest,
    wire.JoinResponse,
    wire.GetTaskRequest,
    wire.GetTaskResponse,
    wire.SubmitUpdateRequest,
    wire.SubmitUpdateResponse,
    wire.AttestRequest,
    wire.AttestResponse,
    journal_pb2.Envelope,
    journal_pb2.Signature,
    plan_pb2.RunPlan,
    tensor_pb2.TensorChunk,
)
VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=300),
    FieldDescriptor.TYPE_STRING: st.text(max_size=100),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 20),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message] | None = None) -> Message:
    """A message of any kind with any of its fields set, nested ones included."""
    message = (kind or draw(st.sampled_from(KINDS)))()
    fill(draw, message)
    return message


def fill(draw: st.DrawFn, message: Message) -> None:
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type is not None:
            if field.is_repeated:
                for _ in range(draw(st.integers(0, 3))):
                    fill(draw, getattr(message, field.name).add())
            else:
                getattr(message, field.name).SetInParent()
                fill(draw, getattr(message, field.name))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(VALUES[field.type], max_size=4)))
        else:
            setattr(message, field.name, draw(VALUES[field.type]))


def update(**content: Any) -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(update=wire.Update(nonce=bytes(16), silo="hospital1", **content))


@given(messages())
@settings(max_examples=300, deadline=None)
def test_every_byte_is_attributed_exactly_once(message: Message) -> None:
    data = message.SerializeToString()
    fields, classes = attribute(data, message.DESCRIPTOR)
    assert sum(fields.values()) == len(data)
    assert sum(classes.values()) == len(data)


@given(messages())
@settings(max_examples=100, deadline=None)
def test_fields_and_classes_agree_with_the_schema(message: Message) -> None:
    fields, classes = attribute(message.SerializeToString(), message.DESCRIPTOR)
    by_class: dict[Exposure, int] = {}
    for path, count in fields.items():
        exposure = field_exposure(message.DESCRIPTOR.full_name, path)
        by_class[exposure] = by_class.get(exposure, 0) + count
    assert by_class == classes


def test_a_chunks_bytes_with_tag_and_length_are_its_classs() -> None:
    for exposure in Exposure:
        if exposure in (Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.CHECKPOINT):
            continue
        chunk = tensor_pb2.TensorChunk(nonce=bytes(16), **{exposure.chunk_field: bytes(300)})  # type: ignore[arg-type]
        data = wire.SubmitUpdateRequest(chunk=chunk).SerializeToString()
        # A tag (two bytes from field 16 on), 2 bytes of length and 300; the rest is the nonce (18 bytes) and the
        # outer tag and length (3 bytes).
        tag = 1 if exposure.number < 16 else 2
        assert attribute(data, wire.SubmitUpdateRequest.DESCRIPTOR).classes == {
            exposure: tag + 302,
            Exposure.PROTOCOL: 21,
        }


def test_a_silos_name_is_identity() -> None:
    data = update().SerializeToString()
    attribution = attribute(data, wire.SubmitUpdateRequest.DESCRIPTOR)
    assert attribution.fields == {"update": 2, "update.nonce": 18, "update.silo": 11}
    assert attribution.classes == {Exposure.PROTOCOL: 20, Exposure.IDENTITY: 11}


def test_an_unknown_field_is_refused() -> None:
    data = wire.GetPlanRequest(nonce=bytes(16), silo="h").SerializeToString()
    hidden = b"\x9a\x06\x05hello"  # field 99, five bytes
    with pytest.raises(RefusedError, match=f"unknown field 99 in medsilo.v1.GetPlanRequest at byte {len(data)}"):
        attribute(data + hidden, wire.GetPlanRequest.DESCRIPTOR)


def test_an_unknown_field_that_protobuf_carries_along_is_refused() -> None:
    smuggled = wire.GetPlanRequest()
    smuggled.ParseFromString(wire.GetPlanRequest(nonce=bytes(16)).SerializeToString() + b"\x9a\x06\x05hello")
    assert b"hello" in smuggled.SerializeToString()
    with pytest.raises(RefusedError, match="unknown field 99"):
        attribute(smuggled.SerializeToString(), wire.GetPlanRequest.DESCRIPTOR)


def test_an_unknown_field_deep_inside_is_refused() -> None:
    spec = tensor_pb2.TensorSpec(name="w", shape=[2], dtype="F32").SerializeToString() + b"\x9a\x06\x01x"
    part = b"\x08\x04\x12" + bytes([len(spec)]) + spec
    header = b"\x2a" + bytes([len(part)]) + part
    data = b"\x0a" + bytes([len(header)]) + header
    wire.SubmitUpdateRequest.FromString(data)  # protobuf itself does not mind
    with pytest.raises(RefusedError, match=r"unknown field 99 in medsilo\.v1\.TensorSpec"):
        attribute(data, wire.SubmitUpdateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("data", "wire_type"),
    [
        (b"\x08\x05", 0),  # field 1 (bytes) as a number
        (b"\x09" + bytes(8), 1),
        (b"\x0d" + bytes(4), 5),
        (b"\x0b\x0c", 3),  # a group
        (b"\x0c", 4),
        (b"\x0e", 6),
        (b"\x0f", 7),
    ],
)
def test_a_wrong_wire_type_is_refused(data: bytes, wire_type: int) -> None:
    with pytest.raises(RefusedError, match=f"nonce has wire type {wire_type} at byte 0"):
        attribute(data, wire.GetPlanRequest.DESCRIPTOR)


def test_a_number_may_not_travel_as_bytes() -> None:
    with pytest.raises(RefusedError, match="protocol_version has wire type 2"):
        attribute(b"\x1a\x01\x01", wire.GetPlanRequest.DESCRIPTOR)


def test_repeated_numbers_may_be_packed_or_not() -> None:
    packed = tensor_pb2.TensorSpec(shape=[3, 300]).SerializeToString()
    loose = b"\x10\x03\x10\xac\x02"
    assert tensor_pb2.TensorSpec.FromString(loose).shape == [3, 300]
    assert attribute(packed, tensor_pb2.TensorSpec.DESCRIPTOR).fields == {"shape": len(packed)}
    assert attribute(loose, tensor_pb2.TensorSpec.DESCRIPTOR).fields == {"shape": len(loose)}


def test_a_message_cut_short_anywhere_inside_a_field_is_refused() -> None:
    message = wire.GetPlanRequest(nonce=bytes(16), silo="hospital1", protocol_version=300)
    data = message.SerializeToString()
    between_fields = {0, 18, 29, len(data)}
    for end in range(len(data) + 1):
        if end in between_fields:
            attribute(data[:end], message.DESCRIPTOR)
        else:
            with pytest.raises(RefusedError):
                attribute(data[:end], message.DESCRIPTOR)


def test_a_nested_message_may_not_reach_beyond_its_length() -> None:
    data = bytearray(update().SerializeToString())
    data[1] -= 1
    with pytest.raises(RefusedError, match="past the end"):
        attribute(bytes(data), wire.SubmitUpdateRequest.DESCRIPTOR)


@pytest.mark.parametrize("data", [b"\x80", b"\x18\x80", b"\x18" + b"\x80" * 10 + b"\x01", b"\xff" * 40, b"\x0a\xff"])
def test_a_number_that_does_not_end_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="cut short or too long"):
        attribute(data, wire.GetPlanRequest.DESCRIPTOR)


def test_a_huge_length_is_refused_not_followed() -> None:
    with pytest.raises(RefusedError, match="past the end"):
        attribute(b"\x0a" + b"\xff" * 9 + b"\x01", wire.GetPlanRequest.DESCRIPTOR)


def test_random_bytes_are_attributed_or_refused_and_nothing_else() -> None:
    numbers = random.Random(20261121)
    accepted = 0
    for count in range(65_536):
        data = numbers.randbytes(numbers.randrange(24))
        kind = KINDS[count % len(KINDS)]
        try:
            attribution = attribute(data, kind.DESCRIPTOR)
        except RefusedError:
            continue
        accepted += 1
        assert sum(attribution.fields.values()) == sum(attribution.classes.values()) == len(data)
    assert accepted > 1000  # the empty message at least


@given(messages(wire.SubmitUpdateRequest), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_attributed_holds_no_field_that_protobuf_does_not_know(message: Message, data: st.DataObject) -> None:
    mutable = bytearray(message.SerializeToString() or b"\x0a\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        mutable[data.draw(st.integers(0, len(mutable) - 1))] = data.draw(st.integers(0, 255))
    try:
        attribute(bytes(mutable), message.DESCRIPTOR)
        parsed = type(message).FromString(bytes(mutable))
    except (RefusedError, DecodeError):
        return
    known = type(message).FromString(bytes(mutable))
    known.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert known.SerializeToString() == parsed.SerializeToString()


def test_model_parameters_stands_for_extractor_and_classifier() -> None:
    assert expand(["MODEL_PARAMETERS"]) == {
        Exposure.MODEL_PARAMETERS_EXTRACTOR,
        Exposure.MODEL_PARAMETERS_CLASSIFIER,
    }
    assert expand(["MODEL_PARAMETERS_CLASSIFIER"]) == {Exposure.MODEL_PARAMETERS_CLASSIFIER}
    assert expand([]) == frozenset()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, r"the classes are .*SAMPLE_COUNT") for name in ("", "EVERYTHING", "_", "UNSPECIFIED")),
        *((name, r"did you mean MODEL_PARAMETERS\?") for name in ("MODEL_PARAMETER", "model_parameters")),
        ("LOCAL_METRIC", r"did you mean LOCAL_METRICS\?"),
    ],
)
def test_a_name_that_is_no_class_is_an_error_that_names_the_nearest_or_all(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"is not an exposure class; " + words):
        expand([name])


def test_every_class_has_a_meaning_in_words() -> None:
    assert set(MEANING) == set(Exposure)
