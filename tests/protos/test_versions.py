"""What the schemas promise to parties of earlier releases, held against the schemas that those were built with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from google.protobuf.message import Message

from medsilo.privacy.door.protocol import agreed, fitted, is_essential, newer, since, spoken_instead
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import SCHEMA_FILES
from medsilo.protos import generate, versions
from medsilo.protos.medsilo.v1 import coordinator_pb2, enrolment_pb2, exposure_pb2, plan_pb2
from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION, released
from tests.support.schemas import messages_of

SILO = "spiffe://test/silo/hospital1"
KEPT = sorted(int(path.stem.removeprefix("version")) for path in versions.RELEASED.iterdir())
FIRST_CALLS = (coordinator_pb2.GetPlanRequest, enrolment_pb2.EnrolRequest)
REMEDY = (
    "What a released schema did not have says so: `(since) = N` on a field, `(value_since)` on an enumeration's value, "
    "`(call_since)` on a call, where N is PROTOCOL_VERSION (protos/versions.py) and newer than every released version. "
    "What a release had stays as it was. docs/upgrading.md has the rules"
)


def pool_of(version: int) -> descriptor_pool.DescriptorPool:
    """The schemas of a released version."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
    files = descriptor_pb2.FileDescriptorSet.FromString(released(version).read_bytes()).file
    left = {file.name: file for file in files}
    while left:
        for name, file in list(left.items()):
            if not set(file.dependency) & set(left):
                pool.Add(file)
                del left[name]
    return pool


def files_of(version: int) -> list[Any]:
    """Those that a released version had."""
    names = [file.name for file in descriptor_pb2.FileDescriptorSet.FromString(released(version).read_bytes()).file]
    pool = pool_of(version)
    return [pool.FindFileByName(file.name) for file in SCHEMA_FILES if file.name in names]


def described(files: Any, version: int | None = None) -> dict[str, tuple[object, ...]]:
    """All that a wire message may hold and a party may call: of a version, or of the schemas as they stand."""
    found: dict[str, tuple[object, ...]] = {}

    def note(item: Any, name: str, *what: object) -> None:
        if version is None or since(item) <= version:
            found[name] = what

    for file in files:
        for message in messages_of(file):
            for field in message.fields:
                kind = field.message_type or field.enum_type
                oneof = field.containing_oneof and field.containing_oneof.name
                type_name = kind and kind.full_name
                note(field, field.full_name, field.number, field.type, field.is_repeated, type_name, oneof)
        for enum in file.enum_types_by_name.values():
            for value in enum.values:
                note(value, f"{enum.full_name}.{value.name}", value.number)
        for service in file.services_by_name.values():
            for call in service.methods:
                ends = (call.input_type.full_name, call.output_type.full_name)
                note(call, call.full_name, *ends, call.client_streaming, call.server_streaming)
    return found


def changes(files: Any, version: int) -> list[str]:
    """What of the schemas claims to be of a released version and is not, and the other way round."""
    then, now = described(files_of(version)), described(files, version)
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def with_a_field(message_name: str, **options: int) -> Any:
    """The schemas with one more field in a message, in a pool of their own."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
    for file in SCHEMA_FILES:
        proto = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
        for message in proto.message_type:
            if message.name == message_name:
                field = message.field.add(name="later", number=900)
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_UINT64
                field.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
                for name, value in options.items():
                    field.options.Extensions[getattr(exposure_pb2, name)] = value
        pool.Add(proto)
    return [pool.FindFileByName(file.name) for file in SCHEMA_FILES]


def filled(kind: type[Message], version: int = PROTOCOL_VERSION) -> Message:
    """A message in which every field has something; of a choice, the last. What a message cannot do without is left
    out if it came after ``version``: a party of that version gets no such message."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if is_essential(field) and since(field) > version:
            continue
        values: list[Any]
        if field.message_type is not None:
            values = [filled(message_factory.GetMessageClass(field.message_type), version)]
        elif field.enum_type is not None:
            values = [1]
        else:
            values = [{field.CPPTYPE_STRING: b"x" if field.type == field.TYPE_BYTES else "x"}.get(field.cpp_type, 1)]
        if field.is_repeated:
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(values[0])
        else:
            setattr(message, field.name, values[0])
    return message


def unknown_in(message: Message) -> Iterator[str]:
    for field in unknown_fields.UnknownFieldSet(message):
        yield f"{message.DESCRIPTOR.full_name} {field.field_number}"
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if field.is_repeated else (value,):
                yield from unknown_in(item)


