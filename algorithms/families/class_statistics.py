"""What methods do alike whose silos send sums over each class's images."""

from __future__ import annotations

import torch
from torch import Tensor

from medsilo.algorithms.method import Site
from medsilo.algorithms.models import Features, Layout
from medsilo.privacy.errors import ConfigurationError

_BATCH = 1024


def class_sums(site: Site) -> tuple[Tensor, Tensor]:
    """The sum of the features of each class's training images, in evaluation mode.

    Returns:
        ``Tensor[C, F]``, float64, and the numbers of images ``Tensor[C]``, int64, both on the CPU.
    """
    classes, features = linear_shape("class means", site.layout)
    sums = torch.zeros(classes, features, dtype=torch.float64)
    images, labels = site.train_data()
    site.model.eval()
    with Features(site.model) as caught, torch.inference_mode():
        for batch, truth in zip(torch.split(images, _BATCH), torch.split(labels, _BATCH), strict=True):
            site.model(batch)
            sums.index_add_(0, truth.cpu().to(torch.int64), caught.last.cpu().to(torch.float64))
    site.model.train()
    return sums, torch.bincount(labels.cpu().to(torch.int64), minlength=classes)


def linear_shape(what: str, layout: Layout) -> tuple[int, int]:
    """Classes and features of the last layer; raises ``ConfigurationError`` where it is not a linear one."""
    shapes = [spec.shape for spec in layout.classifier]
    if not shapes or len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
        raise ConfigurationError(
            f"{what}: the model's last layer must be linear, for it is trained on mean features; choose another model"
        )
    return shapes[0][0], shapes[0][1]
