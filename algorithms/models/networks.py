"""Architectures by name: those of the papers, torchvision's classifiers, and a user's own module.

A model maps ``Tensor[batch, C, H, W]`` to logits ``Tensor[batch, classes]``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medsilo.algorithms.features import Scattering, StainDirections, StainTexture
from medsilo.algorithms.models.fixed import on_backbone, on_fixed
from medsilo.algorithms.models.frozen import train_only
from medsilo.algorithms.models.given_weights import BACKBONE, brought_start
from medsilo.algorithms.models.layout import classifier_of
from medsilo.algorithms.own_code import load
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError


def diversifed_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The convolutional network of the DiversiFed paper (section V-B, Table VIII).

    Convolution 6@5×5, ReLU, max-pooling 2, convolution 16@5×5, ReLU, max-pooling 2, then fully connected layers
    of 120, 84 and ``classes`` units. 44,641 parameters for 28×28×3 and nine classes; 62,006 for 32×32×3 and ten.
    """
    layers = _lenet_body("diversifed-cnn", input_shape)
    layers["classifier"] = nn.Linear(84, classes)
    return nn.Sequential(layers)


def _lenet_body(
    name: str, input_shape: tuple[int, int, int], *, normalise: Callable[[int], nn.Module] | None = None
) -> OrderedDict[str, nn.Module]:
    """LeNet-5's layers up to its 84 features; ``normalise`` makes the layer after a convolution with so many maps."""
    channels, height, width = input_shape
    flat = 16 * _after_two_convolutions(name, height) * _after_two_convolutions(name, width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (inputs, outputs) in enumerate([(channels, 6), (6, 16)], start=1):
        layers[f"convolution{number}"] = nn.Conv2d(inputs, outputs, 5)
        if normalise is not None:
            layers[f"norm{number}"] = normalise(outputs)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    for number, (inputs, outputs) in enumerate([(flat, 120), (120, 84)], start=1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number + 2}"] = nn.ReLU()
    return layers


def _after_two_convolutions(name: str, size: int) -> int:
    left = ((size - 4) // 2 - 4) // 2
    if left < 1:
        raise ConfigurationError(f"{name} needs images of at least 16×16 pixels, not {size}")
    return left


def mlp(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network with one hidden layer of 64 units of the DiversiFed paper, for Fashion-MNIST (section V-B)."""
    channels, height, width = input_shape
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(channels * height * width, 64),
            relu=nn.ReLU(),
            classifier=nn.Linear(64, classes),
        )
    )


def lenet5(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """LeNet-5 with batch normalisation of the pFedSim paper (Table 5, read with its author's code).

    Convolution 6@5×5, batch norm, ReLU, max-pooling 2, convolution 16@5×5, batch norm, ReLU, max-pooling 2, then
    fully connected layers of 120, 84 and ``classes`` units. The paper's table leaves the first pooling out and its
    code has it; the flattened size (400 for 32×32) needs it.
    """
    layers = _lenet_body("lenet5", input_shape, normalise=nn.BatchNorm2d)
    layers["classifier"] = nn.Linear(84, classes)
    return nn.Sequential(layers)


def lenet5_gn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """``lenet5`` with group normalisation in place of batch normalisation, for differential privacy: no image changes
    what happens to another, and there are no running statistics. The parameters' names are the same."""
    layers = _lenet_body("lenet5-gn", input_shape, normalise=_group_norm)
    layers["classifier"] = nn.Linear(84, classes)
    return nn.Sequential(layers)


def _group_norm(maps: int) -> nn.Module:
    """Groups of at least two maps, and at most 16 groups: with one map each, a constant image would become nothing."""
    return nn.GroupNorm(next(groups for groups in range(min(16, maps // 2), 0, -1) if maps % groups == 0), maps)


def cifar_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """CifarCNN of the FedDFQ paper (A.2.1): convolutions 16@5×5, 32@5×5 (padding 1) and 64@3×3 (padding 1), ReLU and
    max-pooling 2 after each, then 128 and ``classes`` units."""
    channels, height, width = input_shape

    def left(size: int) -> int:
        size = ((size - 4) // 2 - 2) // 2 // 2
        if size < 1:
            raise ConfigurationError("cifar-cnn needs images of at least 16×16 pixels")
        return size

    return nn.Sequential(
        OrderedDict(
            convolution1=nn.Conv2d(channels, 16, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            convolution2=nn.Conv2d(16, 32, 5, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            convolution3=nn.Conv2d(32, 64, 3, padding=1),
            relu3=nn.ReLU(),
            pool3=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * left(height) * left(width), 128),
            relu4=nn.ReLU(),
            classifier=nn.Linear(128, classes),
        )
    )


def mnist_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """MNISTCNN of the FedDFQ paper (A.2.1): convolutions 32@5×5 and 64@5×5, ReLU and max-pooling 2 after each, then
    512 and ``classes`` units."""
    channels, height, width = input_shape
    flat = 64 * _after_two_convolutions("mnist-cnn", height) * _after_two_convolutions("mnist-cnn", width)
    return nn.Sequential(
        OrderedDict(
            convolution1=nn.Conv2d(channels, 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            convolution2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(flat, 512),
            relu3=nn.ReLU(),
            classifier=nn.Linear(512, classes),
        )
    )


def fedpdc_cnn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network of the FedPDC paper (section VI-B): convolutions 6@5×5 and 16@5×5, each with ReLU and max-pooling
    2, 120 and 84 units, a projection head of two layers with 256 units (as MOON's), then the classifier."""
    layers = _lenet_body("fedpdc-cnn", input_shape)
    layers["projection1"] = nn.Linear(84, 84)
    layers["relu5"] = nn.ReLU()
    layers["projection2"] = nn.Linear(84, 256)
    layers["classifier"] = nn.Linear(256, classes)
    return nn.Sequential(layers)


class _ResidualBlock(nn.Module):
    """Two normalised 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, normalise: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = normalise(outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = normalise(outputs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), normalise(outputs))
        )

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.convolution1(images)))
        result: Tensor = torch.relu(self.norm2(self.convolution2(inner)) + self.shortcut(images))
        return result


def resnet8(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """ResNet-8: one convolution and three residual blocks of 16, 32 and 64 channels (He et al. 2016, section 4.2, with
    n = 1): 83,892 parameters for 100 classes. The DiversiFed paper's ResNet-8 on CIFAR-100 has 1.26 million, so it is
    another, wider one."""
    return _resnet8(input_shape, classes, nn.BatchNorm2d)


def resnet8_gn(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """``resnet8`` with group normalisation in place of batch normalisation, for differential privacy."""
    return _resnet8(input_shape, classes, _group_norm)


def _resnet8(input_shape: tuple[int, int, int], classes: int, normalise: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            convolution=nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False),
            norm=normalise(16),
            relu=nn.ReLU(),
            block1=_ResidualBlock(16, 16, 1, normalise),
            block2=_ResidualBlock(16, 32, 2, normalise),
            block3=_ResidualBlock(32, 64, 2, normalise),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(64, classes),
        )
    )


def stain_texture(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A linear layer on ``medsilo.algorithms.features.StainTexture``: 123 parameters for each class."""
    return on_fixed("stain-texture", StainTexture(), input_shape, classes)


def stain_directions(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A linear layer on ``medsilo.algorithms.features.StainDirections``: 24 parameters for each class."""
    return on_fixed("stain-directions", StainDirections(), input_shape, classes)


def scattering(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A linear layer on ``medsilo.algorithms.features.Scattering``: 973 parameters for each class."""
    return on_fixed("scattering", Scattering(), input_shape, classes)


ARCHITECTURES: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "diversifed-cnn": diversifed_cnn,
    "mlp-64": mlp,
    "lenet5": lenet5,
    "lenet5-gn": lenet5_gn,
    "resnet8": resnet8,
    "resnet8-gn": resnet8_gn,
    "cifar-cnn": cifar_cnn,
    "mnist-cnn": mnist_cnn,
    "fedpdc-cnn": fedpdc_cnn,
    "stain-texture": stain_texture,
    "stain-directions": stain_directions,
    "scattering": scattering,
}
WITH_BATCH_NORMALISATION = ("lenet5", "resnet8")


def build(
    plan: ModelPlan, *, seed: int | None = None, trusted: tuple[str, ...] = (), weights: Sequence[Path] = ()
) -> nn.Module:
    """The model of a plan, its parameters drawn from ``seed`` (or from torch's generator as it stands).

    ``plan.name`` is a name in ``ARCHITECTURES``; ``torchvision:NAME`` for a torchvision classifier (built with
    ``num_classes``, without downloaded weights; its first layer is replaced where the images are not RGB);
    ``torchvision-features:NAME`` for a linear layer on the features of one, whose weights, of the hash that the plan
    names, are looked for in the files and folders ``weights``; or a dotted path ``package.module:callable`` to a user's
    own factory ``(input_shape, classes) -> nn.Module``.
    A dotted path runs code of this machine that somebody else named, so it must stand in ``trusted``. What
    ``plan.train`` does not name is frozen (``medsilo.algorithms.models.frozen``).

    Raises ``ConfigurationError`` for an unknown name, an untrusted path, a factory whose model does not fit (it does
    not take such images, gives no logits ``[batch, classes]``, or its last linear layer is not its classifier), or a
    ``train`` that does not.
    """
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = _make(plan, trusted, weights)
        model.train()
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigurationError(f"model {plan.name}: it has no trainable parameters")
        if ":" in plan.name:
            _check_fits(model, plan)
        return train_only(model, plan)


def build_start(
    plan: ModelPlan, *, seed: int, trusted: tuple[str, ...] = (), weights: Sequence[Path] = ()
) -> nn.Module:
    """The model of a plan as a run starts: as ``build`` makes it, with the plan's given weights from one of the files
    and folders ``weights``.

    Raises ``ConfigurationError`` as ``build``, and where there is none with the plan's hash.
    """
    model = build(plan, seed=seed, trusted=trusted, weights=weights)
    if plan.weights is not None and not plan.name.startswith(BACKBONE):
        model.load_state_dict(brought_start(model, plan.weights, weights), strict=False)
    return model


def _check_fits(model: nn.Module, plan: ModelPlan) -> None:
    """Tries it on two black images, in training mode, where some models of torchvision give more than logits.

    Its statistics stay as they are; its parameters, which may be gigabytes, are not copied.
    """
    shape = "×".join(map(str, plan.input_shape))
    names = {name for name, _ in model.named_parameters()}
    again = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in names]
    if again:
        raise ConfigurationError(
            f"model {plan.name!r}: {', '.join(again[:3])} is a second name for a parameter that has one; what is "
            "averaged, noised or frozen is so by name, and the other name would undo it. Assign each layer, and each "
            "weight, to one attribute of the network alone"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
            logits = functional_call(model, statistics, torch.zeros(2, *plan.input_shape))
        except Exception as error:  # whatever somebody's own code raises
            raise ConfigurationError(f"model {plan.name!r} does not take images of {shape}: {error}") from error
    found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if found != [2, plan.classes]:
        raise ConfigurationError(
            f"model {plan.name!r} should give a tensor [2, {plan.classes}] for two images of {shape} (a number for "
            f"each class, in training as well), and gives {found}"
        )
    path, classifier = classifier_of(model)
    if isinstance(classifier, nn.Linear) and classifier.out_features != plan.classes:
        raise ConfigurationError(
            f"model {plan.name!r}: its last linear layer, {path}, gives {classifier.out_features} numbers, not "
            f"{plan.classes}; methods take that layer for the classifier, so assign the classifier last in __init__"
        )


def _make(plan: ModelPlan, trusted: tuple[str, ...], weights: Sequence[Path]) -> nn.Module:
    name, shape, classes = plan.name, plan.input_shape, plan.classes
    if name in ARCHITECTURES:
        return ARCHITECTURES[name](shape, classes)
    if name.startswith("torchvision:"):
        return _from_torchvision(name.removeprefix("torchvision:"), shape, classes)
    if name.startswith(BACKBONE):
        return on_backbone(plan, weights)
    if ":" not in name:
        known = ", ".join(ARCHITECTURES)
        raise ConfigurationError(
            f"model {name!r} is not known; use one of {known}, torchvision:NAME, torchvision-features:NAME, or "
            "package.module:callable"
        )
    untrusted = " named by the plan; add it under `trusted_models:` in the configuration to allow it"
    factory = load("model", name, trusted, untrusted=untrusted)
    try:
        model = factory(shape, classes)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"model {name!r} cannot be made: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model {name!r} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_torchvision(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    import torchvision  # takes seconds to load, and most models do without it

    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ConfigurationError(f"torchvision has no classifier named {name!r}; see torchvision.models.list_models()")
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if shape[0] != 3:
        _take_channels(model, shape[0])
    return model


def _take_channels(model: nn.Module, channels: int) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            parent, _, attribute = path.rpartition(".")
            setattr(
                model.get_submodule(parent),
                attribute,
                nn.Conv2d(
                    channels,
                    module.out_channels,
                    (module.kernel_size[0], module.kernel_size[1]),
                    stride=(module.stride[0], module.stride[1]),
                    padding=cast("tuple[int, int]", module.padding),
                    bias=module.bias is not None,
                ),
            )
            return
    raise ConfigurationError("this torchvision model takes RGB images only")
