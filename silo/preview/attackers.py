"""Two attackers who score units by what a model's training made of it: the higher, the likelier a unit was trained on.

* *loss*: by how much the unit's cross entropy fell from the starting model to the trained one;
* *gradient*: how much of the unit's own gradient is in the difference of the two models, by ridge regression of the
  difference on all units' gradients (each the mean of its direction at both models).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageSplit, to_tensor
from medsilo.algorithms.method import State
from medsilo.algorithms.models import OnFixedFeatures

_GRADIENT_NUMBERS = 1 << 26
_RIDGE = 1e-3


class Attackers:
    """They know the starting model, what became of it, and all images.

    Args:
        model: the architecture; its contents are overwritten.
        start: the starting model's whole state.
        units: m of them, two at least.
    """

    def __init__(self, model: nn.Module, start: State, units: Sequence[ImageSplit]) -> None:
        self._model = model
        self._units = [_inputs(model, unit) for unit in units]
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        size = sum(start[name].numel() for name in self._names)
        # A part of the numbers is enough where all of them would not fit into memory.
        count = min(size, _GRADIENT_NUMBERS // len(units))
        self._places = torch.from_numpy(np.unique(np.linspace(0, size - 1, count, dtype=np.int64)))
        self._start = start
        self._losses, self._directions = self._at(start)

    def scores(self, after: State, moved: State | None = None) -> dict[str, npt.NDArray[np.float64]]:
        """Each attacker's scores of the units, ``float64 [m]``.

        ``after``: the trained model's whole state. ``moved``: what training took off the model's parameters, where that
        is not the difference of the two (others' models may have been mixed in between).
        """
        if moved is None:
            moved = {name: self._start[name].double() - after[name].double() for name in self._names}
        flat = torch.cat([moved[name].double().flatten() for name in self._names])
        losses, directions = self._at(after)
        directions += self._directions
        products = (directions @ directions.T).double()
        ridge = _RIDGE * products.diagonal().mean().clamp(min=1e-12) * torch.eye(len(losses), dtype=torch.float64)
        shares = torch.linalg.solve(products + ridge, (directions @ flat[self._places].float()).double())
        return {"loss": self._losses - losses, "gradient": torch.nan_to_num(shares).numpy()}

    def _at(self, state: State) -> tuple[npt.NDArray[np.float64], Tensor]:
        """Of each unit at a model: the mean cross entropy, and the gradient's direction, ``Tensor[m, places]``."""
        self._model.load_state_dict(state, strict=False)
        self._model.eval()
        losses, directions = [], torch.zeros(len(self._units), len(self._places))
        for row, (inputs, labels) in enumerate(self._units):
            loss, gradient = _loss_and_gradient(self._model, inputs, labels)
            losses.append(loss)
            part = torch.nan_to_num(gradient[self._places])
            directions[row] = part / torch.linalg.vector_norm(part).clamp(min=1e-12)
        return np.nan_to_num(np.array(losses)), directions


def _inputs(model: nn.Module, unit: ImageSplit) -> tuple[Tensor, Tensor]:
    device = next(model.parameters()).device
    images = to_tensor(unit.images).to(device)
    # A fixed extractor says the same of an image however often it is asked.
    given = model.extractor(images) if isinstance(model, OnFixedFeatures) else images
    return given, torch.as_tensor(unit.labels).to(device)


def _loss_and_gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """A unit's mean cross entropy, and its gradient over all trainable parameters, on the CPU."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = F.cross_entropy(model(inputs), labels)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    filled = [
        torch.zeros_like(p) if gradient is None else gradient for p, gradient in zip(parameters, gradients, strict=True)
    ]
    return float(loss.detach()), torch.cat([gradient.flatten() for gradient in filled]).cpu()
