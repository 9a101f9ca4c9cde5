"""What many methods do alike: a whole model goes up, where it is needed with batch normalisation's running statistics
or the number of images, a mixture of models comes down, and averages are weighted by numbers of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from medsilo.algorithms.method import State, subset
from medsilo.algorithms.models import Layout
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure

Buffers = Literal["local", "aggregate"]
"""Running statistics stay at the silo, or travel and are averaged like parameters."""

COUNT = TensorSpec("samples", (), "I64")
"""A silo's number of training images, as it travels."""


def upload_specs(layout: Layout, buffers: Buffers = "local") -> dict[Exposure, Sequence[TensorSpec]]:
    """The parts of a whole model."""
    parts: dict[Exposure, Sequence[TensorSpec]] = dict(layout.model_parts())
    if buffers == "aggregate":
        parts[Exposure.RUNNING_STATISTICS] = layout.statistics
    return parts


def model_upload(state: State, layout: Layout, buffers: Buffers = "local") -> dict[Exposure, Part]:
    """A state's parts as they go up."""
    return {exposure: Part.of(subset(state, specs)) for exposure, specs in upload_specs(layout, buffers).items()}


def received_tensors(download: Payload, layout: Layout, buffers: Buffers) -> State:
    """What the coordinator's mixture holds: extractor or whole model, with running statistics where they travel.

    Empty without a mixture. Raises ``RefusedError`` for anything else than these names and shapes.
    """
    part = download.get(Exposure.PEER_DERIVED)
    if part is None:
        return {}
    statistics = layout.statistics if buffers == "aggregate" else ()
    if part.specs not in (layout.parameters + statistics, layout.extractor + statistics):
        raise RefusedError("the coordinator's mixture does not have the model's names and shapes")
    return part.tensors()


def check_linear(method: str, layout: Layout) -> None:
    """Raises ``ConfigurationError`` for a model whose last layer is not linear."""
    shapes = [len(spec.shape) for spec in layout.classifier]
    if shapes not in ([2, 1], [2]):
        raise ConfigurationError(f"{method} works on the classifier's weights; the model's last layer must be linear")


def count_part(samples: int) -> Part:
    """A number of training images as it goes up."""
    return Part.of({COUNT.name: torch.tensor(samples)})


def count_weights(uploads: Iterable[Payload]) -> Tensor:
    """``Tensor[N]`` of weights by the numbers of images that N uploads hold."""
    return sample_weights(torch.stack([upload[Exposure.SAMPLE_COUNT].tensors()[COUNT.name] for upload in uploads]))


def sample_weights(counts: Tensor) -> Tensor:
    """``Tensor[N]`` of image counts to weights that sum to 1, float64; all alike where every count is 0 or less."""
    counts = counts.to(torch.float64).clamp(min=0)
    total = counts.sum()
    return counts / total if total > 0 else torch.full_like(counts, 1 / len(counts))
