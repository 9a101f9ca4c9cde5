"""A silo's images, as its training and its tests are given them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, image_hashes, to_tensor
from medsilo.algorithms.models import extractor_of
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DataError
from medsilo.silo.training.fixed_features import FixedFeatures


def check_fits(dataset: ImageDataset, plan: RunPlan) -> None:
    """Raises ``DataError`` if a silo's images do not fit the plan's model."""
    if dataset.image_shape != plan.model.input_shape:
        raise DataError(
            f"{dataset.source}: images are {'×'.join(map(str, dataset.image_shape))} (channels, height, width), but "
            f"run {plan.run} trains on {'×'.join(map(str, plan.model.input_shape))}; cut the shard from the data set "
            "that the federation agreed on"
        )
    if dataset.num_classes > plan.model.classes:
        raise DataError(
            f"{dataset.source}: has {dataset.num_classes} classes, but run {plan.run} is for {plan.model.classes}"
        )
    if not len(dataset.train):
        raise DataError(f"{dataset.source}: holds no training images")


class SiloImages:
    """One silo's training, validation and test images on its device, each with their labels ``[n]``.

    A model whose extractor is fixed or frozen (``extractor_of``) is given its images' features, which are made once;
    not in training with augmentation, which makes other images at each step.

    ``train`` is the training images ``[n, C, H, W]``, in network scale; ``reserved`` those of them that were set aside,
    None as long as none were; ``class_weights`` the weights of the plan's loss, float32 ``[classes]``, None without.

    Args:
        dataset: the shard.
        model: what is given them, on the device already.
        plan: the run's.
        device: where they are wanted.
        features: the folder in which features are kept; in memory alone by default.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        model: nn.Module,
        plan: RunPlan,
        device: torch.device,
        features: Path | None = None,
    ) -> None:
        self._dataset, self._device = dataset, device
        self._training, self._classes = plan.training, plan.model.classes
        self.train = _on(device, dataset.train)
        self._test = _on(device, dataset.test)
        extractor = extractor_of(model)
        self._features = None if extractor is None else FixedFeatures(extractor, dataset, device, features)
        self._left: Tensor | None = None
        self.reserved: tuple[Tensor, Tensor] | None = None
        self._validation: tuple[Tensor, Tensor] | None = None
        self.class_weights = self._weights_of_classes()

    def inputs(self) -> tuple[Tensor, Tensor]:
        """What a training gives to the model: the training images, or their features ``[n, F]``."""
        images, labels = self.train
        if self._features is None or self._training.augmentation:
            return images, labels
        features = self._features.of("train")
        return features if self._left is None else features[self._left], labels

    def test(self) -> tuple[Tensor, Tensor]:
        """What a test gives to the model: the test images, or their features."""
        return self._judged("test", self._dataset.test)

    def validation(self) -> tuple[Tensor, Tensor] | None:
        """The same of the images by which models may be chosen: the shard's validation images, else those that were set
        aside; None where there are neither."""
        if self._dataset.validation is not None:
            self._validation = self._validation or self._judged("validation", self._dataset.validation)
        return self._validation or self.reserved

    @property
    def has_validation(self) -> bool:
        """Whether there are images by which models may be chosen."""
        return self._dataset.validation is not None or self.reserved is not None

    def forget_features(self) -> None:
        """After the frozen part of the model has changed: features are made anew when they are asked for."""
        if self._features is not None:
            self._features.forget()
            self._validation = None

    def reserve(self, share: float, seed: int) -> int:
        """Sets a share of the training images aside, at least one, and leaves at least one: says how many are left."""
        if self.reserved is not None:
            raise ValueError("validation images have been set aside already")
        images, labels = self.train
        count = min(max(1, round(share * len(labels))), len(labels) - 1)
        order = torch.Generator().manual_seed(seed)
        permutation = torch.randperm(len(labels), generator=order).to(labels.device)
        aside, rest = permutation[:count].sort().values, permutation[count:].sort().values
        self.reserved = (images[aside], labels[aside])
        self.train, self._left = (images[rest], labels[rest]), rest
        self.class_weights = self._weights_of_classes()
        return len(rest)

    def holds_any(self, hashes: Collection[bytes]) -> int:
        """How many of the images (training and test) have one of these SHA-256 hashes of their pixels."""
        looked_for = frozenset(hashes)
        splits = (self._dataset.train, self._dataset.test)
        return sum(digest in looked_for for split in splits for digest in image_hashes(split.images))

    def orders(self, epochs: int, seed: int) -> Iterator[list[Tensor]]:
        """For each epoch its batches, as indices into the training images."""
        order = torch.Generator().manual_seed(seed)
        labels = self.train[1]
        sizes = self.batch_sizes()
        for _ in range(epochs):
            yield list(torch.split(torch.randperm(len(labels), generator=order).to(labels.device), sizes))

    def batch_sizes(self) -> list[int]:
        """The sizes of an epoch's batches, in order. The last one takes what is left over; a single image joins the
        batch before it."""
        whole, left = divmod(len(self.train[1]), self._training.batch_size)
        sizes = [self._training.batch_size] * whole + ([left] if left else [])
        if len(sizes) > 1 and sizes[-1] == 1:
            # Batch normalisation cannot take a batch of one image.
            sizes[-2:] = [sizes[-2] + 1]
        return sizes

    def _judged(self, name: Literal["test", "validation"], split: ImageSplit) -> tuple[Tensor, Tensor]:
        if self._features is None:
            return self._test if name == "test" else _on(self._device, split)
        return self._features.of(name), torch.as_tensor(split.labels).to(self._device)

    def _weights_of_classes(self) -> Tensor | None:
        return None if self._training.class_weights is None else _balanced(self.train[1], self._classes)


def _balanced(labels: Tensor, classes: int) -> Tensor:
    """``float32 [classes]``: n / (K · n_c) for each of the K classes that n labels have, 0 for the others."""
    counts = torch.bincount(labels, minlength=classes)
    weights = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
    return torch.where(counts > 0, weights, 0).float()


def _on(device: torch.device, split: ImageSplit) -> tuple[Tensor, Tensor]:
    return to_tensor(split.images).to(device), torch.as_tensor(split.labels).to(device)
