"""How well a classifier does on labelled images: shares with intervals, ranking, calibration; nothing but figures.

Sensitivity and specificity are one class against the rest. Their 95 % intervals are Wilson's (Wilson 1927; Brown, Cai
and DasGupta 2001) where nobody knows whose the images are, and each counts as independent. Where patients are known
they are a patient-clustered bootstrap's (Field and Welsh 2007): patients are drawn with replacement, each with all
images, and the interval goes from the 2.5th to the 97.5th percentile of the share. If all images behind a share are
right, or all wrong, every draw says the same; the interval is then Wilson's for as many observations as there are
patients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix, roc_auc_score

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Unit = Literal["image", "patient"]

CONFIDENCE = 0.95
RESAMPLES = 2000
BINS = 15
FEWEST_PATIENTS = 5
"""With fewer patients behind a share no interval is given: so few say nothing of how patients differ."""

_SEED = 1
_DRAWS_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class Share:
    """``count`` of ``total`` images; ``low`` to ``high`` is the interval. None is what was not measured.

    ``units``: the patients (or images) behind it.
    """

    count: int
    total: int
    units: int
    low: float | None
    high: float | None

    @property
    def value(self) -> float | None:
        """The share, in [0, 1]."""
        return self.count / self.total if self.total else None


@dataclass(frozen=True)
class ClassPerformance:
    """One class against the rest. ``auroc``: the probability that an image of the class has a higher probability of
    it than an image of another; None where the test images have no image of the class, or no other."""

    sensitivity: Share
    specificity: Share
    auroc: float | None


@dataclass(frozen=True)
class Bin:
    """The images whose highest probability lies in (``low``, ``high``]: how many, its mean, the share that is right.
    None where there are none."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Calibration:
    """The expected calibration error of Guo et al. 2017 (equation 3): the mean, over images, of the gap between
    confidence and accuracy in an image's bin."""

    bins: tuple[Bin, ...]
    error: float


@dataclass(frozen=True)
class Performance:
    """What ``measure`` finds.

    Attributes:
        images: test images.
        patients: whose they are; None where nobody knows.
        confusion: ``[C][C]``, rows the truth, columns what the model says.
        accuracy: the share of images that are right.
        classes: C of them.
        macro_auroc: the mean of the classes' that were measured.
    """

    images: int
    patients: int | None
    confusion: tuple[tuple[int, ...], ...]
    accuracy: Share
    classes: tuple[ClassPerformance, ...]
    macro_auroc: float | None
    calibration: Calibration

    @property
    def unit(self) -> Unit:
        """What is taken to be independent."""
        return "image" if self.patients is None else "patient"


@dataclass(frozen=True)
class Difference:
    """By how much a share of right images rose. The interval is a percentile bootstrap's over units, of the same
    images before and after; None where no image is judged otherwise, or units are too few."""

    value: float
    low: float | None
    high: float | None
    better: int
    worse: int


def measure(probabilities: Floats, labels: Labels, patients: npt.NDArray[np.str_] | None) -> Performance:
    """``probabilities``: float64 [n, C], rows that add up to 1; ``labels``: int64 [n]; ``patients``: str [n].

    Raises ``ValueError`` for arrays that do not fit each other, are empty or not finite.
    """
    count, classes = probabilities.shape
    if not count or labels.shape != (count,) or (patients is not None and patients.shape != (count,)):
        raise ValueError("probabilities, labels and patients should be of the same images, at least one")
    if not np.isfinite(probabilities).all() or int(labels.max()) >= classes:
        raise ValueError("probabilities should be finite, and there should be one for each label")
    said = probabilities.argmax(axis=1)
    owners = _numbered(patients)
    truth, answer = labels[:, None] == np.arange(classes), said[:, None] == np.arange(classes)
    sensitivities = _shares(truth & answer, truth, owners)
    specificities = _shares(~truth & ~answer, ~truth, owners)
    right = (said == labels)[:, None]
    ranked = [_auroc(truth[:, number], probabilities[:, number]) for number in range(classes)]
    known = [value for value in ranked if value is not None]
    table = confusion_matrix(labels, said, labels=np.arange(classes))
    return Performance(
        images=count,
        patients=None if owners is None else int(owners.max()) + 1,
        confusion=tuple(tuple(int(cell) for cell in row) for row in table),
        accuracy=_shares(right, np.ones_like(right), owners)[0],
        classes=tuple(map(ClassPerformance, sensitivities, specificities, ranked)),
        macro_auroc=float(np.mean(known)) if known else None,
        calibration=calibrate(probabilities, labels),
    )


