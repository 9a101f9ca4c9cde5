"""The one door: no bytes without a record, no record of other bytes, no class without leave."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.door import protocol
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import ConsentError, MedsiloError, RefusedError
from medsilo.privacy.exposure import SCHEMA_FILES, SCHEMA_SHA256, Exposure, attribute
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import plan_pb2, tensor_pb2
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION

PEER = "spiffe://test/coordinator/c"


class Only:
    """Lets some classes through."""

    def __init__(self, *classes: Exposure) -> None:
        self.classes = classes

    def check(self, classes: Iterable[Exposure]) -> None:
        if extra := set(classes) - set(self.classes):
            raise ConsentError(f"not {sorted(extra)}")

    held = nullcontext


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/test/silo/a") as opened:
        yield opened


def make_door(journal: Journal, *classes: Exposure) -> Door:
    return Door(journal, identity="spiffe://test/silo/a", federation="test", gate=Only(*classes))


def make_call() -> Call:
    return Call("SubmitUpdate", PEER, "ab" * 32, "test", run="r", round=3)


def records_of(journal: Journal) -> list[dict[str, Any]]:
    """All records after those that every journal begins with."""
    key, schema, *rest = read_records(journal.directory)
    assert (key["kind"], schema["kind"]) == ("key", "schema")
    return rest


def attested(door: Door, call: Call) -> list[dict[str, Any]]:
    """What the door's owner puts its signature to once a call has ended."""
    door.ended(call)
    exchanges: list[dict[str, Any]] = json.loads(door.attest(PEER).payload)["exchanges"]
    return exchanges


def update() -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))


def chunk() -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(chunk=tensor_pb2.TensorChunk(nonce=nonce(), prototypes=b"12345678"))


def test_a_record_describes_exactly_the_bytes_that_are_handed_out(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.PROTOTYPES)
    call, messages = make_call(), [update(), chunk()]
    sealed = door.release(messages, call)
    records = records_of(journal)
    assert [record["frame"] for record in records] == [0, 1]
    assert {record["call_id"] for record in records} == {messages[0].update.nonce.hex()}
    for data, record in zip(sealed, records, strict=True):
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
        assert record["length"] == len(data) == sum(record["classes"].values()) == sum(record["fields"].values())
        assert record["classes"] == attribute(data, wire.SubmitUpdateRequest.DESCRIPTOR).classes
        assert (record["direction"], record["round"], record["peer"]) == ("sent", 3, PEER)
    digests = b"".join(hashlib.sha256(data).digest() for data in sealed)
    assert attested(door, call) == [
        {
            "rpc": "SubmitUpdate",
            "call_id": messages[0].update.nonce.hex(),
            "direction": "sent",
            "messages": 2,
            "length": sum(map(len, sealed)),
            "sha256": hashlib.sha256(digests).hexdigest(),
            "last_index": records[-1]["index"],
        }
    ]


def test_without_a_record_there_are_no_bytes(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)

    def fail(*_: object, **__: object) -> range:
        raise OSError("disk full")

    monkeypatch.setattr(journal, "append", fail)
    with pytest.raises(OSError, match="disk full"):
        door.release([update()], make_call())


