"""The evidence of real daemons: sound, provable without keys, and of no use to whoever changes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.runs.federation import Federation

DOCS = Path(__file__).parents[2] / "docs"


def test_evidence_of_real_daemons(federation: Callable[..., Federation], tmp_path: Path) -> None:
    one = federation(run={"rounds": 2})
    one.run_to_the_end()
    bundles: dict[str, Path] = {}
    for party in ("coordinator", *one.silos):
        command = "coordinator" if party == "coordinator" else "silo"
        bundles[party] = tmp_path / f"{party}.json"
        one.command(command, "audit", "export", "--config", f"{party}.yaml", "--out", str(bundles[party]))
    part = tmp_path / "part.json"
    one.command("silo", "audit", "export", "--config", "hospital1.yaml", "--rounds", "2", "--out", str(part))
    shutil.rmtree(one.folder / "state")  # no keys, no journals, no daemons

    def verify(*words: object, expect: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            one.command("silo", "audit", "verify", *map(str, words), "--json", expect=expect)
        )
        return found

    validator = Draft202012Validator(json.loads((DOCS / "bundle.schema.json").read_text()))
    theirs = bundles["coordinator"]
    for silo in one.silos:
        found = verify(bundles[silo], "--peer", theirs)
        assert found["sound"]
        assert found["acknowledged"] == found["sent"] > 0
        assert found["peer"] == "spiffe://test/coordinator/coordinator"
        assert verify(theirs, "--peer", bundles[silo])["sound"]
    first, *others = one.silos
    for silo in others:
        found = verify(bundles[first], "--peer", bundles[silo])
        assert found["sound"], found
        assert found["findings"] == [], "what personalised methods give to each differs, and is no finding"
        assert found["times"]["confirmed"] > found["records"] / 2
        assert found["times"]["contradicted"] == 0
    told = [record for record in json.loads(bundles[first].read_text())["records"] if "content" in record]
    assert {record["content"]["class"] for record in told} == {"INITIAL_MODEL"}
    for bundle in (*bundles.values(), part):
        validator.validate(json.loads(bundle.read_text()))
        done = subprocess.run(
            [sys.executable, "-I", DOCS / "verify_by_hand.py", bundle], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert verify(part, "--peer", theirs)["whole"] is False

    original = bundles["hospital1"].read_bytes()
    lines = original.splitlines(keepends=True)
    sent = next(number for number, line in enumerate(lines) if b'"direction":"sent"' in line)
    for changed, code in (
        (original.replace(b'"attempt":1', b'"attempt":2', 1), 1),
        (b"".join([*lines[:sent], *lines[sent + 1 :]]), 1),
        (b"".join([*lines[:sent], lines[sent + 1], lines[sent], *lines[sent + 2 :]]), 1),
        (original[:-1], 2),
    ):
        bundles["hospital1"].write_bytes(changed)
        found = verify(bundles["hospital1"], expect=code)
        assert not found["sound"]
        assert found["problem"]
        verify(theirs, "--peer", bundles["hospital1"], expect=code)


def test_hospitals_of_a_common_model_hold_what_they_were_given_against_each_other(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Two honest hospitals are sound, also with the masks of a round, and when one has exported before the end."""
    one = federation(
        run={
            "rounds": 3,
            "method": {"name": "fedavg", "weighting": "uniform"},
            "secure_aggregation": {},
        },
        exposures=["PROTOCOL", "IDENTITY", "MASKED_UPDATE", "PEER_DERIVED", "LOCAL_METRICS"],
    )
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    silos = [one.start_silo(name) for name in one.silos]
    early = tmp_path / "early.json"
    one.wait_for("a round", lambda: [r for r in one.messages("hospital1", "sent") if r["round"] == 1])
    one.command("silo", "audit", "export", "--config", "hospital1.yaml", "--out", str(early))
    one.finish(*silos, coordinator)
    bundles = {name: tmp_path / f"{name}.json" for name in one.silos}
    for name, path in bundles.items():
        one.command("silo", "audit", "export", "--config", f"{name}.yaml", "--out", str(path))
    first, *others = bundles.values()
    for own in (first, early):
        for other in others:
            for pair in ((own, other), (other, own)):
                said = one.command("silo", "audit", "verify", str(pair[0]), "--peer", str(pair[1]), "--json")
                found = json.loads(said)
                assert found["sound"], found
                assert any("one and the same journal of spiffe://test/coordinator/" in r for r in found["remarks"])

    def given(party: str, direction: str) -> dict[tuple[Any, ...], set[str]]:
        told: dict[tuple[Any, ...], set[str]] = {}
        for record in one.messages(party, direction):
            if "content" in record:
                content = record["content"]
                what = (content["class"], record["round"], content["bytes"])
                told.setdefault(what, set()).add(content["sha256"])
        return told

    assert given("hospital1", "received") == given("hospital2", "received") == given("coordinator", "sent")
    assert {what for what, *_ in given("hospital1", "received")} == {"INITIAL_MODEL", "PEER_DERIVED"}
    assert all(len(digests) == 1 for digests in given("coordinator", "sent").values())
