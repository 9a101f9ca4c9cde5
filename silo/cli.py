"""The ``silo`` command."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from privacy.console import application, output
from privacy.console import run as run_app
from privacy.errors import JournalError
from privacy.pki import create_keys, load_audit_key
from privacy.report_builder import build_report, verify_journal
from privacy.report_pages import Format, print_report, write_report
from privacy.report_words import readable_bytes
from silo.config import SiloConfig

app = application("A hospital's side of a federation: trains on its own images, decides and records what leaves.")
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]


@app.command()
def keys(config: Config) -> None:
    """Make the hospital's keys and its certificate request, on this machine."""
    settings = SiloConfig.read(config)
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
            "content": [{**asdict(item), "epsilon": _epsilon(item.exposure.value)} for item in found.content],
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
    for column in ("exposure class", "what", "bytes", "ε", "consented"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for item in found.content:
        what = [f"{name} {'×'.join(map(str, shape)) or 'one number'} {dtype}" for name, shape, dtype in item.tensors]
        fields = [f"{name}: {count}" for name, count in item.fields.items()]
        table.add_row(
            item.exposure.value,
            "\n".join(what or fields),
            str(item.bytes),
            _epsilon(item.exposure.value),
            "yes" if item.leaves else "no: stays here",
        )
    out.print(table)
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
            "bytes (PROTOCOL, IDENTITY) each time it asks for a task. Nothing was sent just now.",
            soft_wrap=True,
        )


def _epsilon(exposure: str) -> str:
    """Privacy loss: without a mechanism there is no bound for what tells about patients."""
    return "0" if exposure in ("PROTOCOL", "IDENTITY", "INITIAL_MODEL") else "∞ (no noise)"


@app.command()
def report(
    config: Config,
    output: Annotated[
        Path | None, typer.Option("--out", help="Folder for the files (default: `report` in the state folder).")
    ] = None,
    formats: Annotated[
        list[Format], typer.Option("--format", help="Write this format only; repeat for several.")
    ] = list(Format),  # noqa: B006 Typer copies it
    run: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
) -> None:
    """Say what left this hospital, to whom and on which consent: in words here; as HTML, PDF and JSON in files."""
    settings = SiloConfig.read(config)
    key = load_audit_key(settings.keys / "audit.key").public_key().public_bytes_raw()
    found = build_report(
        settings.journal,
        key,
        party=settings.identity,
        verification=verify_journal(settings.journal, key),
        run=run,
    )
    written = write_report(found, output or settings.state / "report", formats)
    print_report(found, out)
    for path in written:
        out.print(str(path), markup=False, soft_wrap=True)
    if not found.verification.sound:
        raise typer.Exit(JournalError.exit_code)


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
