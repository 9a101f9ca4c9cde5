"""The plan's optimiser, and what it remembers from one training to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from medsilo.algorithms.method import Memory
from medsilo.privacy.consent.plan import TrainingPlan

OPTIMIZER = "optimizer-"
"""What the names of groups of kept optimisers' states begin with, before the phase."""

NOISED = OPTIMIZER + "noised"
"""The group of whole numbers that a step with noise that is shared out has made."""


def make_optimizer(parameters: Sequence[nn.Parameter], training: TrainingPlan) -> torch.optim.Optimizer:
    """The plan's optimiser."""
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=training.learning_rate, weight_decay=training.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters, lr=training.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
    )


def resumed(
    kept: Memory,
    trained: Sequence[nn.Parameter],
    chosen: Mapping[str, nn.Parameter],
    phase: str,
    training: TrainingPlan,
) -> torch.optim.Optimizer:
    """An optimiser of ``trained``, with what is kept of the phase's last one for the ``chosen`` ones among them."""
    optimizer = make_optimizer(trained, training)
    for key, tensor in kept.get(OPTIMIZER + phase, {}).items():
        kind, name = key.split("/", 1)
        if name in chosen:
            optimizer.state[chosen[name]][kind] = tensor.to(chosen[name].device, copy=True)
    return optimizer


def keep(kept: Memory, optimizer: torch.optim.Optimizer, chosen: Mapping[str, nn.Parameter], phase: str) -> None:
    """Keeps what the optimiser remembers of the ``chosen`` parameters, as ``KIND/PARAMETER``."""
    found = {
        f"{kind}/{name}": tensor.detach().to("cpu", copy=True)
        for name, parameter in chosen.items()
        for kind, tensor in optimizer.state[parameter].items()
        if isinstance(tensor, Tensor)
    }
    if found:
        kept[OPTIMIZER + phase] = found
