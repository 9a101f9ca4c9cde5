"""What ``train`` freezes: it is in no state, layout or buffer, always evaluated, and in the whole model at the end."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.models import (
    Layout,
    PartlyTrained,
    build,
    extractor_of,
    frozen_names,
    frozen_state,
    plain_state,
    state_of,
    whole_state,
)
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError

TRAINS: list[Any] = ["head", {"last": 2}, {"lora": {"rank": 2}}]
SHAPE = (3, 20, 20)


def plan(name: str, train: Any = "all", shape: tuple[int, int, int] = SHAPE) -> ModelPlan:
    return ModelPlan(name=name, input_shape=shape, classes=4, train=train)


def images(count: int = 3, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(5)) * 2 - 1


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images(4)), torch.tensor([0, 0, 1, 2])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@pytest.mark.parametrize("train", TRAINS, ids=str)
@pytest.mark.parametrize("name", ["lenet5", "resnet8", "torchvision:resnet18"])
def test_what_is_frozen_is_in_no_state_and_no_buffer_and_does_not_change(name: str, train: Any) -> None:
    model = build(plan(name, train), seed=1)
    start = build(plan(name), seed=1).state_dict()
    frozen = frozen_names(model)
    layout = Layout.of(model)
    named = {spec.name for spec in layout.parameters + layout.buffers}
    assert named == set(model.state_dict()) == set(state_of(model)) == set(whole_state(model)) - frozen
    assert frozen == set(frozen_state(model))
    assert all(torch.equal(frozen_state(model)[n], start[n]) for n in frozen), "frozen parts are the plan's start"
    before = {n: t.clone() for n, t in whole_state(model).items()}
    after = whole_state(trained(model))
    assert {n for n in before if not torch.equal(before[n], after[n])} == set(before) - frozen
    if train != {"last": 2}:
        assert not layout.buffers


@pytest.mark.parametrize(
    ("name", "train", "expected"),
    [
        ("lenet5", "head", ["classifier.weight", "classifier.bias"]),
        ("lenet5", {"last": 2}, ["hidden2.weight", "hidden2.bias", "classifier.weight", "classifier.bias"]),
        ("torchvision:resnet18", {"last": 2}, ["layer4.1.conv2.weight", "layer4.1.bn2.weight", "layer4.1.bn2.bias"]),
    ],
)
def test_the_last_layers_are_trained_with_what_belongs_to_them(name: str, train: Any, expected: list[str]) -> None:
    layout = Layout.of(build(plan(name, train), seed=1))
    names = [spec.name for spec in layout.parameters]
    assert names[: len(expected)] == expected
    assert names[-2:] == [spec.name for spec in layout.classifier]
    assert [spec.name for spec in layout.buffers] == (
        [f"layer4.1.bn2.{what}" for what in ("running_mean", "running_var", "num_batches_tracked")]
        if "resnet" in name
        else []
    )


@pytest.mark.parametrize("train", TRAINS, ids=str)
def test_frozen_batch_normalisation_stays_in_evaluation_mode(train: Any) -> None:
    model = build(plan("resnet8", train), seed=1)
    for one in (model.train(), copy.deepcopy(model).train()):
        layers = {path: m for path, m in one.named_modules() if isinstance(m, nn.BatchNorm2d)}
        live = {path for path, layer in layers.items() if layer.training}
        assert live == ({"block3.shortcut.1"} if train == {"last": 2} else set())
    assert model.training


def test_dropout_acts_after_the_frozen_part_and_not_in_it() -> None:
    shape = (3, 32, 32)
    head = build(plan("torchvision:vgg11", "head", shape), seed=1).train()
    assert torch.equal(head(images(shape=shape)), head(images(shape=shape)))
    two = build(plan("torchvision:vgg11", {"last": 2}, shape), seed=1).train()
    assert not torch.equal(two(images(shape=shape)), two(images(shape=shape)))


@pytest.mark.parametrize("train", TRAINS, ids=str)
@pytest.mark.parametrize("name", ["diversifed-cnn", "resnet8", "torchvision:resnet18", "torchvision:swin_t"])
def test_the_whole_model_at_the_end_is_the_plain_network_and_says_the_same(name: str, train: Any) -> None:
    shape = (3, 32, 32)
    model = build(plan(name, train, shape), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    plain = build(plan(name, shape=shape), seed=2)
    plain.load_state_dict(plain_state(model, state_of(model)))
    with torch.no_grad():
        said = model.eval()(images(shape=shape))
        torch.testing.assert_close(plain.eval()(images(shape=shape)), said, atol=1e-5, rtol=1e-5)
    assert not isinstance(plain, PartlyTrained)


@pytest.mark.parametrize("name", ["lenet5", "torchvision:resnet18", "mlp-64"])
def test_a_frozen_extractor_is_a_fixed_one(name: str) -> None:
    model = build(plan(name, "head"), seed=1)
    extractor = extractor_of(model)
    assert extractor is not None
    features = extractor(images())
    assert features.shape == (3, extractor.features)
    assert not features.requires_grad
    torch.testing.assert_close(model(features), model.eval()(images()))
    other = extractor_of(build(plan(name, "head"), seed=2))
    assert other is not None
    assert other.definition != extractor.definition == extractor.definition


def test_features_are_kept_of_a_front_that_makes_fewer_numbers_than_an_image_has() -> None:
    few, many, branched, updated = (
        build(plan(name, train), seed=1)
        for name, train in [
            ("lenet5", {"last": 2}),
            ("lenet5", {"last": 4}),
            ("torchvision:resnet18", {"last": 2}),
            ("lenet5", {"lora": {"rank": 2}}),
        ]
    )
    extractor = extractor_of(few)
    assert extractor is not None
    assert extractor.features == 120
    torch.testing.assert_close(few(extractor(images())), few(images()))
    kept = extractor_of(many)
    assert kept is not None
    assert kept.features == 6 * 8 * 8
    assert extractor_of(branched) is extractor_of(updated) is None


class Odd(nn.Module):
    """Gives logarithms of probabilities, by weights that it also takes without calling their layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(3 * 20 * 20, 32)
        self.taken = nn.Linear(32, 32)
        self.down = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.classifier = nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        found = torch.relu(self.first(images.flatten(1) * self.scale))
        found = self.norm(self.down(F.linear(found, self.taken.weight)))
        return torch.log_softmax(self.classifier(found), dim=1)


