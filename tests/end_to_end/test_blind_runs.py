"""Blind mixtures of real daemons: each hospital opens a mixture of its own, of models that the coordinator never
sees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from medsilo.algorithms.models import Layout, build
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.budget.ledger import ledgers
from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS
from tests.support.runs.blind import BLIND, NEAR, SMOOTH, blind
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_signed,
)
from tests.support.runs.federation import PATIENCE, Federation, without_signatures
from tests.support.runs.masked import Make
from tests.support.runs.traces import traces


def models_of(one: Federation) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(one.run_folder(name) / "model.safetensors") for name in one.silos}


def furthest(found: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> float:
    return max(float((found[n][key] - expected[n][key]).abs().max()) for n in found for key in found[n])


def assert_models_are_the_plain_runs(one: Federation, *, near: float = NEAR) -> None:
    expected = one.simulate()
    assert furthest(models_of(one), expected) < near
    # Without mixtures they would be others.
    settings = one.coordinator_config["run"]
    alone = {**settings, "method": {"name": "local"}}
    del alone["secure_aggregation"]
    one.write("coordinator.yaml", {**one.coordinator_config, "run": alone})
    assert furthest(one.simulate(), expected) > 5 * near
    one.write("coordinator.yaml", one.coordinator_config)


def sent(one: Federation, name: str, number: int) -> list[dict[str, Any]]:
    return [r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == number]


def classes_of(records: list[dict[str, Any]]) -> set[str]:
    return {c for r in records for c in r["classes"]} - {"PROTOCOL", "IDENTITY"}


def needles_of(one: Federation, name: str) -> list[bytes]:
    """Stretches of a hospital's model, which it has sent last: as numbers, and in fixed point unsealed."""
    layout = Layout.of(build(CoordinatorConfig.read(one.folder / "coordinator.yaml").plan().model, seed=1))
    start = load_file(one.folder / "state" / "coordinator" / "runs" / "test" / "initial.safetensors")
    model = load_file(one.run_folder(name) / "model.safetensors")
    first = {spec.name: next(key for key in start if key.endswith(spec.name)) for spec in layout.parameters}
    plain, before = (
        np.concatenate([state[names[spec.name]].numpy().reshape(-1) for spec in layout.parameters])
        for state, names in ((model, {name: name for name in first}), (start, first))
    )
    changed = [i for i in range(0, len(plain) - 8, 8) if (plain[i : i + 8] != before[i : i + 8]).all()]
    fixed = np.rint(plain.astype(np.float64) * (1 << FRACTION_BITS)).astype(np.int64)
    places = (changed[len(changed) // 3], changed[-1])
    return [numbers[i : i + 8].tobytes() for i in places for numbers in (plain, fixed)]


@pytest.mark.parametrize("method", ["diversifed", "fedamp"])
def test_models_are_the_plain_runs_and_the_coordinator_has_none_of_them(federation: Make, method: str) -> None:
    one = blind(federation, run={"method": {"name": method}, "training": SMOOTH}, coordinator={"keep_rounds": 10})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos])
    assert traces(one, coordinator, needles_of(one, "hospital1")) == (0, 0)
    coordinator.terminate()
    one.finish(coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_signed(one)
    assert_models_are_the_plain_runs(one)
    shown = set()
    for name in one.silos:
        assert classes_of(sent(one, name, 0)) == classes_of(sent(one, name, 2)) == {"SEALED_MODEL", "MODEL_DISTANCES"}
        assert classes_of(sent(one, name, 1)) == classes_of(sent(one, name, 3)) == {"OPENING_SHARES"}
        assert [r["round"] for r in one.records(name) if r["kind"] == "roster"] == [0, 2]
        helped = [r for r in one.records(name) if r["kind"] == "mix"]
        assert [(r["round"], r["models"], r["rounds"]) for r in helped] == [(0, 2, 1), (2, 2, 2)]
        assert all(0 < r["isolation"] <= r["isolation_over_rounds"] for r in helped)
        assert not (one.run_folder(name) / "blind.json").exists(), "what opened the last mixture is gone"
        came = [r for r in one.messages(name, "received") if r["round"] == 1 and r.get("content")]
        shown |= {r["content"]["sha256"] for r in came if r["content"]["class"] == "MIXING_WEIGHTS"}
    assert len(shown) == 1, "all have on record that they were shown the same weights"
    inspected = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--json"))
    assert inspected["bytes_per_round"] == sum(without_signatures(record) for record in sent(one, "hospital1", 0))
    assert one.command("silo", "audit", "verify", "--config", "hospital1.yaml")
    helped = "This hospital helped to open the mixtures of 2 rounds of training. Each held 2 models or more"
    assert helped in inspected["helped"]
    assert any(
        line.startswith("Who learns what (blind mixture): the coordinator, whatever") for line in inspected["learns"]
    )
    one.command("silo", "report", "--config", "hospital1.yaml", "--format", "json")
    reported = json.loads((one.folder / "state/hospital1/report/report.json").read_text())["runs"]
    run = next(entry for entry in reported if entry["run"] == "test")
    assert helped in run["mixtures_in_words"]
    found = [r for r in one.records("hospital1") if r["kind"] == "mix"]
    assert [entry["mix_sha256"] for entry in run["mixtures"]] == [r["mix_sha256"] for r in found]
    for party, config in (("silo", "hospital1.yaml"), ("coordinator", "coordinator.yaml")):
        told = one.command(party, "report", "--config", config, "--format", "json")
        said = "blind mixture: the coordinator learnt how far models lie apart, and chose the weights by it"
        assert said in " ".join(told.lower().split()), told


def test_pfedsim_mixes_all_of_a_model_evenly_and_then_extractors_by_classifiers(federation: Make) -> None:
    method = {"name": "pfedsim", "warmup_share": 0.34}
    one = blind(federation, run={"method": method, "training": SMOOTH, "rounds": 3})
    one.run_to_the_end()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_models_are_the_plain_runs(one, near=2 * NEAR)  # a round of training more magnifies differences once more
    layout = Layout.of(build(CoordinatorConfig.read(one.folder / "coordinator.yaml").plan().model, seed=1))
    whole = sum(spec.nbytes // 4 for spec in layout.parameters)
    extractor = sum(spec.nbytes // 4 for spec in layout.extractor)
    for name in one.silos:
        came = [classes_of(sent(one, name, number)) for number in (0, 2, 4)]
        assert came == [{"SEALED_MODEL"}, {"SEALED_MODEL", "MODEL_DISTANCES"}, {"SEALED_MODEL", "MODEL_DISTANCES"}]
        sealed = [sum(r["classes"].get("SEALED_MODEL", 0) for r in sent(one, name, number)) for number in (0, 2, 4)]
        assert sealed[0] >= 12 * whole > sealed[1] == sealed[2] >= 12 * extractor, "classifiers stay"


def test_feddfq_without_gradients_compares_identifiers_that_the_coordinator_does_not_see(federation: Make) -> None:
    method = {"name": "feddfq", "agam": False}
    one = blind(federation, run={"method": method, "training": SMOOTH})
    for name in one.silos:
        one.write_consent(
            name,
            exposures=[*BLIND, "DATA_IDENTIFIER"],
            secure_aggregation={"minimum": 3, "largest_isolation": 1000},
        )
    one.run_to_the_end()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are_the_plain_runs(one)
    for name in one.silos:
        for number in (0, 2):
            assert classes_of(sent(one, name, number)) == {"SEALED_MODEL", "MODEL_DISTANCES"}


def test_the_same_search_finds_models_in_a_plain_run(federation: Make) -> None:
    one = federation(run={"rounds": 1, "training": SMOOTH, "ask_for": []})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos])
    assert traces(one, coordinator, needles_of(one, "hospital1"))[1] > 0
    coordinator.terminate()
    one.finish(coordinator)


def test_kills_between_sealing_and_opening_change_nothing(federation: Make) -> None:
    one = blind(federation, run={"method": {"name": "fedamp"}, "training": SMOOTH})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    # Sealed and not sent; then weights are agreed to, and nothing has been sent of what opens mixtures.
    for dies_in in ("0", "1", "2", "3"):
        third = one.start("dying_silo", dies_in, "train", "--config", "hospital3.yaml")
        one.wait_for("the third hospital's end", lambda third=third: third.poll() is not None)
        if dies_in in "12":
            coordinator.kill()
            coordinator.wait(PATIENCE)
            coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.finish(*others, one.start_silo("hospital3"))
    coordinator.terminate()
    one.finish(coordinator)
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are_the_plain_runs(one)
    for name in one.silos:
        rosters = [r for r in one.records(name) if r["kind"] == "roster"]
        assert {r["round"] for r in rosters} == {0, 2}
        assert len({r["roster_sha256"] for r in rosters}) == len(rosters) > 2, "what was sealed again was for another"


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("added", "mixture_of_sealed: the mixture for hospital1 is not made of the models that were sealed"),
        ("after", "mixture_as_stated: the mixture for hospital1 is not the one that the coordinator stated"),
    ],
)
def test_a_mixture_that_something_was_added_to_is_not_trained_from(federation: Make, what: str, rule: str) -> None:
    """Whatever came of it would show in the distances of the next round."""
    one = blind(federation, run={"method": {"name": "fedamp"}, "training": SMOOTH})
    one.start("showing", what, "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    silos = [one.start_silo(name) for name in one.silos]
    one.ends_with(silos[0], 6)
    (refusal,) = [r for r in one.records("hospital1") if r["kind"] == "refusal"]
    assert rule in refusal["reason"]
    for silo in silos[1:]:
        silo.terminate()
        silo.wait(PATIENCE)
    for name in one.silos:
        assert [r["round"] for r in one.records(name) if r["kind"] == "roster"] == [0], "nothing was sealed after it"


@pytest.mark.parametrize("what", ["unit", "two"])
def test_weights_that_show_a_model_or_differ_open_nothing(federation: Make, what: str) -> None:
    one = blind(federation, run={"method": {"name": "fedamp"}, "training": SMOOTH})
    one.start("showing", what, "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    silos = [one.start_silo(name) for name in one.silos]
    for silo in silos:
        one.ends_with(silo, 6)
    for name in one.silos:
        (refusal,) = [r for r in one.records(name) if r["kind"] == "refusal"]
        if what == "unit":
            assert "is not opened by the coordinator's weights: minimum: the mixture of" in refusal["reason"]
            assert not classes_of(sent(one, name, 1)), "nobody has helped"
            assert not [r for r in one.records(name) if r["kind"] == "mix"]
            inspected = json.loads(one.command("silo", "inspect", "--config", f"{name}.yaml", "--json"))
            assert "It refused to help; last: round 2 is not opened" in inspected["helped"]
            assert "minimum: the mixture of" in inspected["helped"]
        else:
            assert "check_sums: those that came for" in refusal["reason"]
        assert [r["round"] for r in one.records(name) if r["kind"] == "roster"] == [0], "nothing was trained of it"


def test_a_part_of_a_model_is_mixed_by_bounded_weights_and_accuracies_go_with_it(federation: Make) -> None:
    model = {"name": "lenet5", "input_shape": [3, 28, 28], "classes": 9, "train": {"last": 2}}
    method = {"name": "diversifed", "variant": "bounded"}
    run = {"method": method, "model": model, "training": SMOOTH, "ask_for": ["LOCAL_METRICS"]}
    one = blind(federation, run=run, isolation=1.0, sketch=64)
    for name in one.silos:
        one.write_consent(name, exposures=[*BLIND, "LOCAL_METRICS"], secure_aggregation={"minimum": 3})
    one.run_to_the_end()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    for name in one.silos:
        assert [classes_of(sent(one, name, number)) for number in range(4)] == [
            {"SEALED_MODEL", "MODEL_DISTANCES", "LOCAL_METRICS"},
            {"OPENING_SHARES"},
        ] * 2
        measured = json.loads((one.run_folder(name) / "results.json").read_text())["measured"]
        assert [one["rounds"] for one in measured] == [0, 1, 2], "of training"
    start = load_file(one.folder / "state" / "coordinator" / "runs" / "test" / "initial.safetensors")
    found = models_of(one)["hospital1"]
    same = [name for name in found if found[name].equal(start[next(key for key in start if key.endswith(name))])]
    assert 0 < len(same) < len(found), "what is frozen stays as it was"


def test_with_differential_privacy_each_round_of_training_is_paid_for_once(federation: Make) -> None:
    privacy = {"epsilon": 4.0, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.25}
    one = blind(federation, run={"privacy": privacy})
    one.run_to_the_end()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    for name in one.silos:
        (account,) = ledgers(one.folder / "state" / name / "ledger")
        charges = [entry.describe() for entry in account.entries()]
        assert [charge["round"] for charge in charges] == [0, 2]
        for charge in charges:
            assert sent(one, name, charge["round"])[0]["ledger"] == [charge]
            assert not sent(one, name, charge["round"] + 1)[0]["ledger"]
        assert one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
    one.command("silo", "report", "--config", "hospital1.yaml", "--format", "json")
    report = json.loads((one.folder / "state/hospital1/report/report.json").read_text())
    assert 0 < report["privacy_loss"]["epsilon"] <= 4.001
