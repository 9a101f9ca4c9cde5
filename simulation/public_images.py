"""A coordinator's public images, cut from a data set so that no silo has any of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, image_hashes
from medsilo.algorithms.method import derive_seed
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.data.settings import Setting
from medsilo.silo.data.sharding import deal


def cut_public(
    dataset: ImageDataset,
    setting: Setting,
    shards: Sequence[ImageDataset],
    *,
    seed: int,
    per_class: int | None = None,
    share: float | None = None,
) -> ImageDataset:
    """As many images of each class, from the validation split, or else from training images that no silo was dealt.

    An image whose pixels some silo has as well is left out, wherever it comes from.

    Args:
        dataset: the whole set.
        setting: how the silos' shards were cut from it.
        shards: the silos' shards.
        seed: of the cut and of the draw.
        per_class: images of each class; or
        share: of the split's images, all classes together.

    Raises:
        ConfigurationError: a class has too few images.
    """
    split, free, origin = _free(dataset, setting, seed)
    if per_class is None:
        per_class = int((share or 0.0) * len(split) / dataset.num_classes)
    held = {digest for shard in shards for part in (shard.train, shard.test) for digest in image_hashes(part.images)}
    hashes = image_hashes(split.images[free])
    free = free[np.array([digest not in held for digest in hashes], dtype=bool)]
    rng = np.random.default_rng(derive_seed(seed, "public images"))
    chosen: list[np.ndarray] = []
    for label in range(dataset.num_classes):
        images = free[split.labels[free] == label]
        if per_class < 1 or len(images) < per_class:
            raise ConfigurationError(
                f"public images: {per_class} of class {label} ({dataset.class_names[label]}) are wanted, and "
                f"{len(images)} {origin} images of it are free; change public_per_class or public_share, or give the "
                "silos fewer images"
            )
        chosen.append(np.sort(rng.permutation(images)[:per_class]))
    public = split.take(np.concatenate(chosen).astype(np.int64))
    first, rest = np.arange(1), np.arange(1, len(public))
    return ImageDataset(
        name=f"{dataset.name}-public",
        source=dataset.source,
        synthetic=dataset.synthetic,
        class_names=dataset.class_names,
        # A data set has two splits at least; the coordinator measures on all of them together.
        train=_without_patients(public.take(rest)),
        validation=None,
        test=_without_patients(public.take(first)),
    )


def _free(dataset: ImageDataset, setting: Setting, seed: int) -> tuple[ImageSplit, npt.NDArray[np.int64], str]:
    """The split to take from, which of its images no silo was dealt, and what to call it."""
    if dataset.validation is not None and len(dataset.validation):
        return dataset.validation, np.arange(len(dataset.validation)), "validation"
    split = dataset.train
    # Where both splits are pooled, indices go on through the test images.
    dealt = np.zeros(len(split) + len(dataset.test), dtype=bool)
    for shard in deal(dataset, setting, seed=seed):
        dealt[shard.train] = True
        if shard.test_from != "test":
            dealt[shard.test] = True
    return split, np.flatnonzero(~dealt[: len(split)]), "training"


def _without_patients(split: ImageSplit) -> ImageSplit:
    return ImageSplit(split.images, split.labels)
