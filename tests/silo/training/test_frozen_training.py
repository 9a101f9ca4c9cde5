"""Training of a part of a network: on kept features of a frozen extractor, with and without differential privacy."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.models import build, frozen_names, frozen_state, state_of, whole_state
from medsilo.algorithms.mrmtl import MRMTL
from medsilo.algorithms.protection.per_image import per_image_gradients
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import AugmentationPlan, ModelPlan, RunPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.training.private_head import head_of
from medsilo.silo.training.private_training import clipped_sum, reads_of
from medsilo.silo.training.site import LocalSite
from medsilo.simulation.batched import Engine, Fit, InThreads, Stacked
from tests.support.hospital.local_training import dataset, plan, site

PRIVACY = PrivacyPlan(epsilon=8, delta=1e-5, clipping_norm=1, noise_multiplier=1, sampling_rate=0.5, steps=12)


def on(train: Any, name: str = "lenet5", *, private: bool = False, **training: Any) -> RunPlan:
    model = ModelPlan(name=name, input_shape=(3, 16, 16), classes=3, train=train)
    return plan(**training).model_copy(update={"model": model, **({"privacy": PRIVACY} if private else {})})


class Counted:
    """Counts the images that a network's first layer sees."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = 0
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_pre_hook(self._count)

    def _count(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.seen += len(inputs[0])


PROBES = 1
"""Images by which an extractor is told from another."""


def counted(run: RunPlan, folder: Path | None = None, *, seed: int = 1) -> tuple[LocalSite, Counted]:
    model = build(run.model, seed=seed)
    counting = Counted(model)
    return site(run, model=model, features=folder), counting


@pytest.mark.parametrize("train", ["head", {"last": 2}], ids=["head", "last"])
def test_a_run_asks_the_frozen_front_about_each_image_once(train: Any, tmp_path: Path) -> None:
    one, counting = counted(on(train), tmp_path / "features")
    for number in range(3):
        one.fit(number)
        one.measure(state_of(one.model))
    assert counting.seen == 10 + 5 + PROBES
    (file,) = (tmp_path / "features").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again, second = counted(on(train), tmp_path / "features")
    again.fit(0)
    assert second.seen == PROBES


def test_another_frozen_part_has_features_of_its_own(tmp_path: Path) -> None:
    counted(on("head"), tmp_path)[0].fit(0)
    other, counting = counted(on("head"), tmp_path, seed=2)
    other.fit(0)
    assert counting.seen == 10 + 5 + PROBES
    assert len(list(tmp_path.iterdir())) == 2
    # The start that the coordinator gives is what counts, not what the seed would have made.
    given, third = counted(on("head"), tmp_path)
    given.start(whole_state(other.model))
    given.fit(0)
    assert third.seen == PROBES
    names = []
    for file in tmp_path.iterdir():
        with safe_open(file, "pt") as read:
            names.append(read.metadata()["extractor"])
    assert len(set(names)) == 2


@pytest.mark.parametrize("train", ["head", {"last": 2}], ids=["head", "last"])
@pytest.mark.parametrize("name", ["lenet5", "torchvision:resnet18"])
def test_kept_features_train_the_model_that_images_train(name: str, train: Any) -> None:
    run = on(train, name, optimizer="sgd", learning_rate=0.1)
    one = site(run)
    one.fit(0)
    by_hand = build(run.model, seed=1)
    by_hand.train()
    images, labels = one.train_data()
    optimizer = torch.optim.SGD([p for p in by_hand.parameters() if p.requires_grad], lr=0.1)
    for order in site(run).orders(0, 2, "training"):
        for index in order:
            optimizer.zero_grad()
            F.cross_entropy(by_hand(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for key, tensor in state_of(by_hand).items():
        torch.testing.assert_close(state_of(one.model)[key], tensor, atol=1e-5, rtol=1e-4)


def test_changed_images_go_through_the_frozen_part_at_every_step(tmp_path: Path) -> None:
    flips = (AugmentationPlan(kind="horizontal_flip", amount=0.5),)
    one, counting = counted(on("head", augmentation=flips), tmp_path)
    one.fit(0)
    assert counting.seen == 2 * 10
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", [False, True])
def test_features_made_before_the_start_was_loaded_are_not_those_of_the_run(tmp_path: Path, kept: bool) -> None:
    """A network that is measured as it was built sees another frozen part than the run's."""
    run, start = on("head"), whole_state(build(on("head").model, seed=99))
    data = dataclasses.replace(dataset(), validation=dataset(train=7).train)
    early, late = (
        site(run, data, model=build(run.model, seed=1), features=tmp_path / "features" if kept else None) for _ in "ab"
    )
    early.validate(state_of(early.model))
    begun = early.start(start)
    late.start(start)
    assert torch.equal(early.inputs()[0], late.inputs()[0])
    assert early.validate(begun) == late.validate(begun)


def test_a_choice_by_validation_images_measures_nothing_before_the_start() -> None:
    run = on("head")
    data = dataclasses.replace(dataset(), validation=dataset(train=7).train)
    model = build(run.model, seed=1)
    counting = Counted(model)
    one = site(run, data, model=model)
    MRMTL(choice="validation").silo_side(one)
    assert counting.seen == 0
    assert one.num_samples == 10, "nothing is set aside where the shard has validation images"


def test_a_start_gives_the_half_what_is_not_frozen_and_the_model_all() -> None:
    run = on("head")
    one = site(run)
    given = {n: torch.full_like(t, 2) for n, t in whole_state(one.model).items()}
    begun = one.start(given)
    assert set(begun) == set(given) - frozen_names(one.model) == {"classifier.weight", "classifier.bias"}
    assert all((tensor == 2).all() for tensor in frozen_state(one.model).values())
    plain = one.plain(begun)
    assert set(plain) == set(build(on("all").model).state_dict())
    assert all((tensor == 2).all() for tensor in plain.values())


@pytest.mark.parametrize("engine", [InThreads(2), Stacked()], ids=["threads", "stacked"])
@pytest.mark.parametrize("train", ["head", {"last": 2}, {"lora": {"rank": 2}}], ids=["head", "last", "lora"])
def test_engines_train_what_a_silo_trains_alone(train: Any, engine: Engine) -> None:
    run = on(train, optimizer="sgd", learning_rate=0.1)
    sites = [site(run, name=name) for name in ("h1", "h2")]
    fits = [Fit(one, state_of(one.model), 0) for one in sites]
    assert engine.takes(fits[0])
    for one, found in zip(sites, engine.train(fits), strict=True):
        one.fit(0)
        for name, tensor in state_of(one.model).items():
            torch.testing.assert_close(found.state[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("train", ["head", {"last": 2}, {"lora": {"rank": 2}}], ids=["head", "last", "lora"])
def test_frozen_batch_normalisation_is_allowed_with_differential_privacy(train: Any) -> None:
    run = on(train, private=True)
    one = site(run, charge=lambda *_: unsealed())
    before = {name: tensor.clone() for name, tensor in whole_state(one.model).items()}
    one.fit(0)
    after = whole_state(one.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before) - frozen_names(one.model)


def test_batch_normalisation_that_is_trained_is_refused_with_differential_privacy() -> None:
    run = on({"last": 2}, "torchvision:resnet18")
    with pytest.raises(ConfigurationError, match=r"layer4.1.bn2 \(BatchNorm2d\) mix the images"):
        check_model(build(run.model, seed=1), run.model.name, run.model.input_shape)
    with pytest.raises(ConfigurationError, match="or freeze them"):
        check_model(build(on("all").model, seed=1), "lenet5", run.model.input_shape)


def test_private_steps_of_a_frozen_extractors_head_are_the_exact_ones() -> None:
    one = site(on("head"))
    chosen = {name: p for name, p in one.model.named_parameters() if p.requires_grad}
    units = [np.array([number]) for number in range(10)]
    head = head_of(one.model.train(), chosen, one.inputs(), units)
    assert head is not None
    exact, _, _ = head.clipped_sum(np.arange(10), 0.05)
    images, labels = one._images.train
    with per_image_gradients(one.model):
        written_out, _ = clipped_sum(one.model, list(chosen.values()), images, labels, np.arange(10), 0.05)
    for found, expected in zip(exact, written_out, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "torchvision:resnet18"])
def test_low_rank_updates_have_single_images_gradients(name: str) -> None:
    model = build(on({"lora": {"rank": 2}}, name).model, seed=1).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in parameters:  # as they begin, the gradients of half of them are zeros
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    images, labels = site(on("all"))._images.train
    bound = 0.5
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for image, label in zip(images, labels, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(image[None]), label[None]), parameters)
        norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients))  # type: ignore[arg-type]
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, bound / float(norm))
    with per_image_gradients(model):
        found, _ = clipped_sum(model, parameters, images, labels, np.arange(len(images)), bound)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_a_charge_is_for_one_frozen_part() -> None:
    """Noise that was drawn for one may not be given again for another."""
    hashes = set()
    for seed in (1, 1, 2):
        model = build(on("head").model, seed=seed)
        model.load_state_dict({"classifier.weight": torch.zeros(3, 84), "classifier.bias": torch.zeros(3)})
        chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hashes.add(reads_of(model, chosen, torch.optim.SGD(chosen.values(), lr=0.1), None, 4))
    assert len(hashes) == 2
