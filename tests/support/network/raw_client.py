"""Hospitals that the tests play themselves: real certificate, real journal, hand-made messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import Message

from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.tensors import Part, Payload
from medsilo.algorithms.tensors.transfer import CHUNK, chunk_message, manifest
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.identity.envelope import from_message
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2
from medsilo.protos.nonces import nonce
from tests.support.runs.federation import Federation

SERVICE = "/medsilo.v1.CoordinatorService"
COORDINATOR = "spiffe://test/coordinator/coordinator"


class RawClient:
    """A hospital that sends what it likes, keeps its journal all the same, and signs for what it exchanged."""

    def __init__(self, one: Federation, name: str, *, claims: str | None = None, keys: Path | None = None) -> None:
        self.name = claims or name
        keys = keys or one.keys(name)
        self.plan = CoordinatorConfig.read(one.folder / "coordinator.yaml").plan()
        pair = ((keys / "tls.key").read_bytes(), (keys / "tls.pem").read_bytes())
        credentials = grpc.ssl_channel_credentials((one.keys(name) / "ca.pem").read_bytes(), *pair)
        self.channel = grpc.secure_channel(
            f"127.0.0.1:{one.port}",
            credentials,
            [("grpc.ssl_target_name_override", "coordinator.coordinator.test")],
        )
        self._one = one
        self._own = name

    @property
    def door(self) -> Door:
        return self._one.door(self._own)

    @contextmanager
    def calling(self, rpc: str) -> Iterator[Call]:
        call = Call(rpc, COORDINATOR, "", "a test")
        try:
            yield call
        finally:
            self.door.ended(call)

    def unary(self, rpc: str, message: Message | bytes) -> bytes:
        """Bytes are sent as they are, past the journal; a message is recorded first."""
        method = self.channel.unary_unary(f"{SERVICE}/{rpc}")
        if isinstance(message, bytes):
            answer: bytes = method(message, timeout=20)
            return answer
        with self.calling(rpc) as call:
            answer = method(self.door.release([message], call)[0], timeout=20)
            self.door.admit(answer, getattr(wire, f"{rpc}Response"), call)
            return answer

    def get_plan(self) -> bytes:
        return self.unary("GetPlan", wire.GetPlanRequest(nonce=nonce(), silo=self.name, protocol_version=1))

    def enrol_coordinator(self) -> None:
        audit_key = load_audit_key(self._one.keys("coordinator") / "audit.key")
        self.door.enrol(COORDINATOR, audit_key.public_key().public_bytes_raw())

    def join(self) -> None:
        self.enrol_coordinator()
        request = wire.JoinRequest(
            nonce=nonce(),
            silo=self.name,
            plan_sha256=self.plan.sha256,
            audit_key=self.door.journal.public_key,
            accepted=True,
            seen=self.seen,
        )
        self.unary("Join", request)

    @property
    def seen(self) -> int:
        """Size of the coordinator's journal as this hospital saw it last."""
        return self.door.receipt_state(COORDINATOR).seen.size

    def attestation(self) -> journal_pb2.Envelope | None:
        """What the next header has to say, after asking what the coordinator knows; None before joining."""
        if self.door.receipt_state(COORDINATOR).peer_key is None:
            return None
        request = wire.AttestRequest(nonce=nonce(), silo=self.name, plan_sha256=self.plan.sha256, seen=self.seen)
        self.unary("Attest", request)
        return self.door.attest(COORDINATOR)

    def submit(self, payload: Payload, *, round_number: int = 0, cut: int | None = None) -> wire.SubmitUpdateResponse:
        return self.send(self.frames(payload, round_number)[:cut])

    def frames(self, payload: Payload, round_number: int = 0) -> list[bytes]:
        """An update's messages; nothing is recorded before they are sent."""
        return [self.header(payload, round_number, attestation=self.attestation()), *self.chunks(payload)]

    def header(self, payload: Payload, round_number: int = 0, **changes: Any) -> bytes:
        update = wire.Update(
            nonce=nonce(),
            silo=self.name,
            **{"plan_sha256": self.plan.sha256, **changes},
            round=round_number,
            parts=manifest(payload),
        )
        return wire.SubmitUpdateRequest(update=update).SerializeToString()

    def chunks(self, payload: Payload) -> list[bytes]:
        return [
            chunk_message(wire.SubmitUpdateRequest, exposure, data, nonce()).SerializeToString()
            for exposure, part in payload.items()
            for data in part.chunks(CHUNK)
        ]

    def send(self, messages: Sequence[bytes]) -> wire.SubmitUpdateResponse:
        with self.calling("SubmitUpdate") as call:
            self.record(messages, call)
            data = self.channel.stream_unary(f"{SERVICE}/SubmitUpdate")(iter(messages), timeout=60)
            answer = self.door.admit(data, wire.SubmitUpdateResponse, call)
            if not answer.repeated:
                self.door.check_receipt(call)
            return answer

    def record(self, messages: Sequence[bytes], call: Call) -> None:
        parsed = [wire.SubmitUpdateRequest.FromString(data) for data in messages]
        assert self.door.release(parsed, call) == list(messages)

    def model(self, **changes: np.ndarray) -> dict[Exposure, Part]:
        """A whole model; ``changes`` replaces tensors (dots in names written as two underscores)."""
        changed = {name.replace("__", "."): torch.from_numpy(value) for name, value in changes.items()}
        module = build(self.plan.model, seed=1)
        tensors = {name: changed.get(name, tensor.detach()) for name, tensor in module.named_parameters()}
        parts = Layout.of(module).model_parts()
        return {exposure: Part.of({s.name: tensors[s.name] for s in parts[exposure]}) for exposure in MODEL}


