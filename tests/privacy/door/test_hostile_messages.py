"""What another party sends is data: whatever it holds, it is taken or refused, and a refusal is a record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import Method
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import ConsentError, DiskError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import plan_pb2, tensor_pb2
from medsilo.protos.nonces import nonce
from tests.support.evidence.planning import make_plan


class NoCounts:
    def check(self, classes: Iterable[Exposure]) -> None:
        if Exposure.SAMPLE_COUNT in set(classes):
            raise ConsentError("SAMPLE_COUNT may not leave")

    held = nullcontext


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/test/silo/a") as opened:
        yield opened


def records_of(journal: Journal) -> list[dict[str, Any]]:
    """All records after the key and the schema, with which every journal begins."""
    return list(read_records(journal.directory))[2:]


@pytest.fixture
def door(journal: Journal) -> Door:
    return Door(journal, identity="spiffe://test/silo/a", federation="test", gate=PlanGate(Exposure))


def call() -> Call:
    return Call("GetTask", "spiffe://test/coordinator/c", "ab" * 32, "a test")


@pytest.mark.parametrize("method", [DiversiFed(temperature=1.0, step_size=2.0), DiversiFed(temperature=0.1), FedAvg()])
def test_a_plan_keeps_its_hash_whatever_its_hyper_parameters(method: Method) -> None:
    message = make_plan(method).to_message()
    plan = RunPlan.from_message(message)
    again = RunPlan.from_message(plan_pb2.RunPlan.FromString(message.SerializeToString()))
    assert plan.sha256 == again.sha256 == RunPlan.from_message(again.to_message()).sha256
    assert RunPlan.model_validate_json(plan.model_dump_json()).sha256 == plan.sha256


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"temperature": [1]}',
        '{"temperature": {"a": 1}}',
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"temperature": 1e999}',
        '{"temperature": 1152921504606846976}',
        '{"temperature": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_hyper_parameters_that_cannot_be_hashed_are_refused_with_the_plan(parameters: str) -> None:
    message = make_plan().to_message()
    message.method.parameters_json = parameters
    with pytest.raises(RefusedError, match="plan"):
        _ = RunPlan.from_message(message).sha256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (plan_pb2.RunPlan(federation="Test!"), "federation"),
        (plan_pb2.RunPlan(run="../../etc"), "run"),
        (plan_pb2.RunPlan(seed=2**53), "seed"),
        (plan_pb2.RunPlan(rounds=1_000_001), "rounds"),
        (plan_pb2.RunPlan(participation=1.5), "participation"),
        (plan_pb2.RunPlan(participation=float("nan")), "participation"),
        (plan_pb2.RunPlan(required=[0]), "exposure class 0"),
        (plan_pb2.RunPlan(optional=[99]), "exposure class 99"),
        (plan_pb2.RunPlan(model=plan_pb2.Model(input_shape=[5])), "input_shape"),
        (plan_pb2.RunPlan(model=plan_pb2.Model(classes=100_001)), "classes"),
        (plan_pb2.RunPlan(training=plan_pb2.Training(learning_rate=float("nan"))), "learning_rate"),
        (plan_pb2.RunPlan(training=plan_pb2.Training(learning_rate=float("inf"))), "learning_rate"),
        (plan_pb2.RunPlan(training=plan_pb2.Training(optimizer="lion")), "optimizer"),
    ],
)
def test_a_plan_with_an_unusable_value_is_refused_by_its_name(change: plan_pb2.RunPlan, words: str) -> None:
    message = make_plan().to_message()
    message.MergeFrom(change)
    with pytest.raises(RefusedError, match=words):
        RunPlan.from_message(message)


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(RefusedError):
        RunPlan.from_message(plan_pb2.RunPlan())


@pytest.mark.parametrize("size", [2**53, 2**60, 2**64 - 1])
def test_a_manifest_with_a_size_beyond_json_is_refused_and_recorded(door: Door, journal: Journal, size: int) -> None:
    spec = tensor_pb2.TensorSpec(name="w", shape=[size], dtype="F32")
    part = tensor_pb2.PartManifest(exposure_class=Exposure.PEER_DERIVED.number, tensors=[spec])
    data = wire.GetTaskResponse(task=wire.Task(nonce=nonce(), parts=[part])).SerializeToString()
    with pytest.raises(RefusedError):
        door.admit(data, wire.GetTaskResponse, call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal"]


def test_a_manifest_with_an_unknown_class_is_refused_and_recorded(door: Door, journal: Journal) -> None:
    spec = tensor_pb2.TensorSpec(name="w", shape=[1], dtype="F32")
    part = tensor_pb2.PartManifest(exposure_class=77, tensors=[spec])  # type: ignore[arg-type]
    data = wire.GetTaskResponse(task=wire.Task(nonce=nonce(), parts=[part])).SerializeToString()
    with pytest.raises(RefusedError, match="exposure class 77"):
        door.admit(data, wire.GetTaskResponse, call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal"]


@pytest.mark.parametrize(
    "message",
    [
        wire.GetTaskResponse(),
        wire.GetTaskResponse(task=wire.Task()),
        wire.GetTaskResponse(task=wire.Task(nonce=bytes(15))),
        wire.GetTaskResponse(chunk=tensor_pb2.TensorChunk(nonce=bytes(17), prototypes=b"x")),
    ],
)
def test_a_message_without_its_nonce_is_neither_taken_nor_sent(
    door: Door, journal: Journal, message: wire.GetTaskResponse
) -> None:
    with pytest.raises(RefusedError, match="nonce"):
        door.admit(message.SerializeToString(), wire.GetTaskResponse, call())
    with pytest.raises(RefusedError, match="nonce"):
        door.release([message], call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal", "refusal"]


def test_text_that_is_no_text_is_refused_and_recorded(door: Door, journal: Journal) -> None:
    data = wire.GetPlanRequest(nonce=bytes(16), silo="ab").SerializeToString().replace(b"ab", b"\xff\xfe")
    with pytest.raises(RefusedError):
        door.admit(data, wire.GetPlanRequest, call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal"]


def test_a_refusal_describes_the_bytes_that_did_not_leave(door: Door, journal: Journal) -> None:
    chunk = wire.SubmitUpdateRequest(chunk=tensor_pb2.TensorChunk(nonce=nonce(), sample_count=bytes(8)))
    with pytest.raises(ConsentError):
        door.through(NoCounts()).release([chunk], call())
    (record,) = records_of(journal)
    assert (record["direction"], record["length"]) == ("sent", len(chunk.SerializeToString()))
    assert record["reason"] == "SAMPLE_COUNT may not leave"


def test_a_failing_disk_is_a_journal_error_and_nothing_is_released(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    real = os.fsync
    monkeypatch.setattr("medsilo.privacy.journal.journal.os.fsync", fail)
    header = wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))
    try:
        with pytest.raises(DiskError, match="input/output error"):
            door.release([header], call())
    finally:
        monkeypatch.setattr("medsilo.privacy.journal.journal.os.fsync", real)


def test_bytes_are_in_the_records_file_before_they_are_handed_over(door: Door, journal: Journal) -> None:
    before = len((journal.directory / "records.jsonl").read_bytes().splitlines())
    for count in range(1, 4):
        door.release([wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))], call())
        assert len((journal.directory / "records.jsonl").read_bytes().splitlines()) == before + count