def odd(_shape: tuple[int, int, int], _classes: int) -> nn.Module:
    return Odd()


ODD = f"{__name__}:odd"


def test_a_network_that_does_not_end_in_its_classifier_has_a_head_and_no_kept_features() -> None:
    model = build(plan(ODD, "head"), seed=1, trusted=(ODD,))
    assert [spec.name for spec in Layout.of(model).parameters] == ["classifier.weight", "classifier.bias"]
    assert extractor_of(model) is None


def test_low_rank_updates_are_of_layers_that_are_called_and_begin_as_nothing() -> None:
    plain = build(plan(ODD), seed=1, trusted=(ODD,)).eval()
    model = build(plan(ODD, {"lora": {"rank": 3}}), seed=1, trusted=(ODD,)).eval()
    layout = Layout.of(model)
    assert {spec.name for spec in layout.extractor} == {
        f"{layer}.{part}.weight" for layer in ("first", "down") for part in ("down", "up")
    }
    assert torch.equal(model(images()), plain(images()))
    before = plain_state(model, state_of(model))
    after = plain_state(model, state_of(trained(model)))
    assert set(after) == set(before) == set(plain.state_dict())
    for layer in ("first", "down"):
        change = (after[f"{layer}.weight"] - before[f"{layer}.weight"]).double()
        assert torch.linalg.matrix_rank(change, rtol=1e-4) == 3
    for name in ("taken.weight", "norm.weight", "scale", "first.bias"):
        assert torch.equal(after[name], before[name])


def test_an_update_of_a_convolution_has_its_rank_over_all_its_kernels() -> None:
    model = build(plan("torchvision:resnet18", {"lora": {"rank": 2}}), seed=1)
    before = plain_state(model, state_of(model))
    after = plain_state(model, state_of(trained(model)))
    change = after["layer2.0.conv1.weight"] - before["layer2.0.conv1.weight"]
    assert torch.linalg.matrix_rank(change.double().flatten(1), rtol=1e-3) == 2
    shapes = {spec.name: spec.shape for spec in Layout.of(model).extractor}
    assert shapes["layer2.0.conv1.down.weight"] == (2, 64, 3, 3)
    assert shapes["layer2.0.conv1.up.weight"] == (128, 2, 1, 1)


def test_updates_are_drawn_by_the_seed() -> None:
    one, same, other = (state_of(build(plan("lenet5", {"lora": {"rank": 2}}), seed=seed)) for seed in (7, 7, 8))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["hidden1.down.weight"], other["hidden1.down.weight"])


@pytest.mark.parametrize(
    ("name", "train", "said"),
    [
        ("lenet5", {"last": 9}, r"lenet5: `train: last: 9` is more than the 5 layers that it has \(convolution1, .*"),
        ("stain-texture", {"last": 2}, "more than the 1 layers that it has"),
        ("lenet5", {"lora": {"rank": 500}}, "no layer but its classifier is larger than an update of rank 500"),
        ("stain-texture", {"lora": {"rank": 1}}, "use a lower rank, or `train: head`"),
    ],
)
def test_a_part_that_a_network_does_not_have_is_refused_in_a_sentence(name: str, train: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        build(plan(name, train), seed=1)


def test_a_network_of_which_a_head_is_all_stays_as_it_is() -> None:
    assert not isinstance(build(plan("stain-texture", "head")), PartlyTrained)


def test_a_state_without_the_frozen_part_is_loaded_strictly_and_others_are_not() -> None:
    model = build(plan("lenet5", "head"), seed=1)
    model.load_state_dict(state_of(model))
    model.load_state_dict(whole_state(model))
    with pytest.raises(RuntimeError, match=r"missing tensors: \['classifier.bias'\]"):
        model.load_state_dict({"classifier.weight": torch.zeros(4, 84)})
    hash_before = model.frozen_sha256
    model.load_state_dict({"hidden1.bias": torch.ones(120)}, strict=False)
    assert model.frozen_sha256 != hash_before
