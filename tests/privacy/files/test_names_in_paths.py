"""A name that becomes part of a path is a name: nothing that leads out of its folder gets so far."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from pydantic import TypeAdapter, ValidationError

from medsilo.privacy.budget.ledger import Subject, ledgers
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.errors import DataError, IdentityError, JournalError, MedsiloError, RefusedError
from medsilo.privacy.files.configuration import Name
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import RECORDS
from medsilo.silo.model.kept_models import find_model
from medsilo.silo.oversight.opening import open_rounds
from tests.support.evidence.exchanging import PLAN, meet, two_rounds

BAD = {
    "up": "../../etc/passwd",
    "dots": "..",
    "dot": ".",
    "hidden": ".ssh",
    "absolute": "/etc/passwd",
    "backslash": "..\\..\\windows",
    "drive": "c:evil",
    "NUL byte": "a\x00b",
    "line break": "hospital1\n",
    "empty": "",
    "long": "a" * 5000,
    "capitals": "Hospital1",
    "Cyrillic": "hоspital1",
    "full-width": "ｈospital1",
    "right to left": "hospital\u202e1",
    "zero width": "hospital\u200b1",
    "composed": "hôpital",
    "percent": "%2e%2e%2f",
    "tilde": "~root",
    "variable": "$HOME",
    "stream": "nul:",
    "space": "hospital 1",
    "hyphen": "-rf",
}
RESERVED = ("con", "nul", "aux", "prn", "com1", "lpt9")
"""Devices on Windows, where Medsilo does not run: its journals are locked in POSIX's way."""


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
def test_a_name_that_is_none_is_refused_wherever_names_come_in(name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(name)
    for where in ("federation", "name"):
        with pytest.raises(IdentityError):
            Identity(**{"federation": "test", "role": "silo", "name": "a", where: name})  # type: ignore[arg-type]
    with pytest.raises(IdentityError):
        Identity.parse(f"spiffe://test/silo/{name}")
    for where in ("federation", "coordinator", "run"):
        with pytest.raises(ValidationError):
            RunPlan.model_validate({**PLAN.model_dump(), where: name})
        message = PLAN.to_message()
        setattr(message, where, name)
        with pytest.raises(RefusedError):
            RunPlan.from_message(message)


@pytest.mark.parametrize("name", RESERVED)
def test_windows_devices_stay_names_in_their_folder(name: str, tmp_path: Path) -> None:
    assert (tmp_path / Identity("test", "silo", name).name).parent == tmp_path


@pytest.mark.parametrize("name", [n for n in BAD.values() if "/" in n or "\x00" in n or n in ("..", ".")])
def test_a_run_is_looked_for_in_its_folder_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(DataError):
        find_model(tmp_path / "runs", name)


@pytest.mark.parametrize("field", ["data_sha256", "split"])
@pytest.mark.parametrize("value", [*BAD.values(), 7, None, []], ids=[*BAD, "number", "null", "list"])
def test_a_ledger_names_no_file_but_its_own(field: str, value: Any, tmp_path: Path) -> None:
    description = {**Subject("ab" * 32, "image").describe(), field: value}
    with pytest.raises((ValueError, TypeError)):
        Subject.read(description)
    try:
        line = rfc8785.dumps({"v": 1, "index": 0, "previous": "", "kind": "ledger", **description})
    except ValueError:
        return
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    with pytest.raises(MedsiloError):
        ledgers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize(("field", "value"), [("run", "../../x"), ("call_id", "../" * 10 + "ab"), ("round", "../x")])
def test_opening_what_was_kept_writes_nowhere_else(field: str, value: str, tmp_path: Path) -> None:
    class Config:
        journal = two_rounds(tmp_path / "parties").silo.folder
        sent_archive = SentArchive(tmp_path / "sent", tmp_path / "sent.key")

    lines = [json.loads(line) for line in (Config.journal / RECORDS).read_bytes().splitlines()]
    for record in lines:
        if record["kind"] == "message" and record["rpc"] == "SubmitUpdate":
            record[field] = value
    (Config.journal / RECORDS).write_bytes(b"".join(rfc8785.dumps(record) + b"\n" for record in lines))
    with pytest.raises(JournalError, match="not in form"):
        open_rounds(Config, tmp_path / "out", run=None, round_number=None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [[], 7, {"a": 1}, None, "zz", "\U0001f4a9"])
@pytest.mark.parametrize("field", ["kind", "call_id", "sha256", "peer", "public_key", "attestation", "run", "plan"])
def test_a_record_that_is_not_in_form_ends_the_start_with_an_error_of_the_journal(
    field: str, value: Any, tmp_path: Path
) -> None:
    """Found by damaged input: many of these were errors of Python's."""
    exchange = meet(tmp_path)
    exchange.close()
    path = exchange.silo.folder / RECORDS
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for record in lines:
        if field in record:
            record[field] = value
    path.write_bytes(b"".join(rfc8785.dumps(record) + b"\n" for record in lines))
    (exchange.silo.folder / "checkpoints.jsonl").unlink()
    with contextlib.suppress(MedsiloError):
        History.read(exchange.silo.folder)
    with contextlib.suppress(MedsiloError):
        exchange.silo.open()
        exchange.silo.journal.close()
