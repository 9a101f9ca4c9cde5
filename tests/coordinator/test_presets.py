"""``privacy: {preset: head}``: settings from public numbers alone, which the plan holds as plain numbers."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError
from torch import nn

from medsilo.algorithms.models import ARCHITECTURES
from medsilo.algorithms.protection.masked import check_masks
from medsilo.algorithms.registry import make
from medsilo.coordinator import presets
from medsilo.coordinator.config import CoordinatorConfig, PrivacyConfig, RunConfig
from medsilo.privacy.budget.accounting import GaussianRelease, epsilon
from medsilo.privacy.consent.plan import RunPlan, TrainingPlan, Trust
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.silo.run.account import check_promise

HEAD = {"preset": "head", "epsilon": 1.0, "delta": 1e-5, "units": 1000}


def linear(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network of which one linear layer is trained."""
    body = nn.Linear(math.prod(input_shape), 12).requires_grad_(False)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), body=body, relu=nn.ReLU(), head=nn.Linear(12, classes)))


@pytest.fixture(autouse=True)
def _a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "fixed-linear", linear)


def config(folder: Path, privacy: dict[str, Any] | None = None, **run: Any) -> CoordinatorConfig:
    content = {
        "federation": "test",
        "listen": "127.0.0.1:7443",
        "insecure": True,
        "state": str(folder / "state"),
        "silos": [f"hospital{number}" for number in range(1, 7)],
        "run": {
            "name": "r",
            "method": {"name": "fedavg"},
            "model": {"name": "fixed-linear", "input_shape": [3, 8, 8], "classes": 4},
            "rounds": 12,
            "privacy": privacy or HEAD,
            **run,
        },
    }
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(content))
    return CoordinatorConfig.read(folder / "coordinator.yaml")


def planned(folder: Path, privacy: dict[str, Any] | None = None, **run: Any) -> RunPlan:
    return config(folder, privacy, **run).plan()


