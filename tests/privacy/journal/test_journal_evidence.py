"""The journal as evidence: what was signed can be neither lost nor tidied away unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.checkpoint import verify
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, Journal, read_checkpoints, read_records
from tests.support.evidence.plain_journal import ORIGIN, PUBLIC, open_journal, plain_record, verified


def killed(folder: Path, records: int) -> None:
    """A journal whose process appended records, the last of them without a checkpoint, and was killed."""
    program = f"""
import os
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from medsilo.privacy.journal.journal import Journal
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
journal = Journal(Path({str(folder)!r}), key=key, origin={ORIGIN!r})
for number, record in enumerate({[plain_record(number) for number in range(records)]!r}):
    journal.append([record])
    if number == {records} - 3:
        journal.checkpoint()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    killed(tmp_path, 5)
    assert [record["number"] for record in read_records(tmp_path)] == [0, 1, 2, 3, 4]
    assert verified(tmp_path) == (5, 3)
    with open_journal(tmp_path) as journal:
        assert len(journal) == 5
    assert verified(tmp_path) == (5, 5)


def test_a_torn_last_record_is_cut_and_nothing_else(tmp_path: Path) -> None:
    killed(tmp_path, 5)
    whole = (tmp_path / RECORDS).read_bytes()
    for torn in (whole + b"{", whole + whole.splitlines()[0], whole[:-1], whole[:-30]):
        (tmp_path / RECORDS).write_bytes(torn)
        (tmp_path / CHECKPOINTS).write_bytes((tmp_path / CHECKPOINTS).read_bytes().splitlines(True)[0])
        kept = 5 if torn.startswith(whole) else 4
        assert verified(tmp_path)[0] == kept
        with open_journal(tmp_path) as journal:
            assert len(journal) == kept
        assert (tmp_path / RECORDS).read_bytes() == b"".join(whole.splitlines(True)[:kept])


def test_a_torn_record_that_was_signed_is_noticed_and_kept_as_evidence(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([plain_record(0), plain_record(1)])
    records = (tmp_path / RECORDS).read_bytes()
    (tmp_path / RECORDS).write_bytes(records[:-1])
    before = contents(tmp_path)
    with pytest.raises(JournalError, match="checkpoint over 2 was signed"):
        open_journal(tmp_path)
    assert contents(tmp_path) == before


def test_records_missing_below_a_signed_checkpoint_are_noticed(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([plain_record(number) for number in range(4)])
    lines = (tmp_path / RECORDS).read_bytes().splitlines(True)
    for kept in range(4):
        (tmp_path / RECORDS).write_bytes(b"".join(lines[:kept]))
        assert verify_evidence(tmp_path).problem == f"records {kept} to 3 were signed and are gone"
        with pytest.raises(JournalError, match=f"holds {kept} records, but a checkpoint over 4 was signed"):
            open_journal(tmp_path)


@pytest.mark.parametrize("index", range(4))
def test_a_changed_record_is_noticed_on_opening(tmp_path: Path, index: int) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([plain_record(number) for number in range(4)])
    lines = (tmp_path / RECORDS).read_bytes().splitlines(True)
    lines[index] = lines[index].replace(b'"number"', b'"numbex"')
    (tmp_path / RECORDS).write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match="not those that were signed"):
        open_journal(tmp_path)
    assert "not the one that was signed" in verify_evidence(tmp_path).problem


def test_a_journal_of_another_key_is_not_continued(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    with pytest.raises(JournalError, match="not signed with this key"):
        Journal(tmp_path, key=Ed25519PrivateKey.generate(), origin=ORIGIN)
    open_journal(tmp_path).close()  # and the failed attempt holds no lock


@pytest.mark.parametrize("line", [b"rubbish\n", b"{}\n", b"[]\n", b'{"checkpoint":1}\n', b"\n"])
def test_a_damaged_checkpoint_is_noticed(tmp_path: Path, line: bytes) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([plain_record(0)])
    assert verify_evidence(tmp_path).sound
    with (tmp_path / CHECKPOINTS).open("ab") as file:
        file.write(line)
    with pytest.raises(JournalError):
        open_journal(tmp_path)
    assert not verify_evidence(tmp_path).sound


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.journal import Journal
try:
    Journal(Path({str(tmp_path)!r}), key=Ed25519PrivateKey.generate(), origin="o")
except JournalError as error:
    print(error)
"""
    with open_journal(tmp_path) as journal:
        journal.append([{"number": 0}])
        before = contents(tmp_path)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "another process has this journal open" in done.stdout
        assert contents(tmp_path) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**60])
def test_a_record_that_cannot_be_written_leaves_no_trace(tmp_path: Path, value: Any) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([{"kind": "note", "number": 0}])
        with pytest.raises(ValueError):
            journal.append([{"kind": "note", "number": 1}, {"kind": "note", "number": value}])
        assert journal.append([{"kind": "note", "number": 1}]) == range(1, 2)
    assert [record["number"] for record in read_records(tmp_path)] == [0, 1]


def test_no_record_at_all_is_no_record(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        assert journal.append([]) == range(0, 0)
        assert len(journal) == 0
    assert not list(read_records(tmp_path))
    assert [verify(note, PUBLIC).size for note in read_checkpoints(tmp_path)] == [0]
    assert verify_evidence(tmp_path).problem == "it holds no record"


def test_records_are_lines_of_canonical_json_with_index_and_time(tmp_path: Path) -> None:
    text = 'Zürich \u2028 \n " \\ \x00 😀'
    with open_journal(tmp_path) as journal:
        journal.append([{"text": text, "b": 1.0, "a": None}])
    (line,) = (tmp_path / RECORDS).read_bytes().splitlines()
    record = json.loads(line)
    assert rfc8785.dumps(record) == line
    assert record["text"] == text
    assert (record["v"], record["index"]) == (1, 0)
    assert record["time"].endswith("Z")


def test_every_checkpoint_covers_what_was_there(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for size in range(1, 4):
            journal.append([{"number": size}])
            assert verify(journal.checkpoint(), PUBLIC).size == size
    assert [verify(note, PUBLIC).size for note in read_checkpoints(tmp_path)] == [1, 2, 3]


def test_the_journal_is_its_owners_alone(tmp_path: Path) -> None:
    open_journal(tmp_path / "journal").close()
    for name in (RECORDS, CHECKPOINTS):
        assert (tmp_path / "journal" / name).stat().st_mode & 0o077 == 0
