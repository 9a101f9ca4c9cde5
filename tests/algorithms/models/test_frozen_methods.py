"""Every method on a network of which a part is frozen: it runs and never touches that part, or is refused in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.models import build, frozen_names, whole_state
from medsilo.algorithms.registry import METHODS
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation

SHAPE = (3, 16, 16)
SHARDS = [
    dataclasses.replace(generate_tissue(seed=seed, train=16, test=6, size=16), name=f"h{seed}") for seed in range(3)
]
SIZES = {"head": 0, "last": 4 * (84 * 120 + 84), "lora": 4 * 2 * ((6 + 75) + (16 + 150) + (120 + 16) + (84 + 120))}
"""Bytes of what is trained besides the classifier."""


def simulation(name: str, train: Any) -> Simulation:
    method = METHODS[name]()
    plan = RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=name, parameters=method.parameters()),
        model=ModelPlan(name="lenet5", input_shape=SHAPE, classes=9, train=train),
        training=TrainingPlan(epochs=1, batch_size=8),
        rounds=2,
        seed=1,
        required=method.required,
    )
    public = None
    if method.needs_public:
        images = generate_tissue(seed=9, train=18, test=9, size=16)
        public = PublicImages(images, build(plan.model, seed=1), SHAPE)
    return Simulation(plan, method, SHARDS, device=torch.device("cpu"), public=public)


@pytest.mark.parametrize("train", ["head", {"last": 2}, {"lora": {"rank": 2}}], ids=["head", "last", "lora"])
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"fedap"}))
def test_a_method_trains_and_sends_what_is_not_frozen(name: str, train: Any) -> None:
    if name == "ridge" and train != "head":
        with pytest.raises(ConfigurationError, match="ridge solves for a linear layer on fixed features"):
            simulation(name, train)
        return
    one = simulation(name, train)
    model = one.silos["h0"].site.model
    frozen = frozen_names(model)
    start = {n: t.clone() for n, t in whole_state(model).items() if n in frozen}
    for _ in range(2):
        one.step()
    kept = [state for side in one.silos.values() for state in side.memory.values()]
    assert not any(frozen & set(state) for state in kept)
    sent = one.last[0].up
    if Exposure.MODEL_PARAMETERS_EXTRACTOR in METHODS[name]().uploads:
        assert sent[MODEL[0]] == SIZES[train if isinstance(train, str) else next(iter(train))]
    assert sent.get(MODEL[1], 0) in (0, 4 * (84 * 9 + 9))
    one.finish()
    assert all(torch.equal(whole_state(model)[n], tensor) for n, tensor in start.items())
    assert all(t.isfinite().all() for side in one.silos.values() for t in side.personal().values())


@pytest.mark.parametrize("train", ["head", {"lora": {"rank": 2}}], ids=["head", "lora"])
def test_fedap_needs_batch_normalisation_that_is_not_frozen(train: Any) -> None:
    with pytest.raises(ConfigurationError, match="what goes into batch normalisation, and this model has none"):
        simulation("fedap", train)
