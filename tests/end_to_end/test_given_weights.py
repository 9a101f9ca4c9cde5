"""Runs that start from given weights, in real daemons: from a file, from files that hospitals bring, from a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.plan import ModelPlan
from tests.support.runs.checks import assert_both_sides_agree, assert_journals_sound, assert_models_are
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]
ARCHITECTURE: dict[str, Any] = {"name": "mlp-64", "input_shape": [3, 28, 28], "classes": 9}
NEEDED = [exposure.value for exposure in FedAvg().required]


def weights_file(folder: Path, *, classes: int = 9) -> Path:
    """A model of another seed than the run's, as ``torch.save`` writes it."""
    plan = ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=classes)
    torch.save(state_of(build(plan, seed=77)), folder / "given.pt")
    return folder / "given.pt"


def run_with(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {**ARCHITECTURE, "weights": weights}
    return {"method": {"name": "fedavg"}, "model": model, "rounds": 2, "ask_for": [], **changes}


def starts_received(one: Federation, silo: str) -> dict[str, int]:
    """Bytes of starting models that a silo was sent, by class."""
    found: dict[str, int] = {}
    for record in one.messages(silo, "received"):
        for exposure in {"INITIAL_MODEL", "PEER_INITIAL_MODEL"} & set(record["classes"]):
            found[exposure] = found.get(exposure, 0) + record["classes"][exposure]
    return found


def test_a_run_from_a_file_trains_what_simulation_trains_from_it(federation: Make, tmp_path: Path) -> None:
    file = weights_file(tmp_path)
    given = {"file": str(file), "public": True, "source": "a public model", "licence": "CC0"}
    one = federation(insecure=True, run=run_with(given), exposures=NEEDED)
    inspected = one.command("coordinator", "plan", "--config", "coordinator.yaml")
    assert hashlib.sha256(file.read_bytes()).hexdigest() in inspected
    one.run_to_the_end()
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    expected = one.simulate()
    assert_models_are(one, expected)
    one.coordinator_config["run"]["model"].pop("weights")
    one.write("coordinator.yaml", one.coordinator_config)
    at_random = one.simulate()
    name = one.silos[0]
    assert any(not torch.equal(tensor, at_random[name][key]) for key, tensor in expected[name].items())
    for silo in one.silos:
        assert set(starts_received(one, silo)) == {"INITIAL_MODEL"}


def test_weights_that_hospitals_bring_never_travel(federation: Make, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    file = weights_file(folder, classes=4)
    given = {"file": str(file), "public": True, "brought": True}
    one = federation(insecure=True, run=run_with(given), exposures=NEEDED)
    coordinator = one.start_coordinator()
    missing = one.start_silo("hospital1")
    assert missing.wait(180) != 0
    said = one.said("hospital1")
    assert hashlib.sha256(file.read_bytes()).hexdigest() in said
    assert "under `weights:`" in said
    for silo in one.silos:
        one.write_silo(silo, weights=[str(folder)])
    processes = [one.start_silo(silo) for silo in one.silos]
    assert [process.wait(180) for process in (*processes, coordinator)] == [0] * 4, one.everything_said()
    one.processes.remove(missing)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    # The last layer has another number of classes and is drawn by the coordinator; its numbers, and no others, came.
    head = 4 * (64 * 9 + 9)
    for silo in one.silos:
        ((exposure, size),) = starts_received(one, silo).items()
        assert exposure == "INITIAL_MODEL"
        assert head <= size < head + 64


def test_a_run_goes_on_from_an_earlier_one_if_hospitals_agree_that_it_reaches_others(federation: Make) -> None:
    first = {"method": {"name": "fedavg"}, "model": ARCHITECTURE, "rounds": 2, "ask_for": []}
    one = federation(insecure=True, run=first, exposures=NEEDED)
    one.run_to_the_end()
    outcome = load_file(one.folder / "state/coordinator/runs/test/outcome.safetensors")
    # FedAvg's personalised model is the one that all were given.
    model = load_file(one.run_folder("hospital1") / "model.safetensors")
    assert all(torch.equal(model[key], tensor) for key, tensor in outcome.items())
    assert outcome.keys() == model.keys()

    one.coordinator_config["run"] = run_with({"run": "test"}, name="second")
    one.write("coordinator.yaml", one.coordinator_config)
    refused = one.command("silo", "inspect", "--plan", _plan(one), "--config", "hospital1.yaml")
    assert "exposure class PEER_INITIAL_MODEL" in refused
    assert "made of hospitals' models: the outcome of run test" in refused
    for silo in one.silos:
        one.write_consent(silo, exposures=[*NEEDED, "PEER_INITIAL_MODEL"])
    one.processes.clear()
    one.run_to_the_end()
    assert_journals_sound(one)
    for silo in one.silos:
        assert set(starts_received(one, silo)) == {"INITIAL_MODEL", "PEER_INITIAL_MODEL"}
    one.command("silo", "report", "--config", "hospital1.yaml", "--run", "second")
    report = json.loads((one.folder / "state/hospital1/report/report.json").read_text())
    (second,) = [run for run in report["runs"] if run["run"] == "second"]
    assert "made of hospitals' models: the outcome of run test" in second["started_from"]
    assert "PEER_INITIAL_MODEL" in {flow["exposure"] for flow in second["came_back"]}


def _plan(one: Federation) -> str:
    said = one.command("coordinator", "plan", "--config", "coordinator.yaml")
    (one.folder / "plan.json").write_text(said[said.index("{") :])
    return "plan.json"


def test_a_runs_outcome_is_not_taken_for_public(federation: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(torch.load(weights_file(tmp_path), weights_only=True), folder / "model.safetensors")
    (folder / "model.json").write_text("{}")
    one = federation(insecure=True, run=run_with({"file": str(folder / "model.safetensors"), "public": True}))
    refusal = one.command("coordinator", "plan", "--config", "coordinator.yaml", expect=2)
    assert "is a run's outcome" in refusal
