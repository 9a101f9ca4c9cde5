"""The ``silo`` command."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer.main import get_group

from medsilo.privacy.errors import ConfigurationError, RehearsalError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.pages.wording import readable_bytes
from medsilo.privacy.party import systemd as service_manager
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
from medsilo.privacy.party.console import application, output
from medsilo.privacy.party.console import run as run_app
from medsilo.privacy.party.logs import LogFormat
from medsilo.privacy.report.format import Format
from medsilo.silo.commands.consent import approve, consent_app
from medsilo.silo.commands.joining import doctor, init
from medsilo.silo.commands.model import Round, Run, evaluate, export
from medsilo.silo.commands.models import models
from medsilo.silo.commands.prepare import prepare, read_window
from medsilo.silo.flower.config import FlowerConfig, read_party
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import known_plan, read_plan

app = application(
    "A hospital's side of a federation: trains on its own images, decides and records what leaves.", program="silo"
)
app.add_typer(consent_app, name="consent")
app.command()(init)
app.command()(doctor)
app.command()(approve)
app.command()(prepare)
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]


audit = audit_app(read_party)
app.add_typer(audit, name="audit")


@audit.command("open")
def open_sent(
    config: Config,
    run: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", min=1, help="Only this round, from 1.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for the tensors (default: state folder).")
    ] = None,
) -> None:
    """Show exactly which tensors left, from the messages that this silo kept (`keep_sent_days`)."""
    from medsilo.silo.oversight.opening import open_rounds

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    number = None if round_number is None else round_number - 1
    table = Table(title=f"What left {settings.name}, message by message held against the journal", title_justify="left")
    for column in ("run", "round", "sent (UTC)", "exposure class", "tensor", "file"):
        table.add_column(column, overflow="fold")
    calls = open_rounds(settings, folder or settings.state / "opened", run=run, round_number=number)
    for call in calls:
        place = (call.run, str(call.round + 1), call.time[:19].replace("T", " "))
        for tensor in call.tensors:
            shape = "×".join(map(str, tensor.shape)) or "one number"
            table.add_row(*place, tensor.exposure.value, f"{tensor.name} {shape} {tensor.dtype}", tensor.file.name)
    out.print(table)
    for call in calls:
        if call.problem:
            what = f"Run {call.run}, round {call.round + 1}, {call.length} bytes in {call.messages} messages"
            out.print(f"{what}: {call.problem}.", markup=False, soft_wrap=True)


@app.command()
def keys(config: Config, rotate: Rotate = False) -> None:
    """Make the hospital's keys and its certificate request, on this machine."""
    settings = read_party(config)
    if rotate:
        rotate_key(settings)
        return
    paths = make_keys(settings)
    if not isinstance(settings, SiloConfig):
        return  # a door for Flower apps needs no certificate
    out.print(
        f"Next: send {paths.request} to the federation's CA, whose operator runs\n"
        f"  coordinator ca issue {settings.name} --request {paths.request.name}\n"
        f"Put the certificate that comes back at {settings.tls_files.certificate}\n"
        f"and the CA's own certificate, ca.pem, at {settings.tls_files.ca}",
        soft_wrap=True,
    )


