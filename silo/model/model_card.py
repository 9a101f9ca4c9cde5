"""A hospital's model card (Mitchell et al., Model Cards for Model Reporting, 2019, section 4)."""

from __future__ import annotations

from html import escape
from importlib.metadata import version

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.pages.blocks import Block, Heading, Paragraph, Table, harmless
from medsilo.privacy.pages.wording import grouped, listed, number_of
from medsilo.silo.model.evaluation import Evaluation
from medsilo.silo.model.kept_models import KeptModel
from medsilo.silo.model.words import NOT_MEASURED, caveats, class_table, percent, share, ways

NO_DEVICE = (
    "It is not a medical device: no authority has cleared it, nobody has tested it in clinical use, and no decision "
    "about a patient may rest on it."
)


def model_card(found: Evaluation) -> list[Block]:
    """The card's nine parts, each below a heading."""
    parts: list[tuple[str, list[Block]]] = [
        ("Model details", _details(found)),
        ("Intended use", _use(found)),
        ("Factors", _factors(found)),
        ("Metrics", [Paragraph(text) for text in ways(found)]),
        ("Evaluation data", _evaluation_data(found)),
        ("Training data", _training_data(found)),
        ("Quantitative analyses", _analyses(found)),
        ("Ethical considerations", _ethics(found)),
        ("Caveats and recommendations", _caveats(found)),
    ]
    return [block for title, blocks in parts for block in (Heading(title), *blocks)]


def as_markdown(found: Evaluation) -> str:
    """The card as the file beside the model."""
    lines = [f"# Model card: {found.silo}'s model of run {found.plan.run}", ""]
    for block in harmless(model_card(found)):
        if isinstance(block, Heading):
            lines += [f"## {block.text}", ""]
        elif isinstance(block, Paragraph):
            lines += [_plain(block.text), ""]
        elif isinstance(block, Table):
            rows = [block.columns, ["---:" if n in block.numbers else "---" for n in range(len(block.columns))]]
            lines += [_plain(block.caption), ""]
            lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in (*rows, *block.rows)]
            lines += [""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    return escape(text, quote=False)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _details(found: Evaluation) -> list[Block]:
    plan = found.plan
    channels, height, width = plan.model.input_shape
    texts = [
        f"The personalised model of {found.silo} in the federation {plan.federation}, run {plan.run}. Architecture "
        f"{plan.model.name}; it takes images of {width} × {height} pixels with {number_of(channels, 'channel')} and "
        f"gives a probability for each of {len(found.class_names)} classes: {listed(list(found.class_names))}.",
        f"Trained by the method {plan.method.name}, for {grouped(found.model.rounds)} of "
        f"{number_of(plan.training_rounds, 'round')}, {number_of(plan.training.epochs, 'epoch')} each, with "
        f"{plan.training.optimizer} at a learning rate of {plan.training.learning_rate:g}.{_outcome(found.model)}",
        f"File: `{found.model.path.name}`, SHA-256 `{found.model_sha256}`. Plan: `{plan.sha256.hex()}`. Card made on "
        f"{found.made:%Y-%m-%d %H:%M} UTC by Medsilo {version('medsilo')}.",
    ]
    return [Paragraph(text) for text in texts]


def _outcome(model: KeptModel) -> str:
    """What else there is to say of the rounds behind it."""
    end = f" The run {model.end}." if model.end else ""
    untrained = "" if model.trained else f" It is NOT trained{'' if model.end else ': no round of the run is in it'}."
    best = " Of the run's rounds the one that did best on the hospital's validation images." * ("best" in model.which)
    return f"{untrained}{end}{best}"


def _use(found: Evaluation) -> list[Block]:
    return [
        Paragraph(
            f"Research on how images of the kind that {found.silo} trained on fall into these classes, within this "
            "hospital."
        ),
        Paragraph(
            f"Out of scope: diagnosis, treatment, triage; images from another scanner, stain, laboratory or hospital; "
            f"images that show none of the classes, as it always names one. {NO_DEVICE}"
        ),
    ]


def _factors(found: Evaluation) -> list[Block]:
    clustered = "" if found.performance.patients is None else " Images of one patient are taken together in intervals."
    return [
        Paragraph(
            "Figures are given for each class. Age, sex, origin, disease stage, scanner and laboratory are not in the "
            f"images' file, so that nobody has examined whether the model does worse for some of them.{clustered}"
        )
    ]


def _evaluation_data(found: Evaluation) -> list[Block]:
    performance = found.performance
    patients = "" if performance.patients is None else f" of {number_of(performance.patients, 'patient')}"
    whose = (
        "the hospital's own test images, which no training used" if found.own else "images given for this evaluation"
    )
    if found.changed and found.own:
        whose = "the hospital's own test images, of a file that has changed since the training"
    synthetic = (
        " They are synthetic: generated by a program, they say nothing about patients." if found.synthetic else ""
    )
    return [Paragraph(f"{number_of(performance.images, 'image')}{patients} in {found.test}: {whose}.{synthetic}")]


def _training_data(found: Evaluation) -> list[Block]:
    plan = found.plan
    patients = "" if found.patients is None else f" of {number_of(found.patients, 'patient')}"
    changed = " (the file has changed since the training; these are its figures of today)" if found.changed else ""
    texts = [f"{number_of(sum(found.training), 'image')}{patients} of this hospital's own{changed}."]
    if set(plan.required) <= {Exposure.PROTOCOL, Exposure.IDENTITY}:
        texts.append("Nothing of other hospitals: the method exchanges nothing.")
    else:
        least = (
            f" What they sent was summed over at least {plan.secure_aggregation.minimum} hospitals."
            if plan.secure_aggregation is not None
            else ""
        )
        texts.append(
            f"Other hospitals' training went into it by what the method {plan.method.name} exchanges. How many "
            f"hospitals took part, and what images they have, is not told to a hospital.{least}"
        )
    rows = [[name, grouped(count)] for name, count in zip(found.class_names, found.training, strict=True)]
    table = Table("This hospital's own training images", ["Class", "Images"], rows, [1], [3, 1])
    return [*(Paragraph(text) for text in texts), table]


def _analyses(found: Evaluation) -> list[Block]:
    performance = found.performance
    auroc = NOT_MEASURED if performance.macro_auroc is None else f"{performance.macro_auroc:.3f}"
    return [
        Paragraph(
            f"Right: {share(performance.accuracy)}. Mean area under the ROC curve: {auroc}. Expected calibration "
            f"error: {percent(performance.calibration.error)}."
        ),
        class_table(found),
    ]


def _ethics(found: Evaluation) -> list[Block]:
    plan = found.plan
    private = (
        f"Trained with differential privacy: the run promises at most {plan.privacy}. The promise is about "
        "what leaves the hospital, and holds for this file only as far as it was made from that."
        if plan.privacy is not None
        else "Trained without differential privacy: there is no limit to what could be worked out from it about the "
        "images that it was trained on (ε = ∞)."
    )
    return [
        Paragraph(private),
        Paragraph("Keep the file as confidential as the images: a model can tell whose images it was trained on."),
    ]


def _caveats(found: Evaluation) -> list[Block]:
    return [
        *(Paragraph(text) for text in caveats(found)),
        Paragraph(
            "Good figures on these test images do not carry over to another hospital, nor to next year's images. "
            "Whoever wants to use the model for more than research has to test it where it shall be used, and have it "
            "cleared."
        ),
        Paragraph(
            "Whoever chooses the best of several models by these test images gets figures that are too good; choose by "
            "other images, and test once."
        ),
    ]
