"""Which methods run under differential privacy: every one of the registry runs as stated, or is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.declarations import Protected
from medsilo.algorithms.method import Method
from medsilo.algorithms.models import build
from medsilo.algorithms.protection.private import check, planned_averages, planned_steps, refusal
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.budget.accounting import GaussianRelease, SampledGaussian, epsilon
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.simulation.batched import InThreads
from medsilo.simulation.federation import Simulation

# With softmax all silos are similar, so that FedDFQ always has a gradient to choose.
CHOSEN: dict[str, dict[str, Any]] = {"feddfq": {"normalisation": "softmax"}}
MODELS = {"ridge": "stain-texture"}
ROUNDS = 2


def wanted(stated: Protected) -> dict[str, Any]:
    """Hyper-parameters that fulfil all conditions, and numbers of epochs that are not the plan's."""
    epochs = [name for name in (*stated.each_round, *stated.at_end) if isinstance(name, str)]
    return {one.name: one.values[0] for one in stated.conditions} | dict.fromkeys(epochs, 2)


def run_plan(method: Method, **changes: Any) -> RunPlan:
    training = TrainingPlan(epochs=1, optimizer="sgd", learning_rate=0.05)
    mechanism = {"epsilon": 8, "delta": 1e-5, "clipping_norm": 1, "noise_multiplier": 3, "sampling_rate": 0.5}
    steps = planned_steps(method, training, ROUNDS, 0.5)
    releases = [
        {"content": one.content, "bound": 1, "noise_multiplier": 10, "times": one.times(ROUNDS)}
        for one in planned_averages(method, ROUNDS)
    ]
    return RunPlan(
        federation="t",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name=MODELS.get(method.name, "lenet5-gn"), input_shape=(3, 16, 16), classes=3),
        training=training,
        rounds=ROUNDS,
        seed=1,
        required=method.required,
        privacy=PrivacyPlan.model_validate({**mechanism, "steps": steps, "releases": releases, **changes}),
    )


def shard(name: str, seed: int) -> ImageDataset:
    numbers = np.random.default_rng(seed)

    def split(count: int) -> ImageSplit:
        images = numbers.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        return ImageSplit(images, np.arange(count, dtype=np.int64) % 3)

    return ImageDataset(name, "a test", True, ("a", "b", "c"), split(6), None, split(3))


SHARDS = [shard(name, seed) for seed, name in enumerate("abc")]


def simulate(method: Method, **options: Any) -> Simulation:
    plan = run_plan(method)
    public = PublicImages(SHARDS[0], build(plan.model, seed=1), (3, 16, 16)) if method.needs_public else None
    return Simulation(plan, method, SHARDS, device=torch.device("cpu"), public=public, **options)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_with_exactly_the_planned_steps_or_is_refused(name: str) -> None:
    stated = METHODS[name].under_privacy
    if isinstance(stated, str):
        reason = refusal(method := make(name, {}))
        assert reason is not None, name
        assert reason.startswith(f"{name} cannot run with differential privacy: ")
        assert "no one has stated" not in reason, "each refusal has a reason of its own"
        with pytest.raises(ConfigurationError, match="run without privacy"):
            check(method)
        return
    simulation = simulate(make(name, wanted(stated) | CHOSEN.get(name, {})))
    plan = simulation.plan
    assert plan.privacy is not None
    for _ in range(ROUNDS):
        simulation.step()
    simulation.finish()
    for own in simulation._charges.values():
        assert sum(event.steps for event in own if isinstance(event, SampledGaussian)) == plan.privacy.steps
        averages = sum(event.releases for event in own if isinstance(event, GaussianRelease))
        assert averages == sum(release.times for release in plan.privacy.releases)
    expected = epsilon(plan.privacy.events, delta=1e-5)
    assert {spent.epsilon for spent in simulation.spent.values()} == {expected}
    assert all(torch.isfinite(t).all() for side in simulation.silos.values() for t in side.personal().values())


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("pfedsim", {"buffers": "aggregate"}, "RUNNING_STATISTICS"),
        ("fedpdc", {"mode": "proximal"}, "`check_disjoint: false`"),
        ("fedpdc", {"check_disjoint": False}, "`mode: proximal`"),
        ("feddfq", {}, "`selection: argmin`: to try gradients one after another"),
        ("feddfq", {"selection": "argmin", "centre": "none"}, "`centre: model_input` or `centre: global_mean`"),
        ("feddfq", {"selection": "argmin", "per_class": True}, "`per_class: false`"),
        ("feddfq", {"selection": "argmin", "buffers": "aggregate"}, "RUNNING_STATISTICS"),
        ("fedproto", {}, "prototypes"),
        ("fedap", {}, "running statistics"),
        ("fedfomo", {}, "ratings"),
    ],
)
def test_refusals_name_what_has_no_mechanism_and_the_way_out(
    name: str, parameters: dict[str, Any], reason: str
) -> None:
    assert reason in (refusal(make(name, parameters)) or "")


def test_a_method_that_nobody_has_thought_about_is_refused() -> None:
    class Newcomer(METHODS["fedavg"]):  # type: ignore[misc]
        name = "newcomer"

    assert "no one has stated" in (refusal(Newcomer()) or "")


def test_simulated_silos_are_trained_one_after_the_other() -> None:
    with pytest.raises(ConfigurationError, match="engine: alone"):
        simulate(make("fedavg", {}), engine=InThreads(2))
