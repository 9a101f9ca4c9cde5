"""``doctor``: what a party's installation looks like, check by check, each with its remedy.

A check never raises: what goes wrong is its finding.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from medsilo.privacy.errors import JournalError, JournalInUseError, MedsiloError, NotReadyError
from medsilo.privacy.files.state_folder import name_some, readable_by_others
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.party.console import medsilo_version
from medsilo.privacy.party.party import PartyConfig

State = Literal["good", "notice", "bad"]
SOON_DAYS = 30
_LITTLE, _TOO_LITTLE = 5 << 30, 200 << 20
_COLOURS = {"good": "green", "notice": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Finding:
    """One check's outcome. ``bad`` has to be mended before training; ``remedy`` says how. ``declines``: there is
    nothing to mend, and the party takes no part, as its consent has it."""

    check: str
    state: State
    found: str
    remedy: str = ""
    declines: bool = False


def good(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "good", found)


def notice(check: str, found: str, remedy: str = "", *, declines: bool = False) -> Finding:
    """Worth knowing; training is possible, or the consent does not want it."""
    return Finding(check, "notice", found, remedy, declines)


def bad(check: str, found: object, remedy: str = "") -> Finding:
    """To be mended. An error's message says the remedy itself."""
    return Finding(check, "bad", str(found), remedy)


def show(name: str, findings: Sequence[Finding], out: Console, *, as_json: bool = False) -> None:
    """Prints the findings; raises ``NotReadyError`` if one of them is bad."""
    wrong = [finding for finding in findings if finding.state == "bad"]
    declines = any(finding.declines for finding in findings)
    if as_json:
        ready = not wrong and not declines
        out.print_json(json.dumps({"party": name, "ready": ready, "findings": [asdict(f) for f in findings]}))
    else:
        word = "to be mended" if wrong else "in order, and takes no part as its consent is" if declines else "ready"
        table = Table(title=f"{name}: {word}", title_justify="left")
        for column in ("check", "", "found, and what to do"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            colour = _COLOURS[finding.state]
            words = finding.found if not finding.remedy else f"{finding.found}\n→ {finding.remedy}"
            table.add_row(finding.check, f"[{colour}]{finding.state}[/]", _plain(words))
        out.print(table)
    if wrong:
        raise NotReadyError(f"{name}: to be mended: {', '.join(dict.fromkeys(finding.check for finding in wrong))}")


def check_versions() -> Finding:
    """Which releases are at work."""
    return good(
        "versions", f"medsilo {medsilo_version()}, Python {platform.python_version()}, gRPC {version('grpcio')}"
    )


def check_keys(party: PartyConfig) -> Finding:
    """That the audit key is there, and nobody else can read any key; what the TLS key holds is looked at with the
    certificate."""
    path = party.keys / "audit.key"
    try:
        load_audit_key(path)
    except MedsiloError as error:
        return bad("keys", error)
    keys = sorted(party.keys.glob("*.key"))
    if wide := [key for key in keys if key.stat().st_mode & 0o077]:
        names = " ".join(map(str, wide))
        return bad("keys", f"others can read {names}", f"chmod 600 {names}")
    return good("keys", f"{', '.join(key.name for key in keys)} in {party.keys}; no one else can read them")


def check_certificate(party: PartyConfig) -> tuple[Finding, Credentials | None]:
    """That certificate, TLS key, CA, name and dates fit together."""
    if party.insecure:
        return notice(
            "certificate", "none: `insecure: true` speaks in plain text", "for trials on one machine only"
        ), None
    try:
        found_here = party.open_credentials()
    except MedsiloError as error:
        return bad("certificate", error), None
    assert found_here is not None
    own = found_here.current
    days = (own.not_after - datetime.now(UTC)).days
    found = f"{own.identity.uri}, valid until {own.not_after:%Y-%m-%d} ({days} days)"
    if days < SOON_DAYS:
        remedy = "renew it in time: send tls.csr to the CA again, or ask for an invitation (docs/joining.md)"
        return notice("certificate", found, remedy), own
    return good("certificate", found), own


def check_disk(folder: Path) -> Finding:
    """That the disk of a party's state has space."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free for {folder}"
    if free < _TOO_LITTLE:
        return bad("disk", found, "make space: a journal that cannot be written stops everything")
    return notice("disk", found, "make space in time") if free < _LITTLE else good("disk", found)


def check_privacy(folder: Path) -> Finding:
    """That other accounts of this machine can read nothing of a party's state."""
    wide = readable_by_others(folder)
    if not wide:
        return good("state folder", f"{folder}: no other account can read what is in it")
    found = f"{folder}: other accounts of this machine can read {name_some(wide, folder)}"
    remedy = f"chmod -R go= {folder} (the daemon does it too when it starts, for what belongs to its account)"
    return bad("state folder", found, remedy)


def check_journal(party: PartyConfig) -> Finding:
    """That the journal is what was signed, as far as opening it shows (`audit verify` checks every record)."""
    if not party.journal.exists():
        return good("journal", "not begun yet")
    try:
        with Journal(
            party.journal, key=load_audit_key(party.keys / "audit.key"), origin=party.journal_origin
        ) as journal:
            return good("journal", f"{len(journal)} records, continues what was signed")
    except JournalInUseError:
        return good("journal", "in use by another process: the daemon (`train`, `serve`), or a second `doctor`")
    except JournalError as error:
        return bad("journal", error, "keep the copy as evidence, and look with `audit verify` what is damaged")
    except MedsiloError as error:
        return notice("journal", f"not looked at: {error}")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
