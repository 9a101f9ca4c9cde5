"""An evaluation as a page for doctors, as JSON, and as a model card beside the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.pages.blocks import Answered, Block, Document, Paragraph, Picture, Section, Table, Terms, harmless
from medsilo.privacy.pages.page import page
from medsilo.privacy.pages.wording import grouped, listed, number_of
from medsilo.silo.model.evaluation import KINDS, Evaluation, Sample
from medsilo.silo.model.kept_models import why_untrained
from medsilo.silo.model.model_card import NO_DEVICE, as_markdown, model_card
from medsilo.silo.model.performance import ClassPerformance, Difference
from medsilo.silo.model.pictures import pairs, reliability, whereabouts
from medsilo.silo.model.words import NOT_MEASURED, caveats, class_table, interval, percent, share, ways
from medsilo.silo.state.config import SiloConfig

CARD = "model-card.md"
_MOST_CLASSES = 20
_MOST_MIXED_UP = 30


def write_page(found: Evaluation, config: SiloConfig) -> list[Path]:
    """Writes ``STATE/evaluation/RUN.html``, beside it ``RUN.json``, and the model card beside the model; all for the
    silo's own user only. Returns their paths."""
    folder = config.state / "evaluation"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{found.plan.run}.html"
    card = config.runs / found.plan.run / CARD
    write_atomically(path, page(make_document(found)), mode=0o600)
    write_atomically(path.with_suffix(".json"), json.dumps(as_json(found), indent=2).encode(), mode=0o600)
    write_atomically(card, as_markdown(found).encode(), mode=0o600)
    return [path, path.with_suffix(".json"), card]


def make_document(found: Evaluation) -> Document:
    """An evaluation in words."""
    plan, performance = found.plan, found.performance
    of = "own test images" if found.own else f"the test images in {found.test}"
    samples = [Section("images", "Images, and what in them counted", _images(found))] if found.samples else []
    return harmless(
        Document(
            title=f"What {found.silo}'s model can and cannot do",
            subtitle=f"The personalised model of run {plan.run} ({plan.method.name}, "
            f"{number_of(found.model.rounds, 'round')} trained) on {of}, made on this machine on "
            f"{found.made:%Y-%m-%d %H:%M UTC}. Nothing was sent.",
            warnings=_warnings(found),
            answers=[_right(found), _missed(found), _sure(found), _compared(found), _patients(), _sent()],
            sections=[
                Section("classes", "Class by class", [class_table(found), *_confusion(found)]),
                Section("calibration", "Are its probabilities right?", _calibration(found)),
                Section("comparison", "Compared with before", _comparison(found)),
                *samples,
                Section("how", "How the figures were made", [Paragraph(text) for text in ways(found)]),
                Section("card", "Model card", model_card(found)),
                Section("words", "Words used here", [Terms(_TERMS)]),
            ],
            evidence=f"Made from {number_of(performance.images, 'test image')} and the model with the SHA-256 "
            f"`{found.model_sha256}`. It stays here: no connection was opened, and it is in no message and no journal.",
        )
    )


def as_json(found: Evaluation) -> dict[str, Any]:
    """An evaluation for machines; ``docs/evaluation.md`` describes it. What was not measured is null."""
    performance = found.performance
    compared = found.compared
    return {
        "silo": found.silo,
        "federation": found.plan.federation,
        "run": found.plan.run,
        "method": found.plan.method.name,
        "rounds": found.model.rounds,
        "which": found.model.which,
        "trained": found.model.trained,
        "end": found.model.end,
        "plan_sha256": found.plan.sha256.hex(),
        "model_sha256": found.model_sha256,
        "made": found.made.isoformat(),
        "test": found.test,
        "own": found.own,
        "synthetic": found.synthetic,
        "images": performance.images,
        "patients": performance.patients,
        "intervals": "Wilson" if performance.patients is None else "patient-clustered bootstrap",
        "accuracy": _with_value(performance.accuracy),
        "macro_auroc": performance.macro_auroc,
        "classes": [_class(name, one) for name, one in zip(found.class_names, performance.classes, strict=True)],
        "confusion": [list(row) for row in performance.confusion],
        "calibration": asdict(performance.calibration),
        "compared": None
        if compared is None
        else {
            "run": compared.run,
            "method": compared.method,
            "accuracy": _with_value(compared.performance.accuracy),
            "macro_auroc": compared.performance.macro_auroc,
            "difference": asdict(compared.difference),
        },
        "overlap": asdict(found.overlap),
        "warnings": _warnings(found),
        "saliency_layer": None if found.layer is None else found.layer[0],
        "samples": [_sample(one) for one in found.samples],
    }


def _with_value(one: Any) -> dict[str, Any]:
    return {"value": one.value, **asdict(one)}


def _class(name: str, one: ClassPerformance) -> dict[str, Any]:
    return {
        "name": name,
        "sensitivity": _with_value(one.sensitivity),
        "specificity": _with_value(one.specificity),
        "auroc": one.auroc,
    }


