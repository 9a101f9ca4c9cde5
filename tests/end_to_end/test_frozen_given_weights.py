"""A frozen part that is given, in real daemons: sent once, or brought by every hospital so that it never travels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.plan import ModelPlan
from tests.support.runs.checks import assert_journals_sound, assert_models_are
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]
TRAINS = {"head": "head", "lora": {"lora": {"rank": 2}}}


@pytest.mark.parametrize("brought", [False, True], ids=["sent", "brought"])
@pytest.mark.parametrize("part", TRAINS)
def test_a_given_part_is_frozen_as_it_is(federation: Make, tmp_path: Path, part: str, brought: bool) -> None:
    plain = ModelPlan(name="lenet5", input_shape=(3, 28, 28), classes=9)
    given = state_of(build(plain, seed=77))
    torch.save(given, tmp_path / "given.pt")
    weights = {
        "file": str(tmp_path / "given.pt"),
        "public": True,
        "source": "a model",
        "brought": brought,
    }
    model = {**plain.model_dump(mode="json"), "train": TRAINS[part], "weights": weights}
    one = federation(
        insecure=True,
        run={"method": {"name": "fedavg"}, "model": model, "rounds": 2, "ask_for": []},
        exposures=[exposure.value for exposure in FedAvg().required],
    )
    if brought:
        for silo in one.silos:
            one.write_silo(silo, weights=[str(tmp_path)])
    one.run_to_the_end()
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    for silo in one.silos:
        found = load_file(one.run_folder(silo) / "model.safetensors")
        assert set(found) == set(given)
        same = {name for name in found if torch.equal(found[name], given[name])}
        weights_of = {f"{layer}.weight" for layer in ("convolution1", "convolution2", "hidden1", "hidden2")}
        classifier = {"classifier.weight", "classifier.bias"}
        assert same == set(given) - classifier - (weights_of if part == "lora" else set())
        start = sum(r["classes"].get("INITIAL_MODEL", 0) for r in one.messages(silo, "received"))
        assert (start < 10_000) if brought else (start > 170_000)
