"""The one door: no bytes without a record, no record of other bytes, no class without leave."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.door import Call, Door, nonce
from privacy.errors import ConsentError, RefusedError
from privacy.exposure import Exposure, attribute
from privacy.journal import Journal, read_records
from protos.medsilo.v1 import coordinator_pb2 as wire
from protos.medsilo.v1 import tensor_pb2


class Only:
    """Lets some classes through."""

    def __init__(self, *classes: Exposure) -> None:
        self.classes = classes

    def check(self, classes: Iterable[Exposure]) -> None:
        if extra := set(classes) - set(self.classes):
            raise ConsentError(f"not {sorted(extra)}")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/test/silo/a") as opened:
        yield opened


def make_door(journal: Journal, *classes: Exposure) -> Door:
    return Door(journal, identity="spiffe://test/silo/a", federation="test", gate=Only(*classes))


def make_call() -> Call:
    return Call("SubmitUpdate", "spiffe://test/coordinator/c", "ab" * 32, "test", run="r", round=3)


def update() -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))


def chunk() -> wire.SubmitUpdateRequest:
    return wire.SubmitUpdateRequest(chunk=tensor_pb2.TensorChunk(nonce=nonce(), prototypes=b"12345678"))


def test_a_record_describes_exactly_the_bytes_that_are_handed_out(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.PROTOTYPES)
    call, messages = make_call(), [update(), chunk()]
    sealed = door.release(messages, call)
    records = list(read_records(journal.directory))
    assert [record["frame"] for record in records] == [0, 1]
    assert {record["call_id"] for record in records} == {messages[0].update.nonce.hex()}
    for data, record in zip(sealed, records, strict=True):
        assert record["sha256"] == hashlib.sha256(data).hexdigest()
        assert record["length"] == len(data) == sum(record["classes"].values()) == sum(record["fields"].values())
        assert record["classes"] == attribute(data, wire.SubmitUpdateRequest.DESCRIPTOR).classes
        assert (record["direction"], record["round"], record["peer"]) == ("sent", 3, "spiffe://test/coordinator/c")
    assert call.sent.messages == 2
    assert call.sent.length == sum(map(len, sealed))
    digests = b"".join(hashlib.sha256(data).digest() for data in sealed)
    assert call.sent.sha256 == hashlib.sha256(digests).digest()


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

    monkeypatch.setattr("privacy.journal.os.fsync", watched)
    make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY).release([update()], make_call())
    order.append("handed out")
    assert order == ["durable", "handed out"]


def test_one_class_without_leave_holds_back_the_whole_batch_and_is_recorded(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    with pytest.raises(ConsentError, match="PROTOTYPES"):
        door.release([update(), chunk()], make_call())
    (record,) = read_records(journal.directory)
    assert record["kind"] == "refusal"
    assert "PROTOTYPES" in record["reason"]


def test_an_unknown_field_is_neither_sent_nor_taken(journal: Journal) -> None:
    door = make_door(journal, *Exposure)
    smuggled = wire.SubmitUpdateRequest.FromString(update().SerializeToString() + bytes([0x9A, 0x06, 2, 104, 105]))
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.release([smuggled], make_call())
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.admit(smuggled.SerializeToString(), wire.SubmitUpdateRequest, make_call())
    assert [record["kind"] for record in read_records(journal.directory)] == ["refusal", "refusal"]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x0a\x02\x12\x05", wire.SubmitUpdateRequest(update={}).SerializeToString()]
)
def test_rubbish_is_refused_and_recorded(journal: Journal, data: bytes) -> None:
    with pytest.raises(RefusedError):
        make_door(journal, *Exposure).admit(data, wire.SubmitUpdateRequest, make_call())
    (record,) = read_records(journal.directory)
    assert (record["kind"], record["length"]) == ("refusal", len(data))


def test_what_comes_in_is_recorded_as_received(journal: Journal) -> None:
    data = update().SerializeToString()
    call = make_call()
    message = make_door(journal, *Exposure).admit(data, wire.SubmitUpdateRequest, call)
    assert message.SerializeToString() == data
    (record,) = read_records(journal.directory)
    assert (record["direction"], record["sha256"]) == ("received", hashlib.sha256(data).hexdigest())
    assert call.received.last_index == record["index"]


def test_two_equal_messages_have_different_hashes(journal: Journal) -> None:
    door = make_door(journal, Exposure.PROTOCOL, Exposure.IDENTITY)
    assert door.release([update()], make_call()) != door.release([update()], make_call())
