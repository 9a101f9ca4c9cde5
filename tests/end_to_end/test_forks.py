"""Real daemons with a coordinator that shows two hospitals two journals, in one run."""

from __future__ import annotations

import json
from collections.abc import Callable

from medsilo.algorithms.datasets import ImageDataset
from tests.support.runs.federation import PATIENCE, Federation

Make = Callable[..., Federation]


def test_a_hospital_that_is_shown_a_second_journal_stops_within_a_round_and_has_proof(
    federation: Make, shards: list[ImageDataset]
) -> None:
    one = federation(shards=shards[:2], run={"rounds": 6})
    coordinator = one.start("two_faced", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    first, second = (one.start_silo(name) for name in one.silos)
    one.ends_with(second, 9)
    deceived = one.silos[1]
    assert "shows two journals" in " ".join(one.said(deceived).split())

    # The second journal began with its second update. What shows it is what the other hospital signs after that: with
    # its next message, or with its update of the next round.
    folder = one.folder / "state" / "coordinator" / "second-journal"
    shown = [json.loads(line) for line in (folder / "records.jsonl").read_bytes().splitlines()]
    assert {r["round"] for r in shown if r.get("rpc") == "SubmitUpdate" and r["peer"].endswith(deceived)} >= {0, 1}
    there = {r.get("round") for r in one.messages("coordinator", "received") if r["peer"].endswith(deceived)}
    assert 1 not in there, "the genuine journal has nothing of it"
    assert max(r["round"] for r in one.messages(deceived, "sent") if r["rpc"] == "SubmitUpdate") <= 2

    # Anyone can check what it has in its hands, with nothing else.
    proof = f"state/{deceived}/fork-proof.json"
    said = one.command("silo", "audit", "verify", proof, "--key", "state/coordinator/keys/audit.pub")
    assert "spiffe://test/coordinator/coordinator has signed two" in " ".join(said.split())
    for process in (first, coordinator):
        process.kill()
        process.wait(PATIENCE)
        one.processes.remove(process)