class HandMade(RawClient):
    """A raw client that also sends half streams, and models that hold one number throughout."""

    def __init__(self, one: Federation, name: str, **options: Any) -> None:
        super().__init__(one, name, **options)
        self.parts = Layout.of(build(self.plan.model, seed=1)).model_parts()

    def constant(self, value: float, *, images: int | None = None) -> dict[Exposure, Part]:
        payload = {
            exposure: Part.of({s.name: torch.full(s.shape, value) for s in self.parts[exposure]}) for exposure in MODEL
        }
        if images is not None:
            payload[Exposure.SAMPLE_COUNT] = Part.of({"samples": torch.tensor(images)})
        return payload

    def half(self, messages: Sequence[bytes], first: int) -> HalfSent:
        return HalfSent(self, messages, first)

    def task(self) -> Iterator[bytes]:
        with self.calling("GetTask") as call:
            request = wire.GetTaskRequest(
                nonce=nonce(),
                silo=self.name,
                plan_sha256=self.plan.sha256,
                wait_seconds=30,
                holds_model=True,
                attestation=self.attestation(),
            )
            (data,) = self.door.release([request], call)
            for answer in self.channel.unary_stream(f"{SERVICE}/GetTask")(data):
                self.door.admit(answer, wire.GetTaskResponse, call)
                yield answer


class HalfSent:
    """An upload of which only the ``first`` messages are sent until ``go_on``.

    Meanwhile the hospital makes other calls, which honest ones never do: only its last answer's proof is of use to it.
    """

    def __init__(self, client: RawClient, messages: Sequence[bytes], first: int) -> None:
        self._go = threading.Event()
        self._client = client
        self._recorded = Call("SubmitUpdate", COORDINATOR, "", "a test")
        client.record(messages, self._recorded)

        def frames() -> Iterator[bytes]:
            yield from messages[:first]
            self._go.wait()
            yield from messages[first:]

        self._call = client.channel.stream_unary(f"{SERVICE}/SubmitUpdate").future(frames())

    def go_on(self) -> wire.SubmitUpdateResponse:
        self._go.set()
        answer = wire.SubmitUpdateResponse.FromString(self._call.result(timeout=60))
        self._client.door.receipt_state(COORDINATOR).check_signed(from_message(answer.attestation))
        self._client.door.ended(self._recorded)
        return answer

    def go_on_never(self) -> None:
        """Waits for what the coordinator makes of that."""
        try:
            self._call.result(timeout=60)
        finally:
            self._go.set()
            self._client.door.ended(self._recorded)

    def give_up(self) -> None:
        self._call.cancel()
        self._go.set()
        self._client.door.ended(self._recorded)
