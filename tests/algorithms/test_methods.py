"""Methods, models and the registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from medsilo.algorithms.families.sharing import sample_weights
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import participants
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import MODEL, Exposure, expand


def own_model(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A user's own factory, as a plan may name it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], classes))


def plan(name: str, shape: tuple[int, int, int] = (3, 28, 28), classes: int = 9) -> ModelPlan:
    return ModelPlan(name=name, input_shape=shape, classes=classes)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_papers_network_has_the_papers_number_of_parameters() -> None:
    assert size(build(plan("diversifed-cnn"))) == 44_641
    assert size(build(plan("diversifed-cnn", (3, 32, 32), 10))) == 62_006  # Table VIII: 62.01K
    assert size(build(plan("diversifed-cnn", (3, 32, 32), 9))) == 61_921
    assert size(build(plan("mlp-64", (1, 28, 28), 10))) == 28 * 28 * 64 + 64 + 64 * 10 + 10


def test_the_other_papers_networks_have_the_numbers_that_their_layers_add_up_to() -> None:
    lenet = 62_006 + 2 * 6 + 2 * 16
    assert size(build(plan("lenet5", (3, 32, 32), 10))) == lenet
    cifar = (75 * 16 + 16) + (400 * 32 + 32) + (288 * 64 + 64) + (576 * 128 + 128) + (128 * 10 + 10)
    assert size(build(plan("cifar-cnn", (3, 32, 32), 10))) == cifar
    mnist = (25 * 32 + 32) + (800 * 64 + 64) + (1024 * 512 + 512) + (512 * 10 + 10)
    assert size(build(plan("mnist-cnn", (1, 28, 28), 10))) == mnist
    projected = 62_006 - (84 * 10 + 10) + (84 * 84 + 84) + (84 * 256 + 256) + (256 * 10 + 10)
    assert size(build(plan("fedpdc-cnn", (3, 32, 32), 10))) == projected
    # He et al. give ResNet-20 (three blocks a stage) 0.27 million; one block a stage leaves 78 thousand.
    assert 75_000 < size(build(plan("resnet8", (3, 32, 32), 10))) < 80_000


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("diversifed-cnn", (1, 28, 28)),
        ("lenet5", (1, 28, 28)),
        ("resnet8", (3, 28, 28)),
        ("cifar-cnn", (3, 28, 28)),
        ("mnist-cnn", (1, 28, 28)),
        ("fedpdc-cnn", (3, 28, 28)),
        ("mlp-64", (3, 28, 28)),
        ("torchvision:resnet18", (3, 28, 28)),
        ("torchvision:resnet18", (1, 28, 28)),
        ("torchvision:mobilenet_v2", (1, 32, 32)),
    ],
)
def test_models_take_images_and_give_logits(name: str, shape: tuple[int, int, int]) -> None:
    model = build(plan(name, shape, 5))
    assert model(torch.zeros(2, *shape)).shape == (2, 5)


def test_the_same_seed_gives_the_same_model_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two, other = (build(plan("diversifed-cnn"), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(before, torch.get_rng_state())


def test_code_that_a_plan_names_runs_only_where_it_is_trusted() -> None:
    name = f"{__name__}:own_model"
    with pytest.raises(ConfigurationError, match="trusted_models"):
        build(plan(name))
    assert size(build(plan(name), trusted=(name,))) == 3 * 28 * 28 * 9 + 9


@pytest.mark.parametrize(
    ("name", "words"),
    [("resnet18", "torchvision:NAME"), ("torchvision:nosuch", "no classifier named 'nosuch'")],
)
def test_an_unknown_model_says_what_there_is(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(plan(name))


def test_a_layout_tells_extractor_classifier_and_buffers_apart() -> None:
    layout = Layout.of(build(plan("torchvision:resnet18")))
    assert [spec.name for spec in layout.classifier] == ["fc.weight", "fc.bias"]
    assert "bn1.weight" in {spec.name for spec in layout.extractor}
    buffers = {spec.name for spec in layout.buffers}
    assert {"bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"} <= buffers
    assert not buffers & {spec.name for spec in layout.parameters}


def test_each_method_says_what_it_exposes() -> None:
    assert Local().required == (Exposure.PROTOCOL, Exposure.IDENTITY)
    assert FedAvg().uploads == {*MODEL, Exposure.SAMPLE_COUNT}
    assert FedAvg(weighting="uniform").uploads == set(MODEL)
    for method in METHODS.values():
        assert set(method().uploads) <= set(method().required)


def test_fedavg_weighs_by_numbers_of_images() -> None:
    assert sample_weights(torch.tensor([10, 30, 60])).tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert sample_weights(torch.tensor([0, 0])).tolist() == [0.5, 0.5]
    assert sample_weights(torch.tensor([-5, 5])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("diversified", {}, "did you mean 'diversifed'"),
        ("diversifed", {"temprature": 1.0}, "did you mean 'temperature'"),
        ("diversifed", {"temperature": "hot"}, "should be a number"),
        ("diversifed", {"start": "middle"}, "should be own or z"),
        ("fedavg", {"weighting": 3}, "should be samples or uniform"),
        ("local", {"x": 1}, "known: none"),
    ],
)
def test_a_mistake_in_a_method_names_the_way_out(name: str, parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(name, parameters)


def test_whole_numbers_do_for_numbers() -> None:
    assert make("diversifed", {"temperature": 1}).parameters()["temperature"] == 1.0


def test_participants_depend_on_seed_and_round_alone() -> None:
    names = [f"h{n}" for n in range(10)]
    draws = [participants(names, share=0.5, seed=1, round_number=n) for n in range(20)]
    assert all(len(draw) == 5 for draw in draws)
    assert len(set(draws)) > 5
    assert draws[3] == participants(list(reversed(names)), share=0.5, seed=1, round_number=3)
    assert participants(names, share=1.0, seed=1, round_number=0) == tuple(names)
    assert len(participants(names, share=0.01, seed=1, round_number=0)) == 1


def test_the_page_of_methods_says_what_each_one_needs_consent_to() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0].strip("`")] = expand(cells[2].split(", ")) if cells[2] != "–" else frozenset()
    always = {Exposure.PROTOCOL, Exposure.IDENTITY}
    assert rows == {name: set(method().required) - always for name, method in METHODS.items()}