def carried() -> list[type[Message]]:
    """Every message that a service carries."""
    services = [service for file in SCHEMA_FILES for service in file.services_by_name.values()]
    kinds = [kind for service in services for call in service.methods for kind in (call.input_type, call.output_type)]
    return [message_factory.GetMessageClass(kind) for kind in kinds]


def test_every_older_version_that_is_supported_is_a_released_one() -> None:
    assert list(range(1, len(KEPT) + 1)) == KEPT
    assert set(range(OLDEST_VERSION, PROTOCOL_VERSION)) <= set(KEPT)
    assert max(KEPT) in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION)
    assert OLDEST_VERSION < PROTOCOL_VERSION, "the version before this one is always supported"


@pytest.mark.parametrize("version", KEPT)
def test_the_schemas_say_of_every_field_value_and_call_which_version_brought_it(version: int) -> None:
    assert changes(SCHEMA_FILES, version) == [], REMEDY


def test_nothing_is_newer_than_the_version_that_this_release_speaks() -> None:
    newest = described(SCHEMA_FILES, PROTOCOL_VERSION)
    assert described(SCHEMA_FILES).keys() == newest.keys(), REMEDY
    if PROTOCOL_VERSION not in KEPT:
        assert newest != described(SCHEMA_FILES, max(KEPT)), "nothing has changed: the version stays as it is"


def test_a_field_that_does_not_say_its_version_is_found() -> None:
    assert changes(with_a_field("JoinResponse"), 1) == ["medsilo.v1.JoinResponse.later"]
    assert changes(with_a_field("JoinResponse", since=2), 1) == []


def test_what_a_run_is_and_what_has_no_substitute_is_essential() -> None:
    """A plan without one of its fields is another plan, with another hash; and a choice has to be made."""
    for file in SCHEMA_FILES:
        for message in messages_of(file):
            for field in message.fields:
                if since(field) > 1 and (file.name == "medsilo/v1/plan.proto" or field.containing_oneof is not None):
                    assert is_essential(field), f"{field.full_name} needs `(essential) = true`. {REMEDY}"


def test_the_first_calls_are_the_same_in_every_version() -> None:
    for kind in FIRST_CALLS:
        assert [field.name for field in kind.DESCRIPTOR.fields if since(field) > 1] == []
        assert kind.DESCRIPTOR.fields_by_name["protocol_version"].number == 3


def test_every_other_request_says_which_version_its_silo_speaks() -> None:
    for call in coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].methods:
        header = coordinator_pb2.Update.DESCRIPTOR if call.client_streaming else call.input_type
        assert "protocol_version" in header.fields_by_name, call.full_name


@pytest.mark.parametrize("version", KEPT)
@pytest.mark.parametrize("kind", carried(), ids=lambda kind: kind.__name__)
def test_a_party_of_an_earlier_release_knows_every_byte_that_it_is_sent(kind: type[Message], version: int) -> None:
    message = fitted(filled(kind, version), version, SILO)
    then = message_factory.GetMessageClass(pool_of(version).FindMessageTypeByName(kind.DESCRIPTOR.full_name))
    read = then.FromString(message.SerializeToString())
    assert list(unknown_in(read)) == []
    assert str(read) == str(message)


@pytest.mark.parametrize("version", KEPT)
def test_what_an_earlier_release_sends_is_read_as_it_was_meant(version: int) -> None:
    for kind in carried():
        then = message_factory.GetMessageClass(pool_of(version).FindMessageTypeByName(kind.DESCRIPTOR.full_name))
        message = filled(then)
        read = kind.FromString(message.SerializeToString())
        assert list(unknown_in(read)) == []
        assert str(read) == str(message)


def test_what_is_new_is_left_out_for_an_older_party_and_kept_for_one_of_this_version() -> None:
    answer = coordinator_pb2.GetPlanResponse(nonce=bytes(16), time_ms=5, protocol_version=PROTOCOL_VERSION)
    assert fitted(answer, PROTOCOL_VERSION, SILO) is answer
    older = fitted(answer, 1, SILO)
    assert (older.time_ms, older.protocol_version) == (5, 0)
    assert answer.protocol_version == PROTOCOL_VERSION


