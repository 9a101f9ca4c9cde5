"""A step whose noise hospitals share out: from the mean that all were handed, to whole numbers that are masked.

Hospital i of n_i units has the mean w and sums its units' clipped gradients there, Σg. What it sends is

    n_i · v - (η·Σg + its share of the noise),        v = w + β·(w - w'),

in multiples of 2^-F, w' being the mean of the round before and β the momentum. The masked sum over all, divided by the
number of all units, is v less the step on all units of all hospitals: SGD with momentum (Polyak's heavy ball), whose
memory is made of the means alone. All but the last term is public, and the noise is added in whole numbers, so that the
sum is what ``medsilo.privacy.budget.shared_noise`` accounts for. An optimiser's memory of the hospital's own steps
would not do: it holds the hospital's own share of the noise, and gradients with no more than that would be in every
later sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.privacy.budget.shared_noise import MOST_SILOS, Lattice
from medsilo.privacy.consent.plan import TrainingPlan
from medsilo.privacy.secure_aggregation.masking import decode, encode
from medsilo.silo.training.private_training import PrivateTrainer

PREVIOUS = "previous"
"""Under this name the optimiser's state holds the mean of the round before."""

_PARTS = 4 * MOST_SILOS
"""A silo's model may take a quarter of its share of the ring, so that its step and noise have room beside it."""


def step(
    private: PrivateTrainer,
    model: nn.Module,
    chosen: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    training: TrainingPlan,
    *,
    fraction_bits: int,
    round_number: int,
    reads: str,
    progress: Callable[[int, float], None],
) -> dict[str, Tensor]:
    """Takes one step on the chosen parameters, which hold the mean; they then hold what the silo sends, divided by its
    number of units. The other arguments are those of ``PrivateTrainer.train``.

    Returns:
        By parameter, int64 of its shape, the whole numbers to be masked.

    Raises ``TrainingError`` for a model or a step that has no room in the masked numbers, ``BudgetError`` if the
    account does not allow the step.
    """
    mechanism = private.plan
    assert mechanism.honest is not None, "its noise is shared out"
    lattice = Lattice(
        training.learning_rate,
        mechanism.clipping_norm,
        fraction_bits,
        mechanism.noise_multiplier,
        mechanism.honest,
        sum(parameter.numel() for parameter in chosen.values()),
    )
    # Before anything is charged: a model without room would be refused after it.
    public = {
        name: encode(
            _from(parameter, optimizer, training.momentum).numpy(),
            weight=private.units,
            fraction_bits=fraction_bits,
            silos=_PARTS,
            what=f"tensor {name}",
        ).view(np.int64)
        for name, parameter in chosen.items()
    }
    steps = private.noised_sum(
        model, chosen, data, lattice, round_number=round_number, phase="training", reads=reads, progress=progress
    )
    found = {}
    with torch.no_grad():
        for name, parameter in chosen.items():
            optimizer.state[parameter][PREVIOUS] = parameter.detach().clone()
            numbers = public[name] - steps[name].numpy()
            own = decode(numbers.view(np.uint64), fraction_bits=fraction_bits) / private.units
            parameter.copy_(torch.from_numpy(own))
            found[name] = torch.from_numpy(numbers)
    return found


def _from(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, momentum: float) -> Tensor:
    """v, from where the step is taken: float32 on the CPU."""
    mean = parameter.detach().to("cpu", torch.float32)
    previous = optimizer.state[parameter].get(PREVIOUS)
    if previous is None or not momentum:
        return mean
    moved: Tensor = mean + momentum * (mean - previous.to("cpu", torch.float32))
    return moved
