"""The ``coordinator`` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medsilo.coordinator.commands.ca import ca_app
from medsilo.coordinator.commands.joining import doctor, init, invite
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.pages.status import status_of
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.pages.wording import minute, ranges, rounds_and_end
from medsilo.privacy.party import logs
from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.commands import (
    Log,
    OnlyRun,
    ReportFolder,
    ReportFormats,
    Rotate,
    make_keys,
    report_on,
    rotate_key,
)
from medsilo.privacy.party.console import application, out, say
from medsilo.privacy.party.console import run as run_app
from medsilo.privacy.party.logs import LogFormat
from medsilo.privacy.party.witness_commands import witness_app
from medsilo.privacy.party.witness_status import witness_lines
from medsilo.privacy.report.format import Format

if TYPE_CHECKING:
    from medsilo.privacy.report.model import Attendance, SharedAccuracy

app = application("The coordinator of a federation: leads runs, and never sees an image.", program="coordinator")
app.command()(init)
app.command()(invite)
app.command()(doctor)
app.add_typer(ca_app, name="ca")
LATE_SHOWN = 10
"""So many of the last rounds that a silo missed stand in the table; all in the JSON."""

Config = Annotated[Path, typer.Option("--config", "-c", help="The coordinator's configuration (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


app.add_typer(audit_app(CoordinatorConfig.read), name="audit")
app.add_typer(witness_app(CoordinatorConfig.read), name="witness")


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
        bool, typer.Option("--until-done", help="End when every silo has the run's end and has signed for it.")
    ] = False,
    log: Log = LogFormat.TEXT,
) -> None:
    """Run the daemon."""
    import medsilo.coordinator.daemon as daemon  # torch and gRPC take seconds to load; the other commands need neither

    logs.begin(log)
    daemon.run(CoordinatorConfig.read(config), until_done=until_done)


@app.command()
def status(config: Config, as_json: AsJson = False) -> None:
    """Show the run's state: round, silos, who is late, whose updates differ from others', what was refused."""
    settings, store = _open(config)
    content = status_of(settings, store, store.rounds(settings.run.name))
    run, silos = content["run"], content["silos"]
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    where = content["end"] or f"round {content['round'] or 0} of {settings.run.exchanges}"
    table = Table(title=f"run {run} · {content['method']} · {where}", title_justify="left")
    compared = any(silo["changes"] for silo in silos)
    columns = ("silo", "state", "rounds delivered", "rounds late")
    for column in (
        (*columns, "last change: length", "beside others' (z-score)", "direction (cosine)") if compared else columns
    ):
        table.add_column(column)
    for silo in silos:
        late = f" ({ranges(silo['late'][-LATE_SHOWN:])})" if silo["late"] else ""
        note = f" (lacks {', '.join(silo['missing'])})" if silo["missing"] else ""
        if silo["withdrawal"] and silo["withdrawal"]["reason"] != Cause.WITHDRAWN:
            note = f" ({silo['withdrawal']['reason']})"
        cells = [silo["silo"], silo["state"] + note, str(silo["rounds_delivered"]), str(silo["rounds_late"]) + late]
        if compared:
            last = silo["changes"][-1] if silo["changes"] else {}
            cells += [_number(last.get(name), form) for name, form in _CHANGE_FORMS.items()]
        table.add_row(*cells)
    out.print(table)
    if content["waiting_for"]:
        since = f" since {minute(content['opened_at'])} UTC" if content["opened_at"] else ""
        say(f"Waiting for {', '.join(content['waiting_for'])}{since}.")
    if unusual := [silo for silo in silos if any(change["unusual"] for change in silo["changes"])]:
        for silo in unusual:
            last = next(change for change in reversed(silo["changes"]) if change["unusual"])
            out.print(f"unusual: {silo['silo']}, round {last['round']}: {', '.join(last['unusual'])}", markup=False)
        out.print(
            "Unusual is not malicious: hospitals whose patients differ send updates that differ (docs/poisoning.md)."
        )
    for line in witness_lines(content["witnesses"]):
        say(line)
    for refusal in content["refusals"][:5]:
        out.print(
            f"refused {refusal['at']} {refusal['rpc']} by {refusal['peer']}: {refusal['reason']}",
            markup=False,
        )


@app.command()
def page(
    config: Config,
    listen: Annotated[str, typer.Option("--listen", help="Address and port.")] = "localhost:8443",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Where the token to sign in with is; made if it is not there.")
    ] = None,
) -> None:
    """Serve a live page about the run, over TLS, to who has its token or an operator's certificate."""
    from medsilo.coordinator.pages.page import serve_page

    settings, store = _open_store(config)
    store.close()
    address = listen if not listen.startswith(("0.0.0.0:", "[::]:")) else f"THIS-MACHINE:{listen.rpartition(':')[2]}"

    def ready(token: Path) -> None:
        out.print(f"The page is at https://{address}; the token to sign in with is in {token}", soft_wrap=True)
        out.print(f"Figures for Prometheus: https://{address}/metrics, with the token as bearer token", soft_wrap=True)

    serve_page(settings, listen, token_file, ready)