def test_a_plan_that_needs_what_an_older_silo_does_not_know_is_refused_to_it_in_words() -> None:
    (file,) = (file for file in with_a_field("Training", since=2, essential=1) if file.name.endswith("plan.proto"))
    plan = message_factory.GetMessageClass(file.message_types_by_name["RunPlan"])()
    plan.training.epochs = 3
    assert fitted(plan, 1, SILO) == plan
    plan.training.later = 7
    with pytest.raises(RefusedError) as refused:
        fitted(plan, 1, SILO)
    assert str(refused.value) == (
        "medsilo.v1.Training.later came with protocol version 2, and hospital1 speaks 1: upgrade the silo hospital1 to "
        "a release of Medsilo that speaks version 2 or later (`silo --version` and `coordinator --version` tell it)"
    )
    assert fitted(plan, 2, SILO) is plan


def test_a_value_that_an_older_silo_does_not_know_is_refused_to_it_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = exposure_pb2.ExposureClass.DESCRIPTOR.values_by_name["EXPOSURE_CLASS_MASKED_UPDATE"]
    monkeypatch.setattr(
        "medsilo.privacy.door.protocol.since", lambda item: 2 if item.name == newest.name else since(item)
    )
    monkeypatch.setattr("medsilo.privacy.door.protocol._has_newer", lambda _message, _version: True)
    with pytest.raises(RefusedError, match=r"EXPOSURE_CLASS_MASKED_UPDATE came with protocol version 2, and hospital1"):
        fitted(plan_pb2.RunPlan(required=[newest.number]), 1, SILO)
    assert fitted(plan_pb2.RunPlan(required=[1]), 1, SILO).required == [1]


def test_a_call_that_an_older_coordinator_does_not_have_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "medsilo.privacy.door.protocol.since", lambda item: 2 if item.name == "Withdraw" else since(item)
    )
    with pytest.raises(
        RefusedError, match=r"the call Withdraw came with protocol version 2.*upgrade the coordinator c "
    ):
        fitted(coordinator_pb2.WithdrawRequest(), 1, "spiffe://test/coordinator/c", "Withdraw")


def test_the_older_partys_version_is_spoken() -> None:
    assert [agreed(theirs, "a", "b") for theirs in (0, 1, PROTOCOL_VERSION, PROTOCOL_VERSION + 5)] == [
        1,
        1,
        PROTOCOL_VERSION,
        PROTOCOL_VERSION,
    ]


def test_parties_that_cannot_work_together_say_which_side_to_upgrade_and_to_which_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medsilo.privacy.door.protocol.OLDEST_VERSION", 3)
    monkeypatch.setattr("medsilo.privacy.door.protocol.PROTOCOL_VERSION", 4)
    with pytest.raises(RefusedError) as refused:
        agreed(2, "the silo hospital1", "this coordinator")
    assert str(refused.value) == (
        "the silo hospital1 speaks protocol version 2, and this coordinator works with 3 to 4: upgrade the silo "
        "hospital1 to a release of Medsilo that speaks version 4 (`silo --version` and `coordinator --version` tell it)"
    )
    old = "this coordinator speaks protocol version 1, the silo version 4; install matching releases"
    with pytest.raises(
        RefusedError, match=r"the coordinator speaks protocol version 1, and this silo works with 3 to 4"
    ):
        spoken_instead(f"the coordinator at a:1 refuses: {old}")


def test_a_coordinator_of_the_first_version_is_asked_again_in_its_own() -> None:
    said = "this coordinator {} protocol version 1, the silo {}version 2; install matching releases"
    assert spoken_instead(said.format("speaks", "")) == 1
    assert spoken_instead(said.format("enrols by", "by ")) == 1
    assert spoken_instead("the round has ended") is None


def test_the_older_side_is_told_that_it_may_be_upgraded() -> None:
    assert newer(PROTOCOL_VERSION, "the coordinator", "this silo") is None
    hint = newer(PROTOCOL_VERSION + 1, "the coordinator", "this silo")
    assert hint is not None
    assert f"upgrade this silo to a release of Medsilo that speaks version {PROTOCOL_VERSION + 1}" in hint


def test_a_released_version_is_kept_once_and_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "RELEASED", tmp_path)
    generate.freeze()
    kept = released(PROTOCOL_VERSION).read_bytes()
    assert described(files_of(PROTOCOL_VERSION)) == described(SCHEMA_FILES)
    with pytest.raises(SystemExit, match=r"raise it in protos/versions\.py first"):
        generate.freeze()
    assert released(PROTOCOL_VERSION).read_bytes() == kept
