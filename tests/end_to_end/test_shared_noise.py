"""Noise that hospitals share out under masks, in real daemons: who trusts takes part, who does not is refused, and both
figures are told wherever the one is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load_file

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.budget.accounting import SharedGaussian
from medsilo.privacy.budget.ledger import ledgers
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_signed,
)
from tests.support.runs.federation import Federation
from tests.support.runs.masked import MASKED, masked

Make = Callable[..., Federation]

ROUNDS = 3
PRIVACY = {"preset": "head", "epsilon": 2.0, "delta": 1e-5, "unit": "image", "units": 90, "honest": 2}
RUN = {
    "model": {"name": "stain-texture", "input_shape": [3, 28, 28], "classes": 9},
    "rounds": ROUNDS,
    "privacy": PRIVACY,
}


def shared(make: Make, *, trusts: str = "2 of 3", **run: Any) -> Federation:
    one = masked(make, run={**RUN, **run})
    one.coordinator_config["run"].pop("training")
    one.write("coordinator.yaml", one.coordinator_config)
    for name in one.silos:
        trust(one, name, trusts)
    return one


def trust(one: Federation, name: str, honest: str | None) -> None:
    one.write_consent(
        name,
        exposures=MASKED,
        privacy={"epsilon": 2.5, "delta": 1e-5},
        secure_aggregation={"minimum": 3},
        **({"trusts": {"honest": honest}} if honest else {}),
    )


def independent(multiplier: float) -> float:
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4)
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), ROUNDS))
    return float(accountant.get_epsilon(1e-5))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_hospital_that_dies_comes_back_with_the_same_noise_and_both_figures_are_told(federation: Make) -> None:
    one = shared(federation)
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    third = one.start("dying_silo", "1", "train", "--config", "hospital3.yaml")
    one.wait_for("the third hospital's end", lambda: third.poll() is not None)
    one.finish(*others, one.start_silo("hospital3"))
    coordinator.terminate()
    one.finish(coordinator)

    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_signed(one)
    plan = CoordinatorConfig.read(one.folder / "coordinator.yaml").plan()
    assert plan.privacy is not None
    multiplier = plan.privacy.noise_multiplier
    together, alone = independent(multiplier), independent(multiplier / 2**0.5)
    assert together <= 2.0 < alone
    models = []
    for name in one.silos:
        (account,) = ledgers(one.folder / "state" / name / "ledger")
        assert [entry.event for entry in account.entries()] == [SharedGaussian(multiplier, 2, 1)] * ROUNDS
        spending = account.spending(1e-5)
        assert spending.epsilon == pytest.approx(together, abs=2e-3)
        assert spending.alone is not None
        assert spending.alone.epsilon == pytest.approx(alone, abs=2e-3)
        classes = {c for r in one.messages(name, "sent") if r["rpc"] == "SubmitUpdate" for c in r["classes"]}
        assert classes == {"PROTOCOL", "IDENTITY", "MASKED_UPDATE"}
        assert one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
        models.append(load_file(one.run_folder(name) / "model.safetensors"))
    for name, tensor in models[0].items():
        assert all(np.array_equal(tensor, other[name]) for other in models[1:]), "all have the same mean"
    second = f"ε = {alone:.3f}"
    told = [
        one.command("silo", "budget", "--config", "hospital3.yaml"),
        one.command("silo", "report", "--config", "hospital3.yaml", "--format", "json"),
        one.command("silo", "inspect", "--config", "hospital3.yaml"),
    ]
    report = json.loads((one.folder / "state/hospital3/report/report.json").read_text())
    for words in (told[0], json.dumps(report, ensure_ascii=False), told[2]):
        assert second in flat(words)
    assert "2 of 3 hospitals" in flat(told[2])
    assert "The hospitals shared noise out" in report["risks"]["MASKED_UPDATE"]
    inspection = json.loads(one.command("silo", "inspect", "--config", "hospital1.yaml", "--json"))
    assert inspection["privacy"]["trust"]["honest"] == "2 of 3"
    assert inspection["privacy"]["trust"]["without_it"]["epsilon"] == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("honest", [None, "3 of 4", "2 of 4"])
def test_a_hospital_that_does_not_trust_as_much_is_not_joined(federation: Make, honest: str | None) -> None:
    one = shared(federation)
    trust(one, "hospital1", honest)
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    silo = one.start_silo("hospital1")
    one.ends_with(silo, 4)
    (refusal,) = [r for r in one.records("hospital1") if r["kind"] == "refusal"]
    assert "`trusts: {honest: 2 of 3}`" in refusal["reason"]
    assert not [r for r in one.messages("hospital1", "sent") if "MASKED_UPDATE" in r["classes"]]
    assert not (one.folder / "state/hospital1/ledger").exists()
    coordinator.terminate()
    one.finish(coordinator)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"method": {"name": "mrmtl"}}, "models of their own"),
        ({"method": {"name": "fedavg", "weighting": "uniform"}}, "weighting: samples"),
        ({"secure_aggregation": None}, "under masks alone"),
        ({"privacy": {**PRIVACY, "honest": 3}}, "less than"),
    ],
)
def test_a_run_for_which_noise_cannot_be_shared_out_is_refused_in_a_sentence(
    federation: Make, run: dict[str, Any], reason: str
) -> None:
    one = shared(federation, **run)
    assert reason in flat(one.command("coordinator", "plan", "--config", "coordinator.yaml", expect=2))
