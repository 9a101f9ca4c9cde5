"""Whole runs of real daemons over mutual TLS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.network.proxy import Proxy
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_signed,
)
from tests.support.runs.federation import BIG, Federation, without_signatures

Make = Callable[..., Federation]


def test_three_hospitals_train_together_and_each_keeps_the_record_of_what_left(federation: Make) -> None:
    one = federation(forked=False)
    one.run_to_the_end()
    one.forked = True  # the commands below start in a moment then

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
    results = json.loads(one.command("coordinator", "results", "--config", "coordinator.yaml", "--json"))
    table = one.command("coordinator", "results", "--config", "coordinator.yaml")
    assert table.count("1–3, end") == len(one.silos)
    assert table == one.command("coordinator", "results", "--config", "coordinator.yaml", "--run", "test")
    one.command("coordinator", "results", "--config", "coordinator.yaml", "--run", "other", expect=2)
    for name in one.silos:
        own = json.loads((one.run_folder(name) / "results.json").read_text())["measured"]
        assert [m["rounds"] for m in own] == [0, 1, 2, 3]
        shared = results["silos"][name]
        assert [m["accuracy"] for m in shared][:3] == pytest.approx([m["accuracy"] for m in own][1:])
        told = one.command("silo", "report", "--config", f"{name}.yaml")
        assert "MODEL_PARAMETERS_CLASSIFIER" in told
        assert "spiffe://test/coordinator/coordinator" in told
        assert "synthetic" in told.lower()
        report = json.loads((one.folder / "state" / name / "report" / "report.json").read_text())
        assert report["verification"]["sound"]
        assert report["bytes_left"] == sum(record["length"] for record in one.messages(name, "sent"))
        classes = {flow["exposure"] for run in report["runs"] for flow in run["left"]}
        assert classes == {
            "PROTOCOL", "IDENTITY", "MODEL_PARAMETERS_EXTRACTOR", "MODEL_PARAMETERS_CLASSIFIER", "LOCAL_METRICS",
        }  # fmt: skip
    predicted = one.command("silo", "predict", "--config", "hospital1.yaml", "--images", "hospital1.npz")
    assert predicted.count("hospital1.npz#") == 30
    records = one.records("hospital1")
    evaluated = json.loads(one.command("silo", "evaluate", "--config", "hospital1.yaml", "--json"))
    kept = json.loads((one.run_folder("hospital1") / "results.json").read_text())["measured"]
    assert evaluated["accuracy"]["value"] == pytest.approx(kept[-1]["accuracy"])
    assert evaluated["compared"]["accuracy"]["value"] == pytest.approx(kept[0]["accuracy"])
    assert one.records("hospital1") == records, "an evaluation is no part of the record"
    inspected = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--json"))
    upload = [r for r in one.messages("hospital1", "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == 0]
    # The first round's number is not on the wire (zero is protobuf's default), so the dry run is exact; what it leaves
    # out, as it says, are the signatures for earlier messages.
    assert inspected["bytes_per_round"] == sum(without_signatures(record) for record in upload)
    assert all(without_signatures(record) == record["length"] for record in upload[1:])
    assert inspected["messages_per_round"] == len(upload)


def test_a_silo_killed_in_mid_training_loses_nothing(federation: Make) -> None:
    """Nor of what its optimiser remembers of the rounds before, where the plan has that kept; and the round it repeats
    changes images and weighs classes as before."""
    changes = [{"kind": "horizontal_flip", "amount": 0.5}, {"kind": "rotation", "amount": 10}]
    training = {"epochs": 20, "batch_size": 16, "keep_optimizer_state": True, "class_weights": "balanced"}
    one = federation(run={"training": {**training, "augmentation": changes}})
    coordinator = one.start_coordinator()
    first, second, third = (one.start_silo(name) for name in one.silos)
    one.wait_to_say("coordinator", "round 2 of 3 is open")
    second.kill()
    second.wait()
    progress = json.loads((one.run_folder("hospital2") / "progress.json").read_text())
    assert progress["trained_rounds"] == 1, "the silo was to be killed while it trained its second round"
    one.finish(first, one.start_silo("hospital2"), third, coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)


def test_a_silo_killed_in_mid_upload_loses_nothing_and_is_counted_once(federation: Make) -> None:
    one = federation(run={"model": BIG, "rounds": 2})
    proxy = Proxy(one.port, hold_after=3_000_000)
    one.write_silo("hospital2", port=proxy.port)
    coordinator = one.start_coordinator()
    first, second, third = (one.start_silo(name) for name in one.silos)
    one.wait_for("half an upload", proxy.held.is_set)
    second.kill()
    second.wait()
    proxy.release()
    one.finish(first, one.start_silo("hospital2"), third, coordinator)
    proxy.close()

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
    sent = {record["sha256"] for record in one.messages("hospital2", "sent")}
    received = {r["sha256"] for r in one.messages("coordinator", "received") if r["peer"].endswith("/hospital2")}
    assert received < sent, "the killed upload's last messages were recorded, and never arrived"


@pytest.mark.parametrize("moment", ["with an update delivered", "in mid-upload"])
def test_a_coordinator_that_was_killed_goes_on_in_its_round(federation: Make, moment: str) -> None:
    one = federation(run={"model": BIG, "rounds": 2})
    proxy = Proxy(one.port, hold_after=3_000_000)
    one.write_silo("hospital2", port=proxy.port)
    coordinator = one.start_coordinator()
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_for("half an upload", proxy.held.is_set)
    if moment == "with an update delivered":
        uploads = one.folder / "state" / "coordinator" / "runs" / "test" / "round-000000"
        one.wait_for("an update", lambda: list(uploads.glob("upload-hospital1-*.safetensors")))
    coordinator.kill()
    coordinator.wait()
    proxy.release()
    again = one.start_coordinator()
    one.finish(*silos, again)
    proxy.close()

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)


def test_a_round_ends_at_its_deadline_with_a_quorum_and_names_the_late(federation: Make) -> None:
    import os
    import signal

    one = federation(run={"quorum": 2, "deadline_minutes": 0.05, "rounds": 2})
    coordinator = one.start_coordinator()
    late = one.start_silo("hospital3")
    one.wait_to_say("coordinator", "hospital3 has joined")
    os.kill(late.pid, signal.SIGSTOP)
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    one.wait_to_say("coordinator", "late: hospital3")
    os.kill(late.pid, signal.SIGCONT)
    one.finish(*others, late, coordinator)

    silos = {silo["silo"]: silo for silo in one.status()["silos"]}
    assert silos["hospital1"]["rounds_late"] == 0
    assert silos["hospital3"]["rounds_late"] >= 1
    assert silos["hospital3"]["state"] == "done"
    missed = silos["hospital3"]["late"]
    assert missed == sorted(set(missed))
    assert set(missed) <= {1, 2}
    assert len(missed) == silos["hospital3"]["rounds_late"]
    one.command("coordinator", "report", "--config", "coordinator.yaml", "--format", "json")
    report = json.loads((one.folder / "state" / "coordinator" / "report" / "report.json").read_text())
    assert {entry["silo"]: entry["late"] for entry in report["attendance"]} == {
        "hospital1": [], "hospital2": [], "hospital3": missed,
    }  # fmt: skip


def test_a_restarted_silo_that_lost_its_results_is_told_the_end_again(federation: Make) -> None:
    one = federation(run={"rounds": 1})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.finish(*[one.start_silo(name) for name in one.silos])
    one.finish(one.start_silo("hospital1"))
    coordinator.terminate()
    assert coordinator.wait(timeout=60) == 0
    assert_every_round_counted_once(one)


def test_a_coordinator_that_may_not_open_enough_files_asks_for_all_that_it_may_and_says_so(federation: Make) -> None:
    one = federation()
    few = ("sh", "-c", 'ulimit -S -n 100; ulimit -H -n 270; exec "$@"', "sh")
    coordinator = one.start_coordinator(prefix=few)
    one.wait_to_say("coordinator", "listening")
    (line,) = re.findall("Max open files.*", Path(f"/proc/{coordinator.pid}/limits").read_text())
    assert line.split()[3:5] == ["270", "270"]
    assert "may have 270 files and connections open, and for 3 hospitals it may need 286" in one.said("coordinator")


def test_the_shipped_configurations_are_valid() -> None:
    from medsilo.coordinator.config import CoordinatorConfig
    from medsilo.privacy.consent.consent import ConsentFile
    from medsilo.silo.state.config import SiloConfig

    configs = Path(__file__).parents[2] / "configs"
    for folder in (configs, configs / "practical-20"):
        plan = CoordinatorConfig.read(folder / "coordinator.yaml").plan()
        for path in folder.glob("hospital?.yaml"):
            hospital = SiloConfig.read(path)
            assert not ConsentFile.read(hospital.consent).missing_for(plan)
