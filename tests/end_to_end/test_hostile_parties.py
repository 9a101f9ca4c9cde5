"""Parties with good certificates and bad intentions (or bad networks): what they can and cannot bring about."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import pytest
import torch
from google.protobuf.message import Message
from safetensors.torch import load_file

from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.tensors import Part
from medsilo.algorithms.tensors.transfer import chunk_message, manifest
from medsilo.privacy.door.door import Call
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.envelope import ATTESTATION, to_message
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2
from medsilo.protos.nonces import nonce
from tests.support.network.raw_client import SERVICE, HandMade, RawClient
from tests.support.runs.federation import PATIENCE, Federation
from tests.support.runs.refusals import delivered, refusal, stall, stored_uploads

Make = Callable[..., Federation]
M = TypeVar("M", bound=Message)


def start(one: Federation) -> list[HandMade]:
    """A coordinator whose first round is open for hand-made hospitals."""
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    clients = [HandMade(one, name) for name in one.silos]
    for client in clients:
        client.join()
    one.wait_to_say("coordinator", "round 1 of")
    return clients


def test_updates_that_do_not_hold_together_are_refused_and_the_right_one_is_taken(federation: Make) -> None:
    one = federation()
    client, *_ = start(one)
    good = client.constant(1.0)
    extractor = good[Exposure.MODEL_PARAMETERS_EXTRACTOR]
    double = Part.of({name: tensor.double() for name, tensor in extractor.tensors().items()})
    renamed = Part.of({f"other.{name}": tensor for name, tensor in extractor.tensors().items()})
    bad_metrics = Part.of({"accuracy": torch.tensor(float("nan")), "loss": torch.tensor(1.0)})
    elsewhere = HandMade(one, "hospital1", keys=one.keys("coordinator"))

    def update(**changes: Part) -> Callable[[], object]:
        return lambda: client.submit({**good, **{Exposure[name]: part for name, part in changes.items()}})

    cases: Mapping[str, tuple[Callable[[], object], grpc.StatusCode, tuple[str, ...]]] = {
        "an infinity": (
            lambda: client.submit(client.constant(float("inf"))),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("infinite", "MODEL_PARAMETERS_EXTRACTOR"),
        ),
        "another dtype": (
            update(MODEL_PARAMETERS_EXTRACTOR=double),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("F64", "F32", "was expected"),
        ),
        "other names": (
            update(MODEL_PARAMETERS_EXTRACTOR=renamed),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("convolution1.weight is missing",),
        ),
        "a measurement that is none": (
            update(LOCAL_METRICS=bad_metrics),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("LOCAL_METRICS", "NaN"),
        ),
        "a part left out": (
            lambda: client.submit({Exposure.MODEL_PARAMETERS_EXTRACTOR: extractor}),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("MODEL_PARAMETERS_CLASSIFIER is missing",),
        ),
        "more bytes than announced": (
            lambda: client.send([*client.frames(good), *client.chunks(good)[-1:]]),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("not what the manifest announced",),
        ),
        "a second header": (
            lambda: client.send([*client.frames(good)[:1], client.header(good), *client.chunks(good)]),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("chunks only",),
        ),
        "chunks without a header": (
            lambda: client.send(client.chunks(good)),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("begins with its header",),
        ),
        "nothing at all": (
            lambda: client.send([]),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("begins with its header",),
        ),
        "another plan": (
            lambda: client.send([client.header(good, plan_sha256=bytes(32)), *client.chunks(good)]),
            grpc.StatusCode.INVALID_ARGUMENT,
            ("another plan",),
        ),
        "the coordinator's certificate": (
            elsewhere.get_plan,
            grpc.StatusCode.UNAVAILABLE,
            (),
        ),
    }
    wrong = []
    for what, (action, code, words) in cases.items():
        try:
            found, details = refusal(action)
        except pytest.fail.Exception:
            wrong.append(f"{what}: was taken")
            continue
        if found != code or not all(word in details for word in words):
            wrong.append(f"{what}: {found} {details}")
    assert wrong == []
    assert delivered(one) == 0
    assert stored_uploads(one) == []
    assert not client.submit(good).repeated
    assert delivered(one) == 1


def test_an_update_before_joining_is_refused(federation: Make) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    client = HandMade(one, "hospital1")
    code, details = refusal(lambda: client.submit(client.constant(1.0)))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "hospital1 has not joined run test")
    code, details = refusal(lambda: next(client.task()))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "hospital1 has not joined run test")


@pytest.mark.parametrize("key", [b"", bytes(5), bytes(1000)], ids=["none", "short", "long"])
def test_an_audit_key_that_can_check_nothing_is_refused(federation: Make, key: bytes) -> None:
    """It is what the hospital's journal is checked with later: Ed25519, 32 bytes."""
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    client = HandMade(one, "hospital1")
    request = wire.JoinRequest(
        nonce=nonce(), silo="hospital1", plan_sha256=client.plan.sha256, audit_key=key, accepted=True
    )
    code, details = refusal(lambda: client.unary("Join", request))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "audit key" in details
    assert one.status()["silos"][0]["state"] == "not joined yet"


