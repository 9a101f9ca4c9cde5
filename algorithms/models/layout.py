"""A model's parameters in order: which are the classifier's, which are statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from medsilo.algorithms.tensors import TensorSpec
from medsilo.privacy.exposure import Exposure


def classifier_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The classifier's path and module: the last linear layer, or, in a model without one, the last layer with
    trainable parameters."""
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]
    return ([(path, module) for path, module in layers if isinstance(module, nn.Linear)] or layers)[-1]


class Features:
    """Catches what goes into a model's classifier while the model runs.

    >>> model = mlp((1, 28, 28), 10)
    >>> with Features(model) as features:
    ...     logits = model(torch.zeros(2, 1, 28, 28))
    >>> features.last.shape
    torch.Size([2, 64])
    """

    def __init__(self, model: nn.Module) -> None:
        self.classifier = classifier_of(model)[1]
        self._last: Tensor | None = None

    @property
    def last(self) -> Tensor:
        """The features ``[n, F]`` of the last batch, with their gradient's history."""
        if self._last is None:
            raise RuntimeError("the model has not run yet")
        return self._last

    def __enter__(self) -> Self:
        self._hook = self.classifier.register_forward_pre_hook(self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _catch(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._last = inputs[0]


@dataclass(frozen=True)
class Layout:
    """Which of a model's tensors are what.

    ``extractor`` and ``classifier`` hold trainable parameters (the classifier is the last linear layer, or, in a
    model without one, the last layer with parameters); ``buffers`` holds the rest of the state, for example
    batch normalisation's running statistics. ``normalisation`` names the trainable parameters (they stand in
    ``extractor`` or ``classifier`` as well) that belong to batch normalisation: its scales and shifts.
    """

    extractor: tuple[TensorSpec, ...]
    classifier: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]
    normalisation: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Reads the layout off a model."""
        last = classifier_of(model)[0]
        prefix = f"{last}." if last else ""
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        specs = {name: TensorSpec.of(name, tensor) for name, tensor in model.state_dict().items()}
        return cls(
            extractor=tuple(specs[name] for name in trainable if not name.startswith(prefix)),
            classifier=tuple(specs[name] for name in trainable if name.startswith(prefix)),
            buffers=tuple(spec for name, spec in specs.items() if name not in trainable),
            normalisation=_normalisation(model),
        )

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """All trainable parameters, extractor first."""
        return self.extractor + self.classifier

    @property
    def statistics(self) -> tuple[TensorSpec, ...]:
        """The buffers that can be averaged: batch normalisation's running means and variances."""
        return tuple(spec for spec in self.buffers if spec.dtype == "F32")

    def model_parts(self) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """A whole model's trainable parameters, by exposure class."""
        return {
            Exposure.MODEL_PARAMETERS_EXTRACTOR: self.extractor,
            Exposure.MODEL_PARAMETERS_CLASSIFIER: self.classifier,
        }


def _normalisation(model: nn.Module) -> tuple[str, ...]:
    layers = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    return tuple(
        f"{path}.{name}" if path else name
        for path, module in layers.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's whole state on the CPU, by name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state on the CPU, by name, what is frozen included; no copy where it is there."""
    return {name: tensor.detach().to("cpu") for name, tensor in nn.Module.state_dict(model).items()}
