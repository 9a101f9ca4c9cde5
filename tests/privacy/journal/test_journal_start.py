"""A start reads what came after the last one remembered, finds the same as by reading all, and trusts nothing in it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import JournalError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal import journal as journals
from medsilo.privacy.journal import recovery
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, Journal, read_records
from medsilo.privacy.journal.start import START
from tests.support.evidence.exchanging import COORDINATOR, SILO, Exchange, Party, key_of, meet, origin_of

SMALL = 60_000
"""A segment's size with which a test's journal has several."""


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    """Two parties after some rounds, of which calls were cut; their journals have segments."""
    monkeypatch.setattr(os, "fsync", lambda _file: None)  # no power is cut here
    met = meet(tmp_path, coordinator=Party(COORDINATOR, tmp_path / "coordinator", key_of(200), segment_bytes=SMALL))
    met.silo.journal._segment_bytes = SMALL
    met.rounds(range(30))
    for what in ("request", "answer", "middle"):
        met.cutting(what, lambda: met.submit(30))
    yield met
    met.close()


def last(exchange: Exchange) -> None:
    """What comes after the start was written."""
    exchange.rounds(range(31, 34))
    exchange.cutting("answer", lambda: exchange.get_task(34))


def stopped(party: Party) -> Path:
    """A copy of the journal's folder, as a killed process leaves it."""
    return copied(party.folder)


def copied(folder: Path) -> Path:
    copy = Path(tempfile.mkdtemp(dir=folder.parent))
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return copy


def found(folder: Path, party: Party) -> dict[str, Any]:
    """All that a start finds out."""
    with Journal(folder, key=party.key, origin=origin_of(party.identity), segment_bytes=SMALL) as journal:
        door = Door(journal, identity=party.identity, federation="test", gate=PlanGate(Exposure))
        kept = {peer: one.kept() for peer, one in sorted(door._receipt_states.items())}
        size = len(journal)
        return {
            "size": size,
            "correspondences": kept,
            "schemas": sorted(door._schemas),
            "rotations": len(door.rotations()),
            "proofs": [journal.consistency(first, size) for first in range(0, size, 7)],
            "tree": (journal._tree.peaks, journal._tree.tiles(), journal._segments.places),
            "files": [path.name for path in journal._segments._paths],
            "kept": [(one.name, one.first, one.size, one.sha256) for one in journal._segments.kept],
            "segment": (journal._segments.first, journal._segments.end, journal._segments.sha256()),
            "signed": (journal._chain.size, journal._chain._last_line, journal._chain.line_bytes),
            "party": journal._party,
            "keys": journal._keys,
            "read": size - journal.read_from,
        }


def without_start(folder: Path, party: Party) -> dict[str, Any]:
    whole = copied(folder)
    (whole / START).unlink()
    return found(whole, party)


def both(exchange: Exchange) -> list[Party]:
    return [exchange.silo, exchange.coordinator]