def test_records_are_on_disk_before_the_bytes_are_handed_out(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    order: list[str] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        fsync(file)
        order.append("durable")

    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    monkeypatch.setattr("medsilo.privacy.journal.journal.os.fsync", watched)
    door.release([update()], make_call())
    order.append("handed out")
    assert order == ["durable", "handed out"]


def test_one_class_without_leave_holds_back_the_whole_batch_and_is_recorded(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    with pytest.raises(ConsentError, match="PROTOTYPES"):
        door.release([update(), chunk()], make_call())
    (record,) = records_of(journal)
    assert record["kind"] == "refusal"
    assert "PROTOTYPES" in record["reason"]


def test_what_the_other_side_is_too_old_for_is_left_out_of_bytes_and_record(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    asking = wire.AttestRequest(nonce=nonce(), silo="a", protocol_version=PROTOCOL_VERSION)
    (older,) = door.release([asking], make_call())
    door.receipt_state(PEER).version = PROTOCOL_VERSION
    asking.nonce = nonce()
    (now,) = door.release([asking], make_call())
    assert [wire.AttestRequest.FromString(data).protocol_version for data in (older, now)] == [0, PROTOCOL_VERSION]
    assert ["protocol_version" in record["fields"] for record in records_of(journal)] == [False, True]


def test_a_message_that_means_nothing_to_an_older_party_is_not_sent_and_the_refusal_recorded(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = plan_pb2.RunPlan.DESCRIPTOR.fields_by_name["secure_aggregation"]
    monkeypatch.setattr(protocol, "since", lambda item: 2 if item.name == masks.name else 1)
    monkeypatch.setattr(protocol, "is_essential", lambda field: field.name == masks.name)
    monkeypatch.setattr(protocol, "_has_newer", lambda *_: True)
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    answer = wire.GetPlanResponse(nonce=nonce(), plan=plan_pb2.RunPlan(secure_aggregation={"minimum": 3}))
    with pytest.raises(RefusedError, match=r"secure_aggregation came with protocol version 2, and .* speaks 1"):
        door.release([answer], make_call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal"]


def test_an_unknown_field_is_neither_sent_nor_taken(journal: Journal) -> None:
    door = make_door(journal, *Exposure)
    smuggled = wire.SubmitUpdateRequest.FromString(update().SerializeToString() + bytes([0x9A, 0x06, 2, 104, 105]))
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.release([smuggled], make_call())
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.admit(smuggled.SerializeToString(), wire.SubmitUpdateRequest, make_call())
    assert [record["kind"] for record in records_of(journal)] == ["refusal", "refusal"]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x0a\x02\x12\x05", wire.SubmitUpdateRequest(update={}).SerializeToString()]
)
def test_rubbish_is_refused_and_recorded(journal: Journal, data: bytes) -> None:
    with pytest.raises(RefusedError):
        make_door(journal, *Exposure).admit(data, wire.SubmitUpdateRequest, make_call())
    (record,) = records_of(journal)
    assert (record["kind"], record["length"]) == ("refusal", len(data))


def test_what_comes_in_is_recorded_as_received(journal: Journal) -> None:
    data = update().SerializeToString()
    call = make_call()
    door = make_door(journal, *Exposure)
    message = door.admit(data, wire.SubmitUpdateRequest, call)
    assert message.SerializeToString() == data
    (record,) = records_of(journal)
    assert (record["direction"], record["sha256"]) == ("received", hashlib.sha256(data).hexdigest())
    (exchange,) = attested(door, call)
    assert (exchange["direction"], exchange["messages"], exchange["last_index"]) == ("received", 1, record["index"])


def test_two_equal_messages_have_different_hashes(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    assert door.release([update()], make_call()) != door.release([update()], make_call())


def test_a_journal_begins_with_the_key_that_checks_it_and_the_schema_that_reads_it(journal: Journal) -> None:
    make_door(journal)
    key, schema = read_records(journal.directory)
    assert (key["public_key"], key["origin"]) == (journal.public_key.hex(), journal.origin)
    assert schema["schema_sha256"] == SCHEMA_SHA256
    assert [base64.b64decode(file) for file in schema["files"]] == [file.serialized_pb for file in SCHEMA_FILES]


def test_a_journal_that_goes_on_does_not_begin_again(journal: Journal) -> None:
    make_door(journal)
    make_door(journal)
    assert [record["kind"] for record in read_records(journal.directory)] == ["key", "schema"]


def test_a_call_id_that_is_in_use_is_refused_in_either_direction(journal: Journal) -> None:
    door = make_door(journal, *Exposure)
    message = update()
    door.release([message], make_call())
    with pytest.raises(RefusedError, match="has been made before"):
        door.release([message], make_call())
    with pytest.raises(RefusedError, match="has been made before"):
        door.admit(message.SerializeToString(), wire.SubmitUpdateRequest, make_call())
    assert [record["kind"] for record in records_of(journal)] == ["message", "refusal", "refusal"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_thread_that_streams_on_after_its_call_has_ended_neither_sends_nor_records(
    journal: Journal, begun: bool
) -> None:
    door = make_door(journal, *Exposure)
    call = make_call()
    if begun:
        door.release([update()], call)
    door.ended(call)
    with pytest.raises(MedsiloError, match="has ended"):
        door.release([chunk() if begun else update()], call)
    assert len(records_of(journal)) == begun
    assert not door.receipt_state(PEER).unsigned()
    assert sum(exchange["messages"] for exchange in attested(door, make_call())) == begun
    assert door.has_parted(PEER), "no call is left under way"


def test_asking_who_has_signed_stops_no_message(journal: Journal) -> None:
    """The coordinator asks at the end of a run, while silos still make their last calls."""
    door = make_door(journal, *Exposure)
    state = door.receipt_state(PEER)
    passed = threading.Event()

    def asks() -> None:
        door.has_parted(PEER)

    def passes() -> None:
        with state.lock:  # as `admit` holds it
            asking.start()
            asking.join(timeout=0.5)  # long enough for it to wait where it waits
            door.receipt_state(PEER)
            passed.set()

    asking = threading.Thread(target=asks, daemon=True)
    threading.Thread(target=passes, daemon=True).start()
    assert passed.wait(timeout=30)
    asking.join(timeout=30)
    assert not asking.is_alive()