def calibrate(probabilities: Floats, labels: Labels, *, bins: int = BINS) -> Calibration:
    """The reliability diagram's ``bins`` bins of equal width, each without its lower edge, and their error."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    places = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    found = []
    for number in range(bins):
        inside = places == number
        some = bool(inside.any())
        found.append(
            Bin(
                low=float(edges[number]),
                high=float(edges[number + 1]),
                count=int(inside.sum()),
                confidence=float(confidence[inside].mean()) if some else None,
                accuracy=float(right[inside].mean()) if some else None,
            )
        )
    gaps = [one.count * abs(one.confidence - one.accuracy) for one in found if one.confidence is not None
            and one.accuracy is not None]  # fmt: skip
    return Calibration(tuple(found), float(sum(gaps) / len(labels)))


def compare(
    after: npt.NDArray[np.bool_], before: npt.NDArray[np.bool_], patients: npt.NDArray[np.str_] | None
) -> Difference:
    """``after``, ``before``: bool [n], which of the same images two models get right."""
    change = after.astype(np.float64) - before.astype(np.float64)
    owners = _numbered(patients)
    units = np.arange(len(change)) if owners is None else owners
    low = high = None
    if change.any() and int(units.max()) + 1 >= FEWEST_PATIENTS:
        total = np.ones((len(change), 1))
        ((low, high),) = _percentiles(_by_unit(change[:, None], units), _by_unit(total, units))
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    return Difference(float(change.mean()), low, high, better, worse)


def wilson(count: int, total: int) -> tuple[float, float]:
    """Wilson's interval (without continuity correction) for ``count`` of ``total`` independent observations."""
    interval = binomtest(count, total).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def _numbered(patients: npt.NDArray[np.str_] | None) -> Labels | None:
    return None if patients is None else np.unique(patients, return_inverse=True)[1].astype(np.int64)


def _auroc(truth: npt.NDArray[np.bool_], scores: Floats) -> float | None:
    return float(roc_auc_score(truth, scores)) if truth.any() and not truth.all() else None


def _shares(hits: npt.NDArray[np.bool_], among: npt.NDArray[np.bool_], owners: Labels | None) -> list[Share]:
    """For each column of bool [n, K] the share of ``among`` that are ``hits``."""
    counts, totals = hits.sum(axis=0).tolist(), among.sum(axis=0).tolist()
    if owners is None:
        return [
            Share(count, total, total, *(wilson(count, total) if total else (None, None)))
            for count, total in zip(counts, totals, strict=True)
        ]
    of_units, all_of_units = _by_unit(hits, owners), _by_unit(among, owners)
    intervals = _percentiles(of_units, all_of_units)
    shares = []
    for number, (count, total) in enumerate(zip(counts, totals, strict=True)):
        units = int((all_of_units[:, number] > 0).sum())
        low: float | None
        high: float | None
        if not total or (units < FEWEST_PATIENTS and 0 < count < total):
            low = high = None
        elif count in (0, total):
            low, high = wilson(units if count else 0, units)
        else:
            low, high = intervals[number]
        shares.append(Share(count, total, units, low, high))
    return shares


def _by_unit(values: npt.NDArray[np.generic], owners: Labels) -> Floats:
    sums = np.zeros((int(owners.max()) + 1, values.shape[1]))
    np.add.at(sums, owners, values.astype(np.float64))
    return sums


def _percentiles(hits: Floats, among: Floats) -> list[tuple[float, float]]:
    """For each column of float64 [U, K] the interval of the share over draws of U units; draws in which there is
    nothing to be shared are left out."""
    drawn = [(weights @ hits, weights @ among) for weights in _draws(len(hits))]
    above, below = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    edges = [100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2]
    intervals = []
    for number in range(hits.shape[1]):
        some = below[:, number] > 0
        ends = np.percentile(above[some, number] / below[some, number], edges) if some.any() else (np.nan, np.nan)
        intervals.append((float(ends[0]), float(ends[1])))
    return intervals


def _draws(units: int) -> Iterator[Floats]:
    """``RESAMPLES`` rows, a few at a time, of how often each unit is drawn; the same each time."""
    generator = np.random.default_rng(_SEED)
    at_a_time = max(1, min(RESAMPLES, _DRAWS_AT_A_TIME // units))
    for start in range(0, RESAMPLES, at_a_time):
        rows = min(at_a_time, RESAMPLES - start)
        yield generator.multinomial(units, np.full(units, 1 / units), size=rows).astype(np.float64)
