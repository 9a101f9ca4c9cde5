"""A network of which only the last layer is trained: a fixed extractor, then a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from medsilo.algorithms.features import Backbone, FixedExtractor
from medsilo.algorithms.features.backbone import uncut
from medsilo.algorithms.features.extractor import SMALLEST
from medsilo.algorithms.models.given_weights import (
    BACKBONE,
    check_taken,
    find_weights,
    read_weights,
    taken,
    tensors_sha256,
)
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError


class OnFixedFeatures(nn.Module):
    """Softmax regression on fixed features. Its parameters are ``classifier.weight``, float32 ``[classes, F]``, zero at
    first, and nothing else; the features' constant, where they have one, stands for a bias."""

    def __init__(self, extractor: FixedExtractor, classes: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = nn.Linear(extractor.features, classes, bias=False)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, C, H, W]``, or of features ``[n, F]`` that the extractor gave."""
        features = images if images.ndim == 2 else self.extractor(images)
        logits: Tensor = self.classifier(features)
        return logits


def on_fixed(name: str, extractor: FixedExtractor, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A linear layer on an extractor; raises ``ConfigurationError`` for images that it does not take."""
    channels, *sides = input_shape
    if channels not in (1, 3) or min(sides) < SMALLEST:
        raise ConfigurationError(
            f"{name} needs RGB or grey images of at least {SMALLEST}×{SMALLEST} pixels, not "
            f"{'×'.join(map(str, input_shape))}"
        )
    return OnFixedFeatures(extractor, classes)


def on_backbone(plan: ModelPlan, places: Sequence[Path]) -> nn.Module:
    """A linear layer on a torchvision classifier's features, whose weights are looked for in these files and folders.

    Raises ``ConfigurationError`` for a plan without weights, or of some of their layers alone, or weights that are not
    there or do not fit.
    """
    if plan.weights is None:
        raise ConfigurationError(
            f"model {plan.name} needs the classifier's weights: name them under `weights:` of the model"
        )
    name = plan.name.removeprefix(BACKBONE)
    whole, last = uncut(name)
    if plan.weights.without not in (None, last):
        raise ConfigurationError(
            f"model {plan.name}: its weights are taken without {plan.weights.without}, so that the plan's hash is not "
            f"of all that makes features; of {name} the last layer alone, {last}, may be left out"
        )
    path = find_weights(plan.weights, places)
    tensors = taken(whole.state_dict(), read_weights(path), last, where=path)
    check_taken(tensors, plan.weights, where=path)
    extractor = Backbone(name, tensors, tensors_sha256(tensors))
    return on_fixed(plan.name, extractor, plan.input_shape, plan.classes)
