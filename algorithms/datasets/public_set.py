"""The coordinator's public images, on which it may measure silos' models (FedPDC)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets.images import ImageDataset, image_hashes, to_tensor
from medsilo.privacy.errors import ConfigurationError

_BATCH = 1024


class PublicImages:
    """A labelled set of images that is nobody's patient's; implements ``medsilo.algorithms.method.PublicSet``.

    All splits of the data set are used. Raises ``ConfigurationError`` for images that do not fit the model.
    """

    def __init__(self, dataset: ImageDataset, model: nn.Module, input_shape: tuple[int, int, int]) -> None:
        splits = [s for s in (dataset.train, dataset.validation, dataset.test) if s is not None and len(s)]
        if dataset.image_shape != input_shape:
            raise ConfigurationError(
                f"{dataset.source}: public images of shape {list(dataset.image_shape)} do not fit the model, which "
                f"takes {list(input_shape)}"
            )
        self._pixels = np.concatenate([split.images for split in splits])
        self._images = to_tensor(self._pixels)
        self._labels = torch.as_tensor(np.concatenate([split.labels for split in splits]))
        self._model = model
        self._initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def accuracy(self, parameters: Mapping[str, Tensor]) -> float:
        """See ``medsilo.algorithms.method.PublicSet``; in evaluation mode."""
        self._model.load_state_dict({**self._initial, **parameters})
        self._model.eval()
        correct = 0
        with torch.inference_mode():
            for start in range(0, len(self._labels), _BATCH):
                logits = self._model(self._images[start : start + _BATCH])
                correct += int((logits.argmax(dim=1) == self._labels[start : start + _BATCH]).sum())
        return correct / len(self._labels)

    def hashes(self) -> Tensor:
        """See ``medsilo.algorithms.method.PublicSet``."""
        digests = image_hashes(self._pixels)
        return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, 32)
