"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]
KnownPlan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="A plan from `coordinator plan`; by default the last one shown here (`silo doctor` asks for it).",
    ),
]
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
