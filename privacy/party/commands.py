"""What ``keys`` and ``report`` do for every party; the two command lines say the rest in their own words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.privacy.errors import JournalError
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.keys import KeyPaths, create_keys, load_audit_key
from medsilo.privacy.party.console import out, say
from medsilo.privacy.party.logs import LogFormat
from medsilo.privacy.party.party import PartyConfig
from medsilo.privacy.report.format import Format

if TYPE_CHECKING:
    from medsilo.privacy.report.model import Answer, Attendance, SharedAccuracy

Rotate = Annotated[
    bool, typer.Option("--rotate", help="Change the audit key, by a signed record; stop the daemon first.")
]
ReportFolder = Annotated[
    Path | None, typer.Option("--out", help="Folder for the files (default: `report` in the state folder).")
]
ReportFormats = Annotated[list[Format], typer.Option("--format", help="Write this format only; repeat for several.")]
OnlyRun = Annotated[str | None, typer.Option("--run", help="Only this run.")]
Log = Annotated[LogFormat, typer.Option("--log", help="Lines for people, or JSON for machines.")]


def rotate_key(party: PartyConfig) -> None:
    """Changes a party's audit key and says so; raises as ``key_rotation.rotate`` does."""
    from medsilo.privacy.journal.key_rotation import rotate  # loads what journals need

    keep_private(party.state)
    found = rotate(party.keys, party.journal, origin=party.journal_origin, identity=party.identity)
    out.print(f"The audit key is a new one ({found[:16]}…), and the journal says so, signed with both keys.")


def make_keys(party: PartyConfig) -> KeyPaths:
    """Makes a party's keys and says where they are; raises as ``create_keys`` does."""
    keep_private(party.state)
    paths = create_keys(party.keys, party.identity)
    out.print(f"Keys are in {party.keys}; they stay on this machine.")
    return paths


def report_on(
    party: PartyConfig,
    folder: Path | None,
    formats: Sequence[Format],
    *,
    run: str | None,
    answers: Sequence[Answer] = (),
    accuracies: Sequence[SharedAccuracy] = (),
    attendance: Sequence[Attendance] = (),
) -> None:
    """Prints the report of a party's own journal, and writes its files into a folder, ``report`` by default.

    Ends the command with the exit code of a broken journal if it is not sound.
    """
    from medsilo.privacy.report.builder import make_report  # takes a while to load; the other commands need none of it
    from medsilo.privacy.report.writing import print_report, write_report

    key = load_audit_key(party.keys / "audit.key").public_key().public_bytes_raw()
    found = make_report(
        party.journal,
        key=key,
        party=party.identity,
        run=run,
        answers=answers,
        accuracies=accuracies,
        attendance=attendance,
    )
    if folder is None:
        keep_private(party.state)
    written = write_report(found, folder or party.state / "report", formats)
    print_report(found, out)
    for path in written:
        say(str(path))
    if not found.verification.sound:
        raise typer.Exit(JournalError.exit_code)
