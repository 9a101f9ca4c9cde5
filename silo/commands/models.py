"""``silo models``: which models runs have left, and which one is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.party.console import output
from medsilo.silo.state.config import SiloConfig

out = output()


def models(
    config: Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")],
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
        _say(f"In use: {kept_models.use_newest(runs).words}; after the next run, that one's.")
        return
    if run is not None or round_ is not None:
        chosen = kept_models.choose_model(runs, run, round_)
        _say(f"In use, until another is put in use: {chosen.words}.")
        if not chosen.trained:
            _say(f"It was not trained: {kept_models.why_untrained(chosen)}.")
        _say(f"Back: silo models --newest --config {config}")
        return
    found, in_use = kept_models.listed(runs)
    if as_json:
        typer.echo(kept_models.as_json(found, in_use))
        return
    if not found:
        _say(f"{runs}: no run has left a model there yet; `silo train` writes one after every round.")
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
            _say(f"Run {model.run}: its model was not trained; {kept_models.why_untrained(model)}.")
        elif model.end and model.which != "best":
            _say(f"Run {model.run} {model.end}.")
    if all(model.validation is None for model in found):
        _say(
            "No best round is kept: the shard has no validation images (a `val` split), and by test images none is "
            "chosen."
        )
    if in_use is None:
        _say("None is in use: no run has trained. A run's model is taken all the same where --run names it.")


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)
