"""A journal in segments is one journal: one tree, linked by signed records, and proofs across all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.journal import RECORDS, Journal, read_lines, read_records
from medsilo.privacy.journal.merkle import MerkleTree, check_consistency
from tests.support.evidence.plain_journal import open_journal, plain_record, verified


def opened(folder: Path) -> Journal:
    return open_journal(folder, segment_bytes=20_000)


def fill(journal: Journal, count: int) -> list[str]:
    """Appends records with a checkpoint after each; returns the notes."""
    notes = []
    for _ in range(count):
        journal.append([plain_record(len(journal), pad="x" * 200)], durable=False)
        notes.append(journal.checkpoint())
    return notes


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("records-*.jsonl"))


def test_segments_are_linked_by_hash_and_signed_checkpoint_and_verify_as_one(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 300)
    with opened(tmp_path) as journal:
        fill(journal, 100)
    assert len(segments(tmp_path)) > 3
    records = list(read_records(tmp_path))
    assert [record["index"] for record in records] == list(range(len(records)))
    links = [record for record in records if record["kind"] == "segment"]
    assert [link["file"] for link in links] == [path.name for path in segments(tmp_path)]
    for link in links:
        path = tmp_path / link["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == link["sha256"]
        assert len(path.read_bytes().splitlines()) == link["records"]
        assert read_note(link["checkpoint"]).size == link["index"] == link["first"] + link["records"]
    assert verified(tmp_path) == (len(records), len(records))


def test_proofs_reach_across_segments_and_restarts(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        notes = fill(journal, 300)
    with opened(tmp_path) as journal:
        notes += fill(journal, 250)
        last = read_note(journal.checkpoint())
        for note in map(read_note, notes):
            proof = journal.consistency(note.size, last.size)
            assert check_consistency(note.size, note.root, last.size, last.root, proof)
    tree = MerkleTree()
    for line in read_lines(tmp_path):
        tree.append(line)
        if tree.size == last.size:
            assert tree.root() == last.root


@pytest.mark.parametrize("damage", ["gone", "changed", "shortened"])
def test_a_damaged_or_missing_segment_is_found(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 300)
    victim = segments(tmp_path)[1]
    content = victim.read_bytes()
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes(content.replace(b'"pad":"x', b'"pad":"y', 1) if damage == "changed" else content[:-300])
    with pytest.raises(JournalError):
        opened(tmp_path)
    assert not verify_evidence(tmp_path).sound


def test_a_crash_while_a_segment_is_set_aside_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if Path(target).name == RECORDS:
            raise KeyboardInterrupt
        return replace(self, target)

    journal = opened(tmp_path)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        fill(journal, 300)
    size = len(journal)
    os.close(journal._file)  # as the end of the process would
    monkeypatch.undo()
    with opened(tmp_path) as again:
        assert len(again) == size
        fill(again, 200)
    assert len(segments(tmp_path)) > 2
    assert verify_evidence(tmp_path).sound
