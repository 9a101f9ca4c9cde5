"""``silo evaluate`` and ``silo export``: what the hospital's own model can do, and the model for other programs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.party.console import output
from medsilo.silo.state.config import SiloConfig

out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]
Run = Annotated[
    str | None,
    typer.Option("--run", help="Which run's model; by default the one in use (`silo models`).", show_default=False),
]
Round = Annotated[
    str | None,
    typer.Option(
        "--round", help="The model after so many rounds, or `last`, or `best`; see `silo models`.", show_default=False
    ),
]


class ExportFormat(StrEnum):
    """ONNX, or PyTorch's own (``torch.export``); spelled as in ``--format``."""

    ONNX = "onnx"
    PT2 = "pt2"


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
        out.print(str(path), markup=False, soft_wrap=True)


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
