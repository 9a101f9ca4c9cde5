"""The ``silo`` command."""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from privacy.accounting import shown
from privacy.audit_commands import AuditParty, audit_app
from privacy.console import application, output
from privacy.console import run as run_app
from privacy.key_rotation import rotate as rotate_key
from privacy.pki import create_keys, load_audit_key
from privacy.report import TELLING, build_report, readable_bytes
from silo.config import SiloConfig

if TYPE_CHECKING:
    from silo.inspection import Inspection, Leaving

app = application("A hospital's side of a federation: trains on its own images, decides and records what leaves.")
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]


def _party(config: Path) -> AuditParty:
    settings = SiloConfig.read(config)
    return AuditParty(settings.name, settings.journal, settings.keys, settings.state)


audit = audit_app(_party)
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
    from silo.opening import open_rounds

    settings = SiloConfig.read(config)
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
def keys(
    config: Config,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Change the audit key, by a signed record; stop the daemon first.")
    ] = False,
) -> None:
    """Make the hospital's keys and its certificate request, on this machine."""
    settings = SiloConfig.read(config)
    if rotate:
        found = rotate_key(settings.keys, settings.journal, origin=settings.journal_origin, identity=settings.identity)
        out.print(f"The audit key is a new one ({found[:16]}…), and the journal says so, signed with both keys.")
        return
    paths = create_keys(settings.keys, settings.identity)
    out.print(f"Keys are in {settings.keys}; they stay on this machine.")
    out.print(
        f"Next: send {paths.request} to the federation's CA, whose operator runs\n"
        f"  coordinator ca issue {settings.name} --request {paths.request.name}\n"
        f"Put the certificate that comes back at {settings.tls_files.certificate}\n"
        f"and the CA's own certificate, ca.pem, at {settings.tls_files.ca}",
        soft_wrap=True,
    )


@app.command()
def train(config: Config) -> None:
    """Join the coordinator's run and train to its end; the same command goes on after any crash."""
    from silo import daemon  # torch and gRPC take seconds to load; the other commands need neither
    from silo.display import Display

    settings = SiloConfig.read(config)
    with Display(out) as display:
        outcome = daemon.train(settings, display)
    results = json.loads((outcome.folder / "results.json").read_text())
    measured = results["measured"]
    out.print(f"Run {outcome.plan.run} has ended; {readable_bytes(outcome.bytes_sent)} left in this session.")
    if measured:
        synthetic = " (synthetic data)" if results["synthetic"] else ""
        out.print(
            f"Accuracy on {results['test_images']} own test images{synthetic}: "
            f"{100 * measured[0]['accuracy']:.1f} % before, {100 * measured[-1]['accuracy']:.1f} % now."
        )
    out.print(f"The model: {outcome.folder / 'model.safetensors'}", soft_wrap=True)
    out.print(f"What left: silo report --config {config}", soft_wrap=True)


