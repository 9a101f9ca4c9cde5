"""Which image goes to which hospital, for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import Labels, Patients
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo.data.settings import (
    ByPatient,
    Dirichlet,
    Pathological,
    PooledDirichlet,
    PracticalGroups,
    TestFrom,
    at_least,
)

Indices = npt.NDArray[np.int64]


Counts = npt.NDArray[np.int64]


LEAST_POOLED = 10
"""Images that a silo has at least in :class:`PooledDirichlet`."""


_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class ShardIndices:
    """Which images one silo gets.

    Attributes:
        train: int64 [n], ascending indices into the training split.
        test: int64 [m], ascending indices into the split that ``test_from`` names.
        test_from: ``test``, ``train``, or ``pool``: then both count through the training split and on through the test
            split.
    """

    train: Indices
    test: Indices
    test_from: TestFrom | Literal["pool"]


def practical_groups(
    train_labels: Labels, test_labels: Labels, setting: PracticalGroups, *, num_classes: int, seed: int
) -> list[ShardIndices]:
    """Each silo's images in DiversiFed's practical setting; see :class:`PracticalGroups`.

    The counts of test images are the training counts scaled down by largest remainders: first dominant
    against other classes, so that the share holds for the test images too, then class by class.

    Args:
        train_labels: int64 [n], the labels of the training split.
        test_labels: int64 [m], the labels of the test split.
        setting: the groups and sizes.
        num_classes: the number of classes.
        seed: at least 0.

    Raises:
        ConfigurationError: a dominant class does not exist, or a class has too few images.
    """
    rng = _generator(seed)
    train_counts, test_counts = [], []
    for silos, classes in zip(setting.groups, setting.dominant, strict=True):
        if max(classes) >= num_classes:
            raise ConfigurationError(
                f"dominant class {max(classes)} does not exist: the data set has {num_classes} classes, "
                f"0 to {num_classes - 1}; give dominant classes of the data set"
            )
        dominant = np.isin(np.arange(num_classes), classes)
        if dominant.all() and setting.share < 1.0:
            raise ConfigurationError(
                f"dominant: {list(classes)} are all classes, so none is left for the other "
                f"{1.0 - setting.share:.0%} of the images; name fewer, or set share to 1"
            )
        for _ in range(silos):
            first = round(setting.share * setting.train_per_silo)
            counts = rng.multinomial(first, dominant / dominant.sum())
            if first < setting.train_per_silo:
                counts += rng.multinomial(setting.train_per_silo - first, ~dominant / (~dominant).sum())
            train_counts.append(counts)
            tested = np.zeros(num_classes, dtype=np.int64)
            sides = [side for side in (dominant, ~dominant) if counts[side].sum()]
            sums = np.array([counts[side].sum() for side in sides], dtype=np.float64)
            for side, total in zip(sides, largest_remainder(sums, setting.test_per_silo), strict=True):
                tested[side] = largest_remainder(counts[side].astype(np.float64), int(total))
            test_counts.append(tested)
    return _deal(rng, train_labels, test_labels, np.stack(train_counts), np.stack(test_counts), setting)


def pathological(
    train_labels: Labels, test_labels: Labels, setting: Pathological, *, num_classes: int, seed: int
) -> list[ShardIndices]:
    """Each silo's images in the pathological setting; see :class:`Pathological`.

    Args:
        train_labels: int64 [n], the labels of the training split.
        test_labels: int64 [m], the labels of the test split.
        setting: the numbers of silos, classes and images.
        num_classes: the number of classes.
        seed: at least 0.

    Raises:
        ConfigurationError: there are fewer classes than a silo is to have, or a class has too few images.
    """
    if setting.classes_per_silo > num_classes:
        raise ConfigurationError(
            f"classes_per_silo is {setting.classes_per_silo}, but the data set has {num_classes} classes; "
            f"give at most {num_classes}"
        )
    rng = _generator(seed)
    held = np.zeros(num_classes, dtype=np.int64)
    train_counts, test_counts = [], []
    for _ in range(setting.silos):
        # The least held classes, ties in a random order.
        order = rng.permutation(num_classes)
        chosen = order[np.argsort(held[order], kind="stable")][: setting.classes_per_silo]
        held[chosen] += 1
        weights = np.zeros(num_classes)
        weights[chosen] = 1.0
        train_counts.append(largest_remainder(weights, setting.train_per_silo))
        test_counts.append(largest_remainder(weights, setting.test_per_silo))
    return _deal(rng, train_labels, test_labels, np.stack(train_counts), np.stack(test_counts), setting)


def dirichlet(
    train_labels: Labels, test_labels: Labels, setting: Dirichlet, *, num_classes: int, seed: int
) -> list[ShardIndices]:
    """Each silo's images under Dirichlet label skew; see :class:`Dirichlet`.

    Args:
        train_labels: int64 [n], the labels of the training split.
        test_labels: int64 [m], the labels of the test split.
        setting: the concentration and sizes.
        num_classes: the number of classes.
        seed: at least 0.

    Raises:
        ConfigurationError: there are fewer images than the silos are to have together.
    """
    rng = _generator(seed)
    train_left = np.bincount(train_labels, minlength=num_classes)
    test_left = np.bincount(test_labels, minlength=num_classes)
    train_needed = setting.silos * setting.train_per_silo
    test_needed = setting.silos * setting.test_per_silo
    if setting.test_from == "train":
        _enough_images("training", train_needed + test_needed, len(train_labels))
        test_left = train_left  # the same array: what one takes, the other no longer has
    else:
        _enough_images("training", train_needed, len(train_labels))
        _enough_images("test", test_needed, len(test_labels))
    train_counts, test_counts = [], []
    for _ in range(setting.silos):
        weights = rng.dirichlet(np.full(num_classes, setting.alpha))
        counts = _take(train_left, weights, setting.train_per_silo)
        train_counts.append(counts)
        test_counts.append(_take(test_left, counts.astype(np.float64), setting.test_per_silo))
    return _deal(rng, train_labels, test_labels, np.stack(train_counts), np.stack(test_counts), setting)


def pooled_dirichlet(labels: Labels, setting: PooledDirichlet, *, num_classes: int, seed: int) -> list[ShardIndices]:
    """Each silo's images where all are dealt and then split; see :class:`PooledDirichlet`.

    Args:
        labels: int64 [n], the labels of the training split, then those of the test split.
        setting: the concentration and the share of test images.
        num_classes: the number of classes.
        seed: at least 0.

    Raises:
        ConfigurationError: there are too few images, or too uneven shares, for every silo to have ten.
    """
    rng = _generator(seed)
    _enough_images("training and test", setting.silos * LEAST_POOLED, len(labels))
    available = np.bincount(labels, minlength=num_classes)
    for _ in range(_DRAWS):
        weights = rng.dirichlet(np.full(setting.silos, setting.alpha), size=num_classes)
        counts = np.stack([largest_remainder(row, int(n)) for row, n in zip(weights, available, strict=True)], axis=1)
        if counts.sum(axis=1).min() >= LEAST_POOLED:
            break
    else:
        raise ConfigurationError(
            f"in {_DRAWS:,} draws some silo always had fewer than {LEAST_POOLED} images; ask for a larger alpha than "
            f"{setting.alpha:g}, or for fewer silos"
        )
    shards = []
    for dealt in _deal_counts(rng, labels, counts):
        tested = min(max(round(setting.test_share * len(dealt)), 1), len(dealt) - 1)
        shuffled = rng.permutation(dealt)
        shards.append(ShardIndices(np.sort(shuffled[tested:]), np.sort(shuffled[:tested]), "pool"))
    return shards


def _take(left: Counts, weights: npt.NDArray[np.float64], total: int) -> Counts:
    """Takes ``total`` images out of ``left`` in proportion to ``weights``, as :class:`Dirichlet` says."""
    taken = np.zeros_like(left)
    while (missing := total - int(taken.sum())) > 0:
        usable = np.where(left > 0, weights, 0.0)
        if usable.sum() <= 0.0:
            usable = left.astype(np.float64)
        step = np.minimum(largest_remainder(usable, missing), left)
        taken += step
        left -= step
    return taken


def _enough_images(kind: str, needed: int, available: int) -> None:
    if needed > available:
        raise ConfigurationError(
            f"the silos need {needed:,} {kind} images together, and there are {available:,}; "
            "ask for fewer images per silo, or fewer silos"
        )


def by_patient(
    train_patients: Patients, test_patients: Patients | None, setting: ByPatient, *, seed: int
) -> list[ShardIndices]:
    """Each silo's images where whole patients are dealt; see :class:`ByPatient`.

    Args:
        train_patients: str [n], the patient of each training image.
        test_patients: str [m], the patient of each test image; not used when testing on held-out patients.
        setting: the number of silos.
        seed: at least 0.

    Raises:
        ConfigurationError: there are fewer patients than silos.
    """
    rng = _generator(seed)
    pool = _shuffled_patients(rng, train_patients)
    if setting.test_from == "train":
        images = np.cumsum([len(indices) for indices in pool])
        fifth = int(np.searchsorted(images, len(train_patients) / 5)) + 1
        held_out = max(fifth, setting.silos)
        test_pool, pool = pool[:held_out], pool[held_out:]
    else:
        if test_patients is None:
            raise DataError("the test images do not tell their patients; take the test images from 'train'")
        test_pool = _shuffled_patients(rng, test_patients)
        test_pool = [indices for indices in test_pool if test_patients[indices[0]] not in set(train_patients)]
    for kind, patients in (("training", pool), ("test", test_pool)):
        if len(patients) < setting.silos:
            way_out = " or take the test patients from 'train'," if setting.test_from == "test" else ""
            raise ConfigurationError(
                f"{setting.silos} silos need a patient each, and there are {len(patients)} {kind} patients; "
                f"ask for fewer silos,{way_out} or choose a setting that does not keep patients together"
            )
    shards = zip(_balanced(pool, setting.silos), _balanced(test_pool, setting.silos), strict=True)
    return [ShardIndices(train, test, setting.test_from) for train, test in shards]


def _shuffled_patients(rng: np.random.Generator, patients: Patients) -> list[Indices]:
    """The indices of each patient's images; the patients in a random order."""
    names, number = np.unique(patients, return_inverse=True)
    grouped = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    return [grouped[patient].astype(np.int64) for patient in rng.permutation(len(names))]


