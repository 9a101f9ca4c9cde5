"""The ``coordinator`` command."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coordinator.ca_commands import ca_app
from coordinator.config import CoordinatorConfig
from coordinator.joining_commands import doctor, init, invite
from coordinator.store import RoundState, Store
from privacy.audit_commands import audit_app
from privacy.console import application, output
from privacy.console import run as run_app
from privacy.errors import ConfigurationError
from privacy.party_commands import OnlyRun, ReportFolder, ReportFormats, Rotate, make_keys, report_on, rotate_key
from privacy.report import Answer, SharedAccuracy
from privacy.report_pages import Format
from privacy.withdrawal import Cause

app = application("The coordinator of a federation: leads runs, and never sees an image.")
app.command()(init)
app.command()(invite)
app.command()(doctor)
app.add_typer(ca_app, name="ca")
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The coordinator's configuration (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


app.add_typer(audit_app(CoordinatorConfig.read), name="audit")


@app.command()
def keys(config: Config, rotate: Rotate = False) -> None:
    """Make the coordinator's keys and its certificate request, on this machine."""
    settings = CoordinatorConfig.read(config)
    if rotate:
        rotate_key(settings)
        return
    paths = make_keys(settings)
    out.print(
        f"Next, where the CA is:\n  coordinator ca issue {settings.name} --role coordinator --request {paths.request} "
        f"--out {settings.tls_files.certificate}\nand copy the CA's ca.pem to {settings.tls_files.ca}",
        soft_wrap=True,
    )


@app.command()
def plan(config: Config) -> None:
    """Print the run's plan as JSON: send it to hospitals, who look at it with `silo inspect --plan`."""
    typer.echo(json.dumps(CoordinatorConfig.read(config).plan().model_dump(mode="json"), indent=2))


@app.command()
def serve(
    config: Config,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="End when every silo has fetched the run's end.")
    ] = False,
) -> None:
    """Run the daemon."""
    import coordinator.daemon as daemon  # torch and gRPC take seconds to load; the other commands need neither

    logging.basicConfig(
        force=True,  # a library that was loaded before may have put a handler of its own there
        level=logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)
    daemon.run(CoordinatorConfig.read(config), until_done=until_done)


@app.command()
def status(config: Config, as_json: AsJson = False) -> None:
    """Show the run's state: round, silos, who is late, what was refused."""
    settings, store = _open(config)
    run = settings.run.name
    members = store.members(run)
    rounds = store.rounds(run)
    current = rounds[-1] if rounds else None
    finished = store.is_finished(run)
    withdrawals = store.withdrawals(run)
    silos: list[dict[str, Any]] = []
    for name in settings.silos:
        member = members.get(name)
        own = [state.participants[name] for state in rounds if name in state.participants]
        withdrawn = withdrawals.get(name)
        state = "withdrawn" if withdrawn else _state(name, member.accepted if member else None, current, finished)
        silos.append(
            {
                "silo": name,
                "state": state,
                "withdrawal": {"at": withdrawn.at, "reason": withdrawn.reason, "rounds_used": withdrawn.rounds_used}
                if withdrawn
                else None,
                "missing": list(member.missing) if member else [],
                "rounds_delivered": sum(p.delivered_at is not None and p.round < settings.run.rounds for p in own),
                "rounds_late": sum(p.late for p in own),
            }
        )
    content: dict[str, Any] = {
        "run": run,
        "method": settings.run.method["name"],
        "round": None if current is None else min(current.number + 1, settings.run.rounds),
        "rounds": settings.run.rounds,
        "finished": finished,
        "silos": silos,
        "refusals": [vars(refusal) for refusal in store.refusals(20)],
    }
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    where = "ended" if finished else f"round {content['round'] or 0} of {settings.run.rounds}"
    table = Table(title=f"run {run} · {content['method']} · {where}", title_justify="left")
    for column in ("silo", "state", "rounds delivered", "rounds late"):
        table.add_column(column)
    for silo in silos:
        note = f" (lacks {', '.join(silo['missing'])})" if silo["missing"] else ""
        if silo["withdrawal"] and silo["withdrawal"]["reason"] != Cause.WITHDRAWN:
            note = f" ({silo['withdrawal']['reason']})"
        table.add_row(silo["silo"], silo["state"] + note, str(silo["rounds_delivered"]), str(silo["rounds_late"]))
    out.print(table)
    if all(silo["withdrawal"] for silo in silos):
        out.print("Every hospital has withdrawn; the run has ended.")
    for refusal in content["refusals"][:5]:
        out.print(
            f"refused {refusal['at']} {refusal['rpc']} by {refusal['peer']}: {refusal['reason']}",
            markup=False,
        )


