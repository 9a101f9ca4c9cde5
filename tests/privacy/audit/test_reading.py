"""Reading evidence and making a report from Python, as the commands do it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from medsilo.privacy.audit.bundle import UnreadableError, open_evidence, read_evidence
from medsilo.privacy.errors import IdentityError, JournalError
from medsilo.privacy.identity.envelope import key_id
from medsilo.privacy.report.builder import make_report
from tests.support.evidence.exchanging import Exchange, two_rounds


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    return two_rounds(tmp_path)


def test_a_bundle_and_its_journal_give_the_same_records_in_order(exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "bundle.json")
    records = list(read_evidence(bundle))
    assert [record["index"] for record in records] == list(range(len(records)))
    assert records == [json.loads(line) for line in open_evidence(bundle).lines]
    assert records == list(read_evidence(str(exchange.silo.folder)))[: len(records)]


def test_a_line_that_is_no_record_is_named_after_those_before_it_were_read(exchange: Exchange) -> None:
    path = exchange.silo.folder / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b'{"index":3,"index":3}\n', *lines[3:]]))
    found = read_evidence(exchange.silo.folder)
    assert [next(found)["index"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UnreadableError, match="line 3 of its records is none"):
        next(found)
    with pytest.raises(UnreadableError, match="cannot be read"):
        next(read_evidence(exchange.silo.folder / "none.json"))


def test_a_report_names_its_owner_and_holds_a_changed_journal_not_sound(exchange: Exchange, tmp_path: Path) -> None:
    key = exchange.silo.journal.public_key
    report = make_report(str(exchange.silo.folder), key=key)
    assert report.verification.sound
    assert report.party.uri == next(read_evidence(exchange.silo.folder))["self"]
    assert report.key_sha256 == key_id(key)
    other = make_report(exchange.silo.folder, key=bytes(reversed(key)))
    assert not other.verification.sound, "the key that was given counts, not the one that the journal names"
    forged = tmp_path / "forged"
    shutil.copytree(exchange.silo.folder, forged)
    path = forged / "records.jsonl"
    assert path.read_bytes().count(b'"round":1') > 1
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":2', 1))
    assert not make_report(forged, key=key).verification.sound


def test_a_report_without_a_key_or_a_journal_says_what_is_missing(exchange: Exchange, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"keys/audit\.pub: cannot be read"):
        make_report(exchange.silo.folder)
    with pytest.raises(JournalError, match="there is no journal there"):
        make_report(tmp_path / "nowhere")
