"""What page and model card of an evaluation say alike: figures in words, warnings, how figures were made."""

from __future__ import annotations

from medsilo.privacy.pages.blocks import Table
from medsilo.privacy.pages.wording import grouped, listed, number_of
from medsilo.silo.model.evaluation import Evaluation
from medsilo.silo.model.performance import BINS, FEWEST_PATIENTS, RESAMPLES, Share

NOT_MEASURED = "not measured"
FEW_IMAGES = 30
"""Of a class: with fewer, Wilson's interval of a share of a half is more than 33 percentage points wide."""
FEW_PATIENTS = 20
"""With fewer, a patient-clustered bootstrap's intervals come out too narrow."""


def percent(value: float) -> str:
    """``86.4 %``."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def interval(low: float | None, high: float | None) -> str:
    """``80.1 to 90.3 %``; ``none, of so few`` where patients are too few for one."""
    return "none, of so few" if low is None or high is None else f"{100 * low:.1f} to {percent(high)}"


def share(one: Share) -> str:
    """``86.4 % (80.1 to 90.3 %), 259 of 300``."""
    if one.value is None:
        return NOT_MEASURED
    ends = "" if one.low is None else f" ({interval(one.low, one.high)})"
    return f"{percent(one.value)}{ends}, {grouped(one.count)} of {grouped(one.total)}"


def class_table(found: Evaluation) -> Table:
    """A row for each class: images, sensitivity, specificity, AUROC."""
    patients = found.performance.patients is not None
    rows = []
    for name, one in zip(found.class_names, found.performance.classes, strict=True):
        cells = [name, grouped(one.sensitivity.total)]
        if patients:
            cells.append(grouped(one.sensitivity.units))
        for rate in (one.sensitivity, one.specificity):
            known = rate.value is not None
            cells.append(f"{percent(rate.value)}\n({interval(rate.low, rate.high)})" if known else NOT_MEASURED)  # type: ignore[arg-type]
        cells.append(NOT_MEASURED if one.auroc is None else f"{one.auroc:.3f}")
        rows.append(cells)
    columns = ["Class", "Test images", *(["Patients"] if patients else []), "Sensitivity", "Specificity", "AUROC"]
    numbers = list(range(1, len(columns)))
    caption = f"Each class against the rest, with 95 % intervals ({method(found)})"
    return Table(caption, columns, rows, numbers, [3, *[2] * len(numbers)])


def method(found: Evaluation) -> str:
    """What intervals are by."""
    return "Wilson" if found.performance.patients is None else "bootstrap over patients"


def ways(found: Evaluation) -> list[str]:
    """How the figures were made."""
    patients = found.performance.patients
    if patients is None:
        how = (
            "95 % intervals are Wilson's score intervals, which take images to be independent of each other. The file "
            "does not say whose the images are (`test_patients`); if some are of the same patient, the intervals are "
            "too narrow."
        )
    else:
        how = (
            f"95 % intervals are a patient-clustered bootstrap's: {grouped(RESAMPLES)} times, as many patients as "
            "there are were drawn with replacement, each with all images, and the interval goes from the 2.5th to the "
            "97.5th percentile. Images of one patient resemble each other and are not counted as independent. Where "
            "all images behind a share are right, or all wrong, the draws cannot differ: the interval is then "
            f"Wilson's, with each patient counted once. Otherwise, with fewer than {FEWEST_PATIENTS} patients behind a "
            "share, there is no interval."
        )
    return [
        "Sensitivity of a class: the share of its images that the model names so. Specificity: the share of all other "
        "images that it does not name so. The model names the class with the highest probability.",
        "AUROC: how often, of an image of the class and one of another, the first has the higher probability of the "
        "class (one against the rest; 0.5 is chance). The mean is over the classes that were measured, all alike "
        "(macro).",
        f"Expected calibration error (Guo et al. 2017): images are put in {BINS} bins of equal width by the highest "
        "probability; the error is the mean over images of the gap, in an image's bin, between mean probability and "
        "share of right answers. With few images it comes out too large.",
        how,
    ]


def caveats(found: Evaluation) -> list[str]:
    """What makes the figures weaker than they look, besides that images are synthetic."""
    performance, told = found.performance, []
    pairs = list(zip(found.class_names, performance.classes, strict=True))
    if absent := [name for name, one in pairs if not one.sensitivity.total]:
        told.append(f"Not measured, for want of test images: {listed(absent)}.")
    if few := [f"{name} ({one.sensitivity.total})" for name, one in pairs if 0 < one.sensitivity.total < FEW_IMAGES]:
        told.append(
            f"Few test images, so that sensitivities are rough: {listed(few)}; {FEW_IMAGES} or more would be better."
        )
    if performance.patients is not None and performance.patients < FEW_PATIENTS:
        told.append(
            f"Test images of {number_of(performance.patients, 'patient')} only: with fewer than {FEW_PATIENTS}, "
            "intervals come out too narrow."
        )
    overlap = found.overlap
    if overlap.images:
        told.append(
            f"{number_of(overlap.images, 'test image')} also stand among the training images, pixel for pixel: figures "
            "are too good."
        )
    if overlap.patients:
        told.append(
            f"{number_of(overlap.patients, 'test patient')} also have training images: figures may be too good. Cut "
            "the shard by patient."
        )
    if found.changed:
        told.append(
            "The hospital's images have changed since the model was trained: test images of today may have been "
            "training images then."
        )
    return told
