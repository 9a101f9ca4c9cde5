"""Cuts one data set into hospitals' shards, in the settings in which papers compare methods.

    shards = cut(dataset, Dirichlet(silos=20, alpha=0.5), seed=0)

Each setting is a frozen dataclass, and each has a pure function from labels (or patients) and a seed to the
indices of every silo's images. The same arguments give the same shards; no image is in two shards, nor in
both the training and the test images of any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, Labels, Patients
from medsilo.privacy.errors import ConfigurationError, DataError

Indices = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]

TestFrom = Literal["test", "train"]
"""Where test images come from: the official test split, or training images that no silo trains on."""


@dataclass(frozen=True)
class PracticalGroups:
    """DiversiFed's practical setting: groups of silos, each with its own dominant classes.

    Of a silo's training images, ``share`` have a dominant class of its group, each drawn uniformly from them;
    the others have one of the remaining classes, drawn uniformly. The test images have the same proportions.
    Patients are not kept together: use :class:`ByPatient` where that matters.

    Attributes:
        groups: the number of silos of each group; at least 1 each.
        dominant: the dominant classes of each group, numbered from 0. Groups may share a class.
        share: from 0 to 1. 1 leaves only dominant classes; with the share that dominant classes have of all
            classes, every silo's images are spread evenly.
        train_per_silo: training images of each silo, at least 1.
        test_per_silo: test images of each silo, at least 1.
        test_from: where the test images come from.

    Raises:
        ConfigurationError: a field is out of its range.
    """

    groups: tuple[int, ...] = (6, 6, 8)
    dominant: tuple[tuple[int, ...], ...] = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    share: float = 0.8
    train_per_silo: int = 500
    test_per_silo: int = 100
    test_from: TestFrom = "test"

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigurationError("groups is empty; give the number of silos of each group, such as 6,6,8")
        for silos in self.groups:
            _at_least("groups", silos, 1)
        if len(self.dominant) != len(self.groups):
            raise ConfigurationError(
                f"dominant has classes for {len(self.dominant)} groups, groups has {len(self.groups)}; "
                "give each group its dominant classes"
            )
        for classes in self.dominant:
            if not classes or len(set(classes)) != len(classes) or min(classes) < 0:
                raise ConfigurationError(
                    f"dominant: {list(classes)} are no dominant classes; give one or more different class "
                    "numbers from 0"
                )
        if not 0.0 <= self.share <= 1.0:
            raise ConfigurationError(f"share is {self.share}; give a number from 0 to 1")
        _check_sizes(self.train_per_silo, self.test_per_silo, self.test_from)

    @property
    def silos(self) -> int:
        """The number of silos of all groups."""
        return sum(self.groups)


@dataclass(frozen=True)
class Pathological:
    """The pathological setting of McMahan et al. (2017): every silo has images of a few classes only.

    Classes are dealt so that each is held by as many silos as any other, to within one; a silo has the same
    number of images of each of its classes, to within one.

    Attributes:
        silos: at least 1.
        classes_per_silo: at least 1; with the number of all classes, every silo has all of them.
        train_per_silo: training images of each silo, at least 1.
        test_per_silo: test images of each silo, at least 1.
        test_from: where the test images come from.

    Raises:
        ConfigurationError: a field is out of its range.
    """

    silos: int
    classes_per_silo: int = 2
    train_per_silo: int = 500
    test_per_silo: int = 100
    test_from: TestFrom = "test"

    def __post_init__(self) -> None:
        _at_least("silos", self.silos, 1)
        _at_least("classes_per_silo", self.classes_per_silo, 1)
        _check_sizes(self.train_per_silo, self.test_per_silo, self.test_from)


@dataclass(frozen=True)
class Dirichlet:
    """Each silo's label distribution is drawn from a symmetric Dirichlet distribution (Hsu et al., 2019).

    Silos are served in order. Where a class has fewer images left than a silo's distribution asks for, the
    silo takes all of them, and the shortfall is spread over the classes that still have images: in proportion
    to the silo's distribution over these, or to the images left where it gives them no weight. The test
    images have the proportions of the training images so found, under the same rule.

    Attributes:
        silos: at least 1.
        alpha: concentration, above 0. Towards 0 each silo has a single class; towards infinity all silos have
            the same distribution.
        train_per_silo: training images of each silo, at least 1.
        test_per_silo: test images of each silo, at least 1.
        test_from: where the test images come from.

    Raises:
        ConfigurationError: a field is out of its range.
    """

    silos: int
    alpha: float
    train_per_silo: int = 500
    test_per_silo: int = 100
    test_from: TestFrom = "test"

    def __post_init__(self) -> None:
        _at_least("silos", self.silos, 1)
        _check_alpha(self.alpha)
        _check_sizes(self.train_per_silo, self.test_per_silo, self.test_from)


@dataclass(frozen=True)
class PooledDirichlet:
    """pFedSim's setting (Tan et al., 2023): training and test split are pooled, every image is dealt, and each silo's
    images are split into training and test images.

    Of each class, the silos get shares that are drawn from a symmetric Dirichlet distribution (Yurochkin et al., 2019),
    so silos differ in their numbers of images, too. The shares of all classes are drawn anew until every silo has ten
    images (customary; ours here, pFedSim's paper does not say). Of a silo's images, those to test on are drawn whatever
    their class.

    Images that tell their patients are refused: a patient could be in a silo's training and test images. Use
    :class:`ByPatient` there.

    Attributes:
        silos: at least 1.
        alpha: concentration, from 0.001. Towards 0 each class is with one silo; towards infinity all silos have as many
            images of a class.
        test_share: of each silo's images, above 0 and below 1; rounded, and one image at least on either side. The
            paper splits them in half.

    Raises:
        ConfigurationError: a field is out of its range.
    """

    silos: int
    alpha: float
    test_share: float = 0.5

    def __post_init__(self) -> None:
        _at_least("silos", self.silos, 1)
        _check_alpha(self.alpha)
        if not 0.0 < self.test_share < 1.0:
            raise ConfigurationError(f"test_share is {self.test_share}; give a number above 0 and below 1")


@dataclass(frozen=True)
class ByPatient:
    """Whole patients are dealt to silos, as hospitals have them; every image is used.

    Patients go, in an order that the seed sets, each to the silo with the fewest images so far. With
    ``test_from`` 'test' the patients of the test split are dealt in the same way, less those who have
    training images too; with 'train', the test split is left aside, and patients of the training split are
    held out until they have a fifth of its images (and there is one for each silo).

    Attributes:
        silos: at least 1, and at most the number of patients.
        test_from: where the test patients come from.

    Raises:
        ConfigurationError: a field is out of its range.
    """

    silos: int
    test_from: TestFrom = "test"

    def __post_init__(self) -> None:
        _at_least("silos", self.silos, 1)
        _check_test_from(self.test_from)


Setting = PracticalGroups | Pathological | Dirichlet | PooledDirichlet | ByPatient

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
    _at_least("seed", seed, 0)
    return np.random.default_rng([seed, 0x5A4D])


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name} is {value}; give at least {least}")


def _check_alpha(alpha: float) -> None:
    if not 1e-3 <= alpha <= 1e6:
        raise ConfigurationError(f"alpha is {alpha}; give a number from 0.001 to 1,000,000")


def _check_test_from(test_from: str) -> None:
    if test_from not in ("test", "train"):
        raise ConfigurationError(f"test_from is {test_from!r}; give 'test' or 'train'")


def _check_sizes(train_per_silo: int, test_per_silo: int, test_from: str) -> None:
    _at_least("train_per_silo", train_per_silo, 1)
    _at_least("test_per_silo", test_per_silo, 1)
    _check_test_from(test_from)
