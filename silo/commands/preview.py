"""``silo inspect`` and ``rehearse``: what would leave, before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import RehearsalError
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.party.console import out
from medsilo.silo.commands.options import Config
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import known_plan, read_plan


def inspect(
    config: Config,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="A plan from `coordinator plan`; by default the last one shown here (`silo doctor` asks for it).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show exactly what would leave in the first round, and what else in others. Sends nothing."""
    from medsilo.silo.preview import inspection
    from medsilo.silo.preview.inspection_display import show

    settings = SiloConfig.read(config)
    found = inspection.inspect(settings, read_plan(plan) if plan else known_plan(settings))
    show(found, settings, out, as_json=as_json)


def rehearse(
    config: Config,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="A plan from `coordinator plan`; by default the last one shown here (`silo doctor` asks for it).",
        ),
    ] = None,
    canaries: Annotated[
        int, typer.Option("--canaries", min=20, help="Images or patients to guess about, at most.")
    ] = 1000,
    whole: Annotated[
        bool,
        typer.Option("--run", help="Rehearse all rounds: leakage by round, accuracy among pretend hospitals, price."),
    ] = False,
    hospitals: Annotated[
        int, typer.Option("--hospitals", min=2, max=100, help="With --run: how many hospitals to pretend.")
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Try out what could be learnt from the first round's update, before it leaves; or, with --run, the whole run.

    Sends and charges nothing.
    """
    from medsilo.privacy.pages.page import print_page_one
    from medsilo.silo.preview import rehearsal
    from medsilo.silo.preview.rehearsal_page import as_json as machine_readable
    from medsilo.silo.preview.rehearsal_page import make_document, write_page

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    chosen = read_plan(plan) if plan else known_plan(settings)
    if whole:
        _rehearse_run(settings, chosen, canaries, hospitals, as_json=as_json)
        return
    with Console(stderr=True).status("training one round, here") as status:
        found = rehearsal.rehearse(
            settings,
            chosen,
            canaries=canaries,
            progress=lambda p: status.update(f"training one round, here: epoch {p.epoch} of {p.epochs}"),
        )
    written = write_page(found, settings)
    if as_json:
        typer.echo(json.dumps(machine_readable(found), indent=2))
    else:
        print_page_one(make_document(found), out)
        out.print(str(written), markup=False, soft_wrap=True)
    if found.broken:
        assert found.claim is not None
        raise RehearsalError(
            f"run {chosen.run} promises at most {found.claim} for its first round, but at least "
            f"ε = {found.audit.epsilon:.3f} was proven; nothing was sent. Rehearse once more; if it happens again, do "
            "not take part, and report it"
        )


def _rehearse_run(settings: SiloConfig, plan: RunPlan, canaries: int, hospitals: int, *, as_json: bool) -> None:
    from medsilo.silo.preview.whole_run import Told, rehearse_run
    from medsilo.silo.preview.whole_run_display import as_json as machine_readable
    from medsilo.silo.preview.whole_run_display import show as show_run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("the run", total=None)

        def tell(told: Told) -> None:
            bar.update(task, description=told.what, completed=told.done, total=told.of)

        found = rehearse_run(settings, plan, canaries=canaries, hospitals=hospitals, tell=tell)
    if as_json:
        typer.echo(json.dumps(machine_readable(found), indent=2))
    else:
        show_run(found, out)