def test_what_is_stored_are_the_bytes_that_the_receipt_is_for(federation: Make) -> None:
    """An upload that was overtaken by another of the same round ends with the other's receipt, and changes nothing."""
    one = federation()
    client, *_ = start(one)
    slow = stall(one, client, client.frames(client.constant(1.0)), 2)
    overtaking = client.submit(client.constant(2.0))
    assert not overtaking.repeated
    answer = slow.go_on()
    assert answer.repeated
    assert answer.first == overtaking.attestation
    assert delivered(one) == 1
    (stored,) = [path for path in stored_uploads(one) if path.suffix == ".safetensors"]
    assert {value for tensor in load_file(stored).values() for value in tensor.unique().tolist()} == {2.0}


def test_a_slow_download_is_what_it_was_and_never_another_hospitals_update(federation: Make) -> None:
    """Rounds go on by quorum while a hospital is still fetching its task; files are written over meanwhile."""
    model = {"name": "torchvision:mobilenet_v3_large", "input_shape": [3, 28, 28], "classes": 9}
    one = federation(
        run={"method": {"name": "fedavg"}, "model": model, "quorum": 2, "deadline_minutes": 0, "rounds": 6},
        exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED"],
    )
    first, second, slow = start(one)

    def round_ends(number: int) -> None:
        for client, value in ((first, 1.0), (second, 2.0)):
            client.submit(client.constant(10 * number + value, images=10), round_number=number)
        one.wait_to_say("coordinator", f"round {number + 2} of 6 is open")

    round_ends(0)
    stream = slow.task()
    assert wire.GetTaskResponse.FromString(next(stream)).task.round == 1
    for number in (1, 2, 3, 4):
        round_ends(number)
    found: set[float] = set()
    for data in stream:
        chunk = wire.GetTaskResponse.FromString(data).chunk.peer_derived
        found.update(torch.frombuffer(bytearray(chunk), dtype=torch.float32).unique().tolist())
    assert found == {1.5}, "round 0's average; 31 and 32, 41 and 42 are other hospitals' own models"


def test_stalled_uploads_of_one_hospital_do_not_keep_the_others_out(federation: Make) -> None:
    one = federation()
    first, second, _ = start(one)
    payload = first.constant(1.0)
    # The last 32 are more than a hospital may have open, whatever they say of their journal.
    stalled = [stall(one, first, first.frames(payload), 1) for _ in range(8)]
    stalled += [first.half([first.header(payload)], 1) for _ in range(32)]
    try:
        assert not second.submit(second.constant(2.0)).repeated
    finally:
        for call in stalled:
            call.give_up()


