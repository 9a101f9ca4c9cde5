"""A torchvision classifier as a fixed extractor: what torchvision itself gives before the last layer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.transforms import v2

from medsilo.algorithms.features.backbone import Backbone, input_of, uncut
from medsilo.algorithms.models import Layout, OnFixedFeatures, build
from medsilo.algorithms.models.given_weights import taken, tensors_sha256
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.consent.plan import ModelPlan, WeightsPlan
from medsilo.privacy.errors import ConfigurationError

NAME = "mobilenet_v3_small"


@pytest.fixture(scope="module")
def whole() -> nn.Module:
    """With random numbers, and statistics of batch normalisation that are not those of a fresh model."""
    torch.manual_seed(3)
    model: nn.Module = torchvision.models.get_model(NAME, weights=None)
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, 64, 64) * 2)
    return model.eval()


def images(count: int, *, channels: int = 3, size: int = 28) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def extractor(whole: nn.Module) -> Backbone:
    tensors = taken(uncut(NAME)[0].state_dict(), whole.state_dict(), uncut(NAME)[1], where="f")
    return Backbone(NAME, tensors, tensors_sha256(tensors))


def test_features_are_torchvisions_before_the_last_layer_centred_and_of_norm_1(whole: nn.Module) -> None:
    seen: list[Tensor] = []
    handle = whole.get_submodule("classifier.3").register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    # torchvision's own preprocessing of one picture, but for the crop: the whole picture is resized.
    made = v2.Compose(
        [
            v2.Resize((224, 224), antialias=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    given = images(3)
    with torch.no_grad():
        whole(made((given + 1) / 2))
    handle.remove()
    centred = seen[0] - seen[0].mean(dim=1, keepdim=True)
    expected = centred / centred.norm(dim=1, keepdim=True)
    found = extractor(whole)(given)
    assert found.shape == (3, 1025)
    assert torch.allclose(found[:, :-1], expected, atol=1e-5)
    assert bool((found[:, -1] == 1).all())


def test_other_images_do_not_matter_and_no_image_is_longer_than_the_bound(whole: nn.Module) -> None:
    one, given = extractor(whole), images(5)
    found = one(given)
    assert torch.equal(found, torch.cat([one(image[None]) for image in given]))
    assert float(found.double().norm(dim=1).max()) <= one.bound
    grey = images(2, channels=1)
    assert torch.equal(one(grey), one(grey.expand(-1, 3, -1, -1)))


def test_it_is_in_evaluation_mode_whatever_it_is_told_and_gives_no_gradient(whole: nn.Module) -> None:
    one, given = extractor(whole), images(2)
    before = one(given)
    one.train()
    assert torch.equal(one(given), before)
    assert torch.equal(one(given), before)  # batch normalisation has seen nothing
    assert not one(given.requires_grad_()).requires_grad


def test_the_weights_are_in_the_definition_by_which_features_are_kept(whole: nn.Module) -> None:
    one = extractor(whole)
    changed = {name: tensor + (tensor.is_floating_point() * 1e-6) for name, tensor in whole.state_dict().items()}
    other = taken(uncut(NAME)[0].state_dict(), changed, uncut(NAME)[1], where="f")
    assert tensors_sha256(other) not in one.definition
    assert Backbone(NAME, other, tensors_sha256(other)).definition != one.definition


@pytest.mark.parametrize(
    ("name", "last", "size"),
    [("resnet18", "fc", 224), ("vgg11", "classifier.6", 224), ("inception_v3", "fc", 299), ("swin_t", "head", 224)],
)
def test_classifiers_are_cut_before_their_last_linear_layer(name: str, last: str, size: int) -> None:
    assert uncut(name)[1] == last
    assert input_of(name).size == size


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no classifier named 'resnet19'"):
        uncut("resnet19")
    with pytest.raises(ConfigurationError, match="squeezenet1_0 does not end in a linear layer"):
        uncut("squeezenet1_0")


def test_a_plans_model_trains_and_sends_the_linear_layer_alone(whole: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    state, last = uncut(NAME)[0].state_dict(), uncut(NAME)[1]
    save_file(whole.state_dict(), file)
    weights = WeightsPlan(
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        tensors_sha256=tensors_sha256(taken(state, whole.state_dict(), last, where="f")),
        source="a test",
        without=last,
        brought=True,
    )
    plan = ModelPlan(name=f"torchvision-features:{NAME}", input_shape=(3, 28, 28), classes=4, weights=weights)
    model = build(plan, seed=1, weights=[file])
    assert isinstance(model, OnFixedFeatures)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        "classifier.weight": (4, 1025)
    }
    assert not Layout.of(model).buffers
    check_model(model, plan.name, plan.input_shape)  # batch normalisation that stands still mixes nothing
    assert tensors_sha256(taken(state, whole.state_dict(), last, where="f")) in model.extractor.definition
    with pytest.raises(ConfigurationError, match=weights.sha256):
        build(plan, seed=1)
    unnamed = weights.model_copy(update={"without": "features", "tensors_sha256": tensors_sha256({})})
    with pytest.raises(ConfigurationError, match=rf"without features, .* the last layer alone, {last}, may be left"):
        build(plan.model_copy(update={"weights": unnamed}), seed=1, weights=[file])
    with pytest.raises(ConfigurationError, match="needs the classifier's weights"):
        build(plan.model_copy(update={"weights": None}), seed=1)
