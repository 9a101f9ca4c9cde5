"""Hospitals that misbehave, for the tests: streams sent piece by piece, and updates of one number."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import torch
from federation import Federation
from test_refusals import NONCE, RawClient

from algorithms.models import Layout, build
from algorithms.tensors import Part
from privacy.exposure import MODEL, Exposure
from protos.medsilo.v1 import coordinator_pb2 as wire

SERVICE = "/medsilo.v1.CoordinatorService"


class HandMade(RawClient):
    """A raw client that also sends single frames, half streams, and models that hold one number throughout."""

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

    def send(self, messages: Sequence[bytes]) -> wire.SubmitUpdateResponse:
        call = self.channel.stream_unary(f"{SERVICE}/SubmitUpdate")
        return wire.SubmitUpdateResponse.FromString(call(iter(messages), timeout=30))

    def half(self, messages: Sequence[bytes], first: int) -> HalfSent:
        return HalfSent(self.channel, messages, first)

    def task(self) -> Iterator[bytes]:
        request = wire.GetTaskRequest(
            nonce=NONCE, silo=self.name, plan_sha256=self.plan.sha256, wait_seconds=30, holds_model=True
        )
        answer: Iterator[bytes] = self.channel.unary_stream(f"{SERVICE}/GetTask")(request.SerializeToString())
        return answer


class HalfSent:
    """An upload of which only the ``first`` messages are sent until ``go_on``."""

    def __init__(self, channel: grpc.Channel, messages: Sequence[bytes], first: int) -> None:
        self._go = threading.Event()

        def frames() -> Iterator[bytes]:
            yield from messages[:first]
            self._go.wait()
            yield from messages[first:]

        self._call = channel.stream_unary(f"{SERVICE}/SubmitUpdate").future(frames())

    def go_on(self) -> wire.SubmitUpdateResponse:
        self._go.set()
        return wire.SubmitUpdateResponse.FromString(self._call.result(timeout=60))

    def give_up(self) -> None:
        self._call.cancel()
        self._go.set()
