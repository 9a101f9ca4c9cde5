"""``silo evaluate``, ``export``, ``predict`` and ``models``: the hospital's own model at work."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.party.console import out, say
from medsilo.privacy.printable import cell
from medsilo.silo.commands.options import Config, Round, Run
from medsilo.silo.commands.prepare import read_window
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.state.config import SiloConfig


def evaluate(
    config: Config,
    run: Run = None,
    round_: Round = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="An .npz whose test images to take; by default the hospital's own.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            help="Another run to compare with; by default separate training (method `local`), else the start.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, max=12, help="Images of each kind on the page; 0 for none.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Show what this hospital's model can do on its own test images: figures, pictures, model card. Sends nothing."""
    from medsilo.privacy.pages.page import print_page_one
    from medsilo.silo.model import evaluation  # PyTorch and scikit-learn take seconds to load
    from medsilo.silo.model.page import as_json as machine_readable
    from medsilo.silo.model.page import make_document, write_page

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    found = evaluation.evaluate(settings, run=run, round_=round_, images=images, against=compare, samples=samples)
    written = write_page(found, settings)
    if as_json:
        typer.echo(json.dumps(machine_readable(found), indent=2))
        return
    print_page_one(make_document(found), out)
    for path in written:
        say(str(path))


def export(
    config: Config,
    path: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; by default NAME.onnx or NAME.pt2 here.", show_default=False),
    ] = None,
    kind: Annotated[
        ExportFormat, typer.Option("--format", help="ONNX, or PyTorch's own (`torch.export`).")
    ] = ExportFormat.ONNX,
    run: Run = None,
    round_: Round = None,
) -> None:
    """Write this hospital's model as one file for other programs, checked against the model. Sends nothing."""
    from medsilo.silo.model import exporting

    settings = SiloConfig.read(config)
    made = exporting.export(settings, path or Path(f"{settings.name}.{kind}"), kind, run=run, round_=round_)
    out.print(
        f"{made.path}: the model of {made.model.words}; on {made.images} test images its probabilities differ from the "
        f"model's by at most {made.difference:.1e}. Whoever gets the file can try to work out what it was trained on.",
        markup=False,
        soft_wrap=True,
    )


def predict(
    config: Config,
    images: Annotated[
        Path,
        typer.Option(
            "--images", help="A picture or DICOM file, a folder of such, or of a folder for each class, or an .npz."
        ),
    ],
    run: Run = None,
    round_: Round = None,
    output: Annotated[Path | None, typer.Option("--out", help="Write CSV there instead of printing it.")] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", help="DICOM: CENTRE/WIDTH, if `silo prepare` was given one.", show_default=False),
    ] = None,
) -> None:
    """Classify images with this hospital's personalised model. Sends nothing."""
    from medsilo.silo.model import prediction
    from medsilo.silo.model.kept_models import find_model, why_untrained

    settings = SiloConfig.read(config)
    kept = find_model(settings.runs, run, round_)
    shown = None if window is None else read_window(window)
    errors = Console(stderr=True)

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"The model: {kept.words}.")
    if not kept.trained:
        say(f"It was not trained: {why_untrained(kept)}.")
    model = prediction.load_kept(kept, trusted=settings.trusted_models, weights=settings.weights)
    found = model.classify(images, window=shown, notice=say)
    target = output.open("w", newline="", encoding="utf-8") if output else sys.stdout
    writer = csv.writer(target)
    writer.writerow(["image", "class", "name", "probability", "truth"])
    for item in found:
        truth = "" if item.truth is None else item.truth
        names = cell(item.image), cell(item.class_name)  # whoever named the pictures
        writer.writerow([names[0], item.label, names[1], f"{item.probability:.4f}", truth])
    if output:
        target.close()
    known = [item for item in found if item.truth is not None]
    if known:
        right = sum(item.label == item.truth for item in known)
        say(f"{right} of {len(known)} right ({100 * right / len(known):.1f} %)")


def models(
    config: Config,
    run: Annotated[str | None, typer.Option("--run", help="Put this run's model in use.", show_default=False)] = None,
    round_: Annotated[
        str | None,
        typer.Option(
            "--round", help="Put the model after so many rounds in use, or `last`, or `best`.", show_default=False
        ),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Take the newest run's last model again, now and after further runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models that runs have left; with --run or --round, put one in use. Sends nothing."""
    from medsilo.silo.model import kept_models

    runs = SiloConfig.read(config).runs
    if newest and (run is not None or round_ is not None):
        raise ConfigurationError("--newest: takes the newest run's last model; leave --run and --round out")
    if newest:
        say(f"In use: {kept_models.use_newest(runs).words}; after the next run, that one's.")
        return
    if run is not None or round_ is not None:
        chosen = kept_models.choose_model(runs, run, round_)
        say(f"In use, until another is put in use: {chosen.words}.")
        if not chosen.trained:
            say(f"It was not trained: {kept_models.why_untrained(chosen)}.")
        say(f"Back: silo models --newest --config {config}")
        return
    found, in_use = kept_models.listed(runs)
    if as_json:
        typer.echo(kept_models.as_json(found, in_use))
        return
    if not found:
        say(f"{runs}: no run has left a model there yet; `silo train` writes one after every round.")
        return
    table = Table(title="Models, the newest run's last", title_justify="left")
    for column in ("run", "rounds", "which", "on validation images", "written (UTC)", "in use"):
        table.add_column(column, overflow="fold")
    for model in found:
        table.add_row(
            model.run,
            f"{model.rounds} of {model.planned}",
            model.which,
            "–" if model.validation is None else f"{100 * model.validation:.1f} % right",
            f"{model.written:%Y-%m-%d %H:%M}",
            "yes" if kept_models.is_same(model, in_use) else "",
        )
    out.print(table)
    for model in found:
        if not model.trained:
            say(f"Run {model.run}: its model was not trained; {kept_models.why_untrained(model)}.")
        elif model.end and model.which != "best":
            say(f"Run {model.run} {model.end}.")
    if all(model.validation is None for model in found):
        say(
            "No best round is kept: the shard has no validation images (a `val` split), and by test images none is "
            "chosen."
        )
    if in_use is None:
        say("None is in use: no run has trained. A run's model is taken all the same where --run names it.")