def _sample(one: Sample) -> dict[str, Any]:
    place = None if one.saliency is None else whereabouts(one.saliency)
    named = {"kind": one.kind, "image": one.number, "truth": one.truth, "said": one.said}
    return {**named, "probability": one.probability, "counted_most": place}


def _warnings(found: Evaluation) -> list[str]:
    warnings = []
    if found.synthetic:
        warnings.append("Synthetic images, generated by a program: these figures say nothing about patients.")
    if not found.model.trained:
        warnings.append(f"This model was not trained: {why_untrained(found.model)}.")
    elif found.model.end:
        warnings.append(f"The run {found.model.end}.")
    elif not found.ended or found.model.rounds < found.plan.training_rounds:
        unfinished = "" if found.ended else "The run has not ended here: "
        warnings.append(
            f"{unfinished}{'t' if unfinished else 'T'}his is the model after {found.model.rounds} of "
            f"{number_of(found.plan.training_rounds, 'round')}."
        )
    warnings += caveats(found)
    if found.samples and not found.synthetic:
        warnings.append("This page holds images of patients. It is for this hospital's eyes only.")
    return warnings


def _right(found: Evaluation) -> Answered:
    performance = found.performance
    accuracy = performance.accuracy
    assert accuracy.value is not None
    of = f"{grouped(performance.images)} image{'' if performance.images == 1 else 's'}"
    if performance.patients is not None:
        of += f" of {number_of(performance.patients, 'patient')}"
    ends = interval(accuracy.low, accuracy.high)
    commonest = max(sum(row) for row in performance.confusion) / performance.images
    return Answered(
        "How often is the model right?",
        f"{percent(accuracy.value)} of the time, on these images",
        [
            f"It was right on {grouped(accuracy.count)} of {of} (95 % interval: {ends}).",
            f"Naming the commonest class every time would have been right on {percent(commonest)}.",
        ],
    )


def _missed(found: Evaluation) -> Answered:
    named = zip(found.class_names, found.performance.classes, strict=True)
    measured = [(one.sensitivity.value, name, one) for name, one in named if one.sensitivity.value is not None]
    measured.sort(key=lambda one: one[0])
    value, name, _ = measured[0]
    points = [f"{name}: {share(one.sensitivity)}" for _, name, one in measured[:3]]
    verdict = f"Most often {name}" if value < 1 else "None of those in the test images"
    return Answered(
        "Which findings does it miss?",
        verdict,
        ["The share of a class's images that it names rightly (sensitivity); the lowest come first."],
        points=points,
    )


def _sure(found: Evaluation) -> Answered:
    calibration = found.performance.calibration
    mean = sum(one.count * one.confidence for one in calibration.bins if one.confidence is not None)
    gap = mean / found.performance.images - (found.performance.accuracy.value or 0.0)
    way = "surer of itself than it is right" if gap > 0 else "less sure of itself than it is right"
    return Answered(
        "Can its probabilities be taken at their word?",
        f"They are off by {100 * calibration.error:.1f} percentage points on average",
        [
            f"On the whole it is {way}: its probabilities are on average {100 * abs(gap):.1f} percentage points "
            f"{'higher' if gap > 0 else 'lower'} than the share of right answers.",
        ],
    )


def _compared(found: Evaluation) -> Answered:
    compared = found.compared
    if compared is None:
        question = "Is it better than before?"
        return Answered(question, "Not known", [f"{found.not_compared}.", _SEPARATE])
    difference, accuracy = compared.difference, compared.performance.accuracy
    assert accuracy.value is not None
    if compared.run is None:
        question, other = "Has training helped?", "the starting model, before any training,"
    elif compared.method == "local":
        question, other = "Has working together helped?", f"this hospital's training alone (run {compared.run})"
    else:
        question = f"Is it better than the model of run {compared.run}?"
        other = f"that model ({compared.method})"
    by = f"{100 * abs(difference.value):.1f} percentage points"
    if difference.low is not None and difference.low > 0:
        verdict = f"Yes, by {by}"
    elif difference.high is not None and difference.high < 0:
        verdict = f"No, it is worse by {by}"
    else:
        verdict = "These images cannot tell"
    return Answered(
        question,
        verdict,
        [
            f"On the same images {other} is right on {share(accuracy)}.",
            f"Of all images, {grouped(difference.better)} are right now that were wrong there, and "
            f"{grouped(difference.worse)} the other way round (95 % interval of the difference: "
            f"{_points(found, difference)}).",
            *([_SEPARATE] if compared.run is None else []),
        ],
    )


_SEPARATE = (
    "What working together has brought can be told by a run of the method `local`, this hospital's training alone: "
    "it is then compared."
)


def _points(found: Evaluation, difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        judged_otherwise = difference.better or difference.worse
        return f"none, of so few {found.performance.unit}s" if judged_otherwise else "none, as nothing differs"
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f} percentage points"


def _patients() -> Answered:
    return Answered("May it be used on patients?", "No", [NO_DEVICE], "attention")


def _sent() -> Answered:
    return Answered(
        "Did anything leave the building?", "Nothing", ["This was done on this machine, without a connection."], "good"
    )