def _balanced(patients: Sequence[Indices], silos: int) -> list[Indices]:
    """Deals patients in order, each to the silo with the fewest images so far."""
    images = np.zeros(silos, dtype=np.int64)
    dealt: list[list[Indices]] = [[] for _ in range(silos)]
    for indices in patients:
        silo = int(images.argmin())
        dealt[silo].append(indices)
        images[silo] += len(indices)
    return [np.sort(np.concatenate(shard)) for shard in dealt]


def largest_remainder(weights: npt.NDArray[np.float64], total: int) -> Counts:
    """Whole numbers in proportion to ``weights`` [k] that add up to ``total``: int64 [k].

    Each is its exact share rounded down, and one more for the largest fractions (Hamilton's method); of equal
    fractions the earlier comes first. A weight of 0 gets 0.

    Raises:
        ConfigurationError: no weight is above 0, or one is negative or not a number.
    """
    if not (weights.sum() > 0.0 and (weights >= 0.0).all() and np.isfinite(weights).all()):
        raise ConfigurationError(f"weights are {weights.tolist()}; give numbers from 0, at least one above 0")
    exact = weights * total / weights.sum()
    counts: Counts = np.floor(exact).astype(np.int64)
    remainder = np.where(weights > 0.0, exact - counts, -1.0)
    order = np.argsort(-remainder, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def _deal(
    rng: np.random.Generator,
    train_labels: Labels,
    test_labels: Labels,
    train_counts: Counts,
    test_counts: Counts,
    setting: PracticalGroups | Pathological | Dirichlet,
) -> list[ShardIndices]:
    """Deals images at random so that silo k gets ``counts[k, c]`` of class c (both [silos, num_classes])."""
    if setting.test_from == "train":
        together = np.concatenate([train_counts, test_counts])
        dealt = _deal_split(rng, train_labels, together, "training", setting)
        train, test = dealt[: len(train_counts)], dealt[len(train_counts) :]
    else:
        train = _deal_split(rng, train_labels, train_counts, "training", setting)
        test = _deal_split(rng, test_labels, test_counts, "test", setting)
    return [ShardIndices(*indices, setting.test_from) for indices in zip(train, test, strict=True)]


def _deal_split(
    rng: np.random.Generator,
    labels: Labels,
    counts: Counts,
    kind: str,
    setting: PracticalGroups | Pathological | Dirichlet,
) -> list[Indices]:
    needed, available = counts.sum(axis=0), np.bincount(labels, minlength=counts.shape[1])
    if (needed > available).any():
        worst = int(np.argmax(needed / np.maximum(available, 0.5)))
        fitting = available[worst] / needed[worst]
        suggestions = []
        if kind == "training":
            suggestions.append(f"about {int(fitting * setting.train_per_silo)} training images per silo")
        if kind == "test" or setting.test_from == "train":
            suggestions.append(f"about {int(fitting * setting.test_per_silo)} test images per silo")
        raise ConfigurationError(
            f"class {worst} runs out: the silos need {needed[worst]:,} {kind} images of it, and there are "
            f"{available[worst]:,}; ask for {' and '.join(suggestions)}, or for fewer silos"
        )
    return _deal_counts(rng, labels, counts)


def _deal_counts(rng: np.random.Generator, labels: Labels, counts: Counts) -> list[Indices]:
    """Random images of each class, as many as ``counts`` [silos, num_classes] says; there have to be so many."""
    silos, num_classes = counts.shape
    shards: list[list[Indices]] = [[] for _ in range(silos)]
    for label in range(num_classes):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for shard, part in zip(shards, np.split(shuffled, np.cumsum(counts[:, label])), strict=False):
            shard.append(part)
    return [np.asarray(np.sort(np.concatenate(shard)), dtype=np.int64) for shard in shards]


def _generator(seed: int) -> np.random.Generator:
    at_least("seed", seed, 0)
    return np.random.default_rng([seed, 0x5A4D])
