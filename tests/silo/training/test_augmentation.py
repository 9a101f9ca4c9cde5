"""Changed images and weighted classes: what the plan says, by seed alone, one image for one, hashed only if asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, to_tensor
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import RunConfig
from medsilo.privacy.consent.plan import AugmentationPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import RefusedError
from medsilo.protos.medsilo.v1 import plan_pb2
from medsilo.silo.training.augmentation import _CHANGES, Augmenter, seeded
from medsilo.simulation.batched import Fit, InThreads, Stacked
from medsilo.simulation.federation import Simulation
from tests.support.hospital.local_training import Recording, dataset, equal, plan, site, trained
from tests.support.hospital.private_training import Silent, private_plan, private_site

ALL: list[dict[str, Any]] = [
    {"kind": "horizontal_flip", "amount": 0.5},
    {"kind": "vertical_flip", "amount": 0.5},
    {"kind": "rotation", "amount": 20},
    {"kind": "crop", "amount": 2},
    {"kind": "brightness", "amount": 0.2},
    {"kind": "contrast", "amount": 0.2},
    {"kind": "saturation", "amount": 0.2},
    {"kind": "hue", "amount": 0.05},
]


def batch(count: int = 4, height: int = 8, width: int = 8) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(5)) * 2 - 1


def augmenter(*steps: dict[str, Any], seed: int = 1) -> Augmenter:
    return Augmenter([AugmentationPlan(**step) for step in steps], seeded(seed))


def drawn(count: int, value: float) -> Tensor:
    return torch.full((count, 2), value)


def test_each_change_is_the_one_that_it_is_called() -> None:
    images = (batch() + 1) / 2
    assert torch.equal(_CHANGES["horizontal_flip"](images, drawn(4, 0.0), 0.5), torch.flip(images, [3]))
    assert torch.equal(_CHANGES["vertical_flip"](images, drawn(4, 0.0), 0.5), torch.flip(images, [2]))
    assert torch.equal(_CHANGES["horizontal_flip"](images, drawn(4, 0.5), 0.5), images)
    # Half of the range is no turn; its whole is one of 90°, to the left or right.
    torch.testing.assert_close(_CHANGES["rotation"](images, drawn(4, 0.5), 90), images)
    turned = _CHANGES["rotation"](images, drawn(4, 1.0), 90)
    assert any(torch.allclose(turned, torch.rot90(images, k, [2, 3]), atol=1e-5) for k in (1, 3))
    torch.testing.assert_close(
        _CHANGES["rotation"](images, drawn(4, 0.0), 90), torch.rot90(turned, 2, [2, 3]), atol=1e-5, rtol=0
    )
    # 1.5 and 0.5 times as bright; contrast 0 would leave one grey, saturation 0 only greys.
    dim = torch.full((2, 3, 4, 4), 0.4)
    torch.testing.assert_close(_CHANGES["brightness"](dim, torch.tensor([[1.0, 0], [0.0, 0]]), 0.5)[:, 0, 0, 0],
                               torch.tensor([0.6, 0.2]))  # fmt: skip
    assert _CHANGES["contrast"](images, drawn(4, 0.0), 1.0).flatten(1).std(dim=1).max() < 1e-6
    grey = _CHANGES["saturation"](images, drawn(4, 0.0), 1.0)
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    red = torch.zeros(1, 3, 2, 2)
    red[:, 0] = 1
    blue = _CHANGES["hue"](red, drawn(1, 1.0), 1 / 3) + _CHANGES["hue"](red, drawn(1, 0.0), 1 / 3)
    torch.testing.assert_close(blue, 1 - red, atol=1e-5, rtol=0)  # a third of the circle to either side: green and blue


def test_a_turn_keeps_what_lies_beside_each_other_in_images_that_are_no_squares() -> None:
    image = torch.zeros(1, 1, 9, 21)
    image[0, 0, 4, 10 - 3 : 10 + 4] = 1  # a bar of seven pixels through the middle
    turned = _CHANGES["rotation"](image, drawn(1, 1.0), 90)
    expected = torch.zeros(9, 5)
    expected[4 - 3 : 4 + 4, 2] = 1
    torch.testing.assert_close(turned[0, 0, :, 8:13], expected, atol=1e-5, rtol=0)  # further out is the mirror


def test_a_crop_is_a_window_of_the_mirrored_image() -> None:
    image = torch.arange(5.0).repeat(1, 1, 5, 1)
    margins = np.pad(np.arange(5.0), 2, mode="reflect")
    places = set()
    for value in np.linspace(0, 0.999, 50):
        row = _CHANGES["crop"](image, drawn(1, float(value)), 2)[0, 0, 0].tolist()
        matches = [start for start in range(5) if row == margins[start : start + 5].tolist()]
        assert matches
        places.add(matches[0])
    assert places == {0, 1, 2, 3, 4}


def test_every_image_becomes_one_with_draws_of_its_own_that_nothing_else_changes() -> None:
    images = batch(1).repeat(6, 1, 1, 1)
    torch.manual_seed(1)
    first = augmenter(*ALL)(images)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    change = augmenter(*ALL)
    again = change(images)
    assert torch.equal(first, again)
    assert first.shape == images.shape
    assert len({tuple(image.flatten().tolist()) for image in first}) == 6
    assert not torch.equal(change(images), again), "the next batch is changed in other ways"
    assert not torch.equal(augmenter(*ALL, seed=2)(images), first)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "PyTorch's own generator is left alone"
    assert first.min() >= -1.0001
    assert first.max() <= 1.0001


def test_training_on_changed_images_has_the_same_bits_for_the_same_seed_alone() -> None:
    run = plan(augmentation=ALL)
    base = trained(run)
    assert equal(base, trained(run))
    assert not equal(base, trained(plan()))
    assert not equal(base, trained(run, round_number=1))
    model = Recording()
    site(plan(augmentation=ALL[:1]), model=model).fit(0)
    plain = Recording()
    site(plan(), model=plain).fit(0)
    for changed, own in zip(model.batches, plain.batches, strict=True):
        flipped = [not torch.allclose(a, b, atol=1e-6) for a, b in zip(changed, own, strict=True)]
        expected = [torch.flip(b, [2]) if f else b for f, b in zip(flipped, own, strict=True)]
        torch.testing.assert_close(changed, torch.stack(expected))


def test_training_without_changes_is_as_it_was() -> None:
    images = batch()
    assert augmenter()(images) is images


def test_steps_of_a_methods_own_see_changed_images_and_measures_do_not() -> None:
    one, plain = site(plan(augmentation=ALL)), site(plan())
    for (changed, labels), (own, same) in zip(one.batches(0), plain.batches(0), strict=True):
        assert not torch.equal(changed, own)
        assert torch.equal(labels, same)
    assert torch.equal(one.train_data()[0], plain.train_data()[0])
    assert one.measure(state_of(one.model)) == plain.measure(state_of(plain.model))


def test_a_changed_record_stays_one_record_under_differential_privacy() -> None:
    """Whatever one image is, all others are changed as before, and the sum moves by no more than the bound."""
    run = private_plan(rate=1.0, clipping_norm=0.05, training={"augmentation": ALL})
    data = dataset(train=6)
    blank = data.train.images.copy()
    blank[2] = 255
    other = ImageDataset(data.name, data.source, True, data.class_names,
                         ImageSplit(blank, data.train.labels), None, data.test)  # fmt: skip
    seen, sums = [], []
    for one in (data, other):
        at = private_site(run, one, noise=Silent(bytes(32)))
        recorded: list[Tensor] = []
        at.model.register_forward_pre_hook(lambda _m, inputs, keep=recorded: keep.append(inputs[0].clone()))
        before = torch.cat([p.detach().flatten().clone() for p in at.model.parameters()])
        at.fit(0)
        seen.append(torch.cat(recorded))
        sums.append((before - torch.cat([p.detach().flatten() for p in at.model.parameters()])) * 6)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(seen[0][others], seen[1][others])
    assert not torch.equal(seen[0][2], to_tensor(data.train.images)[2])
    # Replaced, not blanked: at most twice the bound.
    assert float((sums[0] - sums[1]).norm()) <= 2 * 0.05 * (1 + 1e-4)


def test_engines_give_changed_and_weighted_training_the_daemons_bits() -> None:
    run = plan(augmentation=ALL, class_weights="balanced", batch_size=4)
    alone = site(run)
    alone.fit(0)
    one = site(run)
    fit = Fit(one, {k: t.clone() for k, t in one.model.state_dict().items()}, 0)
    assert not Stacked().takes(fit)
    threads = InThreads(2)
    assert threads.takes(fit)
    trained_, again = threads.train([fit, fit])
    assert trained_.state.keys() == state_of(alone.model).keys()
    assert equal(trained_.state, again.state)


def test_weights_of_classes_are_those_that_everybody_calls_balanced() -> None:
    data = dataset(train=12)
    labels = np.array([0] * 7 + [2] * 5, dtype=np.int64)  # a silo that lacks a class
    data = ImageDataset(data.name, data.source, True, data.class_names,
                        ImageSplit(data.train.images, labels), None, data.test)  # fmt: skip
    one = site(plan(epochs=1, batch_size=100, optimizer="sgd", learning_rate=0.1, class_weights="balanced"), data)
    expected = compute_class_weight("balanced", classes=np.array([0, 2]), y=labels)
    by_hand = build(plan().model, seed=1)
    entropies = nn.functional.cross_entropy(by_hand(to_tensor(data.train.images)), torch.as_tensor(labels), reduction="none")  # fmt: skip  # noqa: E501
    weights = torch.tensor([expected[0] if label == 0 else expected[1] for label in labels], dtype=torch.float32)
    ((entropies * weights).sum() / weights.sum()).backward()
    one.fit(0)
    for own, parameter in zip(one.model.parameters(), by_hand.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(own.detach(), parameter.detach() - 0.1 * parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("moon", {}),
        ("fedrod", {}),
        ("feddbe", {}),
        ("fedproto", {}),
        ("apple", {}),
        ("pfedme", {"inner_steps": 1}),
        ("perfedavg", {}),
    ],
)
def test_methods_with_a_loss_of_their_own_weigh_classes_too(name: str, options: dict[str, Any]) -> None:
    models = []
    for weights in (None, "balanced"):
        method = make(name, options)
        run = plan(epochs=1, batch_size=6, class_weights=weights).model_copy(
            update={
                "required": method.required,
                "model": ModelPlan(name="mlp-64", input_shape=(3, 16, 16), classes=3),
            }
        )
        shards = []
        for number in range(3):
            data = dataset(train=10 + number)  # 4 + 3 + 3 images of a class
            shards.append(ImageDataset(f"h{number}", "a test", True, data.class_names, data.train, None, data.test))
        one = Simulation(run, method, shards, device=torch.device("cpu"))
        one.step()
        # Their own losses begin with what the first round gave, or their model is what that made.
        if name in ("apple", "feddbe", "fedproto", "fedavg", "moon"):
            one.step()
        models.append(one.silos["h0"].personal())
    assert any(not torch.equal(tensor, models[1][key]) for key, tensor in models[0].items())


def test_a_plan_without_them_has_the_hash_it_had_before_there_were_any() -> None:
    text = plan().canonical().decode()
    assert "augmentation" not in text
    assert "class_weights" not in text
    message = plan().to_message()
    assert not message.training.augmentation
    assert message.training.class_weights == ""
    asked = plan(augmentation=ALL, class_weights="balanced")
    assert len({plan().sha256, asked.sha256, plan(augmentation=ALL[::-1]).sha256, plan(augmentation=ALL).sha256}) == 4
    received = plan_pb2.RunPlan.FromString(asked.to_message().SerializeToString())
    assert RunPlan.from_message(received) == asked == RunPlan.model_validate_json(asked.model_dump_json())


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([{"kind": "rotation", "amount": 181}], "at most 180, not 181"),
        ([{"kind": "horizontal_flip", "amount": 1.5}], "at most 1, not 1.5"),
        ([{"kind": "hue", "amount": 0.6}], "at most 0.5"),
        ([{"kind": "brightness", "amount": 0}], "greater than 0"),
        ([{"kind": "brightness", "amount": float("nan")}], "amount"),
        ([{"kind": "crop", "amount": 1.5}], "whole pixels"),
        ([{"kind": "shear", "amount": 1}], "horizontal_flip"),
        ([{"kind": "crop", "amount": 1}, {"kind": "crop", "amount": 2}], "named once"),
        ([{"kind": "crop", "amount": 1, "fill": 3}], "fill"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(steps: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingPlan(augmentation=steps)
    assert words in str(caught.value)


def test_what_images_or_privacy_do_not_allow_is_refused_on_both_sides() -> None:
    grey = {"name": "mlp-64", "input_shape": (1, 8, 8), "classes": 3}
    base = {"name": "r", "method": {"name": "fedavg"}, "model": grey, "rounds": 1}
    private = {"privacy": {"epsilon": 8, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.1}}
    for training, more, words in (
        ({"augmentation": [{"kind": "hue", "amount": 0.1}]}, {}, "hue needs RGB images"),
        ({"augmentation": [{"kind": "crop", "amount": 8}]}, {}, "crop by 8 pixels needs images larger"),
        ({"class_weights": "balanced"}, private, "label counts, which have no mechanism"),
    ):
        with pytest.raises(ValidationError, match=words):
            RunConfig.model_validate({**base, **more, "training": training})
    honest = private_plan()
    message = honest.to_message()
    message.training.class_weights = "balanced"
    with pytest.raises(RefusedError, match="label counts, which have no mechanism"):
        RunPlan.from_message(message)
    message.training.class_weights = "by coordinator"
    with pytest.raises(RefusedError, match="class_weights"):
        RunPlan.from_message(message)
