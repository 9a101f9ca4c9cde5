"""Runs with differential privacy over real daemons: charged before they train, told in the journal, ended by the
budget."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, save_npz
from medsilo.privacy.budget.accounting import DiscreteLaplace, GaussianRelease, SampledGaussian, epsilon
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject, ledgers
from medsilo.privacy.report.rehearsed import read_rehearsals
from tests.support.evidence.charges import replay
from tests.support.network.proxy import Proxy
from tests.support.runs.checks import assert_every_round_counted_once, assert_journals_sound
from tests.support.runs.faults import Fault, needs_faults, run_through
from tests.support.runs.federation import Federation
from tests.support.runs.once import KEEP, assert_charged_once, assert_released_once

Make = Callable[..., Federation]

PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.25}
CLASSES = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT")
STEPS_OF_A_ROUND = 4


def private(make: Make, method: str = "diversifed", *, budget: float = 4.5, **options: Any) -> Federation:
    run = {
        "method": {"name": method},
        "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.001},
        "rounds": 2,
        "ask_for": [],
        "privacy": PRIVACY,
        **options.pop("run", {}),
    }
    one = make(run=run, exposures=options.pop("exposures", CLASSES), **options)
    for name in one.silos:
        one.write_consent(name, privacy={"epsilon": budget, "delta": 1e-5})
    return one


def ledger(one: Federation, silo: str) -> Ledger:
    (found,) = [one for one in ledgers(one.folder / "state" / silo / "ledger") if one.subject.split == "train"]
    return found


def run_again(one: Federation, name: str) -> None:
    """The same federation, with another run."""
    one.coordinator_config["run"]["name"] = name
    one.write("coordinator.yaml", one.coordinator_config)
    one.processes.clear()


@pytest.mark.parametrize("masks", [False, True])
def test_ridge_is_charged_as_one_gaussian_release(federation: Make, masks: bool) -> None:
    one = private(
        federation,
        "ridge",
        exposures=("PROTOCOL", "IDENTITY", "FEATURE_MOMENTS", "MASKED_UPDATE", "PEER_DERIVED"),
        run={
            "model": {"name": "stain-texture", "input_shape": [3, 28, 28], "classes": 9},
            "rounds": 1,
            **({"secure_aggregation": {}} if masks else {}),
        },
    )
    one.run_to_the_end()
    assert_journals_sound(one)
    for name in one.silos:
        (entry,) = ledger(one, name).entries()
        assert isinstance(entry.event, GaussianRelease)
        assert entry.event.releases == 1
        accountant = PLDAccountant().compose(GaussianDpEvent(entry.event.noise_multiplier))
        assert ledger(one, name).guarantee(1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), abs=0.01)
        assert 3.9 < accountant.get_epsilon(1e-5) <= 4.0
        left = {exposure for record in one.messages(name, "sent") for exposure in record["classes"]}
        assert left == {"PROTOCOL", "IDENTITY", "MASKED_UPDATE" if masks else "FEATURE_MOMENTS"}


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("fedavg", {}),
        ("diversifed", {}),
        ("pfedsim", {}),
        ("fedpdc", {"mode": "proximal", "check_disjoint": False}),
    ],
)
def test_a_private_run_charges_the_ledger_and_tells_what_it_cost(
    federation: Make, public_data: Path, method: str, parameters: dict[str, Any]
) -> None:
    one = private(
        federation,
        run={"method": {"name": method, **parameters}},
        exposures=(*CLASSES, "DERIVED_ACCURACY"),
        coordinator={"public_data": str(public_data)},
    )
    one.run_to_the_end()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    for name in one.silos:
        account = ledger(one, name)
        entries = account.entries()
        assert [
            (e.purpose.run, e.purpose.round, e.event.steps) for e in entries if isinstance(e.event, SampledGaussian)
        ] == [
            ("test", 0, STEPS_OF_A_ROUND),
            ("test", 1, STEPS_OF_A_ROUND),
        ]
        spent = account.guarantee(1e-5).epsilon
        assert 3.9 < spent <= 4.0, "the noise is the least that keeps to the target"
        records = one.records(name)
        assert epsilon(replay(records)[account.subject], delta=1e-5) == spent
        # Each update names the charge that paid for it, which the journal told of before.
        for number in range(2):
            sent = [r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == number]
            (charge,) = sent[0]["ledger"]
            assert charge["round"] == number
            assert all(r["ledger"] == [] for r in sent[1:])
            told = [r["index"] for r in records if r["kind"] == "ledger" and r["charge"]["index"] == charge["index"]]
            assert told[0] < sent[0]["index"]
    said = json.loads(one.command("silo", "budget", "--config", "hospital1.yaml", "--json"))
    assert said[0]["spent"]["epsilon"] == ledger(one, "hospital1").guarantee(1e-5).epsilon
    assert said[0]["left"] == pytest.approx(4.5 - said[0]["spent"]["epsilon"])
    assert said[0]["conditions"] == "unit image, adjacency zero-out, accountant PLD"
    assert [run["name"] for run in said[0]["runs"]] == ["test/test"]
    words = one.command("silo", "budget", "--config", "hospital1.yaml")
    assert "Spent on these images" in words
    assert "Runs without it, if there were any, are not in it" in " ".join(words.split())
    report = one.command("silo", "report", "--config", "hospital1.yaml")
    for told in (words, report):
        flat = " ".join(told.split())
        for part in (
            "δ = 1e-05",
            "unit image",
            "adjacency zero-out",
            "accountant PLD",
            "of the budget of 4.5",
            "is left",
        ):
            assert part in flat or (part.startswith("of the") and "budget is 4.5" in flat), (part, flat)
    written = json.loads((one.folder / "state/hospital1/report/report.json").read_text())
    loss = written["privacy_loss"]
    assert loss["epsilon"] == loss["accounts"][0]["spent"]["epsilon"] == said[0]["spent"]["epsilon"]
    assert loss["accounts"][0]["spent"]["unit"] == "image"
    assert one.command("silo", "audit", "verify", "--config", "hospital1.yaml")


def test_inspection_tells_the_plans_cost_per_class_before_anything_is_sent(federation: Make) -> None:
    one = private(federation, "fedavg")
    plan = one.folder / "plan.json"
    plan.write_text(one.command("coordinator", "plan", "--config", "coordinator.yaml"))
    found = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--plan", str(plan), "--json"))
    losses = {item["exposure"]: item["loss"] for item in found["content"]}
    assert losses["MODEL_PARAMETERS_EXTRACTOR"] == {"epsilon": 4.0, "mechanism": "noised training (DP-SGD)"}
    assert losses["SAMPLE_COUNT"] == {"epsilon": 0.0, "mechanism": "public under zero-out adjacency"}
    assert losses["PROTOCOL"]["epsilon"] == 0
    assert found["privacy"]["run"]["epsilon"] == 4.0
    assert found["privacy"]["spent"]["epsilon"] == 0
    words = " ".join(one.command("silo", "inspect", "--config", "hospital1.yaml", "--plan", str(plan)).split())
    assert "ε = 4.000 at δ = 1e-05 (unit image, adjacency zero-out, accountant PLD)" in words
    assert not (one.folder / "state/hospital1/ledger").exists()


def test_a_rehearsal_sends_nothing_and_costs_nothing(federation: Make) -> None:
    """While the run waits for a person, who looks before saying yes: on the wire there is the request for the plan."""
    one = private(federation, "fedavg")
    one.write_consent("hospital1", approval="required")
    proxy = Proxy(one.port)
    one.write_silo("hospital1", port=proxy.port)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    silo = one.start_silo("hospital1")
    one.wait_to_say("hospital1", "waits for approval")
    journals = [one.folder / f"state/{name}/journal/records.jsonl" for name in ("hospital1", "coordinator")]
    before = [journal.read_bytes() for journal in journals]
    connections = len(proxy.connections)
    found = json.loads(one.command("silo", "rehearse", "--config", "hospital1.yaml", "--json"))
    assert found["verdict"] in ("not refuted", "cannot tell")
    assert found["epsilon_lower_bound"] <= found["claimed"]["epsilon"] <= found["claimed_of_the_run"]["epsilon"] == 4.0
    assert (found["units"], found["claimed"]["unit"], found["synthetic"]) == (90, "image", True)
    assert [journal.read_bytes() for journal in journals] == before
    assert {record["rpc"] for record in one.messages("hospital1", "sent")} == {"GetPlan"}
    assert len(proxy.connections) == connections
    assert not list((one.folder / "state/hospital1/ledger").glob("*.jsonl")), "nothing is charged"
    kept = sorted((one.folder / "state/hospital1/rehearsal").iterdir())
    assert [path.name for path in kept] == ["test.html", "test.json"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept)
    (told,) = read_rehearsals(kept[1].parent)
    assert (told.run, told.verdict, told.epsilon_lower_bound) == (
        "test",
        found["verdict"],
        found["epsilon_lower_bound"],
    )
    for process in (silo, coordinator):
        process.kill()


def test_feddfq_pays_for_its_identifier_once_and_sends_the_same_bytes_in_the_next_run(
    federation: Make, shards: list[ImageDataset]
) -> None:
    classes = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS_EXTRACTOR", "PEER_DERIVED")
    one = private(
        federation,
        budget=8.0,
        shards=shards[:2],
        run={"method": {"name": "feddfq", "selection": "argmin", "normalisation": "softmax"}},
        exposures=(*classes, "CLASSIFIER_GRADIENT", "DATA_IDENTIFIER"),
    )
    plan = one.folder / "plan.json"
    plan.write_text(one.command("coordinator", "plan", "--config", "coordinator.yaml"))
    found = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--plan", str(plan), "--json"))
    losses = {item["exposure"]: item["loss"] for item in found["content"]}
    assert losses["DATA_IDENTIFIER"]["mechanism"] == "clipped and noised average"
    assert 0 < losses["DATA_IDENTIFIER"]["epsilon"] < 1
    assert losses["CLASSIFIER_GRADIENT"] == {"epsilon": 4.0, "mechanism": "made from the noised training alone"}
    assert [(r["content"], r["times"]) for r in found["privacy"]["releases"]] == [("identifier", 1), ("choice", 1)]
    assert not (one.folder / "state/hospital1/ledger").exists()
    one.run_to_the_end()
    run_again(one, "again")
    plan.write_text(one.command("coordinator", "plan", "--config", "coordinator.yaml"))
    again = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--plan", str(plan), "--json"))
    said = one.command("silo", "inspect", "--config", "hospital1.yaml", "--plan", str(plan))
    assert "DATA_IDENTIFIER only once" in " ".join(said.split())
    (identifier,) = [item["loss"] for item in again["content"] if item["exposure"] == "DATA_IDENTIFIER"]
    assert identifier["epsilon"] == 0
    assert identifier["mechanism"].startswith("already paid for this data set")
    foreseen = again["privacy"]["after"]["epsilon"]
    one.run_to_the_end()
    assert foreseen == pytest.approx(ledger(one, "hospital1").guarantee(1e-5).epsilon, abs=1e-9)
    assert_journals_sound(one)
    for name in one.silos:
        phases = [(e.purpose.run, e.purpose.round, e.purpose.phase) for e in ledger(one, name).entries()]
        assert sorted(phases) == sorted(
            [
                ("test", 0, "training"),
                ("test", 0, "identifier"),
                ("test", 1, "choice"),
                ("test", 1, "training"),
                ("again", 0, "training"),
                ("again", 1, "choice"),
                ("again", 1, "training"),
            ]
        )
        state = one.folder / "state" / name / "runs"
        kept = [next((state / run).glob("identifier-*.safetensors")).read_bytes() for run in ("test", "again")]
        assert kept[0] == kept[1]
        for run in ("test", "again"):
            sent = [r for r in one.messages(name, "sent") if r["run"] == run and "DATA_IDENTIFIER" in r["classes"]]
            assert {r["round"] for r in sent} == {0}
        first = next(r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["run"] == "test")
        assert {charge["phase"] for charge in first["ledger"]} == {"training", "identifier"}


def test_accuracies_of_a_private_run_are_noisy_counts_with_an_account_of_their_own(
    federation: Make, shards: list[ImageDataset]
) -> None:
    """hospital2 consents to the class, and gives its test images no budget: none of its accuracies leaves."""
    one = private(
        federation,
        shards=shards[:2],
        method="fedavg",
        exposures=(*CLASSES, "LOCAL_METRICS"),
        run={"ask_for": ["LOCAL_METRICS"], "privacy": {**PRIVACY, "metrics_epsilon": 3.0}},
    )
    one.write_consent("hospital1", privacy={"epsilon": 4.5, "delta": 1e-5, "metrics_epsilon": 2.5})
    one.run_to_the_end()
    assert_journals_sound(one)
    (tested,) = [x for x in ledgers(one.folder / "state/hospital1/ledger") if x.subject.split == "test"]
    # A third of 3.0 each: for the last of the three the budget of 2.5 is too small.
    assert [(e.purpose.round, e.purpose.phase, e.event) for e in tested.entries()] == [
        (0, "accuracy", DiscreteLaplace(1.0)),
        (1, "accuracy", DiscreteLaplace(1.0)),
    ]
    assert "the accuracy stays here" in one.said("hospital1")
    measured = json.loads((one.run_folder("hospital1") / "results.json").read_text())["measured"]
    results = json.loads(one.command("coordinator", "results", "--config", "coordinator.yaml", "--json"))
    found = results["silos"]
    shown = [(entry["round"], entry["accuracy"], entry["loss"]) for entry in found["hospital1"]]
    shared = {m["rounds"]: m["shared"] for m in measured if "shared" in m}
    assert shown == [(n, pytest.approx(shared[n + 1]), None) for n in (0, 1)]
    for _, accuracy, _ in shown:
        assert accuracy * len(shards[0].test) == pytest.approx(round(accuracy * len(shards[0].test)), abs=1e-3)
    assert found["hospital2"] == []
    assert "no budget for them" in one.said("hospital2")
    assert not [r for r in one.messages("hospital2", "sent") if "LOCAL_METRICS" in r["classes"]]
    update = next(r for r in one.messages("hospital1", "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == 0)
    assert {(charge["split"], charge["phase"]) for charge in update["ledger"]} == {
        ("train", "training"),
        ("test", "accuracy"),
    }
    said = json.loads(one.command("silo", "budget", "--config", "hospital1.yaml", "--json"))
    assert {(a["subject"]["split"], a["budget"]) for a in said} == {("train", 4.5), ("test", 2.5)}
    assert one.command("silo", "audit", "verify", "--config", "hospital1.yaml")


def test_a_second_run_that_would_overspend_is_refused_before_training(federation: Make) -> None:
    one = private(federation, budget=4.5)
    one.run_to_the_end()
    before = {name: ledger(one, name).path.read_bytes() for name in one.silos}
    run_again(one, "again")
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    for name in one.silos:
        silo = one.start_silo(name)
        assert silo.wait(120) == 10, one.everything_said()
        assert "silo budget" in one.said(name)
        assert "unit image, adjacency zero-out, accountant PLD" in one.said(name)
        assert ledger(one, name).path.read_bytes() == before[name]
        (refusal,) = [r for r in one.records(name) if r["kind"] == "refusal"]
        assert "would bring the privacy loss" in refusal["reason"]
    assert "lacks the run's privacy loss" in one.said("coordinator")
    coordinator.kill()
    assert not [r for r in one.messages("hospital1", "sent") if r["run"] == "again" and r["rpc"] == "SubmitUpdate"]


def test_one_image_more_and_a_corrected_label_are_no_fresh_budget(federation: Make) -> None:
    one = private(federation, budget=4.5)
    one.run_to_the_end()
    run_again(one, "again")
    for shard in one.shards:
        train = shard.train
        corrected = ImageSplit(
            np.concatenate([train.images, train.images[:1] ^ 1]), np.concatenate([train.labels[1:], train.labels[:2]])
        )
        save_npz(one.folder / f"{shard.name}.npz", dataclasses.replace(shard, train=corrected))
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    for shard in one.shards:
        assert one.start_silo(shard.name).wait(120) == 10, one.everything_said()
        said = " ".join(one.said(shard.name).split())
        assert "charges for the same images or patients in other accounts: 2 on data set" in said
        assert shard.fingerprint[:16] in said
        assert len(ledger(one, shard.name).entries()) == 2, "nothing was charged"
        assert not [r for r in one.messages(shard.name, "sent") if r["run"] == "again" and r["rpc"] == "SubmitUpdate"]
    coordinator.kill()


def test_without_a_privacy_section_each_run_is_held_to_its_promise_and_what_was_before_is_said(
    federation: Make,
) -> None:
    one = private(federation)
    for name in one.silos:
        one.write_consent(name)
    one.run_to_the_end()
    assert "other runs included" not in one.said("hospital1")
    run_again(one, "again")
    one.run_to_the_end()
    account = ledger(one, "hospital1")
    spent = account.spending(1e-5, run=account.entries()[0].purpose.whole_run)
    said = " ".join(one.said("hospital1").split())
    assert f"these images have cost {spent.guarantee} so far, other runs included." in said
    assert "run again is held to its own promise alone: ε = 4" in said
    assert len(account.entries()) == 4
    assert one.command("silo", "audit", "verify", "--config", "hospital1.yaml")


def test_a_hospital_that_raises_its_budget_pays_for_both_runs_from_one_account(federation: Make) -> None:
    one = private(federation, budget=4.5)
    one.run_to_the_end()
    run_again(one, "again")
    for name in one.silos:
        one.write_consent(name, privacy={"epsilon": 9.0, "delta": 1e-5})
    one.run_to_the_end()
    account = ledger(one, "hospital1")
    assert [e.purpose.run for e in account.entries()] == ["test", "test", "again", "again"]
    assert 4.0 < account.guarantee(1e-5).epsilon < 8.0, "composed, not added up"


@needs_faults
def test_kills_at_any_step_leave_one_charge_a_round_and_one_release_with_a_budget_that_has_none_to_spare(
    federation: Make,
) -> None:
    """A hundred and more of them: ``tests.support.runs.fault_campaign --mixes private --kinds kill``."""
    metrics = {"epsilon": 4.0, "delta": 1e-5, "metrics_epsilon": 2.0}
    one = private(
        federation,
        method="fedavg",
        exposures=(*CLASSES, "LOCAL_METRICS"),
        run={"rounds": 4, "ask_for": ["LOCAL_METRICS"], "privacy": {**PRIVACY, "metrics_epsilon": 2.0}},
    )
    for name in one.silos:
        one.write_silo(name, **KEEP)
        one.write_consent(name, privacy=metrics)
    # Before and after the key is sealed, the ledger charged and the journal told; in the middle of saving and sending.
    places = [("sealed", 1), ("sealed", 2), ("ledger", 1), ("ledger", 2), ("journal/", 12), ("runs/", 6), ("runs/", 9)]
    faults = [
        Fault("kill", "disk", step, after=after, where=where) for where, step in places for after in (False, True)
    ]
    run_through(one, {"hospital2": faults, "hospital1": [Fault("kill", "rpc", step) for step in (17, 9, 12, 8)]})
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_charged_once(one)
    assert_released_once(one)
    account = ledger(one, "hospital2")
    assert epsilon(replay(one.records("hospital2"))[account.subject], delta=1e-5) == account.guarantee(1e-5).epsilon


def test_a_budget_exhausted_in_mid_run_ends_that_silos_part_and_the_others_go_on(federation: Make) -> None:
    one = private(federation, budget=4.5, run={"quorum": 2, "deadline_minutes": 0})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    third = one.start_silo("hospital3")
    one.wait_to_say("hospital3", "joined run")
    # Meanwhile another federation's run is charged to the same images.
    subject = Subject(one.shards[2].fingerprint, "image")
    elsewhere = Ledger(one.folder / "state/hospital3/ledger", subject)
    elsewhere.charge(GaussianRelease(1.1), Purpose("other", "run", "00" * 32, 0, "training"), Budget(9.0, 1e-5))
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    assert third.wait(120) == 10, one.everything_said()
    assert "round 1 of run test would make it" in one.said("hospital3").replace("\n", " ")
    assert len(ledger(one, "hospital3").entries()) == 1, "nothing was charged"
    assert not [r for r in one.messages("hospital3", "sent") if r["rpc"] == "SubmitUpdate"]
    one.processes.remove(third)
    assert "has been told" in one.said("hospital3"), "the coordinator does not wait for it any more"
    one.finish(*others, coordinator)
    assert len(ledger(one, "hospital1").entries()) == 2


def test_a_private_training_that_diverges_is_on_record_and_its_charge_stays(federation: Make) -> None:
    rate = {"training": {"epochs": 1, "batch_size": 32, "optimizer": "sgd", "learning_rate": 3e38}}
    one = private(federation, run={**rate, "privacy": {**PRIVACY, "clipping_norm": 1000.0}})
    promise = {"epsilon": 4.5, "delta": 1e-5}
    for name in one.silos:
        one.write_consent(name, privacy=promise, training={"learning_rate": 3e38})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    for names in (one.silos, ["hospital1"]):
        for silo in [one.start_silo(name) for name in names]:
            assert silo.wait(120) == 8, one.everything_said()
            one.processes.remove(silo)
    assert len(ledger(one, "hospital1").entries()) == 1, "on a CPU it is the same training, and fails alike"
    told = [record for record in one.records("hospital1") if record["kind"] == "ledger"]
    assert [("spent" in record, record.get("failed")) for record in told] == [
        (True, None),
        (False, True),
        (False, True),
    ]
    coordinator.kill()
    assert_journals_sound(one, *one.silos)


def test_a_run_without_privacy_is_refused_where_the_consent_demands_it(federation: Make) -> None:
    one = private(federation, run={"privacy": None})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    assert one.start_silo("hospital1").wait(60) == 4
    assert "a run without differential privacy (`privacy: demanded: false`)" in one.said("hospital1")
    one.wait_to_say("coordinator", "lacks a run without differential privacy")
