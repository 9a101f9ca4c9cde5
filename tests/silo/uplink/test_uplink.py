"""The silo's way out, against servers that do not do what a coordinator does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.tensors import Part
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.silo.state.config import CoordinatorAddress, SiloConfig
from medsilo.silo.uplink import uplink
from medsilo.silo.uplink.explaining import UnansweredError
from medsilo.silo.uplink.uplink import Uplink

PLAN = RunPlan.model_validate(
    {
        "federation": "test",
        "coordinator": "coordinator",
        "run": "run1",
        "method": {"name": "fedavg", "parameters": {}},
        "model": {"name": "cnn-medical", "input_shape": (3, 28, 28), "classes": 9},
        "training": {},
        "rounds": 1,
        "seed": 1,
        "required": ["MODEL_PARAMETERS_EXTRACTOR"],
        "optional": [],
        "downlink": ["PEER_DERIVED"],
    }
)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes every call and answers none; of a stream ``/Half`` it gives one message."""
    over = threading.Event()

    def never(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        over.wait()
        return b""

    def never_after_all(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        for _ in requests:
            pass
        return never(b"", context)

    def half(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        never(request, context)

    class Silence(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            if details.method == "/Half":
                return grpc.unary_stream_rpc_method_handler(half)
            if details.method.endswith("/SubmitUpdate"):
                return grpc.stream_unary_rpc_method_handler(never_after_all)
            return grpc.unary_unary_rpc_method_handler(never)

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    server.add_generic_rpc_handlers((Silence(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    over.set()
    server.stop(grace=None).wait()


def configured(address: str, folder: Path) -> SiloConfig:
    return SiloConfig(
        federation="test",
        name="hospital1",
        coordinator=CoordinatorAddress(address=address),
        state=folder,
        shard=folder / "shard.npz",
        insecure=True,
    )


def test_a_coordinator_that_takes_the_call_for_a_task_and_hangs_is_asked_again(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "WAIT_SECONDS", 0)
    monkeypatch.setattr(uplink, "ANSWER_SECONDS", 0.5)
    with given_up_twice(silent, tmp_path, monkeypatch) as way_out:
        way_out.next_task(PLAN, holds_model=True, trained_rounds=0)
    assert sent(tmp_path) == ["GetTask", "GetTask"]


def test_a_coordinator_that_takes_a_whole_update_and_hangs_is_sent_it_again(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "STALLED_SECONDS", 0.5)
    update = {Exposure.MODEL_PARAMETERS_EXTRACTOR: Part.of({"weight": torch.ones(3)})}
    with given_up_twice(silent, tmp_path, monkeypatch) as way_out:
        way_out.submit(PLAN, 0, update, before_last=lambda: None)
    assert sent(tmp_path) == ["SubmitUpdate", "SubmitUpdate"] * 2, "a header and a piece, twice"


def test_a_coordinator_that_hangs_in_the_midst_of_what_it_sends_is_given_up(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(silent, tmp_path)
    with Journal(config.journal, key=Ed25519PrivateKey.generate(), origin=config.journal_origin) as journal:
        door = Door(journal, identity=config.identity.uri, federation="test", gate=PlanGate(Exposure))
        way_out = Uplink(config, None, door, notice=str)
        stream = way_out._channel.unary_stream("/Half")(b"")
        assert way_out._waiting.next_of(stream, 60) == b"first"
        with pytest.raises(UnansweredError, match=r"does not answer within 0\.5 s"):
            way_out._waiting.next_of(stream, 0.5)
        way_out.close()


@contextmanager
def given_up_twice(silent: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uplink]:
    """A way out to the silent server, on which what is called ends when it has been given up for the second time."""
    monkeypatch.setattr(Uplink, "_keep_step", lambda *_: None)  # else it would ask for receipts first
    config = configured(silent, folder)
    said: list[str] = []

    class EnoughError(Exception):
        pass

    def told(words: str) -> None:
        said.append(words)
        if len(said) == 2:
            raise EnoughError

    with Journal(config.journal, key=Ed25519PrivateKey.generate(), origin=config.journal_origin) as journal:
        door = Door(journal, identity=config.identity.uri, federation="test", gate=PlanGate(Exposure))
        way_out = Uplink(config, None, door, notice=told)
        way_out.use(door, PLAN)
        with pytest.raises(EnoughError):
            yield way_out
        way_out.close()
    assert all("does not answer within 0.5 s; trying again" in words for words in said)


def sent(folder: Path) -> list[str]:
    """Which calls the messages belong to that were sent."""
    records = read_records(configured("localhost:1", folder).journal)
    return [record["rpc"] for record in records if record["kind"] == "message"]


def test_a_run_that_has_ended_is_no_failure_though_the_coordinator_says_nothing_more(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "PARTING_SECONDS", 0.5)
    config = configured(silent, tmp_path)
    said: list[str] = []
    key = Ed25519PrivateKey.generate()
    with Journal(config.journal, key=key, origin=config.journal_origin) as journal:
        door = Door(journal, identity=config.identity.uri, federation="test", gate=PlanGate(Exposure))
        way_out = Uplink(config, None, door, notice=said.append)
        way_out.use(door, PLAN)
        way_out.part(PLAN)
        way_out.close()
        assert door.has_parted(config.coordinator_identity.uri), "the call that was given up is over"
    (notice,) = said
    assert "does not answer within" in notice
    assert "stays without this silo's receipt" in notice
    (sent,) = (record for record in read_records(config.journal) if record["kind"] == "message")
    assert (sent["rpc"], sent["direction"]) == ("Attest", "sent")
    assert set(sent["classes"]) == {Exposure.PROTOCOL.value, Exposure.IDENTITY.value}
