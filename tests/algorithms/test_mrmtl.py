"""MR-MTL: its models against the formula in float64, its limiting case, its range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.mrmtl import MRMTL, MRMTLSilo
from medsilo.algorithms.protection.private import refusal, reporting_refusal
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.site import LocalSite
from tests.support.methods.tiny_federation import run_plan, shard, simulate

RATE, STEPS, ROUNDS = 0.05, 3, 4


def linear() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 3))


def test_two_silos_go_where_the_formula_leads() -> None:
    """Softmax regression, all images in each step: w_k ← w_k − η (∇F_k(w_k) + λ (w_k − w̄)), w̄ the mean of the w_k as
    they were at the end of the round before."""
    method = MRMTL(proximal_weight=0.7)
    plan = run_plan(method, rounds=ROUNDS)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"epochs": STEPS, "batch_size": 24})})
    sides = {}
    for name in ("a", "b"):
        site = LocalSite(name, shard(name, seed=ord(name)), linear(), plan, device=torch.device("cpu"))
        sides[name] = method.silo_side(site)
        sides[name].begin(state_of(site.model))
    coordinator = method.coordinator_side(Federation(Layout.of(linear()), rounds=ROUNDS, seed=1, silos=("a", "b")))

    # The last column of x and of w is the bias.
    start = state_of(linear())
    w = dict.fromkeys("ab", np.column_stack([start["1.weight"], start["1.bias"]]).astype(np.float64))
    mean = None
    download: Payload = {}
    for number in range(ROUNDS):
        for name, side in sides.items():
            side.train(number, download)
            images, labels = side.site.train_data()
            x = np.column_stack([images.flatten(1).numpy().astype(np.float64), np.ones(len(images))])
            for _ in range(STEPS):
                scores = np.exp(x @ w[name].T)
                gradient = (scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[labels]).T @ x / len(x)
                w[name] = w[name] - RATE * (gradient + (0.0 if mean is None else 0.7 * (w[name] - mean)))
        uploads = {name: side.upload() for name, side in sides.items()}
        download = coordinator.aggregate(Round(number, uploads, uploads, MemoryWorkspace())).for_silo("a")
        mean = (w["a"] + w["b"]) / 2
    for name, side in sides.items():
        found = side.personal()
        np.testing.assert_allclose(np.column_stack([found["1.weight"], found["1.bias"]]), w[name], atol=2e-6)
    assert np.abs(w["a"] - w["b"]).max() > 0.01, "else it would not show which silo has which"


def test_without_the_term_it_is_separate_training_to_the_last_bit() -> None:
    alone, none, held = (simulate(method, rounds=3) for method in (Local(), MRMTL(proximal_weight=0.0), MRMTL()))
    for name, side in alone.silos.items():
        for key, tensor in side.personal().items():
            assert torch.equal(tensor, none.silos[name].personal()[key])
            assert not torch.equal(tensor, held.silos[name].personal()[key])


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"proximal_weight is -0.1; it must be 0 or more"):
        MRMTL(proximal_weight=-0.1)


# --- λ chosen by the silo ------------------------------------------------------------------------------------------


def half_of(method: MRMTL, data: ImageDataset, *, reserve: bool = False) -> MRMTLSilo:
    site = LocalSite(data.name, data, linear(), run_plan(method, rounds=ROUNDS), device=torch.device("cpu"))
    if reserve:
        site.reserve(0.25)
    side = method.silo_side(site)
    side.begin(state_of(site.model))
    assert isinstance(side, MRMTLSilo)
    return side


def given(scale: float) -> Payload:
    """A mean that is far from every silo's model."""
    centre = {spec.name: torch.full(spec.shape, scale) for spec in Layout.of(linear()).parameters}
    return {Exposure.PEER_DERIVED: Part.of(centre)}


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_a_silo_takes_the_weight_with_the_least_loss_on_images_it_does_not_train_on(scale: float) -> None:
    data = shard("a", seed=1, train=40)
    weights = [0.5 * factor for factor in (0.1, 0.3, 1, 3, 10)]
    trained = []
    for weight in weights:
        side = half_of(MRMTL(proximal_weight=weight), data, reserve=True)
        side.train(0, {})
        side.train(1, given(scale))
        trained.append(side.personal())
        images, labels = side.site.reserved_data()
    losses = []
    for state in trained:
        logits = images.flatten(1) @ state["1.weight"].T + state["1.bias"]
        losses.append(float(nn.functional.cross_entropy(logits, labels)))
    assert len(set(losses)) == 5
    choosing = half_of(MRMTL(proximal_weight=0.5, choice="validation", validation_share=0.25), data)
    choosing.train(0, {})
    choosing.train(1, given(scale))
    best = int(np.argmin(losses))
    assert float(choosing.memory["choice"]["weight"]) == pytest.approx(weights[best])
    assert all(torch.equal(tensor, trained[best][name]) for name, tensor in choosing.personal().items())


