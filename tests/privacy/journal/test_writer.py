"""A coordinator that has lost its lease writes nothing more into the journal, whenever in its work it was stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import JournalInUseError, LeaseLostError, StoreError
from medsilo.privacy.journal.journal import RECORDS, Journal
from tests.support.evidence.plain_journal import KEY, ORIGIN, plain_record


def opened(folder: Path, *, take_over: bool = False, allowed: Callable[[], None] = lambda: None) -> Journal:
    return Journal(folder, key=KEY, origin=ORIGIN, segment_bytes=5000, take_over=take_over, allowed=allowed)


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Journal]:
    """A journal whose process has it open."""
    journal = opened(tmp_path)
    journal.append([plain_record(number) for number in range(5)])
    journal.checkpoint()
    yield journal
    journal.close()


def test_a_journal_that_is_open_is_taken_from_its_process_only_by_one_that_says_so(hanging: Journal) -> None:
    with pytest.raises(JournalInUseError):
        opened(hanging.directory)
    with opened(hanging.directory, take_over=True) as journal:
        assert len(journal) == 5
        with pytest.raises(JournalInUseError):
            opened(hanging.directory)


@pytest.mark.parametrize(
    "write",
    [
        lambda journal: journal.append([plain_record(len(journal))]),
        lambda journal: journal.append([plain_record(len(journal))], durable=False),
        lambda journal: journal.checkpoint(),
        lambda journal: journal.checkpoint(durable=False),
        lambda journal: journal.remember(dict),
        lambda journal: journal.close(),
    ],
    ids=["record", "record, not waited for", "checkpoint", "checkpoint, not waited for", "start", "close"],
)
def test_who_has_lost_the_journal_writes_nothing_more(tmp_path: Path, write: Callable[[Journal], object]) -> None:
    old = opened(tmp_path)
    old.append([plain_record(number) for number in range(5)])
    with opened(tmp_path, take_over=True) as new:
        new.append([plain_record(5)])
        new.checkpoint()
        before = everything(tmp_path)
        try:
            write(old)
        except LeaseLostError:
            pass
        else:
            assert getattr(write, "__name__", "") == "<lambda>"
        assert everything(tmp_path) == before
        new.append([plain_record(6)])
    assert verify_evidence(tmp_path).sound


@pytest.mark.parametrize("step", ["write", "fsync"])
def test_what_was_being_written_while_another_took_over_counts_for_nothing(
    hanging: Journal, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Stopped between its look at who may write and the write, or behind it."""
    took: list[Journal] = []
    whole = getattr(os, step)

    def stopped(file: int, *rest: object) -> object:
        if file == hanging._file and not took:
            monkeypatch.setattr(os, step, whole)
            took.append(opened(hanging.directory, take_over=True))
        return whole(file, *rest)

    monkeypatch.setattr(os, step, stopped)
    size = len(hanging)
    with pytest.raises(LeaseLostError, match="has taken over this journal"):
        hanging.append([plain_record(size)])
    (new,) = took
    # What stood in the file before the other came is a record like any other: of something that did not happen.
    assert len(new) == size + (step == "fsync")
    new.append([plain_record(len(new))])
    new.close()
    assert verify_evidence(hanging.directory).sound


@pytest.mark.parametrize("step", ["link", "open", "replace"])
def test_a_segment_that_was_being_set_aside_then_takes_no_files_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    old = opened(tmp_path)
    old.append([plain_record(number, pad="x" * 400) for number in range(12)])
    took: list[Journal] = []
    place: object = Path if step == "replace" else os
    whole = getattr(place, step)

    def stopped(*given: object, **named: object) -> object:
        if not took and (step == "link" or (RECORDS in str(given[0]) and ".writing-" in str(given[0]))):
            monkeypatch.setattr(place, step, whole)
            took.append(opened(tmp_path, take_over=True))
        return whole(*given, **named)

    monkeypatch.setattr(place, step, stopped)
    with pytest.raises((LeaseLostError, FileNotFoundError)):
        old.checkpoint()
    (new,) = took
    new.append([plain_record(len(new), pad="x" * 400) for _ in range(12)])
    new.checkpoint()
    size = len(new)
    new.close()
    with opened(tmp_path, take_over=True) as again:
        assert len(again) == size
    assert verify_evidence(tmp_path).sound
    old.close()


def test_while_a_process_may_not_lead_nothing_is_written(tmp_path: Path) -> None:
    sure = [True]

    def allowed() -> None:
        if not sure[0]:
            raise StoreError("not sure")

    with opened(tmp_path, allowed=allowed) as journal:
        journal.append([plain_record(0)])
        sure[0] = False
        before = everything(tmp_path)
        for write in (lambda: journal.append([plain_record(1)]), journal.checkpoint):
            with pytest.raises(StoreError):
                write()
        assert everything(tmp_path) == before
        sure[0] = True
        journal.append([plain_record(1)])
    assert verify_evidence(tmp_path).sound