def test_a_start_reads_only_what_follows_and_finds_what_reading_all_finds(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    for party in both(exchange):
        party.door.remember(after=1)
    before = {party.name: len(party.journal) for party in both(exchange)}
    last(exchange)
    parsed: list[int] = []
    parse = recovery.parse
    monkeypatch.setattr(
        recovery, "parse", lambda line, index, folder: (parsed.append(index), parse(line, index, folder))[1]
    )
    for party in both(exchange):
        folder = stopped(party)
        assert len(list(folder.glob("records-*.jsonl"))) > 1
        parsed.clear()
        slow = without_start(folder, party)
        assert min(parsed) == 0
        assert slow.pop("read") == slow["size"]
        parsed.clear()
        quick = found(folder, party)
        assert min(parsed) == before[party.name]
        assert quick.pop("read") == quick["size"] - before[party.name]
        assert quick == slow
        assert verify_evidence(folder).sound


def test_what_was_remembered_again_and_again_while_others_write_is_the_same(exchange: Exchange) -> None:
    over = threading.Event()

    def remember() -> None:
        while not over.is_set():
            exchange.coordinator.door.remember(after=1)

    thread = threading.Thread(target=remember)
    thread.start()
    exchange.rounds(range(31, 60))
    over.set()
    thread.join()
    folder = stopped(exchange.coordinator)
    slow, quick = without_start(folder, exchange.coordinator), found(folder, exchange.coordinator)
    assert quick.pop("read") < slow.pop("read")
    assert quick == slow


def test_after_a_change_of_keys_all_is_read_once(exchange: Exchange, tmp_path: Path) -> None:
    silo = exchange.silo
    silo.door.remember(after=1)
    silo.rotate(tmp_path / "keys")
    assert silo.journal.read_from == 0
    exchange.in_step = False
    exchange.get_plan()
    exchange.join()
    silo.door.remember(after=1)
    folder = stopped(silo)
    slow, quick = without_start(folder, silo), found(folder, silo)
    assert quick.pop("read") < slow.pop("read")
    assert quick == slow
    assert quick["rotations"] == 1


def damage_start(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / START).read_bytes())
        change(content)
        (folder / START).write_text(json.dumps(content))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / START).write_bytes((folder / START).read_bytes()[:-100]),
        lambda folder: (folder / START).write_bytes(b"[]"),
        lambda folder: (folder / START).write_bytes(b"\xff" * 100),
        damage_start(lambda content: content["signatures"][0].update(sig="AAAA")),
        damage_start(lambda content: content.update(payload="e30=")),
        lambda folder: shutil.copy(folder.parent / "hospital1" / START, folder / START),
    ],
    ids=["cut", "other JSON", "no JSON", "signature", "content", "another party's"],
)
def test_a_start_that_is_damaged_or_another_journals_is_passed_over(
    exchange: Exchange, damage: Callable[[Path], object]
) -> None:
    for party in both(exchange):
        party.door.remember(after=1)
    folder = stopped(exchange.coordinator)
    damage(folder)
    slow, quick = without_start(folder, exchange.coordinator), found(folder, exchange.coordinator)
    assert quick["read"] == quick["size"]
    assert quick == slow


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize("which", ["first segment", "last segment", "newest file", "checkpoints"])
def test_a_journal_that_was_changed_beside_its_start_is_refused_as_before(exchange: Exchange, which: str) -> None:
    party = exchange.coordinator
    party.door.remember(after=1)
    last(exchange)
    party.journal.checkpoint()
    folder = stopped(party)
    older = sorted(folder.glob("records-*.jsonl"))
    path = {"first segment": older[0], "last segment": older[-1], "checkpoints": folder / CHECKPOINTS}.get(
        which, folder / RECORDS
    )
    old, new = (b'"direction":"sent"', b'"direction":"sEnt"')
    if which == "checkpoints":
        old, new = path.read_bytes()[-40:], b"x" * 39 + b"\n"
    replace(path, old, new)
    with pytest.raises(JournalError):
        found(folder, party)
    assert not verify_evidence(folder).sound


@pytest.mark.parametrize("lost", ["a segment", "the end", "more than the end"])
def test_a_journal_that_is_shorter_than_its_start_is_refused(exchange: Exchange, lost: str) -> None:
    party = exchange.coordinator
    party.door.remember(after=1)
    folder = stopped(party)
    if lost == "a segment":
        sorted(folder.glob("records-*.jsonl"))[0].unlink()
    else:
        lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
        (folder / RECORDS).write_bytes(b"".join(lines[: -1 if lost == "the end" else 1]))
    with pytest.raises(JournalError):
        found(folder, party)


def test_segments_that_came_back_from_a_backup_unchanged_are_taken(exchange: Exchange) -> None:
    party = exchange.coordinator
    party.door.remember(after=1)
    folder = stopped(party)
    for path in folder.glob("records*.jsonl"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert found(folder, party)["read"] == 0


def test_a_segment_that_ends_after_the_start_is_taken_up_in_its_new_place(exchange: Exchange) -> None:
    party = exchange.coordinator
    party.door.remember(after=1)
    files = len(list(party.folder.glob("records-*.jsonl")))
    exchange.rounds(range(31, 60))
    folder = stopped(party)
    assert len(list(folder.glob("records-*.jsonl"))) > files + 1
    slow, quick = without_start(folder, party), found(folder, party)
    assert quick.pop("read") < slow.pop("read")
    assert quick == slow


def test_what_the_owner_remembers_of_records_that_a_crash_then_took_away_is_passed_over(exchange: Exchange) -> None:
    party = exchange.coordinator
    journal, size = party.journal, len(party.journal)

    def memory() -> dict[str, Any]:
        exchange.attest()
        return party.door._memory()

    journal.remember(memory)
    folder = stopped(party)
    kept = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    gone = len(list(read_records(folder))) - size
    assert gone > 0
    (folder / RECORDS).write_bytes(b"".join(kept[:-gone]))
    notes = (folder / CHECKPOINTS).read_bytes().splitlines(keepends=True)
    whole = [line for line in notes if int(json.loads(line)["checkpoint"].split("\n")[1]) <= size]
    (folder / CHECKPOINTS).write_bytes(b"".join(whole))
    slow, quick = without_start(folder, party), found(folder, party)
    assert quick["size"] == size
    assert quick["correspondences"] == slow["correspondences"]


def test_a_disk_that_does_not_take_the_start_costs_a_line_in_the_log(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journals, "write_start", full)
    exchange.coordinator.door.remember(after=1)
    assert "the next start has to read the whole journal" in caplog.text
    assert SILO in found(stopped(exchange.coordinator), exchange.coordinator)["correspondences"]
