"""A run that ends before its plan does: everyone is told why, and a model that was not trained is not taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable

from medsilo.privacy.consent.early_end import EndReason
from tests.support.runs.federation import Federation
from tests.support.runs.masked import masked

Make = Callable[..., Federation]


def words(said: str) -> str:
    return " ".join(said.split())


def test_a_run_that_too_many_have_left_tells_the_others_why_and_leaves_no_model_that_is_taken_for_a_trained_one(
    federation: Make,
) -> None:
    one = masked(federation, run={"rounds": 30})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital2")]
    third = one.start("dying_silo", "0", "train", "--config", "hospital3.yaml")
    one.wait_for("the third hospital's end", lambda: third.poll() is not None)
    one.command("silo", "consent", "withdraw", "--yes", "--config", "hospital3.yaml")
    one.finish(*others, coordinator)

    why = f"0 of 30 rounds: {EndReason.WITHDRAWN_FROM_MASKS.value}"
    for party in ("hospital1", "hospital2"):
        assert why in words(one.said(party))
    assert "hospital3" not in one.said("hospital1") + one.said("hospital2"), "no hospital is told another's name"
    assert why in words(one.command("coordinator", "status", "--config", "coordinator.yaml"))
    assert one.status()["end"] == f"ended after {why}"

    for command in (("predict", "--images", "hospital1.npz"), ("evaluate",), ("export", "--format", "pt2")):
        said = words(one.command("silo", *command, "--config", "hospital1.yaml", expect=3))
        assert "no run has left a trained model" in said
        assert why in said
        assert "--run" in said
    named = ("--run", "test", "--config", "hospital1.yaml")
    said = words(one.command("silo", "predict", "--images", "hospital1.npz", *named))
    assert "The model: run test, after 0 of 30 rounds (its last). It was not trained" in said
    one.command("silo", "evaluate", *named)
    card = words((one.run_folder("hospital1") / "model-card.md").read_text())
    assert "for 0 of 30 rounds" in card
    assert why in card
    listed = words(one.command("silo", "models", "--config", "hospital1.yaml"))
    assert "0 of 30" in listed
    assert why in listed
    (model,) = json.loads(one.command("silo", "models", "--json", "--config", "hospital1.yaml"))["models"]
    assert (model["rounds"], model["trained"], model["in_use"]) == (0, False, False)
