"""The ways in which a data set is cut into hospitals' shards, with their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from medsilo.privacy.errors import ConfigurationError

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
            at_least("groups", silos, 1)
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
        at_least("silos", self.silos, 1)
        at_least("classes_per_silo", self.classes_per_silo, 1)
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
        at_least("silos", self.silos, 1)
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
        at_least("silos", self.silos, 1)
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
        at_least("silos", self.silos, 1)
        _check_test_from(self.test_from)


Setting = PracticalGroups | Pathological | Dirichlet | PooledDirichlet | ByPatient


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name} is {value}; give at least {least}")


def _check_alpha(alpha: float) -> None:
    if not 1e-3 <= alpha <= 1e6:
        raise ConfigurationError(f"alpha is {alpha}; give a number from 0.001 to 1,000,000")


def _check_test_from(test_from: str) -> None:
    if test_from not in ("test", "train"):
        raise ConfigurationError(f"test_from is {test_from!r}; give 'test' or 'train'")


def _check_sizes(train_per_silo: int, test_per_silo: int, test_from: str) -> None:
    at_least("train_per_silo", train_per_silo, 1)
    at_least("test_per_silo", test_per_silo, 1)
    _check_test_from(test_from)
