"""What the message schemas promise."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import SCHEMA_FILES, TENSOR_CLASSES, Exposure, attribute, exposure_of
from medsilo.protos import generate
from medsilo.protos.medsilo.v1 import exposure_pb2, tensor_pb2
from tests.support.schemas import messages_of

ROOT = Path(__file__).parents[2]


def unannotated(file: Any) -> list[str]:
    return [field.full_name for message in messages_of(file) for field in message.fields if exposure_of(field) is None]


def private_file(*, annotate_second: bool) -> Any:
    """A schema of two fields in a pool of its own, of which the second may lack its annotation."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(exposure_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="private.proto", package="private", syntax="proto3", dependency=["medsilo/v1/exposure.proto"]
    )
    message = file.message_type.add(name="Outer").nested_type.add(name="Inner")
    for number, name in ((1, "annotated"), (2, "second")):
        field = message.field.add(
            name=name,
            number=number,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
        if number == 1 or annotate_second:
            field.options.Extensions[exposure_pb2.exposure] = exposure_pb2.EXPOSURE_CLASS_PROTOCOL
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName("private.proto")


def test_every_field_on_the_wire_has_an_exposure_class() -> None:
    assert [name for file in SCHEMA_FILES for name in unannotated(file)] == []


def test_the_search_for_unannotated_fields_looks_at_every_message() -> None:
    names = {message.full_name for file in SCHEMA_FILES for message in messages_of(file)}
    assert {
        "medsilo.v1.TensorChunk",
        "medsilo.v1.Envelope",
        "medsilo.v1.Signature",
        "medsilo.v1.AttestRequest",
        "medsilo.v1.RunPlan",
        "medsilo.v1.Update",
        "medsilo.v1.SubmitUpdateResponse",
    } <= names
    assert sum(len(message.fields) for file in SCHEMA_FILES for message in messages_of(file)) > 80


def test_a_field_without_an_annotation_is_found() -> None:
    assert unannotated(private_file(annotate_second=False)) == ["private.Outer.Inner.second"]
    assert unannotated(private_file(annotate_second=True)) == []


def test_a_byte_of_an_unannotated_field_is_refused_at_run_time() -> None:
    message = private_file(annotate_second=False).message_types_by_name["Outer"].nested_types_by_name["Inner"]
    with pytest.raises(RefusedError, match=r"private\.Outer\.Inner\.second has no exposure class"):
        attribute(b"\x0a\x01x", message)


def test_every_schema_file_is_among_those_that_are_checked_and_hashed() -> None:
    on_disk = {str(path.relative_to(generate.ROOT)) for path in generate.ROOT.rglob("*.proto")}
    assert on_disk == {file.name for file in SCHEMA_FILES}


def test_every_message_that_a_service_carries_is_in_the_checked_schemas() -> None:
    checked = {message.full_name for file in SCHEMA_FILES for message in messages_of(file)}
    services = [service for file in SCHEMA_FILES for service in file.services_by_name.values()]
    assert {service.name for service in services} == {"CoordinatorService", "EnrolmentService"}
    for method in (method for service in services for method in service.methods):
        assert {method.input_type.full_name, method.output_type.full_name} <= checked


def test_the_generated_code_is_in_step_with_the_schemas() -> None:
    assert generate.drift() == []


def test_code_that_is_out_of_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "protos"
    shutil.copytree(generate.ROOT, copy)
    monkeypatch.setattr(generate, "ROOT", copy)
    monkeypatch.setattr(generate, "SCHEMAS", sorted(copy.glob("medsilo/v1/*.proto")))
    assert generate.drift() == []
    schema = copy / "medsilo/v1/journal.proto"
    schema.write_text(schema.read_text().replace("string payload_type = 2", "string kind = 2"))
    (copy / "medsilo/v1/gone_pb2.py").write_text("")
    assert generate.drift() == ["medsilo/v1/gone_pb2.py", "medsilo/v1/journal_pb2.py", "medsilo/v1/journal_pb2.pyi"]


def test_the_classes_of_python_and_of_the_wire_are_the_same() -> None:
    on_the_wire = [
        value.name.removeprefix("EXPOSURE_CLASS_")
        for value in exposure_pb2.ExposureClass.DESCRIPTOR.values
        if value.number != exposure_pb2.EXPOSURE_CLASS_UNSPECIFIED
    ]
    assert on_the_wire == [exposure.name for exposure in Exposure] == [exposure.value for exposure in Exposure]


def test_a_class_comes_back_from_its_number() -> None:
    assert [Exposure.from_number(exposure.number) for exposure in Exposure] == list(Exposure)


@pytest.mark.parametrize("number", [0, 29, -1, 2**31 - 1])
def test_a_number_that_is_no_class_is_refused(number: int) -> None:
    with pytest.raises(RefusedError, match=str(number)):
        Exposure.from_number(number)


def test_every_tensor_class_has_a_chunk_field_of_its_own() -> None:
    fields = tensor_pb2.TensorChunk.DESCRIPTOR.fields_by_name
    assert set(TENSOR_CLASSES) == set(Exposure) - {Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.CHECKPOINT}
    assert {exposure.chunk_field for exposure in TENSOR_CLASSES} | {"nonce"} == set(fields)
    for exposure in TENSOR_CLASSES:
        assert exposure_of(fields[exposure.chunk_field]) == exposure
        assert fields[exposure.chunk_field].containing_oneof.name == "data"


def test_the_schemas_pass_bufs_lint() -> None:
    beside = Path(sys.executable).parent / "buf"
    buf = shutil.which("buf") or (str(beside) if beside.exists() else None)
    if buf is None:
        pytest.skip("buf is not installed")
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