class Impostor:
    """A server that answers like a coordinator, with the given party's keys and changed answers.

    It keeps a journal and signs for what it has, except in what ``tamper`` says of a hospital.
    """

    def __init__(self, one: Federation, party: str, *, tamper: Mapping[str, str] | None = None) -> None:
        self.plan = RawClient(one, "hospital1").plan
        self.tamper = tamper or {}
        self.seen: list[tuple[str, bytes]] = []
        self.earlier = b""
        self._door = one.door(party)
        self._certificate = (one.keys(party) / "tls.pem").read_bytes()
        handlers = {
            "GetPlan": grpc.unary_unary_rpc_method_handler(self._get_plan),
            "Join": grpc.unary_unary_rpc_method_handler(self._join),
            "GetTask": grpc.unary_stream_rpc_method_handler(self._get_task),
            "SubmitUpdate": grpc.stream_unary_rpc_method_handler(self._submit),
            "Attest": grpc.unary_unary_rpc_method_handler(self._attest),
        }
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE[1:], handlers),))
        pair = ((one.keys(party) / "tls.key").read_bytes(), self._certificate)
        ca = (one.folder / "ca" / "ca.pem").read_bytes()
        credentials = grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=True)
        self.server.add_secure_port(f"127.0.0.1:{one.port}", credentials)
        self.server.start()

    @contextmanager
    def _answering(self, rpc: str, name: str) -> Iterator[tuple[Call, str]]:
        call = Call(rpc, f"spiffe://test/silo/{name}", "", "an impostor's answer")
        try:
            yield call, self.tamper.get(name, "")
        finally:
            self._door.ended(call)

    def _take(self, data: bytes, kind: type[M], call: Call) -> M:
        self.seen.append((call.rpc, data))
        return self._door.admit(data, kind, call)

    def _word(self, call: Call, breach: str, *, since: int | None = None) -> journal_pb2.Envelope | None:
        """The impostor's attestation, as the breach has it."""
        if breach == f"no receipt in {call.rpc}":
            return None
        if breach == "another silo's task":
            call = dataclasses.replace(call, peer="spiffe://test/silo/hospital1")
        word = self._door.attest(call.peer, since=since)
        if breach == f"a receipt for other bytes in {call.rpc}":
            document = json.loads(word.payload)
            for exchange in document["exchanges"]:
                if exchange["call_id"] == call.call_id:
                    exchange["sha256"] = "00" * 32
            word = to_message(self._door.journal.seal(document, ATTESTATION))
        return word

    def _get_plan(self, data: bytes, _: Any) -> bytes:
        with self._answering("GetPlan", wire.GetPlanRequest.FromString(data).silo) as (call, breach):
            self._take(data, wire.GetPlanRequest, call)
            plan = self.plan.to_message()
            if breach == "fewer classes":
                del plan.required[2:]
            response = wire.GetPlanResponse(
                nonce=nonce(),
                plan=plan,
                coordinator_certificate=self._certificate,
                coordinator_audit_key=self._door.journal.public_key,
            )
            return self._door.release([response], call)[0]

    def _join(self, data: bytes, _: Any) -> bytes:
        with self._answering("Join", wire.JoinRequest.FromString(data).silo) as (call, breach):
            request = self._take(data, wire.JoinRequest, call)
            self._door.enrol(call.peer, request.audit_key)
            response = wire.JoinResponse(nonce=nonce(), attestation=self._word(call, breach, since=request.seen))
            return self._door.release([response], call)[0]

    def _attest(self, data: bytes, _: Any) -> bytes:
        with self._answering("Attest", wire.AttestRequest.FromString(data).silo) as (call, breach):
            request = self._take(data, wire.AttestRequest, call)
            response = wire.AttestResponse(nonce=nonce(), attestation=self._word(call, breach, since=request.seen))
            return self._door.release([response], call)[0]

    def _get_task(self, data: bytes, _: Any) -> Iterator[bytes]:
        with self._answering("GetTask", wire.GetTaskRequest.FromString(data).silo) as (call, kind):
            self._take(data, wire.GetTaskRequest, call)
            state = state_of(build(self.plan.model, seed=self.plan.seed))
            payload = {Exposure.INITIAL_MODEL: Part.of(state)}
            if kind == "a NaN":
                state["classifier.bias"][0] = float("nan")
            if kind == "a class that is not announced":
                payload[Exposure.LABEL_COUNTS] = Part.of({"counts": torch.zeros(9)})
            if kind == "another type":
                state["classifier.bias"] = state["classifier.bias"].double()
                payload = {Exposure.INITIAL_MODEL: Part.of(state)}
            if kind == "an answer of before":
                yield self.earlier
                return
            if kind == "another model":
                payload = {Exposure.INITIAL_MODEL: Part.of({"classifier.bias": torch.zeros(9)})}
            task = wire.Task(nonce=nonce(), kind=wire.TASK_KIND_TRAIN, round=0, parts=manifest(payload))
            if kind == "a round beyond the end":
                task.round = 99
            if (word := self._word(call, kind)) is not None:
                task.attestation.CopyFrom(word)
            (self.earlier,) = self._door.release([wire.GetTaskResponse(task=task)], call)
            yield self.earlier
            for exposure, part in payload.items():
                chunks = list(part.chunks(1 << 16))
                for chunk in chunks[: len(chunks) - (kind == "a download cut short")]:
                    message = chunk_message(wire.GetTaskResponse, exposure, chunk, nonce())
                    yield self._door.release([message], call)[0]

    def _submit(self, stream: Iterator[bytes], _: Any) -> bytes:
        messages = list(stream)
        with self._answering("SubmitUpdate", wire.SubmitUpdateRequest.FromString(messages[0]).update.silo) as (
            call,
            breach,
        ):
            for data in messages:
                self._take(data, wire.SubmitUpdateRequest, call)
            response = wire.SubmitUpdateResponse(nonce=nonce(), attestation=self._word(call, breach))
            if breach == "says it had the update before":
                response.repeated = True
                response.first.CopyFrom(response.attestation)
            return self._door.release([response], call)[0]


