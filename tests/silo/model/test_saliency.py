"""Grad-CAM: on models made by hand the map is what the paper's equations say, and peaks where it must."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.models import ARCHITECTURES, build
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.silo.model.saliency import grad_cam


class BrightOrDark(nn.Module):
    """Class 0 is what is bright, class 1 what is dark; each pixel votes for itself."""

    def __init__(self, *, pooled: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(self.convolution, self.relu, *([nn.MaxPool2d(2)] if pooled else []))
        self.classifier = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.convolution.weight.copy_(torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1))
            self.classifier.weight.copy_(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(images).mean(dim=(2, 3)))
        return logits


def images() -> Tensor:
    """Bright in the upper left, dark in the lower right, grey else."""
    pixels = torch.zeros(2, 1, 12, 12)
    pixels[:, :, 1:4, 2:5] = torch.linspace(0.5, 1.0, 9).reshape(3, 3)
    pixels[:, :, 8:11, 7:10] = -torch.linspace(0.5, 1.0, 9).reshape(3, 3)
    return pixels


def test_the_map_peaks_on_what_the_class_is_about() -> None:
    found = grad_cam(BrightOrDark(), images(), torch.tensor([0, 1]))
    assert found is not None
    bright, dark = found.maps
    assert np.unravel_index(bright.argmax(), bright.shape) == (3, 4)
    assert np.unravel_index(dark.argmax(), dark.shape) == (10, 9)
    assert (bright.max(), dark.max()) == (1.0, 1.0)
    assert not bright[8:11, 7:10].any(), "what speaks against the class is left out"
    assert found.maps.shape == (2, 12, 12)


def test_behind_a_mean_over_places_it_is_the_class_activation_map() -> None:
    """Selvaraju et al. 2017, section 3.1: Grad-CAM generalises CAM (Zhou et al. 2016)."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
    last = nn.Linear(5, 4)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)
    pixels, classes = torch.randn(3, 3, 8, 8), torch.tensor([2, 0, 3])
    found = grad_cam(model, pixels, classes)
    assert found is not None
    with torch.inference_mode():
        cam = torch.relu(torch.einsum("nk,nkhw->nhw", last.weight[classes], body(pixels)))
    expected = cam / cam.amax(dim=(1, 2), keepdim=True)
    assert np.allclose(found.maps, expected.numpy(), atol=1e-5)
    assert (found.layer, found.places) == ("0", (8, 8))


def test_pooling_is_passed_over_also_at_the_end_of_a_block() -> None:
    found = grad_cam(BrightOrDark(pooled=True), images(), torch.tensor([0, 1]))
    assert found is not None
    assert (found.layer, found.places) == ("relu", (12, 12))


def test_a_coarse_map_is_stretched_over_the_image() -> None:
    """One cell of 4 × 4 lit: bilinear between the cells' centres, as torch's own upsampling."""
    strided = nn.Conv2d(1, 1, 3, stride=3, bias=False)
    nn.init.constant_(strided.weight, 1.0)
    head = nn.Linear(1, 2, bias=False)
    nn.init.constant_(head.weight, 1.0)
    model = nn.Sequential(strided, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    pixels = torch.zeros(1, 1, 12, 12)
    pixels[0, 0, 3:6, 6:9] = 1.0
    found = grad_cam(model, pixels, torch.tensor([0]))
    assert found is not None
    lit = torch.zeros(1, 1, 4, 4)
    lit[0, 0, 1, 2] = 1.0
    expected = F.interpolate(lit, size=(12, 12), mode="bilinear", align_corners=False)[0, 0]
    assert np.allclose(found.maps[0], (expected / expected.max()).numpy(), atol=1e-6)


def test_where_nothing_speaks_for_a_class_the_map_is_empty() -> None:
    pixels = torch.zeros(1, 1, 12, 12)
    found = grad_cam(BrightOrDark(), pixels, torch.tensor([0]))
    assert found is not None
    assert not found.maps.any()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_has_a_map_or_none_and_is_left_as_it_was(name: str) -> None:
    model = build(ModelPlan(name=name, input_shape=(3, 32, 32), classes=4), seed=1)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pixels = torch.rand(2, 3, 32, 32) * 2 - 1
    found = grad_cam(model, pixels, torch.tensor([1, 3]))
    if name in ("mlp-64", "stain-texture", "stain-directions", "scattering"):
        assert found is None
    else:
        assert found is not None
        assert found.maps.shape == (2, 32, 32)
        assert np.isfinite(found.maps).all()
        assert 0 <= found.maps.min() <= found.maps.max() <= 1
        assert min(found.places) >= 4
        alone = grad_cam(model, pixels[1:], torch.tensor([3]))
        assert alone is not None
        assert np.allclose(alone.maps[0], found.maps[1], atol=1e-4), "an image's map is its own"
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
