"""A journal of what went to a party that speaks another system's protocol and signs nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Call
from medsilo.privacy.door.foreign_door import ForeignDoor, ForeignSchema
from medsilo.privacy.errors import ConfigurationError, ConsentError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import RECORDS, read_records
from medsilo.privacy.journal.records import ConsentRecord, ForeignPeerRecord, PeerKeyRecord, RunRecord
from medsilo.privacy.report.builder import build_report
from medsilo.privacy.report.page_one import answers
from tests.support.evidence.plain_journal import IDENTITY, KEY, PUBLIC, open_journal

PEER = "spiffe://test/coordinator/server"
CONSENTED = (Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.SAMPLE_COUNT)
PLAN = {
    "method": {"name": "parcels", "parameters": {}},
    "rounds": None,
    "required": ["SAMPLE_COUNT"],
    "optional": [],
    "downlink": [],
}


def parcels(*more: str) -> bytes:
    """The schema of a system that sends parcels."""
    file = descriptor_pb2.FileDescriptorProto(name="parcels.proto", package="parcels", syntax="proto3")
    message = file.message_type.add(name="Parcel")
    for number, name in enumerate(("sender", "content", *more), start=1):
        field = message.field.add(name=name, number=number)
        field.type, field.label = field.TYPE_BYTES, field.LABEL_OPTIONAL
    return file.SerializeToString()


def schema(*more: str) -> ForeignSchema:
    exposures = {"Parcel.sender": Exposure.IDENTITY, "Parcel.content": Exposure.PROTOCOL}
    return ForeignSchema([parcels(*more)], exposures, split="Parcel.content")


@pytest.fixture
def door(tmp_path: Path) -> Iterator[ForeignDoor]:
    with open_journal(tmp_path / "journal") as journal:
        yield ForeignDoor(journal, schema(), identity=IDENTITY, federation="test", peer=PEER, protocol="Parcels 1")


def join(door: ForeignDoor) -> str:
    """A consent and a run on record; returns the plan's hash."""
    consent = {"exposures": list(CONSENTED), "coordinator": PEER, "methods": ["parcels"], "rounds": 2, "expires": None}
    door.note(ConsentRecord(consent={"sha256": "0" * 64, **consent}))
    digest = hashlib.sha256(write_canonical(PLAN)).hexdigest()
    door.note(RunRecord(run="one", plan_sha256=digest, plan=PLAN))
    return digest


def parcel(door: ForeignDoor, content: bytes = b"") -> Any:
    message = door.schema.make("parcels.Parcel")
    message.sender, message.content = b"hospital", content
    return message


def call(door: ForeignDoor, digest: str, number: int | None = 0) -> Call:
    return door.call("PushMessages", "ab" * 32, "send a parcel", run="one", plan_sha256=digest, round=number)


def send(door: ForeignDoor, digest: str, number: int | None = 0, counts: int = 3) -> bytes:
    message = parcel(door, b"head" + bytes(counts))
    parts = ("content", {Exposure.PROTOCOL: 4, Exposure.SAMPLE_COUNT: counts})
    return door.release(
        message, call(door, digest, number), PlanGate(CONSENTED), parts=parts, head=lambda n: b"%d|" % n
    )


def test_a_journal_without_receipts_is_sound_and_says_that_nobody_signed(door: ForeignDoor, tmp_path: Path) -> None:
    wire = send(door, join(door))
    assert wire.startswith(b"19|")
    door.admit(parcel(door, b"thanks").SerializeToString(), "parcels.Parcel", call(door, ""))
    door.journal.checkpoint()
    found = verify_evidence(tmp_path / "journal", key=PUBLIC)
    assert found.sound, found.problem
    assert (found.sent, found.received, found.acknowledged) == (1, 1, 0)
    assert any("Parcels 1 and signs no receipts" in remark for remark in found.remarks)