@app.command()
def train(config: Config, log: Log = LogFormat.TEXT) -> None:
    """Join the coordinator's run and train to its end; the same command goes on after any crash."""
    from medsilo.silo.run import daemon  # torch and gRPC take seconds to load; the other commands need neither
    from medsilo.silo.run.display import Display

    settings = SiloConfig.read(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    service_manager.watch(lambda: True)
    service_manager.notify("READY=1")
    with Display(out, as_json=log is LogFormat.JSON) as display:
        outcome = daemon.train(settings, display)
    if log is LogFormat.JSON:
        return
    results = json.loads((outcome.folder / "results.json").read_text())
    measured = results["measured"]
    out.print(f"Run {outcome.run} has ended; {readable_bytes(outcome.bytes_sent)} left in this session.")
    if measured:
        synthetic = " (synthetic data)" if results["synthetic"] else ""
        out.print(
            f"Accuracy on {results['test_images']} own test images{synthetic}: "
            f"{100 * measured[0]['accuracy']:.1f} % before, {100 * measured[-1]['accuracy']:.1f} % now."
        )
    out.print(f"The model: {outcome.folder / 'model.safetensors'}", soft_wrap=True)
    out.print(f"What left: silo report --config {config}", soft_wrap=True)


def _end(number: int, _frame: FrameType | None) -> None:
    # At once: whatever is under way, nothing is lost by it. An exception out of a handler can leave gRPC waiting for
    # ever for a call that it interrupted.
    shown = b"\x1b[?25h\n" if sys.stdout.isatty() else b""  # the cursor, which the progress bar hides
    os.write(sys.stderr.fileno(), shown + b"stopped; the same command goes on from here\n")
    os._exit(128 + number)


@app.command()
def flower(config: Config, log: Log = LogFormat.TEXT) -> None:
    """Be the door between a Flower SuperNode on this machine and its server: what leaves is agreed to and recorded."""
    from medsilo.privacy.party import logs
    from medsilo.silo.flower.serving import serve

    settings = FlowerConfig.read(config)
    logs.begin(log)

    def ready() -> None:
        service_manager.watch(lambda: True)
        service_manager.notify("READY=1")
        out.print(f"The door is open: flower-supernode --insecure --superlink {settings.flower.listen}", soft_wrap=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    serve(settings, ready)


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@app.command()
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


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Try out what could be learnt from the first round's update, before it leaves. Sends and charges nothing."""
    from medsilo.privacy.pages.page import print_page_one
    from medsilo.silo.preview import rehearsal
    from medsilo.silo.preview.rehearsal_page import as_json as machine_readable
    from medsilo.silo.preview.rehearsal_page import make_document, write_page

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    chosen = read_plan(plan) if plan else known_plan(settings)
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


@app.command()
def budget(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures to this file too.")] = None,
    shard: Annotated[
        Path | None,
        typer.Option("--shard", help="An older version's file: its charges then count for its own images alone."),
    ] = None,
) -> None:
    """Show what the privacy ledgers say: spent and left, per run, release and version. Sends nothing."""
    from medsilo.silo.oversight import budget as view

    settings = SiloConfig.read(config)
    if shard is not None:
        version = view.remember(settings, shard)
        typer.echo(f"The images and patients of data set {version} are on record (as keyed hashes).", err=True)
    found = view.read_accounts(settings, course=html is not None)
    if html is not None:
        from medsilo.silo.oversight.budget_page import to_html

        try:
            write_atomically(html, to_html(settings.name, found).encode())
        except OSError as error:
            raise ConfigurationError(f"{html}: cannot be written ({error.strerror}); give another file") from None
    if as_json:
        typer.echo(json.dumps([view.as_json(account) for account in found], indent=2))
        return
    if not found:
        out.print(
            f"There is no privacy ledger in {settings.ledgers}: nothing was trained with differential privacy. What "
            "was learnt from models without it has no bound; see `silo report`.",
            soft_wrap=True,
        )
    for account in found:
        for table in view.tables(account):
            out.print(table)
        for line in view.lines(account):
            out.print(line, markup=False, soft_wrap=True)


@app.command()
def report(
    config: Config,
    folder: ReportFolder = None,
    formats: ReportFormats = list(Format),  # noqa: B006 Typer copies it
    run: OnlyRun = None,
) -> None:
    """Say what left this hospital, to whom and on which consent: in words here; as HTML, PDF and JSON in files."""
    report_on(read_party(config), folder, formats, run=run)


@app.command()
def page(
    config: Config,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port, on this machine alone.")] = 8600,
) -> None:
    """Serve a page on this machine alone: what has left, what would leave next, the budget, a button to withdraw."""
    from medsilo.silo.oversight.live_page import serve_page

    def ready(address: str, token: Path) -> None:
        out.print(f"The page, to be opened on this machine: {address}", markup=False, soft_wrap=True)
        out.print(f"Its token is in {token}", markup=False, soft_wrap=True)

    serve_page(SiloConfig.read(config), port, ready)


@app.command()
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
    model = prediction.load_kept(kept, trusted=settings.trusted_models)
    found = model.classify(images, window=shown, notice=say)
    target = output.open("w", newline="", encoding="utf-8") if output else sys.stdout
    writer = csv.writer(target)
    writer.writerow(["image", "class", "name", "probability", "truth"])
    for item in found:
        truth = "" if item.truth is None else item.truth
        writer.writerow([item.image, item.label, item.class_name, f"{item.probability:.4f}", truth])
    if output:
        target.close()
    known = [item for item in found if item.truth is not None]
    if known:
        right = sum(item.label == item.truth for item in known)
        say(f"{right} of {len(known)} right ({100 * right / len(known):.1f} %)")


app.command()(evaluate)
app.command()(export)
app.command()(models)


def _add_shard() -> None:
    from medsilo.silo.commands.shard import shard

    app.command()(shard)


def main() -> None:
    """Entry point."""
    # Cutting data sets needs PyTorch and Matplotlib, which take seconds to load: the other commands need not wait.
    if not get_group(app).commands.keys() & set(sys.argv[1:2]):
        _add_shard()
    run_app(app)