def test_the_plan_holds_plain_numbers_that_a_silo_checks_as_ever(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    found, training = plan.privacy, plan.training
    assert found is not None
    assert (found.sampling_rate, found.steps, training.epochs) == (1.0, 96, 8)
    assert (training.optimizer, training.momentum, training.keep_optimizer_state) == ("sgd", 0.9, True)
    assert (found.unit, found.clipping_norm, found.averaged_share) == ("patient", 0.25, 0.5)
    assert 0.98 < epsilon([GaussianRelease(found.noise_multiplier, 96)], delta=1e-5) <= 1.0
    assert "preset" not in json.dumps(plan.model_dump(mode="json"))
    assert RunPlan.from_message(plan.to_message()) == plan
    check_promise(plan, make("fedavg", {}))
    weaker = found.model_copy(update={"noise_multiplier": 0.75 * found.noise_multiplier})
    with pytest.raises(RefusedError, match="cost"):
        check_promise(plan.model_copy(update={"privacy": weaker}), make("fedavg", {}))


def test_the_noise_in_the_averaged_model_is_the_same_whatever_the_setting(tmp_path: Path) -> None:
    """The documented rule: with noise of deviation zC on each of T steps, divided by n, at H hospitals, the mean
    model's noise is η/(1 - β)·√T·zC/(n√H); it is 1.5 unless ``LONGEST`` is reached."""

    def noise(units: int, rounds: int, unit: str, **privacy: Any) -> float:
        plan = planned(tmp_path, {**HEAD, "units": units, "unit": unit, **privacy}, rounds=rounds)
        assert plan.privacy is not None
        size = plan.training.learning_rate / (1 - plan.training.momentum)
        steps = plan.training.epochs * plan.rounds
        deviation = plan.privacy.noise_multiplier * plan.privacy.clipping_norm
        return size * math.sqrt(steps) * deviation / (units * math.sqrt(6))

    for setting in [
        (1000, 12, "image"),
        (300, 12, "image"),
        (300, 5, "image"),
        (300, 200, "image"),
        (7, 12, "patient"),
    ]:
        assert noise(*setting) == pytest.approx(1.5, rel=0.01)
    assert noise(300, 12, "image", epsilon=2.0) == pytest.approx(1.5, rel=0.01)
    assert noise(100_000, 12, "image", epsilon=8.0) < 0.1, "it goes no further than without noise"


def test_who_is_alone_is_given_shorter_steps(tmp_path: Path) -> None:
    alone, together = (planned(tmp_path, method={"name": name}).training for name in ("local", "fedavg"))
    assert together.learning_rate == pytest.approx(alone.learning_rate * math.sqrt(6), rel=0.01)


@pytest.mark.parametrize(("rounds", "most"), [(12, 0.026), (5, 0.041), (200, 0.011)])
def test_no_correlation_of_the_noise_would_take_more_than_this_off_the_last_model(rounds: int, most: float) -> None:
    """Independent noise leaves ‖w‖·√T in Σ wₜ·gₜ, no other of the same cost less than Σ wₜ (Cauchy and Schwarz)."""
    each = presets.epochs(rounds)
    steps = each * rounds
    averaged = math.ceil(presets.AVERAGED_SHARE * each)
    model, memory = np.zeros(steps), np.zeros(steps)  # how much of each step's gradient is in them
    for round_number in range(rounds):
        models = []
        for step in range(each):
            memory = presets.MOMENTUM * memory + np.eye(1, steps, round_number * each + step)[0]
            model = model + memory
            models.append(model)
        model = np.mean(models[-averaged:], axis=0)
    assert 0 < 1 - model.sum() / np.linalg.norm(model) / math.sqrt(steps) <= most


@pytest.mark.parametrize(
    ("few", "enough"),
    [
        ({"units": 7, "epsilon": 2.0}, {"units": 20, "epsilon": 2.0}),
        ({"units": 300, "epsilon": 0.1, "unit": "image"}, {"units": 1000, "epsilon": 0.25, "unit": "image"}),
    ],
)
def test_too_few_units_for_so_much_noise_are_said_with_how_many_it_takes(
    few: dict[str, Any], enough: dict[str, Any], tmp_path: Path
) -> None:
    assert config(tmp_path, {**HEAD, **enough}).warnings() == []
    (said,) = config(tmp_path, {**HEAD, **few}).warnings()
    assert f"with {few['units']} units" in said
    needed = int(re.search(r"about (\d+) in each", said)[1])  # type: ignore[index]
    assert config(tmp_path, {**HEAD, **few, "units": needed}).warnings() == []
    assert config(tmp_path, {**HEAD, **few, "units": needed - 1}).warnings() != []


def test_the_image_is_the_unit_where_the_file_says_so(tmp_path: Path) -> None:
    found = planned(tmp_path, {**HEAD, "unit": "image"}).privacy
    assert found is not None
    assert (found.unit, found.clipping_norm) == ("image", 1.0)


def test_a_model_of_which_more_is_trained_is_refused(tmp_path: Path) -> None:
    model = {"name": "lenet5-gn", "input_shape": [3, 28, 28], "classes": 4}
    with pytest.raises(ConfigurationError, match=r"run\.privacy\.preset.*one linear layer"):
        planned(tmp_path, model=model)


@pytest.mark.parametrize(
    ("privacy", "run", "words"),
    [
        ({**HEAD, "sampling_rate": 0.1}, {}, "chooses sampling_rate"),
        ({**HEAD, "clipping_norm": 1.0, "averaged_share": 0.1}, {}, "chooses clipping_norm, averaged_share"),
        ({k: v for k, v in HEAD.items() if k != "units"}, {}, "go together"),
        ({"epsilon": 1, "delta": 1e-5, "sampling_rate": 0.1, "units": 5}, {}, "go together"),
        (HEAD, {"training": {"epochs": 3}}, "chooses the training"),
        ({**HEAD, "preset": "heads"}, {}, "head"),
    ],
)
def test_what_the_preset_chooses_is_not_given_beside_it(
    privacy: dict[str, Any], run: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        config(tmp_path, privacy, **run)


def test_without_a_preset_nothing_is_different() -> None:
    with pytest.raises(ValidationError, match="sampling_rate"):
        PrivacyConfig.model_validate({"epsilon": 1, "delta": 1e-5})
    found = PrivacyConfig(epsilon=8, delta=1e-5, sampling_rate=0.05)
    assert (found.unit, found.clipping_norm) == ("image", 1.0)
    training = TrainingPlan(epochs=2)
    assert found.training(make("fedavg", {}), training, 12, 6) is training
    plan = found.plan(make("fedavg", {}), training, 12)
    assert plan.averaged_share == 0
    assert "averaged_share" not in plan.model_dump(), "its hash stays what it was at an older silo"
    assert RunConfig.model_fields["training"].default == TrainingPlan()


SHARED = {**HEAD, "honest": 5}


def shared(folder: Path, *, rounds: int = 8, **privacy: Any) -> RunPlan:
    """Among six hospitals under masks."""
    config(folder, {**SHARED, **privacy}, rounds=rounds)
    content = yaml.safe_load((folder / "coordinator.yaml").read_text())
    content["insecure"] = False
    content["run"]["secure_aggregation"] = {"minimum": 6}
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(content))
    return CoordinatorConfig.read(folder / "coordinator.yaml").plan()


def test_with_shared_noise_a_round_is_one_plain_step_as_far_as_the_lesser_noise_allows(tmp_path: Path) -> None:
    plan = shared(tmp_path)
    found, training = plan.privacy, plan.training
    assert found is not None
    assert (found.honest, found.steps, training.epochs, found.averaged_share, found.unit) == (5, 8, 1, 0.0, "patient")
    assert not training.momentum
    assert plan.trust == Trust(5, 6)
    assert RunPlan.from_message(plan.to_message()) == plan
    check_promise(plan, make("fedavg", {}))
    check_masks(plan, make("fedavg", {}))
    for changes in ({}, {"units": 4}, {"epsilon": 0.5}, {"rounds": 20}, {"units": 4, "honest": 3}):
        one = shared(tmp_path, **{"units": 7, **changes})
        assert one.privacy is not None
        assert one.privacy.honest is not None
        # Of all six hospitals' shares, divided by the number of all units.
        share = one.privacy.noise_multiplier * one.privacy.clipping_norm / math.sqrt(one.privacy.honest)
        noise = one.training.learning_rate * math.sqrt(one.rounds) * share / (changes.get("units", 7) * math.sqrt(6))
        assert noise == pytest.approx(1.1, rel=0.01)
    assert shared(tmp_path, unit="image", rounds=2).training.learning_rate == 10, "what a consent takes by default"
    fewer = found.model_copy(update={"noise_multiplier": 0.75 * found.noise_multiplier})
    with pytest.raises(RefusedError, match="cost"):
        check_promise(plan.model_copy(update={"privacy": fewer}), make("fedavg", {}))


def test_a_silo_takes_no_coordinators_word_for_a_method_whose_noise_cannot_be_shared_out(tmp_path: Path) -> None:
    plan = shared(tmp_path)
    for name, parameters, reason in (
        ("mrmtl", {}, "models of their own"),
        ("fedprox", {}, "models of their own"),
        ("fedper", {}, "models of their own"),
        ("fedavg", {"weighting": "uniform"}, "weighting: samples"),
    ):
        with pytest.raises(RefusedError, match=reason):
            check_masks(plan, make(name, parameters))
