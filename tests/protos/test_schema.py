"""The message schemas: every field annotated, the generated code in step, lint clean."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from privacy.errors import RefusedError
from privacy.exposure import SCHEMA_FILES, TENSOR_CLASSES, Exposure, attribute, exposure_of
from protos.generate import drift
from protos.medsilo.v1 import exposure_pb2, tensor_pb2

ROOT = Path(__file__).parents[2]


def test_every_field_on_the_wire_has_an_exposure_class() -> None:
    fields = [
        field for file in SCHEMA_FILES for message in file.message_types_by_name.values() for field in message.fields
    ]
    assert len(fields) > 50
    assert [field.full_name for field in fields if exposure_of(field) is None] == []


def test_no_schema_file_is_left_out_of_the_check() -> None:
    assert {Path(file.name).name for file in SCHEMA_FILES} == {p.name for p in (ROOT / "protos").rglob("*.proto")}


def test_a_field_without_a_class_cannot_be_sent() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="bare.proto", package="bare", syntax="proto3")
    message = file.message_type.add(name="Bare")
    message.field.add(name="secret", number=1, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("bare.Bare")
    with pytest.raises(RefusedError, match=r"bare\.Bare\.secret has no exposure class"):
        attribute(b"\x0a\x01x", descriptor)


def test_the_classes_of_the_code_are_those_of_the_schema() -> None:
    on_the_wire = {name.removeprefix("EXPOSURE_CLASS_") for name in exposure_pb2.ExposureClass.keys()}  # noqa: SIM118
    assert {exposure.value for exposure in Exposure} == on_the_wire - {"UNSPECIFIED"}
    for exposure in Exposure:
        assert Exposure.from_number(exposure.number) is exposure


def test_every_kind_of_tensor_has_a_field_of_its_own_class() -> None:
    oneof = tensor_pb2.TensorChunk.DESCRIPTOR.oneofs_by_name["data"]
    assert {field.name: exposure_of(field) for field in oneof.fields} == {
        exposure.chunk_field: exposure for exposure in TENSOR_CLASSES
    }


def test_the_generated_code_is_that_of_the_schemas() -> None:
    assert drift() == []


def test_buf_finds_nothing() -> None:
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf is not None, "the package buf-bin is one of the development dependencies"
    outcome = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
