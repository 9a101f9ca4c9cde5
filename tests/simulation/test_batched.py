"""Training many silos at once gives what each would have got alone."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import PERSONAL, Correction, Downloads, SiloSide, State
from medsilo.algorithms.models import Layout, build, state_of
from medsilo.algorithms.tensors import Part, Payload
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import TrainingError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.site import LocalSite
from medsilo.simulation.batched import Engine, Fit, InLanes, InThreads, Stacked, train_round

CPU = torch.device("cpu")
SIZES = {"a": 23, "b": 30, "c": 21, "d": 8}
"""With batches of 10: batches of 10, 10, 3; of 10, 10, 10; of 10, 11; of 8."""


def plan(model: str = "diversifed-cnn", **training: Any) -> RunPlan:
    return RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name="local", parameters={}),
        model=ModelPlan(name=model, input_shape=(3, 16, 16), classes=3),
        training=TrainingPlan(**{"epochs": 2, "batch_size": 10, **training}),
        rounds=3,
        seed=1,
        required=Local().required,
    )


def sites(run: RunPlan, model: nn.Module | None = None, sizes: dict[str, int] = SIZES) -> dict[str, LocalSite]:
    """Silos that share one module."""
    model = model or build(run.model, seed=1)
    found = {}
    for number, (name, count) in enumerate(sizes.items()):
        draw = np.random.default_rng(number)
        split = ImageSplit(
            draw.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8), draw.integers(0, 3, count, dtype=np.int64)
        )
        data = ImageDataset(name, "a test", True, ("a", "b", "c"), split, None, split)
        found[name] = LocalSite(name, data, model, run, device=CPU)
    return found


def sides_of(found: dict[str, LocalSite]) -> dict[str, SiloSide]:
    """DiversiFed's sides, each silo with a starting model of its own."""
    sides: dict[str, SiloSide] = {}
    for number, (name, site) in enumerate(found.items()):
        sides[name] = DiversiFed(proximal_weight=3.0).silo_side(site)
        sides[name].begin({key: value + 0.01 * number for key, value in state_of(site.model).items()})
    return sides


def towards(found: dict[str, LocalSite]) -> Downloads:
    """A z of its own for every silo but the last, which has none and trains plainly."""
    own: dict[str, Payload] = {}
    for number, (name, site) in enumerate(list(found.items())[:-1]):
        z = {spec.name: torch.full(spec.shape, 0.05 * number) for spec in site.layout.parameters}
        own[name] = {Exposure.PEER_DERIVED: Part.of(z)}
    return Downloads(own)


def one_by_one(run: RunPlan) -> dict[str, State]:
    found = sites(run)
    sides, downloads = sides_of(found), towards(found)
    for name, side in sides.items():
        side.train(1, downloads.for_silo(name))
    return {name: side.personal() for name, side in sides.items()}


def at_once(run: RunPlan, engine: Engine) -> dict[str, State]:
    found = sites(run)
    sides = sides_of(found)
    train_round(sides, 1, towards(found), found, engine)
    return {name: side.personal() for name, side in sides.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("training", [{}, {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9}], ids=str)
@pytest.mark.parametrize("model", ["diversifed-cnn", "mlp-64", "stain-texture"])
def test_a_round_stacked_or_in_lanes_is_the_sequential_one_up_to_rounding(model: str, training: dict[str, Any]) -> None:
    """Silos of unequal sizes, each with a model and a z of its own, in one module that they share."""
    run = plan(model, **training)
    expected = one_by_one(run)
    for engine in (Stacked(), InLanes(2)):
        found = at_once(run, engine)
        for name in SIZES:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=2e-5)


def test_a_round_in_threads_is_bit_equal_to_the_sequential_one() -> None:
    torch.set_num_threads(2)
    found = at_once(plan(), InThreads(2))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    expected = one_by_one(plan())
    assert all(torch.equal(found[name][key], expected[name][key]) for name in SIZES for key in found[name])


class Counting(Stacked):
    """Remembers how many fits came together."""

    def __init__(self) -> None:
        self.together: list[list[str]] = []

    def train(self, fits: Any) -> Any:
        self.together.append([fit.site.name for fit in fits])
        return super().train(fits)


def test_silos_on_fixed_features_are_stacked_although_the_extractor_has_constants() -> None:
    found = sites(plan("stain-texture"))
    site = found["a"]
    assert next(site.model.buffers(), None) is not None
    assert Stacked().takes(Fit(site, state_of(site.model), 0))


