"""The network that docs/own-data-and-models.md shows runs as it stands there, and what the page warns of is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.site import LocalSite

PAGE = (Path(__file__).parents[2] / "docs" / "own-data-and-models.md").read_text(encoding="utf-8")
NAME = "ournets:tissue_net"


@pytest.fixture(autouse=True)
def _ournets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "ournets.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "ournets", raising=False)


def plan(name: str = NAME, shape: tuple[int, int, int] = (3, 28, 28), classes: int = 9) -> ModelPlan:
    return ModelPlan(name=name, input_shape=shape, classes=classes)


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 64, 64), (3, 20, 31)])
def test_the_pages_network_takes_images_of_any_size_and_its_classifier_is_found(shape: tuple[int, int, int]) -> None:
    model = build(plan(shape=shape), seed=1, trusted=(NAME,))
    assert model(torch.zeros(2, *shape)).shape == (2, 9)
    assert [spec.name for spec in Layout.of(model).classifier] == ["classifier.weight", "classifier.bias"]
    again = build(plan(shape=shape), seed=1, trusted=(NAME,))
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_the_pages_network_runs_only_where_it_is_trusted() -> None:
    assert PAGE.count(f"trusted_models: [{NAME}]") == 2
    with pytest.raises(ConfigurationError, match="trusted_models"):
        build(plan(), seed=1)


def test_the_pages_network_trains_with_differential_privacy_and_its_classifier_can_stay_at_home() -> None:
    model = build(plan(classes=3), seed=1, trusted=(NAME,))
    check_model(model, NAME, plan().input_shape)
    images = np.random.default_rng(1).integers(0, 256, (12, 28, 28, 3), dtype=np.uint8)
    split = ImageSplit(images, np.arange(12, dtype=np.int64) % 3)
    run = RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name="fedper", parameters={}),
        model=plan(classes=3),
        training=TrainingPlan(epochs=1),
        rounds=1,
        seed=1,
        required=FedPer().required,
        privacy=PrivacyPlan(epsilon=8, delta=1e-5, clipping_norm=1, noise_multiplier=1, sampling_rate=0.5, steps=2),
    )
    dataset = ImageDataset("h", "random images", True, ("a", "b", "c"), split, None, split)
    site = LocalSite("h", dataset, model, run, device=torch.device("cpu"), charge=lambda *_: unsealed())
    side = FedPer().silo_side(site)
    side.begin({name: tensor.clone() for name, tensor in model.state_dict().items()})
    side.train(0, {})
    sent = {spec.name for spec in side.upload()[Exposure.MODEL_PARAMETERS_EXTRACTOR].specs}
    assert Exposure.MODEL_PARAMETERS_CLASSIFIER not in side.upload()
    assert sent == {name for name, _ in model.named_parameters() if not name.startswith("classifier.")}


class Own(nn.Module):
    """What the cases below spoil."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(3 * 28 * 28, 16)
        self.classifier = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(images.flatten(1)))
        return logits


def batch_norm(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 26 * 26, classes))


def one_class_too_many(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Own(classes + 1)


def pair(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = Own(classes)
    model.forward = lambda images: (images, images)  # type: ignore[method-assign, assignment, return-value]
    return model


def classifier_first(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = Own(classes)
    body = model.body
    del model.body
    model.body = body
    return model


tried_with: list[int] = []


def telling_its_parameters(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = Own(classes)
    model.body.register_forward_hook(lambda body, *_: tried_with.append(body.weight.data_ptr()))  # type: ignore[operator, union-attr]
    return model


def two_names(shape: tuple[int, int, int], classes: int) -> nn.Module:
    model = Own(classes)
    model.head = model.classifier
    return model


def two_layers_of_one_weight(shape: tuple[int, int, int], classes: int) -> nn.Module:
    body, classifier = nn.Linear(3 * 28 * 28, classes), nn.Linear(classes, classes)
    between = nn.Linear(classes, classes)
    between.weight = classifier.weight
    return nn.Sequential(nn.Flatten(), body, between, classifier)


def too_small(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(shape[0], 4, 99), nn.Flatten(), nn.Linear(4, classes))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (one_class_too_many, r"should give a tensor \[2, 9\] for two images of 3×28×28.*gives \[2, 10\]"),
        (pair, "gives tuple"),
        (classifier_first, "its last linear layer, body, gives 16 numbers, not 9"),
        (two_names, r"head\.weight, head\.bias is a second name .*to one attribute"),
        (two_layers_of_one_weight, r"3\.weight is a second name"),
        (too_small, "does not take images of 3×28×28"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_the_run(factory: object, words: str) -> None:
    name = f"{__name__}:{factory.__name__}"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=words):
        build(plan(name), seed=1, trusted=(name,))


def test_a_network_is_tried_without_a_second_copy_of_its_parameters() -> None:
    name = f"{__name__}:telling_its_parameters"
    tried_with.clear()
    model = build(plan(name), seed=1, trusted=(name,))
    assert tried_with == [model.body.weight.data_ptr()]  # type: ignore[union-attr, operator]


def test_batch_normalisation_is_refused_by_name_under_differential_privacy_and_group_normalisation_is_not() -> None:
    name = f"{__name__}:batch_norm"
    model = build(plan(name), seed=1, trusted=(name,))
    assert int(model[1].num_batches_tracked) == 0, "to try a model leaves its statistics as they were"
    with pytest.raises(ConfigurationError, match=r"1 \(BatchNorm2d\) mix the images of a batch.*group normalisation"):
        check_model(model, name, plan().input_shape)
    model[1] = nn.GroupNorm(2, 4)
    check_model(model, name, plan().input_shape)
