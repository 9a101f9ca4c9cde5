"""The kernel's count beside the record's: what is proven, what is not, and what is alarming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.witness_door import WitnessDoor
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.cosignature import COSIGNATURE, NoteKey
from medsilo.privacy.journal.records import EgressRecord
from medsilo.privacy.pages.blocks import Answered
from medsilo.privacy.report.model import Report
from medsilo.privacy.report.writing import make_document, to_json
from medsilo.privacy.witness.protocol import AddCheckpoint
from tests.support.evidence.recorded import MODELS, Recorded

WITNESS = NoteKey("ethics.example.org", COSIGNATURE, bytes(32))
QUESTION = "Did anything else leave?"


def count(recorded: Recorded, since: int, sent: int, **changes: Any) -> None:
    told = {"connections": 1, "retransmitted": 0, "segments": 9, "received": 0, "interfaces": {"lo": 70}, "refused": 0}
    recorded.door.note(EgressRecord(since=since, address="hub.example:7443", sent=sent, **{**told, **changes}))


def begun(folder: Path) -> Recorded:
    recorded = Recorded(folder)
    recorded.consent("MODEL_PARAMETERS")
    return recorded


def answer(report: Report) -> Answered | None:
    found = [one for one in make_document(report).answers if one.question == QUESTION]
    return found[0] if found else None


def upload(recorded: Recorded, number: int) -> int:
    """Uploads a round; how many bytes that was."""
    before = recorded.report().bytes_left
    recorded.upload("spring", number, MODELS)
    return recorded.report().bytes_left - before


def test_carriage_within_its_formats_is_proven_by_the_kernel(tmp_path: Path) -> None:
    with begun(tmp_path) as recorded:
        since = len(recorded.journal)
        count(recorded, since, 0, connections=0)
        recorded.run("spring")
        left = upload(recorded, 0)
        count(recorded, since, left + 900)
        report = recorded.report()
        (egress,) = report.egress
        assert (egress.attributed, egress.overhead, report.uncounted) == (left, 900, 0)
        found = answer(report)
        assert found is not None
        assert found.verdict == "Not from this program over the network: proven by the kernel"
        assert found.tone == "good"
        told = json.loads(to_json(report))["egress"][0]
        assert (told["overhead"], told["accounted"]) == (900, True)
        assert verify_evidence(tmp_path).sound


def ask(recorded: Recorded) -> tuple[int, int]:
    """Asks a witness; how many bytes the question and its head are."""
    door = WitnessDoor(recorded.door, PlanGate(Exposure), WITNESS, run=None, plan_sha256=None)
    question = AddCheckpoint(0, (), recorded.journal.checkpoint())
    length = len(b"".join(question.parts()))
    data, _ = door.release(question, "", lambda length: b"h" * 150)
    return length, len(data) - length


def to_witness(sent: int, connections: int = 1) -> dict[str, Any]:
    counts = {"connections": connections, "retransmitted": 0, "segments": 5, "received": 300}
    return {"address": "ethics.example.org:443", "names": [WITNESS.name], "sent": sent, **counts}


def test_what_goes_to_a_witness_is_held_against_what_the_record_tells_of_it_alone(tmp_path: Path) -> None:
    with begun(tmp_path) as recorded:
        recorded.run("spring")
        ask(recorded)  # before the kernel counted
        since = len(recorded.journal)
        count(recorded, since, 0, connections=0, witnesses=[to_witness(0, 0)])
        left = upload(recorded, 0)
        question, head = ask(recorded)
        assert head == 150
        count(recorded, since, left + 900, witnesses=[to_witness(question + head + 700)])
        report = recorded.report()
        (egress,) = report.egress
        assert [way.attributed for way in egress.ways] == [left, question]
        assert [way.overhead for way in egress.ways] == [900, head + 700]
        assert [way.witnesses for way in egress.ways] == [(), (WITNESS.name,)]
        assert (egress.accounted, report.uncounted) == (True, question)
        schema = json.loads((Path(__file__).parents[3] / "docs" / "bundle.schema.json").read_text())
        form = Draft202012Validator({"$ref": "#/$defs/egress", "$defs": schema["$defs"]})
        lines = (tmp_path / "records.jsonl").read_text().splitlines()
        for record in (found for found in map(json.loads, lines) if found["kind"] == "egress"):
            form.validate(record)
            assert not form.is_valid({**record, "witnesses": [{**record["witnesses"][0], "sent": -1}]})
        # The room that calls to the coordinator leave is none for what goes to a witness.
        more = question + egress.ways[1].allowance + 1
        assert more - question < egress.ways[0].allowance
        count(recorded, since, left, witnesses=[to_witness(more)])
        assert not recorded.report().egress[0].accounted
        found = answer(recorded.report())
        assert found is not None
        assert found.verdict == "MORE left than the record tells of, by the kernel's count"
        assert "`ethics.example.org:443` and `hub.example:7443`" in " ".join(map(str, found.sentences))


@pytest.mark.parametrize(
    ("changes", "verdict", "tone"),
    [
        ({"sent": 100_000}, "MORE left than the record tells of, by the kernel's count", "bad"),
        ({"interfaces": {"lo": 0, "eth0": 5}}, "MORE left than the record tells of, by the kernel's count", "bad"),
        ({"refused": 2}, "Something tried to, and the kernel stopped it", "attention"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(tmp_path: Path, changes: Any, verdict: str, tone: str) -> None:
    with begun(tmp_path) as recorded:
        since = len(recorded.journal)
        count(recorded, since, 0)
        recorded.run("spring")
        left = upload(recorded, 0)
        count(recorded, since, **{"sent": left + 900, **changes})
        found = answer(recorded.report())
        assert found is not None
        assert (found.verdict, found.tone) == (verdict, tone)


def test_each_process_begins_its_count_anew_and_what_left_between_was_not_counted(tmp_path: Path) -> None:
    with begun(tmp_path) as recorded:
        recorded.run("spring")
        lengths = []
        for number in (0, 1, 2):
            since = len(recorded.journal)
            if number != 1:
                count(recorded, since, 0)
            lengths.append(upload(recorded, number))
            if number != 1:
                count(recorded, since, lengths[-1] + 100)
        report = recorded.report()
        assert [one.attributed for one in report.egress] == [lengths[0], lengths[2]]
        assert report.uncounted == lengths[1] > 0
        found = answer(report)
        assert found is not None
        assert found.verdict == "No, proven by the kernel for a part of the time"


def test_without_a_count_nothing_is_said_of_the_kernel(tmp_path: Path) -> None:
    with begun(tmp_path) as recorded:
        recorded.run("spring")
        upload(recorded, 0)
        report = recorded.report()
        assert answer(report) is None
        assert json.loads(to_json(report))["egress"] == []