def test_padding_weighs_nothing() -> None:
    """One step of SGD on batches of 3 and 5 images, by hand from the definition of the mean cross entropy."""
    run = plan("mlp-64", epochs=1, optimizer="sgd", learning_rate=0.1)
    found = sites(run, sizes={"a": 3, "b": 5})
    start = state_of(found["a"].model)
    for trained, site in zip(Stacked().train([Fit(s, start, 0) for s in found.values()]), found.values(), strict=True):
        images, labels = site.train_data()
        model = build(run.model, seed=1)
        picked = torch.log_softmax(model(images), dim=1)[torch.arange(len(labels)), labels]
        (-picked.sum() / len(labels)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                trained.state[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-5, atol=1e-6
            )


def test_corrections_differ_by_silo_and_missing_ones_are_nothing() -> None:
    """With images of nothing but zeros the hidden layer's weights have no gradient: one SGD step moves them by
    −η (strength (w − centre) + linear), and not at all without a correction."""
    run = plan("mlp-64", epochs=1, optimizer="sgd", learning_rate=0.5)
    found = sites(run, sizes={"a": 4, "b": 4, "c": 4})
    for site in found.values():
        site.train_data()[0].zero_()
    name = "hidden.weight"
    start = {key: torch.full_like(value, 2.0) for key, value in state_of(found["a"].model).items()}
    corrections = [
        Correction(strength=0.25, centre={name: torch.full_like(start[name], -2.0)}),
        Correction(linear={name: torch.full_like(start[name], 3.0)}),
        None,
    ]
    fits = [Fit(s, start, 0, correction=c) for s, c in zip(found.values(), corrections, strict=True)]
    moved = [trained.state[name].unique().tolist() for trained in Stacked().train(fits)]
    assert moved == [[2.0 - 0.5 * 0.25 * 4.0], [2.0 - 0.5 * 3.0], [2.0]]


class TwoPhases(SiloSide):
    """Trains the classifier, then the rest, with work of its own between."""

    def train(self, round_number: int, download: Payload) -> None:
        site = self.site
        classifier: Collection[str] = {spec.name for spec in site.layout.classifier}
        site.load(self.memory[PERSONAL])
        steps = site.fit(round_number, trainable=classifier, epochs=1, phase="head")
        middle = {key: value * 0.5 for key, value in state_of(site.model).items()}
        site.load(middle)
        rest: Collection[str] = {spec.name for spec in site.layout.extractor}
        steps += site.fit(round_number, trainable=rest, epochs=1, phase="body")
        self.memory[PERSONAL] = {**state_of(site.model), "steps": torch.tensor(steps)}

    def upload(self) -> Payload:
        return {}


def test_a_half_that_trains_twice_waits_twice() -> None:
    states = []
    engine = Counting()
    for together in (False, True):
        found = sites(plan())
        sides: dict[str, SiloSide] = {name: TwoPhases(Local(), site) for name, site in found.items()}
        for side in sides.values():
            side.begin(state_of(side.site.model))
        if together:
            train_round(sides, 0, Downloads(), found, engine)
        else:
            for side in sides.values():
                side.train(0, {})
        states.append({name: side.personal() for name, side in sides.items()})
    assert engine.together == [list(SIZES), list(SIZES)]
    for name in SIZES:
        torch.testing.assert_close(states[1][name], states[0][name], rtol=1e-3, atol=2e-5)
    assert [int(states[1][name]["steps"]) for name in SIZES] == [6, 6, 4, 2]


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, 3))


def normalising() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 16 * 16), nn.Linear(3 * 16 * 16, 3))


class Branching(nn.Module):
    """Looks at its numbers, which ``vmap`` cannot."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3 * 16 * 16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(images.flatten(1))
        return found if found.sum().item() > 0 else 2 * found


@pytest.mark.parametrize("make", [dropping, normalising, Branching])
def test_what_cannot_be_stacked_is_trained_as_always(make: Any) -> None:
    states = []
    for together in (False, True):
        found = sites(plan(), make())
        sides: dict[str, SiloSide] = {name: Local().silo_side(site) for name, site in found.items()}
        initial = state_of(found["a"].model)
        for side in sides.values():
            side.begin(copy.deepcopy(initial))
        if together:
            train_round(sides, 0, Downloads(), found, Stacked())
        else:
            for side in sides.values():
                side.train(0, {})
        states.append({name: side.personal() for name, side in sides.items()})
    assert all(torch.equal(states[0][name][key], states[1][name][key]) for name in SIZES for key in initial)


@pytest.mark.parametrize("engine", [Stacked(), InThreads(2), InLanes(2)], ids=["stacked", "threads", "lanes"])
def test_divergence_is_the_same_error_and_leaves_the_sites_as_they_were(engine: Engine) -> None:
    found = sites(plan(optimizer="sgd", learning_rate=1e30))
    sides = sides_of(found)
    with pytest.raises(TrainingError, match=r"diverged in round 1, epoch 1.*smaller learning rate"):
        train_round(sides, 1, Downloads(), found, engine)
    assert not any("fit" in vars(site) for site in found.values())


def test_layouts_of_sites_stay_those_of_the_model() -> None:
    one = sites(plan())["a"]
    other = build(plan().model, seed=2)
    twin = one.with_model(other)
    assert twin.model is other
    assert twin.layout == Layout.of(one.model)
    assert one.model is not other