@app.command()
def inspect(
    config: Config,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan from `coordinator plan`; by default the one this silo saw last."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show exactly what would leave in the first round, and what else in others. Sends nothing."""
    from silo import inspection

    settings = SiloConfig.read(config)
    found = inspection.inspect(settings, inspection.read_plan(plan) if plan else inspection.known_plan(settings))
    if as_json:
        content = {
            "run": found.plan.run,
            "plan_sha256": found.plan.sha256.hex(),
            "messages_per_round": found.messages,
            "bytes_per_round": found.total,
            "bytes_per_request_for_a_task": found.asking,
            "content": [{**asdict(item), "loss": _loss(item)} for item in found.content],
            "privacy": _privacy(found),
            "also_in_other_rounds": [exposure.value for exposure in found.other_rounds],
            "missing": found.missing.lines(),
        }
        typer.echo(json.dumps(content, indent=2))
        return
    table = Table(
        title=f"Run {found.plan.run}, {found.plan.method.name}: what would leave {settings.name} in the "
        f"first of {found.plan.rounds} rounds, to {settings.coordinator_identity.uri}",
        title_justify="left",
    )
    for column in ("exposure class", "what", "bytes", "ε of the run", "consented"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for item in found.content:
        what = [f"{name} {'×'.join(map(str, shape)) or 'one number'} {dtype}" for name, shape, dtype in item.tensors]
        fields = [f"{name}: {count}" for name, count in item.fields.items()]
        table.add_row(
            item.exposure.value,
            "\n".join(what or fields),
            str(item.bytes),
            str(item.loss),
            "yes" if item.leaves else "no: stays here",
        )
    out.print(table)
    for line in _privacy_lines(found):
        out.print(line, markup=False, soft_wrap=True)
    if found.other_rounds:
        also = ", ".join(exposure.value for exposure in found.other_rounds)
        out.print(f"In another round, as the method's phases have it, also: {also}.")
    if found.missing:
        out.print("The consent does not cover this run; nothing of it would leave. Missing:")
        for line in found.missing.lines():
            out.print(f"  - {line}", markup=False)
    else:
        out.print(
            f"{found.total} bytes in {found.messages} messages a round, once the run is joined, and {found.asking} "
            "bytes (PROTOCOL, IDENTITY) each time it asks for a task. Each also carries signed receipts for what was "
            "exchanged before (PROTOCOL, IDENTITY; some 1 to 4 kB). Nothing was sent just now.",
            soft_wrap=True,
        )


def _loss(item: Leaving) -> dict[str, object]:
    epsilon = item.loss.epsilon
    return {"epsilon": None if math.isinf(epsilon) else epsilon, "mechanism": item.loss.mechanism}


def _privacy(found: Inspection) -> dict[str, object] | None:
    if found.guarantee is None or found.spent is None or found.after is None:
        return None
    return {
        "run": asdict(found.guarantee),
        "spent": asdict(found.spent),
        "after": asdict(found.after),
        "largest_group": found.largest_group,
    }


def _privacy_lines(found: Inspection) -> list[str]:
    if found.guarantee is None or found.spent is None or found.after is None:
        return ["The run has no differential privacy: there is no bound on what its content tells about a patient."]
    lines = [
        f"The run promises {found.guarantee}: one cost for all that comes from the noised training.",
        f"These images have cost {found.spent} so far; after this run, from its first round, it would be "
        f"{shown(found.after.epsilon)}.",
    ]
    if found.guarantee.unit == "image" and (found.largest_group or 1) > 1:
        lines.append(
            f"The unit is the image, and one patient has up to {found.largest_group} images here: a patient is "
            "protected less than the number says."
        )
    return lines


@app.command()
def budget(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what the privacy ledgers say: spent and left, per run and per release. Sends nothing."""
    from silo import budget as view

    settings = SiloConfig.read(config)
    found = view.read_accounts(settings)
    if as_json:
        typer.echo(json.dumps([view.as_json(account) for account in found], indent=2))
        return
    if not found:
        out.print(
            f"There is no privacy ledger in {settings.ledgers}: nothing was trained with differential privacy. What "
            "left without it has no bound; see `silo report`.",
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
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for report.html and report.json (default: state folder)."),
    ] = None,
) -> None:
    """Say what left this hospital: in words here, as a page and as JSON in files."""
    settings = SiloConfig.read(config)
    key = load_audit_key(settings.keys / "audit.key").public_key().public_bytes_raw()
    found = build_report(settings.journal, key, party=settings.identity.uri, federation=settings.federation)
    folder = output or settings.state / "report"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(found.to_html(), encoding="utf-8")
    (folder / "report.json").write_text(found.to_json(), encoding="utf-8")
    if found.synthetic:
        out.print("Synthetic data: the images were generated by a program; they show no patient.")
    for line in found.summary():
        out.print(line, markup=False, soft_wrap=True)
    for group in found.groups():
        table = Table(title=f"{group.when}, to {group.peer}", title_justify="left")
        for column in ("exposure class", "bytes", "rounds", "tells about patients"):
            table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
        for flow in group.flows:
            telling = "yes" if flow.exposure in TELLING else "no"
            table.add_row(flow.exposure.value, str(flow.bytes), group.rounds(flow), telling)
        out.print(table)
    out.print(found.verified, markup=False, soft_wrap=True)
    out.print(f"{folder / 'report.html'}\n{folder / 'report.json'}", soft_wrap=True)
    if not found.sound:
        raise typer.Exit(7)


@app.command()
def predict(
    config: Config,
    images: Annotated[Path, typer.Option("--images", help="A picture, a folder of pictures, or an .npz.")],
    run: Annotated[str | None, typer.Option("--run", help="Which run's model; by default the newest.")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="Write CSV there instead of printing it.")] = None,
) -> None:
    """Classify images with this hospital's personalised model. Sends nothing."""
    from silo import prediction

    settings = SiloConfig.read(config)
    folder = prediction.find_run(settings.runs, run)
    found = prediction.predict(folder, images, trusted=settings.trusted_models)
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
        Console(stderr=True).print(f"{right} of {len(known)} right ({100 * right / len(known):.1f} %)")


def _add_shard() -> None:
    from silo.shard_command import shard

    app.command()(shard)


def main() -> None:
    """Entry point."""
    _add_shard()
    run_app(app)