def test_a_field_of_bytes_is_attributed_part_by_part(door: ForeignDoor, tmp_path: Path) -> None:
    send(door, join(door))
    record = list(read_records(tmp_path / "journal"))[-1]
    assert record["fields"] == {"sender": 10, "content": 2, "content.protocol": 4, "content.sample_count": 3}
    assert record["classes"] == {"IDENTITY": 10, "PROTOCOL": 6, "SAMPLE_COUNT": 3}
    assert sum(record["classes"].values()) == record["length"]


def test_what_is_not_agreed_to_does_not_leave_and_is_on_record(door: ForeignDoor, tmp_path: Path) -> None:
    parts = ("content", {Exposure.LOCAL_METRICS: 2})
    with pytest.raises(ConsentError, match="LOCAL_METRICS"):
        door.release(parcel(door, b"07"), call(door, join(door)), PlanGate(CONSENTED), parts=parts)
    last = list(read_records(tmp_path / "journal"))[-1]
    assert last["kind"] == "refusal"
    assert "LOCAL_METRICS" in last["reason"]
    assert verify_evidence(tmp_path / "journal", key=PUBLIC).sent == 0


def test_a_field_without_a_class_or_out_of_the_schema_is_refused(door: ForeignDoor, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no exposure class"):
        schema("letter").read(b"", "parcels.Parcel")
    unknown = parcel(door).SerializeToString() + b"\x9a\x06\x01x"
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.admit(unknown, "parcels.Parcel", call(door, ""))
    message = door.schema.make("parcels.Parcel")
    message.ParseFromString(unknown)  # protobuf keeps what it does not know
    with pytest.raises(RefusedError, match="unknown field 99"):
        door.release(message, call(door, join(door)), PlanGate(CONSENTED))
    with pytest.raises(ConfigurationError, match=r"no field Parcel\.letter"):
        ForeignSchema([parcels()], {"Parcel.letter": Exposure.PROTOCOL}, split="Parcel.content")


def test_rounds_are_counted_over_restarts_and_held_against_the_consent(tmp_path: Path) -> None:
    for number in range(3):
        with open_journal(tmp_path / "journal") as journal:
            door = ForeignDoor(journal, schema(), identity=IDENTITY, federation="test", peer=PEER, protocol="Parcels 1")
            assert door.rounds == ({"one": set(range(number))} if number else {})
            send(door, join(door), number)
    found = verify_evidence(tmp_path / "journal", key=PUBLIC)
    assert "updates of 3 rounds left; the consent holds 2" in found.problem


def test_a_flipped_byte_in_the_journal_is_found(door: ForeignDoor, tmp_path: Path) -> None:
    send(door, join(door))
    door.journal.checkpoint()
    path = tmp_path / "journal" / RECORDS
    content = path.read_bytes()
    place = content.index(b'"content.sample_count":3') + len(b'"content.sample_count":')
    path.write_bytes(content[:place] + b"4" + content[place + 1 :])
    found = verify_evidence(tmp_path / "journal", key=PUBLIC)
    assert not found.sound


def test_nobody_is_excused_from_receipts_afterwards(door: ForeignDoor, tmp_path: Path) -> None:
    door.note(PeerKeyRecord(peer="spiffe://test/coordinator/c", public_key=PUBLIC.hex(), rotations=[]))
    door.note(ForeignPeerRecord(peer="spiffe://test/coordinator/c", protocol="none"))
    door.journal.checkpoint()
    assert "excuses" in verify_evidence(tmp_path / "journal", key=PUBLIC).problem


def test_the_report_says_that_contents_are_the_hospitals_own_declaration(door: ForeignDoor, tmp_path: Path) -> None:
    send(door, join(door))
    door.journal.checkpoint()
    journal = tmp_path / "journal"
    party = Identity.parse(IDENTITY)
    public = KEY.public_key().public_bytes_raw()
    report = build_report(journal, public, party=party)
    assert report.verification.sound
    words = json.dumps([[one.verdict, one.sentences] for one in answers(report)], ensure_ascii=False)
    assert "the hospital has declared" in words
    assert "signs no receipts" in words
    assert "ε = ∞" in words
    assert "No image" not in words