def _confusion(found: Evaluation) -> list[Block]:
    names, table = found.class_names, found.performance.confusion
    if len(names) > _MOST_CLASSES:
        mixed = sorted(
            (
                (count, row, column)
                for row, line in enumerate(table)
                for column, count in enumerate(line)
                if row != column
            ),
            key=lambda one: (-one[0], one[1:]),
        )[:_MOST_MIXED_UP]
        rows = [[names[row], names[column], grouped(count)] for count, row, column in mixed if count]
        return [Table("What is mixed up most", ["It is", "The model says", "Images"], rows, [2], [2, 2, 1])]
    rows = [
        [name, *(grouped(count) if any(line) else "–" for count in line)]
        for name, line in zip(names, table, strict=True)
    ]
    numbers = list(range(1, len(names) + 1))
    return [
        Table(
            "Confusion matrix: what it is (rows) and what the model says (columns), in images",
            ["It is ↓, model says →", *names],
            rows,
            numbers,
            [3, *[1] * len(numbers)],
        ),
        Paragraph("A row of dashes: the test images hold none of this class."),
    ]


def _calibration(found: Evaluation) -> list[Block]:
    calibration = found.performance.calibration
    title = (
        f"Reliability diagram: {number_of(found.performance.images, 'image')} in {len(calibration.bins)} bins by how "
        f"sure the model is; expected calibration error {percent(calibration.error)}"
    )
    rows = [
        [
            f"{percent(one.low)} to {percent(one.high)}",
            grouped(one.count),
            percent(one.confidence),
            percent(one.accuracy),
        ]
        for one in calibration.bins
        if one.confidence is not None and one.accuracy is not None
    ]
    return [
        Picture(reliability(calibration, title=title), title),
        Table(
            "Bins that hold images",
            ["How sure", "Images", "How sure on average", "How often right"],
            rows,
            [1, 2, 3],
            [2, 1, 1, 1],
        ),
    ]


def _comparison(found: Evaluation) -> list[Block]:
    compared = found.compared
    if compared is None:
        return [Paragraph(f"{found.not_compared}.")]
    other = "starting model" if compared.run is None else f"run {compared.run} ({compared.method})"
    rows = []
    for name, one in (
        (other, compared.performance),
        (f"run {found.plan.run} ({found.plan.method.name})", found.performance),
    ):
        auroc = NOT_MEASURED if one.macro_auroc is None else f"{one.macro_auroc:.3f}"
        rows.append([name, share(one.accuracy), auroc, percent(one.calibration.error)])
    return [
        Table(
            "The same test images, two models",
            ["Model", "Right", "AUROC, mean", "Calibration error"],
            rows,
            [1, 2, 3],
            [3, 3, 1, 1],
        ),
        Paragraph(
            f"Difference in the share of right images: {100 * compared.difference.value:+.1f} percentage points (95 % "
            f"interval, bootstrap over {found.performance.unit}s: "
            f"{_points(found, compared.difference)})."
        ),
    ]


def _images(found: Evaluation) -> list[Block]:
    if found.layer is None:
        explained = (
            "What in an image counted cannot be shown: this model has no layer that keeps a place for each part of the "
            "image."
        )
    else:
        name, (height, width) = found.layer
        explained = (
            "Beside each image stands the same image, faded where nothing spoke for the model's answer (Grad-CAM, "
            f"Selvaraju et al. 2017, of the layer `{name}`, which sees the image as {height} × {width} places; finer "
            "detail means nothing). It shows where the model looked, not that it was right to look there."
        )
    blocks: list[Block] = [Paragraph(explained)]
    for number, kind in enumerate(KINDS):
        if samples := [one for one in found.samples if one.kind == kind]:
            title = f"The model is {kind}: {_listed_images(samples, found.class_names)}"
            blocks.append(Paragraph(f"The model is {kind}:"))
            blocks.append(Picture(pairs(samples, found.class_names, identifier=f"images-{number}", title=title), title))
    rows = [
        [
            str(one.number),
            one.kind,
            found.class_names[one.truth],
            found.class_names[one.said],
            percent(one.probability),
            "–" if one.saliency is None else whereabouts(one.saliency),
        ]
        for one in found.samples
    ]
    columns = ["Image", "The model is", "It is", "It says", "How sure", "Counted most"]
    blocks.append(
        Table(
            "The same images in words (counted from 0, as `silo predict` does)", columns, rows, [4], [1, 2, 2, 2, 1, 2]
        )
    )
    return blocks


def _listed_images(samples: Sequence[Sample], names: Sequence[str]) -> str:
    return listed([f"image {one.number} is {names[one.truth]}, it says {names[one.said]}" for one in samples])


_TERMS = [
    ("AUROC", "area under the receiver operating characteristic; see how the figures were made."),
    ("calibration", "whether of all answers given with 80 % probability, 80 % are right."),
    ("interval", "in 19 of 20 such evaluations it holds the true figure for images of this kind."),
    ("personalised model", "the model that this hospital has after the run; other hospitals have others."),
    ("sensitivity", "of the images that show a finding, the share in which the model names it."),
    ("specificity", "of the images that do not show it, the share in which the model does not name it."),
    ("synthetic", "made by a program; showing no patient."),
]
