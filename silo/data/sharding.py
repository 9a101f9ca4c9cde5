"""Cuts one data set into hospitals' shards, in the settings in which papers compare methods.

    shards = cut(dataset, Dirichlet(silos=20, alpha=0.5), seed=0)

Each setting is a frozen dataclass, and each has a pure function from labels (or patients) and a seed to the
indices of every silo's images. The same arguments give the same shards; no image is in two shards, nor in
both the training and the test images of any.
"""

from __future__ import annotations

import numpy as np

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, Patients
from medsilo.privacy.errors import DataError
from medsilo.silo.data.dealing import (
    Indices,
    ShardIndices,
    by_patient,
    dirichlet,
    pathological,
    pooled_dirichlet,
    practical_groups,
)
from medsilo.silo.data.settings import (
    ByPatient,
    Pathological,
    PooledDirichlet,
    PracticalGroups,
    Setting,
)


def cut(dataset: ImageDataset, setting: Setting, *, seed: int, prefix: str = "hospital") -> list[ImageDataset]:
    """The shards of ``dataset``, one for each silo, named ``prefix`` and a number from 1.

    A shard has the full set's class names, source and ``synthetic`` flag, and the patients of its images
    where they are known. It has no validation split.

    Args:
        dataset: what to cut.
        setting: how to cut it.
        seed: at least 0; the same seed gives the same shards.
        prefix: the start of each shard's name.

    Raises:
        ConfigurationError: the data set has too few classes, images or patients for the setting.
        DataError: the setting needs to know the patients, and the data set does not tell them; or it does, and the
            setting would not keep them together.
    """
    indices = deal(dataset, setting, seed=seed)
    shards = []
    for number, shard in enumerate(indices, start=1):
        if shard.test_from == "pool":
            train, test = _of_pool(dataset, shard.train), _of_pool(dataset, shard.test)
        else:
            train = dataset.train.take(shard.train)
            test = (dataset.test if shard.test_from == "test" else dataset.train).take(shard.test)
        shards.append(
            ImageDataset(
                name=f"{prefix}{number}",
                source=dataset.source,
                synthetic=dataset.synthetic,
                class_names=dataset.class_names,
                train=train,
                validation=None,
                test=test,
            )
        )
    return shards


def _of_pool(dataset: ImageDataset, indices: Indices) -> ImageSplit:
    """Images by their places in the training split and on through the test split."""
    first = len(dataset.train)
    parts = dataset.train.take(indices[indices < first]), dataset.test.take(indices[indices >= first] - first)
    return ImageSplit(
        images=np.concatenate([part.images for part in parts]), labels=np.concatenate([part.labels for part in parts])
    )


def deal(dataset: ImageDataset, setting: Setting, *, seed: int) -> list[ShardIndices]:
    """Which images each silo gets; what ``cut`` cuts along.

    Args:
        dataset: what to cut.
        setting: how to cut it.
        seed: at least 0; the same seed gives the same indices.
    """
    if isinstance(setting, ByPatient):
        return by_patient(
            _patients(dataset, dataset.train, "training"),
            _patients(dataset, dataset.test, "test") if setting.test_from == "test" else None,
            setting,
            seed=seed,
        )
    train_labels, test_labels, classes = dataset.train.labels, dataset.test.labels, dataset.num_classes
    if isinstance(setting, PooledDirichlet):
        if dataset.train.patients is not None or dataset.test.patients is not None:
            raise DataError(
                f"{dataset.name}: the images tell their patients, and this setting would put images of one patient "
                "among a silo's training and its test images; choose the setting that deals whole patients"
            )
        return pooled_dirichlet(np.concatenate([train_labels, test_labels]), setting, num_classes=classes, seed=seed)
    if isinstance(setting, PracticalGroups):
        return practical_groups(train_labels, test_labels, setting, num_classes=classes, seed=seed)
    if isinstance(setting, Pathological):
        return pathological(train_labels, test_labels, setting, num_classes=classes, seed=seed)
    return dirichlet(train_labels, test_labels, setting, num_classes=classes, seed=seed)


def _patients(dataset: ImageDataset, split: ImageSplit, split_name: str) -> Patients:
    if split.patients is None:
        raise DataError(
            f"{dataset.name}: the {split_name} images do not tell their patients, so whole patients cannot "
            "be dealt; choose another setting"
            + (", or take the test images from 'train'" if split_name == "test" else "")
        )
    return split.patients
