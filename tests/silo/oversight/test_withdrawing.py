"""A consent can be taken back whatever else is wrong on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from medsilo.privacy.errors import MedsiloError
from medsilo.silo.cli import app


@pytest.mark.parametrize("records", ['{"kind":"key"}\nrubbish\n{"x":1}\n', "[]\n{}\n"], ids=["no JSON", "no records"])
def test_a_consent_is_taken_back_although_the_journal_cannot_be_read(tmp_path: Path, records: str) -> None:
    """A daemon that runs appends to it, and would send on."""
    config = tmp_path / "hospital1.yaml"
    config.write_text(
        "federation: test\nname: hospital1\ncoordinator: {address: 'localhost:1'}\nstate: state\nshard: images.npz\n"
        "consent: consent.yaml\n"
    )
    journal = tmp_path / "state" / "journal"
    journal.mkdir(parents=True)
    (journal / "records.jsonl").write_text(records)
    (tmp_path / "state" / "keys").mkdir()
    (tmp_path / "state" / "keys" / "audit.key").touch()
    done = CliRunner().invoke(app, ["consent", "withdraw", "--yes", "--config", str(config)])
    assert "Withdrawn: nothing leaves any more." in done.output
    assert (tmp_path / "state" / "withdrawal.json").exists()
    assert done.exit_code != 0, "the coordinator could not be told, and the journal is to be looked at"
    assert isinstance(done.exception, MedsiloError)