@pytest.fixture
def impostor() -> Iterator[Callable[..., Impostor]]:
    made: list[Impostor] = []

    def make(one: Federation, party: str, **options: Any) -> Impostor:
        made.append(Impostor(one, party, **options))
        return made[-1]

    yield make
    for server in made:
        server.server.stop(0)


def test_a_hospital_that_plays_coordinator_gets_not_a_byte(federation: Make, impostor: Callable[..., Impostor]) -> None:
    one = federation()
    server = impostor(one, "hospital2")
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=5)
    assert "cannot show a valid certificate of spiffe://test/coordinator/coordinator" in said
    assert server.seen == []


def test_a_coordinator_that_does_not_keep_to_the_plan_gets_no_model(
    federation: Make, impostor: Callable[..., Impostor], shards: Any
) -> None:
    """Each hospital meets another breach; every one ends with exit code 6 and words, and no tensor has left."""
    breaches = {
        "hospital1": ("fewer classes", "a plan must name all of that"),
        "hospital2": ("a NaN", "NaN"),
        "hospital3": ("a class that is not announced", "LABEL_COUNTS, which the plan does not announce"),
    }
    more = {
        "hospital1": ("another model", "does not have the names, shapes and types"),
        "hospital2": ("a round beyond the end", "round 99 lies beyond the plan's 3 rounds"),
        "hospital3": ("a download cut short", "bytes short in INITIAL_MODEL"),
    }
    still_more = {
        "hospital1": ("another type", "does not have the names, shapes and types"),
        "hospital2": ("another silo's task", "came from spiffe://test/coordinator/coordinator"),
        "hospital3": ("an answer of before", "spiffe://test/coordinator/coordinator"),
    }
    one = federation()
    server = impostor(one, "coordinator")
    for by_silo in (breaches, more, still_more):
        server.tamper = {silo: kind for silo, (kind, _) in by_silo.items()}
        processes = {name: one.start_silo(name) for name in one.silos}
        for name, process in processes.items():
            code = process.wait(timeout=PATIENCE)
            kind, words = by_silo[name]
            receipt = kind in ("another silo's task", "an answer of before")
            assert code == (9 if receipt else 6), f"{kind}: {code}\n{one.said(name)}"
            assert words in one.said(name).replace("\n", " "), f"{kind}: {one.said(name)}"
            # It stands in the hospital's journal, once for each of its sessions so far.
            refusals = [r for r in one.records(name) if r["kind"] == "refusal"]
            assert words in refusals[-1]["reason"], kind
            assert len(refusals) == 1 + [breaches, more, still_more].index(by_silo), kind
    assert {rpc for rpc, _ in server.seen} <= {"GetPlan", "Join", "GetTask"}
    for name in one.silos:
        assert {c for r in one.messages(name, "sent") for c in r["classes"]} == {"PROTOCOL", "IDENTITY"}


