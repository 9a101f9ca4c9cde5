"""Accuracies under differential privacy: how far one unit moves a count, and when none may leave."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.privacy.budget.accounting import DiscreteLaplace, Event
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import MetricsPlan
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.errors import BudgetError, DataError
from medsilo.silo.training.private_count import PrivateCounts, held_out_owners
from tests.support.hospital.local_training import dataset

PLAN = MetricsPlan(epsilon=0.5, releases=4)
PATIENTS = [0, 0, 0, 0, 1, 1, 2, 2, 2]


class First(NoiseSource):
    """Always draws the same image of a patient, and makes no noise."""

    def shuffled(self, count: int) -> npt.NDArray[np.int64]:
        return np.arange(count, dtype=np.int64)

    def discrete_laplace(self, epsilon: float) -> int:
        return 0


def free(*_: object) -> Paid:
    return unsealed()


def shard(train: list[str] | None = None, test: list[str] | None = None, *, same: bool = False) -> ImageDataset:
    base = dataset(train=6, test=6)

    def with_patients(split: ImageSplit, patients: list[str] | None) -> ImageSplit:
        return ImageSplit(split.images, split.labels, None if patients is None else np.array(patients))

    first = with_patients(base.train, train)
    images = base.train.images if same else base.test.images[:6]
    second = with_patients(ImageSplit(images, base.train.labels), test)
    return ImageDataset("h", "shard.npz", True, base.class_names, first, None, second)


@pytest.mark.parametrize("owners", [list(range(9)), PATIENTS], ids=["image", "patient"])
def test_no_unit_moves_the_count_by_more_than_one(owners: list[int]) -> None:
    """Whatever the answers, blanking a unit (all its answers are wrong) moves the count by at most 1."""
    owner = np.array(owners)
    counts = PrivateCounts(PLAN, owner, free, noise=First())
    moved = set()
    for seed in range(50):
        right = np.random.default_rng(seed).random(9) < 0.7
        for unit in range(max(owners) + 1):
            blanked = np.where(owner == unit, False, right)
            moved.add(counts.count(right, First()) - counts.count(blanked, First()))
    assert moved == {0, 1}


def test_the_accuracy_is_the_noised_share_of_units_within_its_range() -> None:
    class Shifted(First):
        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

        def discrete_laplace(self, epsilon: float) -> int:
            assert epsilon == 0.5
            return self.by

    right = np.array([True] * 4 + [False] * 5)
    for by, expected in ((0, 4 / 9), (2, 6 / 9), (-9, 0.0), (99, 1.0)):
        assert PrivateCounts(PLAN, np.arange(9), free, noise=Shifted(by)).accuracy(right, round_number=0) == expected
    assert PrivateCounts(PLAN, np.array(PATIENTS), free, noise=Shifted(0)).accuracy(right, round_number=0) == 1 / 3


def test_every_release_is_charged_before_noise_is_drawn_and_the_account_may_refuse() -> None:
    charged: list[tuple[int, str, Event]] = []

    class Watched(First):
        def discrete_laplace(self, epsilon: float) -> int:
            assert charged
            return 0

    def charge(*what: object) -> Paid:
        charged.append(what[:3])  # type: ignore[arg-type]
        return unsealed()

    PrivateCounts(PLAN, np.arange(9), charge, noise=Watched()).accuracy(np.ones(9, dtype=np.bool_), round_number=3)
    assert charged == [(3, "accuracy", DiscreteLaplace(0.5))]

    class Never(First):
        def discrete_laplace(self, epsilon: float) -> int:
            raise AssertionError("nothing is drawn without a charge")

    def refuse(*_: object) -> Paid:
        raise BudgetError("nothing left")

    with pytest.raises(BudgetError):
        PrivateCounts(PLAN, np.arange(9), refuse, noise=Never()).accuracy(np.ones(9, dtype=np.bool_), round_number=0)


def test_two_accuracies_of_one_model_have_noise_of_their_own() -> None:
    counts = PrivateCounts(MetricsPlan(epsilon=0.001, releases=9), np.arange(10_000), free)
    right = np.arange(10_000) % 2 == 0
    found = {counts.accuracy(right, round_number=0) for _ in range(5)}
    assert len(found) > 1


@pytest.mark.parametrize("unit", ["image", "patient"])
def test_patients_in_both_splits_are_refused(unit: str) -> None:
    apart = shard(list("aabbcc"), list("ddeeff"))
    expected = list(range(6)) if unit == "image" else [0, 0, 1, 1, 2, 2]
    assert held_out_owners(apart, unit).tolist() == expected  # type: ignore[arg-type]
    with pytest.raises(DataError, match="1 patients are in the training and in the test split"):
        held_out_owners(shard(list("aabbcc"), list("cdeeff")), unit)  # type: ignore[arg-type]


def test_images_in_both_splits_are_refused_where_nobody_says_whose_they_are() -> None:
    with pytest.raises(DataError, match="6 images are in the training and in the test split"):
        held_out_owners(shard(same=True), "image")
    with pytest.raises(DataError, match="test_patients"):
        held_out_owners(shard(list("aabbcc")), "patient")