def test_a_silo_chooses_in_rounds_that_are_powers_of_two_and_keeps_its_choice_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = half_of(MRMTL(proximal_weight=0.5, choice="validation"), shard("a", seed=1, train=40))
    trainings: list[int] = []
    ordinary = LocalSite.fit

    def noted(site: LocalSite, round_number: int, **settings: Any) -> int:
        trainings.append(round_number)
        return ordinary(site, round_number, **settings)

    monkeypatch.setattr(LocalSite, "fit", noted)
    side.train(0, {})
    for number in range(1, 10):
        side.train(number, given(0.1))
    assert [trainings.count(number) for number in range(10)] == [1, 5, 5, 1, 5, 1, 1, 1, 5, 1]


def test_a_pull_too_strong_for_the_step_size_is_not_chosen() -> None:
    """η λ is 0.05 · 4,000 at the strongest, and models grow two hundredfold in a step."""
    side = half_of(MRMTL(proximal_weight=400.0, choice="validation"), shard("a", seed=1, train=200))
    side.train(0, {})
    side.train(1, given(0.1))
    assert float(side.memory["choice"]["weight"]) == pytest.approx(40.0)
    assert all(torch.isfinite(tensor).all() for tensor in side.personal().values())


def with_validation(data: ImageDataset) -> ImageDataset:
    """Its validation images have the classes in another order, so that no model of its own does well on them."""
    split = shard("v", seed=8).train
    return replace(data, validation=replace(split, labels=2 - split.labels))


def test_a_choice_at_home_changes_nothing_that_leaves_and_takes_the_best_mixture() -> None:
    data = with_validation(shard("a", seed=1))
    plain, home = half_of(MRMTL(proximal_weight=0.5), data), half_of(MRMTL(proximal_weight=0.5, choice="home"), data)
    for side in (plain, home):
        side.train(0, {})
        side.train(1, given(0.05))
    for exposure, part in plain.upload().items():
        assert all(torch.equal(home.upload()[exposure].tensors()[name], t) for name, t in part.tensors().items())
    own = home.personal()
    home.finish({})
    mixtures = [{name: (1 - a) * 0.05 + a * tensor for name, tensor in own.items()} for a in (0, 0.25, 0.5, 0.75, 1)]
    losses = [home.site.validation_loss(mixture) for mixture in mixtures]
    best = mixtures[int(np.argmin(np.array(losses, dtype=np.float64)))]
    for name, tensor in home.personal().items():
        torch.testing.assert_close(tensor, best[name])
    assert min(loss for loss in losses if loss is not None) < (losses[-1] or 0), "else it would not show a choice"


def test_without_validation_images_a_silo_keeps_its_own_model() -> None:
    side = half_of(MRMTL(choice="home"), shard("a", seed=1))
    side.train(0, {})
    side.train(1, given(0.05))
    before = side.personal()
    side.finish({})
    assert side.personal() is before


def test_what_validation_images_choose_leaves_no_private_run() -> None:
    assert "`choice: plan` or `choice: home`" in (refusal(MRMTL(choice="validation")) or "")
    assert refusal(MRMTL(choice="home")) is None
    assert "`choice: plan`" in (reporting_refusal(MRMTL(choice="home")) or "")
    assert reporting_refusal(MRMTL()) is None


def test_a_plan_of_one_weight_for_all_is_written_as_before() -> None:
    assert MRMTL().parameters() == {"proximal_weight": 0.1}
