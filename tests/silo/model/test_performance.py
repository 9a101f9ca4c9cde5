"""The figures that doctors look at, against published examples and formulae of another kind."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from medsilo.silo.model.performance import Share, calibrate, compare, measure, wilson


def certain(said: list[int], classes: int) -> npt.NDArray[np.float64]:
    """Probabilities of a model that says these classes, and is sure of it."""
    return np.eye(classes)[said]


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombes_table(count: int, total: int, low: float, high: float) -> None:
    """Newcombe 1998, Two-sided confidence intervals for the single proportion, Table I, method 3."""
    assert wilson(count, total) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


def test_auroc_is_that_of_hanley_and_mcneil() -> None:
    """Hanley and McNeil 1982, Table I: 109 tomograms rated 1 to 5, area 0.893."""
    normal, abnormal = [33, 6, 6, 11, 2], [3, 2, 2, 11, 33]
    ratings = np.repeat([1, 2, 3, 4, 5] * 2, [*normal, *abnormal]) / 10
    labels = np.repeat([0, 1], [sum(normal), sum(abnormal)]).astype(np.int64)
    found = measure(np.stack([1 - ratings, ratings], axis=1), labels, None)
    assert [one.auroc for one in found.classes] == [pytest.approx(0.893, abs=5e-4)] * 2
    assert found.macro_auroc == pytest.approx(0.893, abs=5e-4)


def test_auroc_is_the_share_of_pairs_that_are_in_order() -> None:
    numbers = np.random.default_rng(3)
    probabilities = numbers.dirichlet(np.ones(4), 60).round(1)  # ties, too
    labels = numbers.integers(0, 4, 60)
    found = measure(probabilities, labels, None)
    for number, one in enumerate(found.classes):
        inside, outside = probabilities[labels == number, number], probabilities[labels != number, number]
        pairs = [(a > b) + 0.5 * (a == b) for a in inside for b in outside]
        assert one.auroc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    known = [one.auroc for one in found.classes if one.auroc is not None]
    assert found.macro_auroc == pytest.approx(sum(known) / 4)


def test_confusion_sensitivity_and_specificity_by_hand() -> None:
    """Rows are the truth. Of class 0: 2 of 3 found, 5 of 7 others left alone."""
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    found = measure(certain([0, 0, 1, 1, 1, 0, 0, 2, 2, 1], 3), labels, None)
    assert found.confusion == ((2, 1, 0), (2, 2, 0), (0, 1, 2))
    assert found.accuracy == Share(6, 10, 10, *wilson(6, 10))
    first = found.classes[0]
    assert first.sensitivity == Share(2, 3, 3, *wilson(2, 3))
    assert first.specificity == Share(5, 7, 7, *wilson(5, 7))
    assert (found.unit, found.patients) == ("image", None)


@pytest.mark.parametrize("patients", [None, np.array(["a", "a", "b", "c", "d"])], ids=["images", "patients"])
def test_a_class_without_test_images_is_not_measured(patients: npt.NDArray[np.str_] | None) -> None:
    found = measure(certain([0, 0, 1, 0, 2], 3), np.array([0, 0, 1, 1, 0]), patients)
    absent = found.classes[2]
    assert (absent.sensitivity.value, absent.sensitivity.low, absent.auroc) == (None, None, None)
    assert absent.specificity.value == pytest.approx(0.8)
    assert found.confusion[2] == (0, 0, 0)
    of_two = [one.auroc for one in found.classes[:2]]
    assert found.macro_auroc == pytest.approx(sum(value for value in of_two if value is not None) / 2)
    only = measure(certain([0, 1], 2), np.array([0, 0]), None if patients is None else patients[:2])
    assert (only.macro_auroc, only.classes[0].auroc, only.classes[0].specificity.value) == (None, None, None)


def test_calibration_error_by_hand() -> None:
    """0.95 sure and 8 of 10 right; 0.65 sure and 6 of 10 right: (0.15 + 0.05) / 2."""
    sure = np.repeat([0.95, 0.65], 10)
    labels = np.array([0] * 8 + [1] * 2 + [0] * 6 + [1] * 4)
    found = calibrate(np.stack([sure, 1 - sure], axis=1), labels)
    assert found.error == pytest.approx(0.1)
    assert len(found.bins) == 15
    full = {(round(one.low, 3), one.count, one.accuracy) for one in found.bins if one.count}
    assert full == {(0.933, 10, 0.8), (0.6, 10, 0.6)}
    assert all(one.confidence is one.accuracy is None for one in found.bins if not one.count)


def test_a_bin_holds_its_upper_edge() -> None:
    """Guo et al. 2017: B_m is ((m - 1) / M, m / M]."""
    found = calibrate(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([0, 0]), bins=10)
    assert [number for number, one in enumerate(found.bins) if one.count] == [4, 9]


def ratio_interval(hits: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The ratio estimator's, linearised (Cochran, Sampling Techniques, 1977, equation 6.13), with a normal quantile."""
    share, count = hits.sum() / sizes.sum(), len(sizes)
    error = math.sqrt(count / (count - 1) * float(((hits - share * sizes) ** 2).sum())) / sizes.sum()
    return share - 1.959964 * error, share + 1.959964 * error


