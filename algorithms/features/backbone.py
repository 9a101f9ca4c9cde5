"""A torchvision classifier up to its last layer, with given weights, as a fixed extractor."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from medsilo.algorithms.features.extractor import FixedExtractor
from medsilo.privacy.errors import ConfigurationError

_TRAINED_WITH: dict[str, dict[str, bool]] = {
    name: {"transform_input": True, "aux_logits": False, "init_weights": False}
    for name in ("googlenet", "inception_v3")
}
"""What these two are made with where they are given ImageNet's weights."""


@dataclass(frozen=True)
class Input:
    """What a torchvision classifier takes, by what is public of its ImageNet weights.

    ``size``: height and width in pixels. ``mean``, ``deviation``: of red, green and blue, each from 0 to 1.
    ``interpolation``: by which images are resized.
    """

    size: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    interpolation: str


def uncut(name: str) -> tuple[nn.Module, str]:
    """A torchvision classifier without numbers (on the device ``meta``), and the path of its last linear layer.

    Raises ``ConfigurationError`` for a name that torchvision has not, or a classifier that does not end in a linear
    layer.
    """
    import torchvision  # takes seconds to load

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ConfigurationError(f"torchvision has no classifier named {name!r}; see torchvision.models.list_models()")
    with torch.random.fork_rng(devices=[]):
        model: nn.Module = torchvision.models.get_model(name, weights=None, **_TRAINED_WITH.get(name, {})).to("meta")
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ConfigurationError(f"torchvision's {name} does not end in a linear layer before which it could be cut")
    return model, linear[-1]


@functools.cache
def input_of(name: str) -> Input:
    """What torchvision's classifier of that name takes."""
    import torchvision

    made = next(iter(torchvision.models.get_model_weights(name))).transforms()
    return Input(made.crop_size[0], tuple(made.mean), tuple(made.std), made.interpolation.value)


class Backbone(FixedExtractor):
    """The features of one image before the last layer of a torchvision classifier in evaluation mode.

    The whole image is resized to what the classifier was trained on and normalised by the constants of its ImageNet
    weights. Of the features their mean is taken away, and they are scaled to norm 1; a last number is 1. So no image's
    are longer than √2, up to float32's rounding.

    Args:
        name: of the classifier in torchvision.
        tensors: its state, but for the last layer.
        sha256: of ``tensors`` (``medsilo.algorithms.models.given_weights.tensors_sha256``); it is in the definition.
    """

    bound = math.sqrt(2) * (1 + 1e-6)

    _mean: Tensor
    _deviation: Tensor

    def __init__(self, name: str, tensors: Mapping[str, Tensor], sha256: str) -> None:
        super().__init__()
        self._input = input_of(name)
        self.definition = f"torchvision-features 1: {name}, {self._input}, weights {sha256}"
        model, last = uncut(name)
        layer = model.get_submodule(last)
        assert isinstance(layer, nn.Linear)
        self.features = layer.in_features + 1
        parent, _, attribute = last.rpartition(".")
        setattr(model.get_submodule(parent), attribute, nn.Identity())
        # In a list it is no part of the module: what it reads are the buffers, which do not travel.
        self._parts = [model.eval()]
        self._names = tuple(model.state_dict())
        for number, tensor in enumerate(tensors[one] for one in self._names):
            self.register_buffer(f"_tensor{number}", tensor, persistent=False)
        mean, deviation = (torch.tensor(one)[:, None, None] for one in (self._input.mean, self._input.deviation))
        self.register_buffer("_mean", mean, persistent=False)
        self.register_buffer("_deviation", deviation, persistent=False)

    def of(self, images: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return self._of(images)
        # One by one: in a batch, the same image may have other last bits beside other images.
        return torch.cat([self._of(image) for image in torch.split(images, 1)])

    def _of(self, images: Tensor) -> Tensor:
        size, mode = (self._input.size,) * 2, self._input.interpolation
        resized = F.interpolate((images.float() + 1) / 2, size, mode=mode, antialias=True, align_corners=False)
        normal = (resized.clamp(0, 1) - self._mean) / self._deviation
        given = {name: getattr(self, f"_tensor{number}") for number, name in enumerate(self._names)}
        found = functional_call(self._parts[0], given, (normal,)).double()
        centred = found - found.mean(dim=1, keepdim=True)
        length = centred.square().sum(dim=1, keepdim=True).sqrt()
        return torch.cat([centred / length.clamp(min=1e-12), torch.ones_like(length)], dim=1).float()
