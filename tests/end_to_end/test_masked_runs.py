"""Masked runs of real daemons: the coordinator learns sums, and no single update, whoever drops out."""

from __future__ import annotations

import json

import numpy as np
from safetensors.torch import load_file

from medsilo.algorithms.families.sharing import count_part, model_upload
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.protection.masked import encode_upload
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.budget.ledger import ledgers
from medsilo.privacy.consent.plan import SecureAggregationPlan
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.envelope import key_id
from medsilo.privacy.identity.keys import load_audit_key
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are_nearly,
    assert_signed,
)
from tests.support.runs.federation import Federation, without_signatures
from tests.support.runs.masked import Make, masked
from tests.support.runs.traces import memory_of, traces

PLAIN = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED"]


def answered(one: Federation, name: str) -> set[tuple[int, str]]:
    return {(r["round"], r["rpc"]) for r in one.messages(name, "received")}


def needles_of(one: Federation, name: str) -> list[bytes]:
    """Stretches of a hospital's trained model: as it would travel plainly, and as fixed-point numbers unmasked."""
    config = CoordinatorConfig.read(one.folder / "coordinator.yaml")
    layout = Layout.of(build(config.plan().model, seed=1))
    progress = json.loads((one.run_folder(name) / "progress.json").read_text())
    state = load_file(one.run_folder(name) / progress["files"]["trained"])
    upload = {**model_upload(state, layout), Exposure.SAMPLE_COUNT: count_part(90)}
    _, fixed = encode_upload(upload, SecureAggregationPlan(minimum=3, rounds=1), 3)
    plain, start = (
        np.concatenate([group[spec.name].numpy().reshape(-1) for spec in layout.parameters])
        for group in (state, load_file(one.run_folder(name) / progress["files"]["personal"]))
    )
    # Where training has changed nothing (a unit that is never active), the numbers are the starting model's.
    changed = [i for i in range(0, len(plain) - 8, 8) if (plain[i : i + 8] != start[i : i + 8]).all()]
    places = (changed[len(changed) // 3], changed[-1])
    return [plain[i : i + 8].tobytes() for i in places] + [fixed[i : i + 8].tobytes() for i in places]


def test_masked_rounds_survive_a_killed_hospital_and_leave_no_single_update_at_the_coordinator(
    federation: Make,
) -> None:
    one = masked(federation)
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    third = one.start("dying_silo", "1", "train", "--config", "hospital3.yaml")
    one.wait_for("the third hospital's end", lambda: third.poll() is not None)
    one.wait_for(
        "the others' updates of round 2",
        lambda: all((1, "SubmitUpdate") in answered(one, name) for name in ("hospital1", "hospital2")),
    )
    needles = needles_of(one, "hospital1")
    assert traces(one, coordinator, needles) == (0, 0)
    again = one.start_silo("hospital3")
    one.finish(*others, again)
    assert traces(one, coordinator, needles) == (0, 0)
    assert "hospital3 has begun anew; all mask again with fresh keys" in one.said("coordinator")
    coordinator.terminate()
    one.finish(coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_signed(one)
    assert_models_are_nearly(one, one.simulate())
    for name in one.silos:
        rosters = [r for r in one.records(name) if r["kind"] == "roster"]
        assert {r["round"] for r in rosters} == {0, 1}
        assert all(r["silos"] == one.silos and len(r["statements"]) == 3 for r in rosters)
        # Each masking had a roster of its own, and the same silos.
        assert len({r["roster_sha256"] for r in rosters}) == len(rosters) == 3
        sent = [r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["round"] in (0, 1)]
        classes = {c for r in sent for c in r["classes"]}
        assert classes == {"PROTOCOL", "IDENTITY", "MASKED_UPDATE"}
    assert one.command("silo", "audit", "verify", "--config", "hospital3.yaml")
    inspected = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--json"))
    upload = [r for r in one.messages("hospital1", "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == 0]
    assert inspected["masks_with_anyone"]
    assert "could invent hospitals" in one.command("silo", "inspect", "--config", "hospital1.yaml")
    assert inspected["bytes_per_round"] == sum(without_signatures(record) for record in upload)
    for party, config in (("silo", "hospital1.yaml"), ("coordinator", "coordinator.yaml")):
        told = one.command(party, "report", "--config", config, "--format", "json")
        # The words that are looked for wrap with the console.
        assert "masked: the coordinator saw only the sum of 3 silos" in " ".join(told.lower().split())


def test_without_masks_the_same_search_finds_single_updates_on_disk_and_what_memory_holds(federation: Make) -> None:
    one = masked(federation, exposures=PLAIN, run={"secure_aggregation": None, "rounds": 1})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos])
    # Updates pass through its memory on their way to disk, and need not have stayed there; its certificate has.
    certificate = (one.keys("coordinator") / "tls.pem").read_bytes()
    assert any(certificate in stretch for stretch in memory_of(coordinator))
    _, in_files = traces(one, coordinator, needles_of(one, "hospital1"))
    assert in_files > 0
    coordinator.terminate()
    one.finish(coordinator)


def classes_of(one: Federation, name: str, number: int) -> set[str]:
    """The classes of what a hospital's updates of a round held."""
    sent = [r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == number]
    return {c for r in sent for c in r["classes"]} - {"PROTOCOL", "IDENTITY"}


def test_pfedsim_sends_sums_in_its_warm_up_and_single_models_after_it_where_the_consent_knows_both(
    federation: Make,
) -> None:
    one = masked(federation, exposures=[*PLAIN, "MASKED_UPDATE"], run={"method": {"name": "pfedsim"}})
    one.write_consent("hospital3", secure_aggregation={"minimum": 3})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    one.ends_with(one.start_silo("hospital3"), 4)
    assert "updates without masks from round 2 on" in " ".join(one.said("hospital3").split())
    assert not classes_of(one, "hospital3", 0)
    one.write_consent("hospital3")
    one.finish(*others, one.start_silo("hospital3"), coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are_nearly(one, one.simulate())
    for name in one.silos:
        assert classes_of(one, name, 0) == {"MASKED_UPDATE"}
        assert classes_of(one, name, 1) == {"MODEL_PARAMETERS_EXTRACTOR", "MODEL_PARAMETERS_CLASSIFIER"}
        assert [r["round"] for r in one.records(name) if r["kind"] == "roster"] == [0]
    one.command("silo", "report", "--config", "hospital1.yaml", "--format", "json")
    report = json.loads((one.folder / "state/hospital1/report/report.json").read_text())
    (said,) = [run["what_left"] for run in report["runs"] if run["run"] == "test"]
    assert said.startswith("masked: the coordinator saw only the sum of 3 silos; without masks: models")
    assert "whoever runs the federation's CA" in report["risks"]["MASKED_UPDATE"]


def test_a_masked_private_round_waits_for_a_hospital_that_refused_a_key_and_is_paid_for_once(federation: Make) -> None:
    privacy = {"epsilon": 4.0, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.25}
    one = masked(federation, run={"rounds": 1, "privacy": privacy})
    keys = {n: key_id(load_audit_key(one.keys(n) / "audit.key").public_key().public_bytes_raw()) for n in one.silos}

    def consent(name: str, audit_keys: dict[str, str]) -> None:
        others = {other: key for other, key in audit_keys.items() if other != name}
        one.write_consent(
            name, secure_aggregation={"minimum": 3, "audit_keys": others}, privacy={"epsilon": 4.5, "delta": 1e-5}
        )

    for name in one.silos:
        consent(name, keys)
    consent("hospital3", {**keys, "hospital1": "ab" * 32})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    one.ends_with(one.start_silo("hospital3"), 6)
    assert not classes_of(one, "hospital3", 0), "nothing of its update has left"
    (refusal,) = [r for r in one.records("hospital3") if r["kind"] == "refusal"]
    assert "which the consent does not name" in refusal["reason"]
    consent("hospital3", keys)
    one.finish(*others, one.start_silo("hospital3"), coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    for name in one.silos:
        (account,) = ledgers(one.folder / "state" / name / "ledger")
        (charge,) = [entry.describe() for entry in account.entries()]
        assert (charge["round"], charge["phase"]) == (0, "training")
        assert classes_of(one, name, 0) == {"MASKED_UPDATE"}
        first = next(r for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" and r["round"] == 0)
        assert first["ledger"] == [charge]
    one.command("silo", "report", "--config", "hospital3.yaml", "--format", "json")
    report = json.loads((one.folder / "state/hospital3/report/report.json").read_text())
    (said,) = [run["what_left"] for run in report["runs"] if run["run"] == "test"]
    assert said == "masked: the coordinator saw only the sum of 3 silos"
    # Masks make no number smaller: what the sum tells has the limit that each hospital's own noise gives it.
    assert report["risks"]["MASKED_UPDATE"].startswith("With noise (run test: ε = 4.000 at δ = 1e-05")
    assert 0 < report["privacy_loss"]["epsilon"] <= 4.001
    assert "whoever runs the federation's CA" not in report["risks"]["MASKED_UPDATE"], "the consent names their keys"
    assert not json.loads(one.command("silo", "inspect", "--config", "hospital3.yaml", "--json"))["masks_with_anyone"]