def test_a_receipt_for_other_bytes_is_not_believed(federation: Make, impostor: Callable[..., Impostor]) -> None:
    one = federation()
    impostor(one, "coordinator", tamper={"hospital1": "a receipt for other bytes in SubmitUpdate"})
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=9).replace("\n", " ")
    assert "the receipt of spiffe://test/coordinator/coordinator is not for the bytes in the record" in said
    assert "SubmitUpdate" in said


def test_a_coordinator_that_gives_no_receipt_gets_nothing_more(
    federation: Make, impostor: Callable[..., Impostor]
) -> None:
    """Each hospital is denied it at another step; no model leaves after that, least of all a next round's."""
    denied = {"hospital1": "Join", "hospital2": "GetTask", "hospital3": "SubmitUpdate"}
    one = federation()
    server = impostor(one, "coordinator", tamper={name: f"no receipt in {rpc}" for name, rpc in denied.items()})
    processes = {name: one.start_silo(name) for name in one.silos}
    for name, process in processes.items():
        assert process.wait(timeout=PATIENCE) == 9, one.said(name)
        said = one.said(name).replace("\n", " ")
        assert "has answered without a receipt for what was sent to it" in said
        assert denied[name] in said
    uploads = [wire.SubmitUpdateRequest.FromString(data) for rpc, data in server.seen if rpc == "SubmitUpdate"]
    assert {(u.update.silo, u.update.round) for u in uploads if u.WhichOneof("frame") == "update"} == {("hospital3", 0)}
    for name, rpc in denied.items():
        assert one.messages(name, "sent")[-1]["rpc"] == rpc


def test_a_coordinator_that_says_it_had_an_update_before_has_to_show_its_receipt(
    federation: Make, impostor: Callable[..., Impostor]
) -> None:
    one = federation()
    impostor(one, "coordinator", tamper={"hospital1": "says it had the update before"})
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=9).replace("\n", " ")
    assert "says that it has had SubmitUpdate (round 0) before" in said
    assert "for nothing that was sent to it" in said


def test_many_uploads_at_once_of_one_update_count_once(federation: Make) -> None:
    one = federation()
    client, *_ = start(one)
    answers: list[wire.SubmitUpdateResponse] = []
    halves = [stall(one, client, client.frames(client.constant(3.0)), 1) for _ in range(8)]
    threads = [threading.Thread(target=lambda half=half: answers.append(half.go_on())) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 8
    assert sum(not answer.repeated for answer in answers) == 1
    words = {(answer.first if answer.repeated else answer.attestation).SerializeToString() for answer in answers}
    assert len(words) == 1, "the one that counted"
    assert delivered(one) == 1
