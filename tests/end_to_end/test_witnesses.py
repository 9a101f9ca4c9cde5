"""Real daemons whose journals a witness in a process of its own cosigns, over HTTP."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.runs.federation import Federation
from tests.support.runs.witness_daemon import Witness, name_witnesses

Make = Callable[..., Federation]


def verify(one: Federation, source: str, *words: str, expect: int = 0) -> dict[str, Any]:
    said = one.command("silo", "audit", "verify", source, "--json", *words, expect=expect)
    found: dict[str, Any] = json.loads(said)
    return found


def test_journals_are_cosigned_in_a_run_and_the_witness_that_is_away_is_told_of(federation: Make) -> None:
    one = federation()
    here, away = Witness(one, "here"), Witness(one, "away")
    name_witnesses(one, [here, away])
    here.start()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)
    for name, role in [*((silo, "silo") for silo in one.silos), ("coordinator", "coordinator")]:
        one.command(role, "audit", "export", "--config", f"{name}.yaml", "--out", f"{name}.json")
        (one.folder / f"{name}.seen").write_text(here.last(f"medsilo/test/{role}/{name}"))
        found = verify(one, f"{name}.json", "--witness", here.key, "--seen", f"{name}.seen")
        assert found["sound"], found
        kinds = [record["kind"] for record in one.records(name)]
        assert "cosigned" in kinds
        # What is not covered is the showing of the last checkpoint itself.
        assert found["witnessed"]["covered"] >= len(kinds) - 4
        asked = [r for r in one.messages(name, "sent") if r["peer"].startswith("witness:")]
        assert {tuple(r["classes"]) for r in asked} == {("CHECKPOINT",)}
        assert {r["peer"] for r in asked} == {"witness:here.example.org"}
        # Both are asked for, and one has never answered.
        policy = {"keys": [here.key, away.key], "needed": 2}
        one.write("policy.yaml", policy)
        found = verify(one, f"{name}.json", "--witness", "policy.yaml", expect=1)
        assert [finding["kind"] for finding in found["findings"]] == ["witness"]
        status = json.loads((one.folder / "state" / name / "witnesses.json").read_text())
        assert status["here.example.org"]["away"] is None
        assert "cannot be reached" in status["away.example.org"]["away"]
    assert verify(one, f"{one.silos[0]}.json", "--peer", "coordinator.json", "--witness", here.key)["sound"]
    said = one.command("coordinator", "status", "--config", "coordinator.yaml")
    assert "away since" in said.replace("\n", " ")
    one.command("silo", "report", "--config", f"{one.silos[0]}.yaml", "--format", "html", "--out", "report")
    report = next((one.folder / "report").glob("*.html")).read_text()
    assert "away.example.org (which has never answered)" in report


def test_nothing_goes_to_a_witness_that_the_consent_does_not_name(federation: Make) -> None:
    one = federation()
    here = Witness(one, "here")
    name_witnesses(one, [here])
    first, second = one.silos[:2]
    one.write_consent(first, exposures=[*one.exposures, "CHECKPOINT"])
    one.write_consent(second, witnesses={"keys": [here.key]})
    here.start()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)
    for name in (first, second):
        assert not [r for r in one.messages(name, "sent") if r["peer"].startswith("witness:")]
        one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
    assert "does not name this witness" in one.said(first)


def test_a_journal_that_was_put_back_behind_its_witness_is_found(federation: Make, tmp_path: Path) -> None:
    one = federation()
    here = Witness(one, "here")
    name_witnesses(one, [here])
    here.start()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos], coordinator)
    name = one.silos[0]
    # The owner cuts its journal back, with its own key; every record that is left is genuine.
    records = (one.folder / "state" / name / "journal" / "records.jsonl").read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(records) if json.loads(line)["kind"] == "cosigned") + 1
    journal = one.folder / "cut"
    journal.mkdir()
    (journal / "records.jsonl").write_bytes(b"".join(records[:cut]))
    notes = (one.folder / "state" / name / "journal" / "checkpoints.jsonl").read_text().splitlines(keepends=True)
    kept = [n for n in notes if int(json.loads(n)["checkpoint"].split("\n")[1]) <= cut]
    (journal / "checkpoints.jsonl").write_text("".join(kept))
    assert verify(one, "cut")["sound"]
    (one.folder / "seen").write_text(here.last(f"medsilo/test/silo/{name}"))
    found = verify(one, "cut", "--witness", here.key, "--seen", "seen", expect=1)
    assert "withheld, or it was put back" in found["findings"][0]["what"]