def of_patients(seed: int, count: int) -> tuple[npt.NDArray[np.int64], list[int], npt.NDArray[np.str_]]:
    """Labels, answers and patients: each patient with a number of images and an ease of their own."""
    numbers = np.random.default_rng(seed)
    owners = np.repeat(np.arange(count), numbers.integers(2, 12, count))
    ease = numbers.beta(4, 2, count)[owners]
    labels = numbers.integers(0, 2, len(owners))
    said = np.where(numbers.random(len(owners)) < ease, labels, 1 - labels)
    return labels, said.tolist(), np.array([f"patient {owner}" for owner in owners])


def test_the_patients_bootstrap_agrees_with_the_ratio_estimators_formula() -> None:
    labels, said, patients = of_patients(5, 150)
    found = measure(certain(said, 2), labels, patients)
    names = np.unique(patients)
    right = np.array([((patients == n) & (labels == said)).sum() for n in names], float)
    sizes = np.array([(patients == n).sum() for n in names], float)
    low, high = ratio_interval(right, sizes)
    assert found.accuracy.low == pytest.approx(low, abs=0.006)
    assert found.accuracy.high == pytest.approx(high, abs=0.006)
    assert found.accuracy.units == found.patients == 150
    assert found.accuracy.low is not None
    assert found.accuracy.high is not None
    naive = wilson(found.accuracy.count, found.accuracy.total)
    assert found.accuracy.high - found.accuracy.low > 1.2 * (naive[1] - naive[0])


def test_a_patients_image_counted_twice_narrows_no_interval() -> None:
    labels, said, patients = of_patients(7, 40)
    once = measure(certain(said, 2), labels, patients)
    twice = measure(certain([*said, *said], 2), np.tile(labels, 2), np.tile(patients, 2))
    for one, other in zip(once.classes, twice.classes, strict=True):
        assert (one.sensitivity.low, one.sensitivity.high) == pytest.approx(
            (other.sensitivity.low, other.sensitivity.high)
        )


def test_where_all_are_right_each_patient_counts_once() -> None:
    labels = np.repeat([0, 1], 50)
    patients = np.array([f"patient {number // 5}" for number in range(100)])
    found = measure(certain(labels.tolist(), 2), labels, patients)
    assert found.classes[0].sensitivity == Share(50, 50, 10, *wilson(10, 10))


def test_of_four_patients_there_is_no_interval() -> None:
    labels = np.zeros(20, np.int64)
    patients = np.array([f"patient {number // 5}" for number in range(20)])
    found = measure(certain([0] * 13 + [1] * 7, 2), labels, patients)
    assert (found.accuracy.low, found.accuracy.high, found.accuracy.value) == (None, None, 0.65)


def test_the_difference_of_two_models_is_of_the_same_images() -> None:
    """30 images better, 10 worse of 200: +0.1; its standard error as of paired proportions, 0.0304 (Agresti,
    Categorical Data Analysis, 2002, section 10.1)."""
    before = np.array([True] * 60 + [False] * 140)
    after = np.array([True] * 50 + [False] * 10 + [True] * 30 + [False] * 110)
    found = compare(after, before, None)
    assert (found.better, found.worse, found.value) == (30, 10, pytest.approx(0.1))
    error = math.sqrt(40 - 20**2 / 200) / 200
    assert (found.low, found.high) == pytest.approx((0.1 - 1.96 * error, 0.1 + 1.96 * error), abs=0.008)
    same = compare(after, after, None)
    assert (same.value, same.low, same.high) == (0.0, None, None)


def test_the_same_images_give_the_same_intervals() -> None:
    labels, said, patients = of_patients(9, 30)
    assert measure(certain(said, 2), labels, patients) == measure(certain(said, 2), labels, patients)


def test_figures_of_nothing_or_of_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        measure(np.zeros((0, 2)), np.zeros(0, np.int64), None)
    with pytest.raises(ValueError, match="finite"):
        measure(np.full((1, 2), np.nan), np.zeros(1, np.int64), None)