@app.command()
def results(
    config: Config,
    as_json: AsJson = False,
    chosen: Annotated[
        str | None, typer.Option("--run", help="An earlier run; by default the configuration's.", show_default=False)
    ] = None,
) -> None:
    """Show each silo's accuracy on its own test images, as far as silos consented to share it."""
    settings, store = _open(config, chosen)
    run = chosen or settings.run.name
    plan = next(json.loads(canonical) for name, canonical, _ in store.runs() if name == run)
    rounds = store.rounds(run)
    shared = {
        name: [
            (p.round, p.accuracy, p.loss)
            for state in rounds
            if (p := state.participants.get(name)) is not None and p.accuracy is not None
        ]
        for name in dict.fromkeys([*settings.silos, *(silo for state in rounds for silo in state.participants)])
    }
    if as_json:
        silos = {
            name: [{"round": number, "accuracy": accuracy, "loss": loss} for number, accuracy, loss in measured]
            for name, measured in shared.items()
        }
        typer.echo(json.dumps({"run": run, "method": plan["method"]["name"], "silos": silos}, indent=2))
        return
    if Exposure.LOCAL_METRICS not in plan["optional"] and not any(shared.values()):
        out.print(
            f"Run {run} asks nobody for accuracies. Hospitals that consent to LOCAL_METRICS send theirs in runs with "
            "`ask_for: [LOCAL_METRICS]`.",
            soft_wrap=True,
        )
        return
    table = Table(
        title=f"run {run} · accuracy on each silo's own test images, after training",
        title_justify="left",
    )
    for column in ("silo", "first", "best", "last", "measured after"):
        table.add_column(column, justify="left" if column in ("silo", "measured after") else "right")
    lasts = []
    for name, measured in shared.items():
        if not measured:
            table.add_row(name, "not shared", "", "", "")
            continue
        accuracies = [accuracy for _, accuracy, _ in measured]
        lasts.append(accuracies[-1])
        cells = [f"{100 * value:.1f} %" for value in (accuracies[0], max(accuracies), accuracies[-1])]
        table.add_row(name, *cells, rounds_and_end((number for number, *_ in measured), plan["rounds"]))
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
    from medsilo.privacy.report.model import Answer

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
        attendance=[one for name, plan, _ in store.runs() for one in _attendance(store, name, plan)],
    )


_CHANGE_FORMS = {"norm": ".4g", "score": "+.1f", "cosine": "+.2f"}


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _attendance(store: Store, run: str, plan: str) -> list[Attendance]:
    from medsilo.privacy.report.model import Attendance

    rounds = [state for state in store.rounds(run) if state.number < json.loads(plan)["rounds"]]
    found = []
    for silo in sorted({silo for state in rounds for silo in state.participants}):
        own = [state.participants[silo] for state in rounds if silo in state.participants]
        delivered = sum(one.delivered_at is not None for one in own)
        found.append(Attendance(run, silo, delivered, [one.round + 1 for one in own if one.late]))
    return found


def _shared_accuracy(store: Store, run: str) -> SharedAccuracy | None:
    from medsilo.privacy.report.model import SharedAccuracy

    last = {
        name: participation.accuracy
        for state in store.rounds(run)
        for name, participation in state.participants.items()
        if participation.accuracy is not None
    }
    return SharedAccuracy(run, len(last), sum(last.values()) / len(last)) if last else None


def _open(config: Path, run: str | None = None) -> tuple[CoordinatorConfig, Store]:
    settings, store = _open_store(config)
    begun = [name for name, _, _ in store.runs()]
    if run is not None and run not in begun:
        raise ConfigurationError(f"--run {run}: there is no such run; begun were: {', '.join(begun) or 'none'}")
    if run is None and settings.run.name not in begun:
        raise ConfigurationError(f"run {settings.run.name} has not been started yet; see `coordinator serve`")
    return settings, store


def _open_store(config: Path) -> tuple[CoordinatorConfig, Store]:
    settings = CoordinatorConfig.read(config)
    if settings.store is None and not (settings.state / "coordinator.db").exists():
        raise ConfigurationError(
            f"{settings.state}: no run has been started there yet; begin with `coordinator serve --config {config}`"
        )
    return settings, Store(settings.database)


def main() -> None:
    """Entry point."""
    run_app(app)
