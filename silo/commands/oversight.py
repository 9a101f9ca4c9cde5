"""``silo report``, ``dossier``, ``budget``, ``page`` and ``audit open``: what the data protection officer looks at."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.party.commands import (
    OnlyRun,
    ReportFolder,
    ReportFormats,
    report_on,
)
from medsilo.privacy.party.console import medsilo_version, out, say
from medsilo.privacy.report.format import Format
from medsilo.silo.commands.options import Config
from medsilo.silo.flower.config import read_party
from medsilo.silo.state.config import SiloConfig


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


def budget(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures to this file too.")] = None,
    shard: Annotated[
        Path | None,
        typer.Option("--shard", help="An older version's file: its charges then count for its own images alone."),
    ] = None,
    patients: Annotated[
        bool, typer.Option("--patients", help="Show what each training patient has cost, instead. It stays here.")
    ] = False,
) -> None:
    """Show what the privacy ledgers say: spent and left, per run, release and version. Sends nothing."""
    from medsilo.silo.oversight import budget as view

    settings = SiloConfig.read(config)
    if shard is not None:
        version = view.remember(settings, shard)
        typer.echo(f"The images and patients of data set {version} are on record (as keyed hashes).", err=True)
    if patients:
        listed = view.read_patients(settings)
        if as_json:
            typer.echo(json.dumps([asdict(one) for one in listed], indent=2))
        else:
            out.print(view.patients_table(listed))
        return
    found = view.read_accounts(settings, course=html is not None)
    if html is not None:
        try:
            write_atomically(html, view.to_html(settings.name, found).encode())
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


def report(
    config: Config,
    folder: ReportFolder = None,
    formats: ReportFormats = list(Format),  # noqa: B006 Typer copies it
    run: OnlyRun = None,
) -> None:
    """Say what left this hospital, to whom and on which consent: in words here; as HTML, PDF and JSON in files."""
    report_on(read_party(config), folder, formats, run=run)


def dossier(
    config: Config,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="The hospital's own statements (default: NAME.dossier.yaml beside --config)."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for the files (default: `dossier` in the state folder).")
    ] = None,
    run: OnlyRun = None,
    bom: Annotated[
        Path | None, typer.Option("--bom", help="Write the runs' models and data as a CycloneDX file (JSON) too.")
    ] = None,
) -> None:
    """Draft the data protection file: art. 30 and 35 GDPR and others, each fact with the records that prove it.

    Asks once, at a terminal, what only the hospital can say, and keeps the answers; what is not answered is a blank.
    """
    from medsilo.privacy.dossier.draft import Draft
    from medsilo.privacy.dossier.model_bom import make_bom
    from medsilo.privacy.dossier.questionnaire import Answers, ask_answers, read_answers
    from medsilo.privacy.dossier.writing import write_dossier
    from medsilo.privacy.identity.keys import load_audit_key
    from medsilo.privacy.pages.page import print_page_one
    from medsilo.privacy.report.builder import make_report

    party = read_party(config)
    file = answers or config.with_name(f"{party.name}.dossier.yaml")
    if answers is not None or file.exists():
        stated = read_answers(file)
    elif sys.stdin.isatty():
        say("What only the hospital can say. Leave empty what is not known yet: it becomes a blank to fill in.")
        stated = ask_answers(lambda what: str(typer.prompt(what, default="", show_default=False)), file)
        say(f"Kept in {file}, to be changed there.")
    else:
        stated = Answers()
        say(f"There is no {file}, and no terminal to ask at: what the hospital states is left blank.")
    key = load_audit_key(party.keys / "audit.key").public_key().public_bytes_raw()
    found = make_report(party.journal, key=key, party=party.identity, run=run)
    if folder is None:
        keep_private(party.state)
    draft = Draft(found, party.journal)
    document, paths = write_dossier(draft, stated, folder or party.state / "dossier")
    if bom is not None:
        files = {file.parent.name: file for file in (party.state / "runs").glob("*/model.safetensors")}
        write_atomically(bom, make_bom(draft, files, version=medsilo_version()))
        paths.append(bom)
    print_page_one(document, out)
    for path in paths:
        say(str(path))
    if not found.verification.sound:
        raise typer.Exit(JournalError.exit_code)


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
