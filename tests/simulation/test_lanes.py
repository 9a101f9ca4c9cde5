"""Networks in lanes against PyTorch's own layers."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.models import build
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.simulation.lanes import in_lanes


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"layer{number}", layer) for number, layer in enumerate(layers)))


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, images: Tensor) -> None:
    labels = torch.arange(len(images)) % 3
    twin = in_lanes(copy.deepcopy(model))
    assert twin is not None
    assert list(twin.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(twin(images), model(images), rtol=1e-10, atol=1e-12)
    for _ in range(2):  # the memory of the first step is used again
        expected, found = gradients(model, images, labels), gradients(twin, images, labels)
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("convolutions", "shape"),
    [
        ([nn.Conv2d(3, 6, 5)], (3, 12, 12)),
        ([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3)], (1, 14, 14)),
        ([nn.Conv2d(2, 4, (3, 5), bias=False)], (2, 11, 16)),  # odd rows, a kernel that is no square, no bias
        ([nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)], (3, 28, 28)),
        ([nn.Conv2d(3, 4, 4), nn.Conv2d(4, 3, 2)], (3, 18, 13)),
    ],
)
@pytest.mark.parametrize("batch", [1, 7])
def test_results_and_gradients_are_those_of_pytorch(
    convolutions: list[nn.Conv2d], shape: tuple[int, int, int], batch: int
) -> None:
    torch.manual_seed(1)
    images = torch.randn(batch, *shape, dtype=torch.float64)
    body = network(*(layer for one in convolutions for layer in (one, nn.ReLU(), nn.MaxPool2d(2)))).double()
    flat = body(images).flatten(1).shape[1]
    assert_same(network(*body, nn.Flatten(), nn.Linear(flat, 8), nn.ReLU(), nn.Linear(8, 3)).double(), images)


def test_of_several_equal_maxima_the_first_gets_the_gradient() -> None:
    """Backgrounds of one colour are nothing but such."""
    torch.manual_seed(1)
    images = torch.randint(0, 2, (5, 3, 12, 12)).double()
    images[0] = 1.0
    model = network(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 3)).double()
    with torch.no_grad():
        # Sums of whole numbers are exact, so that both see the same ties.
        model[0].weight.copy_(torch.randint(-1, 2, model[0].weight.shape))
        model[0].bias.fill_(1.0)
    assert_same(model, images)


def test_only_what_is_trained_gets_a_gradient() -> None:
    torch.manual_seed(1)
    model = network(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 3)).double()
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    model[0].weight.requires_grad_(False)
    assert_same(model, images)
    model[0].bias.requires_grad_(False)
    assert_same(model, images)


@pytest.mark.parametrize(
    ("name", "can"),
    [("diversifed-cnn", True), ("fedpdc-cnn", True), ("mlp-64", False), ("resnet8", False), ("lenet5", False)],
)
def test_which_networks_it_can_do(name: str, can: bool) -> None:
    model = build(ModelPlan(name=name, input_shape=(3, 32, 32), classes=9), seed=1)
    assert (in_lanes(model) is not None) == can


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 3, 3, groups=3), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(3)),
        (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
    ],
    ids=["padded", "strided", "grouped", "pooled by three", "rounded up", "averaged", "normalised"],
)
def test_other_layers_are_left_to_pytorch(layers: tuple[nn.Module, ...]) -> None:
    assert in_lanes(network(*layers, nn.Flatten(), nn.Linear(4, 3))) is None


def test_a_second_pass_before_the_first_ones_gradient_is_refused() -> None:
    model = in_lanes(network(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 3)))
    assert model is not None
    images = torch.randn(2, 3, 12, 12)
    first = model(images).sum()
    model(images)
    with pytest.raises(RuntimeError, match="used again before its backward pass"):
        first.backward()