@app.command()
def results(config: Config, as_json: AsJson = False) -> None:
    """Show each silo's accuracy on its own test images, as far as silos consented to share it."""
    settings, store = _open(config)
    run = settings.run.name
    rounds = store.rounds(run)
    content = {
        name: [
            {"round": p.round, "accuracy": p.accuracy, "loss": p.loss}
            for state in rounds
            if (p := state.participants.get(name)) is not None and p.accuracy is not None
        ]
        for name in settings.silos
    }
    if as_json:
        typer.echo(json.dumps({"run": run, "method": settings.run.method["name"], "silos": content}, indent=2))
        return
    table = Table(title=f"run {run} · accuracy on each silo's own test images", title_justify="left")
    for column in ("silo", "first", "best", "last", "measured rounds"):
        table.add_column(column, justify="left" if column == "silo" else "right")
    lasts = []
    for name, measured in content.items():
        if not measured:
            table.add_row(name, "not shared", "", "", "0")
            continue
        accuracies = [m["accuracy"] for m in measured if m["accuracy"] is not None]
        lasts.append(accuracies[-1])
        cells = [f"{100 * value:.1f} %" for value in (accuracies[0], max(accuracies), accuracies[-1])]
        table.add_row(name, *cells, str(len(accuracies)))
    if lasts:
        table.add_section()
        table.add_row("mean of those shared", "", "", f"{100 * sum(lasts) / len(lasts):.1f} %", "")
    out.print(table)


@app.command()
def report(
    config: Config,
    folder: ReportFolder = None,
    formats: ReportFormats = list(Format),  # noqa: B006 Typer copies it
    run: OnlyRun = None,
) -> None:
    """Say what left which hospital, by the coordinator's own record: in words here; as HTML, PDF and JSON in files."""
    settings, store = _open_store(config)
    names = [name for name, _, _ in store.runs()]
    report_on(
        settings,
        folder,
        formats,
        run=run,
        answers=[
            Answer(name, member.silo, member.accepted, list(member.missing), member.answered_at)
            for name in names
            for member in store.members(name).values()
        ],
        accuracies=[shared for name in names if (shared := _shared_accuracy(store, name))],
    )


def _shared_accuracy(store: Store, run: str) -> SharedAccuracy | None:
    last = {
        name: participation.accuracy
        for state in store.rounds(run)
        for name, participation in state.participants.items()
        if participation.accuracy is not None
    }
    return SharedAccuracy(run, len(last), sum(last.values()) / len(last)) if last else None


def _open(config: Path) -> tuple[CoordinatorConfig, Store]:
    settings, store = _open_store(config)
    if settings.run.name not in [name for name, _, _ in store.runs()]:
        raise ConfigurationError(f"run {settings.run.name} has not been started yet; see `coordinator serve`")
    return settings, store


def _open_store(config: Path) -> tuple[CoordinatorConfig, Store]:
    settings = CoordinatorConfig.read(config)
    if settings.store is None and not (settings.state / "coordinator.db").exists():
        raise ConfigurationError(
            f"{settings.state}: no run has been started there yet; begin with `coordinator serve --config {config}`"
        )
    return settings, Store(settings.database)


def _state(name: str, accepted: bool | None, current: RoundState | None, finished: bool) -> str:
    if accepted is None:
        return "not yet heard of"
    if not accepted:
        return "declined"
    if current is None or name not in current.participants:
        return "joined"
    if current.participants[name].delivered_at is not None:
        return "done" if finished else "delivered"
    return "fetching the end" if finished else "training"


def main() -> None:
    """Entry point."""
    run_app(app)
