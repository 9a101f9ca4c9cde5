"""Local training: the same seed gives the same bits, every image counts, and divergence is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.method import Correction
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.tensors import Part
from medsilo.privacy.consent.plan import RunPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError, DataError, TrainingError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.device import choose_device
from medsilo.silo.training.measuring import Progress
from medsilo.silo.training.optimizers import make_optimizer
from tests.support.hospital.local_training import CPU, Recording, dataset, equal, plan, site, trained


def naming(index: int) -> nn.Module:
    """A model that names one class whatever it sees."""
    last = nn.Linear(3 * 16 * 16, 3)
    nn.init.zeros_(last.weight)
    last.bias.data = torch.eye(3)[index]
    return nn.Sequential(nn.Flatten(), last)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_same_seed_gives_bit_equal_models(optimizer: str) -> None:
    run = plan(optimizer=optimizer, momentum=0.9)
    assert equal(trained(run), trained(run))


def test_seed_silo_and_round_each_change_the_order_of_images() -> None:
    base = trained(plan())
    assert not equal(base, trained(plan(), name="other"))
    assert not equal(base, trained(plan(), round_number=1))
    other = site(plan(seed=2), model=build(plan().model, seed=1))
    other.fit(0)
    assert not equal(base, state_of(other.model))


def test_dropout_is_seeded_too() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, 3))

    states = []
    for _ in range(2):
        one = site(plan(), model=dropping())
        torch.manual_seed(torch.seed())
        one.fit(0)
        states.append(state_of(one.model))
    assert equal(*states)


@pytest.mark.parametrize(
    ("train", "batch", "sizes"),
    [
        (10, 4, [4, 4, 2]),
        (9, 4, [4, 5]),  # the last image would stand alone: it joins the batch before
        (8, 4, [4, 4]),
        (3, 100, [3]),
        (1, 4, [1]),
        (5, 1, [1, 1, 1, 2]),
    ],
)
def test_every_epoch_visits_every_image_once_the_incomplete_last_batch_included(
    train: int, batch: int, sizes: list[int]
) -> None:
    model = Recording()
    data = dataset(train)
    site(plan(epochs=2, batch_size=batch), data, model=model).fit(0)
    assert [len(images) for images in model.batches] == 2 * sizes
    images = to_tensor(data.train.images)
    everything = sorted(image.sum().item() for image in images)
    side = len(sizes)
    epochs = [torch.cat(model.batches[:side]), torch.cat(model.batches[side:])]
    for epoch in epochs:
        assert sorted(image.sum().item() for image in epoch) == pytest.approx(everything)
    if train > 3:
        assert not torch.equal(*epochs)


def test_a_step_of_sgd_is_what_pytorch_computes_by_hand() -> None:
    run = plan(epochs=1, batch_size=100, optimizer="sgd", learning_rate=0.1, weight_decay=0.01)
    data = dataset()
    by_hand = build(run.model, seed=1)
    loss = nn.functional.cross_entropy(by_hand(to_tensor(data.train.images)), torch.as_tensor(data.train.labels))
    loss.backward()
    one = site(run, data)
    one.fit(0)
    for own, parameter in zip(one.model.parameters(), by_hand.parameters(), strict=True):
        assert parameter.grad is not None
        expected = parameter.detach() - 0.1 * (parameter.grad + 0.01 * parameter.detach())
        torch.testing.assert_close(own.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_correction_is_added_to_the_gradient_of_every_step() -> None:
    """With plain SGD the whole training moves by the linear term times learning rate and number of steps."""
    plain, pushed = (site(plan(optimizer="sgd", learning_rate=1e-6)) for _ in range(2))
    before = state_of(plain.model)
    linear = {name: torch.full_like(parameter, 3.0) for name, parameter in plain.model.named_parameters()}
    assert plain.fit(0) == 6  # two epochs of three batches
    pushed.fit(0, correction=Correction(linear=linear))
    for name, tensor in state_of(pushed.model).items():
        if name in linear:
            moved = tensor - state_of(plain.model)[name]
            torch.testing.assert_close(moved, torch.full_like(moved, -6 * 3e-6), rtol=0.2, atol=1e-6)
    assert not equal(before, state_of(pushed.model))


def test_only_what_is_trainable_is_trained() -> None:
    one = site(plan())
    before = state_of(one.model)
    one.fit(0, trainable={spec.name for spec in one.layout.classifier})
    after = state_of(one.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {spec.name for spec in one.layout.classifier}
    assert all(parameter.requires_grad for parameter in one.model.parameters())


def test_validation_images_are_set_aside_and_not_trained_on() -> None:
    one = site(plan())
    images, labels = one.train_data()
    one.reserve(0.25)
    assert len(one.reserved_data()[1]) == round(0.25 * len(labels))
    assert one.num_samples == len(one.train_data()[1]) == len(labels) - len(one.reserved_data()[1])
    together = torch.cat([one.train_data()[0], one.reserved_data()[0]]).flatten(1)
    assert sorted(together.sum(1).tolist()) == sorted(images.flatten(1).sum(1).tolist())


def test_the_optimiser_is_the_plans() -> None:
    model = build(plan().model)
    adam = make_optimizer(list(model.parameters()), TrainingPlan(learning_rate=0.25, weight_decay=0.5))
    assert isinstance(adam, torch.optim.Adam)
    assert (adam.defaults["lr"], adam.defaults["weight_decay"]) == (0.25, 0.5)
    sgd = make_optimizer(list(model.parameters()), TrainingPlan(optimizer="sgd", momentum=0.5))
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.5


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd", "momentum": 0.9}], ids=["adam", "momentum"])
def test_a_kept_optimiser_goes_on_where_it_was_and_a_fresh_one_does_not(options: dict[str, Any]) -> None:
    run = plan(epochs=1, batch_size=100, weight_decay=0.01, keep_optimizer_state=True, **options)
    images, labels = site(run).train_data()
    by_hand = build(run.model, seed=1)
    optimizer = make_optimizer(list(by_hand.parameters()), run.training)
    one = site(run)
    for round_number in range(3):
        # What the runtime saved is all that the next round is begun with.
        saved = {group: {k: t.clone() for k, t in state.items()} for group, state in one.optimizers.items()}
        one = site(run, model=one.model)
        one.optimizers = saved
        one.fit(round_number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(images), labels).backward()
        optimizer.step()
        torch.testing.assert_close(state_of(one.model), state_of(by_hand))  # the order of images is another
    fresh = site(plan(epochs=1, batch_size=100, weight_decay=0.01, **options))
    for round_number in range(3):
        fresh.fit(round_number)
    assert not fresh.optimizers
    kept = state_of(by_hand)
    assert any(not torch.allclose(t, kept[name]) for name, t in state_of(fresh.model).items())


def test_each_phase_of_a_round_keeps_an_optimiser_of_its_own() -> None:
    one = site(plan(keep_optimizer_state=True))
    one.fit(0, trainable={"classifier.weight"}, phase="head")
    one.fit(0, phase="body")
    steps = {group: set(state) for group, state in one.optimizers.items()}
    assert {key.split("/", 1)[1] for key in steps["optimizer-head"]} == {"classifier.weight"}
    assert len(steps["optimizer-body"]) == 3 * len(list(one.model.parameters()))
    assert one.optimizers["optimizer-head"]["step/classifier.weight"] == 2 * 3


def test_a_plan_that_keeps_no_optimiser_has_the_hash_it_had_before_one_could() -> None:
    assert "keep_optimizer_state" not in plan().canonical().decode()
    kept = plan(keep_optimizer_state=True)
    assert kept.sha256 != plan().sha256
    assert RunPlan.from_message(kept.to_message()) == kept == RunPlan.model_validate_json(kept.model_dump_json())
    assert RunPlan.from_message(plan().to_message()) == plan()


def test_divergence_is_an_error_that_says_so() -> None:
    with pytest.raises(TrainingError, match=r"diverged in round 2, epoch 1.*smaller learning rate"):
        site(plan(optimizer="sgd", learning_rate=1e30)).fit(2)


def test_progress_is_told_after_every_epoch() -> None:
    told: list[Progress] = []
    site(plan(epochs=3), progress=told.append).fit(4)
    ends = [p for p in told if p.step == p.steps]
    assert [(p.round, p.epoch, p.epochs, p.steps) for p in ends] == [(4, n, 3, 3) for n in (1, 2, 3)]


def test_a_measurement_is_accuracy_and_mean_cross_entropy_in_evaluation_mode() -> None:
    data = dataset(test=7)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.BatchNorm1d(3 * 16 * 16), nn.Linear(3 * 16 * 16, 3))
    one = site(plan(), data, model=model)
    state = state_of(model)
    found = one.measure(state)
    assert found is not None
    model.eval()
    logits = model(to_tensor(data.test.images)).detach()
    labels = torch.as_tensor(data.test.labels)
    assert found.accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert equal(state, state_of(model))


def test_the_mean_accuracy_of_classes_counts_each_class_alike() -> None:
    """However many images of it there are: a model that names one class alone has one over their number."""
    data = dataset(test=7)  # three images of class a, two of b and of c
    frequent = site(plan(), data, model=naming(0)).measure({})
    rare = site(plan(), data, model=naming(2)).measure({})
    assert frequent is not None
    assert rare is not None
    assert (frequent.accuracy, frequent.of_classes) == (pytest.approx(3 / 7), pytest.approx(1 / 3))
    assert (rare.accuracy, rare.of_classes) == (pytest.approx(2 / 7), pytest.approx(1 / 3))
    # Of a class that the images do not have, nothing is said.
    two = dataclasses.replace(data, test=data.test.take(np.array([0, 1, 3])))
    found = site(plan(), two, model=naming(0)).measure({})
    assert found is not None
    assert found.of_classes == 0.5


def test_a_shard_that_does_not_fit_the_plan_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"3×16×16.*3×28×28"):
        site(plan(size=28))
    with pytest.raises(DataError, match="has 3 classes, but run r is for 2"):
        site(plan(classes=2))


def test_a_device_that_is_not_there_is_a_configuration_error() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(ConfigurationError, match="cuda:3"):
            choose_device("cuda:3")


@pytest.mark.parametrize("weight", [0.0, 50.0])
def test_a_large_lambda_holds_the_model_at_z(weight: float) -> None:
    one = site(plan(optimizer="sgd", learning_rate=0.01, epochs=10))
    side = DiversiFed(proximal_weight=weight).silo_side(one)
    initial = state_of(one.model)
    side.begin(initial)
    z = {spec.name: initial[spec.name] + 0.01 for spec in one.layout.parameters}
    start = sum(((initial[name] - z[name]) ** 2).sum().item() for name in z)
    side.train(1, {Exposure.PEER_DERIVED: Part.of(z)})
    end = sum(((side.personal()[name] - z[name]) ** 2).sum().item() for name in z)
    assert (end < 0.05 * start) == (weight > 0)


class Typed(Recording):
    """Keeps the type of numbers that it computes with."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = super().forward(images)
        self.types = {found.dtype}
        return found


def test_mixed_precision_computes_in_sixteen_bits_and_keeps_thirty_two() -> None:
    states = []
    for precision, computed in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        torch.manual_seed(3)
        model = Typed()
        one = site(plan(keep_optimizer_state=True), model=model, precision=precision)
        one.fit(0)
        assert model.types == {computed}
        states.append(state_of(model))
        kept = [*states[-1].values(), *one.optimizers["optimizer-training"].values()]
        assert {tensor.dtype for tensor in kept} == {torch.float32}
        one.measure(states[-1])
        assert model.types == {torch.float32}
    exact, mixed = states
    assert not equal(exact, mixed)
    torch.testing.assert_close(mixed["linear.weight"], exact["linear.weight"], rtol=0, atol=5e-3)


def test_mixed_precision_is_refused_under_differential_privacy() -> None:
    from tests.support.hospital.private_training import private_plan, private_site

    with pytest.raises(ConfigurationError, match="shown for float32 alone; use precision: float32"):
        private_site(private_plan(), precision="bfloat16")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigurationError, match=r"cuda:2: this machine's PyTorch sees 2 CUDA device"):
        choose_device("cuda:2")
