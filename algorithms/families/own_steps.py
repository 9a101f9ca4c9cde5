"""What methods do alike that take their own steps instead of an optimiser's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medsilo.algorithms.method import Site
from medsilo.privacy.errors import TrainingError


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def mean_gradients(site: Site, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradients of a batch's loss for ``trained_parameters``, zeros for those that play no part."""
    parameters = list(trained_parameters(site.model).values())
    loss = site.loss(site.model(images), labels)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [
        torch.zeros_like(p) if gradient is None else gradient for p, gradient in zip(parameters, found, strict=True)
    ]


def check_finite(parameters: Sequence[Tensor], round_number: int) -> None:
    """Raises ``TrainingError`` for a model that is no longer finite."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise TrainingError(
            f"local training diverged in round {round_number}: the model is no longer finite. Nothing of this round "
            "was sent; ask the coordinator for smaller step sizes of the method"
        )
