"""The account survives: never less on disk than was released, whatever happens in between."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.privacy.budget.accounting import GaussianRelease, SampledGaussian, epsilon
from medsilo.privacy.budget.ledger import Budget, Entry, Ledger, Purpose, Subject, ledgers
from medsilo.privacy.budget.units import Content
from medsilo.privacy.errors import BudgetError, DiskError
from tests.support.evidence.charges import replay
from tests.support.evidence.charges import told as charges

DATA = "ab" * 32
SUBJECT = Subject(DATA, "image")
AMPLE = Budget(50.0, 1e-5)
CONTENTS = {
    split: Content(np.full((3, 4, 4, 1), number, np.uint8) + np.arange(3, dtype=np.uint8)[:, None, None, None], None)
    for number, split in ((10, "train"), (20, "test"))
}
RELEASE = GaussianRelease(40.0)


def purpose(round_number: int = 0, run: str = "tissue-1") -> Purpose:
    return Purpose("tissue", run, "cd" * 32, round_number, "training")


def test_the_account_outlives_runs_federations_and_restarts(tmp_path: Path) -> None:
    Ledger(tmp_path, SUBJECT).charge(SampledGaussian(0.2, 2, 200), purpose(), AMPLE)
    Ledger(tmp_path, SUBJECT).charge(SampledGaussian(0.2, 2, 300), purpose(run="tissue-2"), AMPLE)
    entry = Ledger(tmp_path, SUBJECT).charge(GaussianRelease(4), Purpose("skin", "x", "00", 3, "identifier"), AMPLE)
    found = Ledger(tmp_path, SUBJECT).guarantee(1e-5)
    assert round(found.epsilon, 3) == 12.704
    assert str(found) == "ε = 12.704 at δ = 1e-05 (unit image, adjacency zero-out, accountant PLD)"
    assert [e.index for e in Ledger(tmp_path, SUBJECT).entries()] == [1, 2, 3]
    assert (entry.purpose.federation, entry.purpose.run, entry.purpose.round) == ("skin", "x", 3)


def test_each_data_set_version_unit_and_split_has_an_account_of_its_own(tmp_path: Path) -> None:
    others = [Subject("ff" * 32, "image"), Subject(DATA, "patient"), Subject(DATA, "image", "test")]
    for subject in (SUBJECT, *others):
        assert Ledger(tmp_path, subject).cost(1e-5).epsilon == 0
        Ledger(tmp_path, subject, CONTENTS).charge(RELEASE, purpose(), AMPLE)
    assert {ledger.subject for ledger in ledgers(tmp_path)} == {SUBJECT, *others}
    assert all(len(ledger.entries()) == 1 for ledger in ledgers(tmp_path))


def test_overspend_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    ledger.charge(SampledGaussian(0.2, 2, 500), purpose(), Budget(12.63, 1e-5))
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetError) as caught:
        ledger.charge(GaussianRelease(4), purpose(4), Budget(12.63, 1e-5))
    assert ledger.path.read_bytes() == before
    for words in ("12.63", "1e-05", "unit image", "zero-out", "PLD", "12.622", "12.704", "round 5", "tissue-1"):
        assert words in str(caught.value)


def test_a_torn_last_line_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    for number in range(3):
        ledger.charge(RELEASE, purpose(number), AMPLE)
    whole = ledger.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in range(1, len(last)):
        ledger.path.write_bytes(whole[: len(whole) - cut])
        reopened = Ledger(tmp_path, SUBJECT)
        assert len(reopened.entries()) == 2
        if cut % 40 == 0:
            reopened.charge(RELEASE, purpose(9), AMPLE)
            assert [e.purpose.round for e in Ledger(tmp_path, SUBJECT).entries()] == [0, 1, 9]


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_changed_or_missing_line_is_found(tmp_path: Path, line: int) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    for number in range(3):
        ledger.charge(GaussianRelease(40.0 + number), purpose(number), AMPLE)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    changed = [*lines]
    changed[line] = changed[line].replace(b"tissue" if line else b"zero-out", b"zissue" if line else b"replace-one")
    for damaged in (changed, lines[:line] + lines[line + 1 :]):
        ledger.path.write_bytes(b"".join(damaged))
        with pytest.raises(BudgetError, match="What these images have cost is not known"):
            Ledger(tmp_path, SUBJECT)


def test_a_ledger_that_got_shorter_or_vanished_under_a_daemon_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    ledger.charge(RELEASE, purpose(0), AMPLE)
    early = ledger.path.read_bytes()
    ledger.charge(RELEASE, purpose(1), AMPLE)
    ledger.path.write_bytes(early)
    with pytest.raises(BudgetError, match="shorter than it was"):
        ledger.charge(RELEASE, purpose(2), AMPLE)
    ledger.path.unlink()
    with pytest.raises(BudgetError):
        ledger.charge(RELEASE, purpose(2), AMPLE)


def records(entries: list[Entry]) -> list[dict[str, Any]]:
    """A journal that tells of each charge twice: by itself, and with the message that it paid for."""
    told = [json.loads(json.dumps(entry.describe())) for entry in entries]
    return [{"kind": "ledger", "charge": one} for one in told] + [{"kind": "message", "ledger": told}]


def test_a_ledger_older_than_the_journal_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    entries = [ledger.charge(RELEASE, purpose(0), AMPLE)]
    backup = ledger.path.read_bytes()
    entries.append(ledger.charge(RELEASE, purpose(1), AMPLE))
    ledger.check_holds(charges(records(entries)))
    ledger.path.write_bytes(backup)
    restored = Ledger(tmp_path, SUBJECT)
    with pytest.raises(BudgetError, match=r"an older copy.*may be: .*`ledger:`.*Only if it is lost, .* backup"):
        restored.check_holds(charges(records(entries)))
    restored.charge(GaussianRelease(30.0), purpose(5), AMPLE)
    with pytest.raises(BudgetError, match="charge 2"):
        restored.check_holds(charges(records(entries)))


def test_an_account_of_another_version_that_the_journal_knows_must_be_there(tmp_path: Path) -> None:
    """Without it nobody would inherit from it."""
    former = Ledger(tmp_path, Subject("ee" * 32, "image"), CONTENTS)
    told = records([former.charge(RELEASE, purpose(), AMPLE)])
    Ledger(tmp_path, SUBJECT, CONTENTS).check_holds(charges(told))
    former.path.unlink()
    with pytest.raises(BudgetError, match=r"an older copy.*may be: .*`ledger:`.*Only if it is lost, .* backup"):
        Ledger(tmp_path, SUBJECT, CONTENTS).check_holds(charges(told))


def test_a_run_is_held_to_its_promise_with_every_round_that_was_repeated(tmp_path: Path) -> None:
    """Where the consent has no budget. Other runs' charges are no part of it, but its own on other versions are."""
    steps, promise = SampledGaussian(0.1, 1.145, 10), Budget(4.0, 1e-5, of_run=True)
    ledger = Ledger(tmp_path, SUBJECT, CONTENTS)
    ledger.charge(SampledGaussian(0.1, 1.145, 50), purpose(run="another"), AMPLE)
    for number in range(3):
        ledger.charge(steps, purpose(number), promise)
    again = Ledger(tmp_path, Subject("ee" * 32, "image"), {"train": CONTENTS["train"]})
    for number in range(2):
        again.charge(steps, purpose(number), promise)
    for one in (ledger, again):
        with pytest.raises(BudgetError, match=r"run tissue-1 promises ε = 4 .* 3\.997 of it is spent"):
            one.charge(steps, purpose(2), promise)
    run = purpose().whole_run
    assert ledger.spending(1e-5, run=run).epsilon == epsilon([SampledGaussian(0.1, 1.145, 50)], delta=1e-5) <= 4
    assert ledger.guarantee(1e-5).epsilon > 5


def test_a_file_under_another_accounts_name_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    ledger.charge(RELEASE, purpose(), AMPLE)
    ledger.path.rename(tmp_path / "copy.jsonl")
    with pytest.raises(BudgetError, match="give it that name back"):
        Ledger(tmp_path, Subject("ee" * 32, "image")).guarantee(1e-5)


def test_the_journal_alone_gives_the_same_epsilon(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    other = Ledger(tmp_path, Subject("ff" * 32, "image"))
    entries = [ledger.charge(SampledGaussian(0.05, 1.1, 20), purpose(n), AMPLE) for n in range(5)]
    entries += [ledger.charge(GaussianRelease(7.5), purpose(5), AMPLE), other.charge(RELEASE, purpose(), AMPLE)]
    told = replay(records(entries))
    assert set(told) == {SUBJECT, other.subject}
    assert epsilon(told[SUBJECT], delta=1e-5) == ledger.cost(1e-5).epsilon
    lie = records(entries)
    lie[-1]["ledger"][0]["event"]["noise_multiplier"] = 11
    with pytest.raises(ValueError, match="two ways"):
        replay([*lie, *records(entries)])


class Crash(BaseException):
    """The process is gone."""


class FaultyDisk:
    """Counts the steps of ``os`` on disk, ends the process at one of them, and knows what a power cut may leave.

    ``at`` counts from 0. ``how``: "before" or "after" the step, or "torn" in the middle of a write.
    """

    def __init__(self, patch: pytest.MonkeyPatch, path: Path, at: int, how: str) -> None:
        self.path, self.at, self.how = path, at, how
        self.count = 0
        self.durable = b""
        self.hit = False
        for name in ("open", "write", "fsync", "ftruncate", "mkdir", "replace", "close"):
            patch.setattr(os, name, self._deadly(name, getattr(os, name)))

    def _deadly(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.hit:
                return step(*arguments, **options)  # the dying process's own tidying up
            counts = self.how != "torn" or name == "write"
            now = counts and self.count == self.at
            self.count += counts
            if now and self.how == "before":
                if name == "close":
                    step(*arguments)  # as the system does for a process that ends
                self._die()
            if now and self.how == "torn":
                step(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                self._die()
            result = step(*arguments, **options)
            if name == "fsync" and self.path.exists():
                self.durable = self.path.read_bytes()
            if now:
                if name == "open":
                    os.close(result)
                self._die()
            return result

        return call

    def _die(self) -> None:
        self.hit = True
        raise Crash

    def after_power_cut(self, kept: float) -> None:
        """What was not made durable is lost from some place on."""
        if self.path.exists():
            written = self.path.read_bytes()
            lost = len(written) - len(self.durable)
            self.path.write_bytes(written[: len(self.durable) + int(kept * max(lost, 0))])


CHARGES = 7


def test_crash_never_undercounts(tmp_path: Path) -> None:
    """Crashes at every step on disk, in each of three ways, with and without the loss of what was not durable; for the
    version itself, and for another that has its images."""
    points = 0
    for how in ("before", "after", "torn"):
        for kept in (1.0, 0.0, 0.6):
            at = 0
            while True:
                folder = tmp_path / f"{how}-{kept}-{at}"
                released: list[Entry] = []
                with pytest.MonkeyPatch.context() as patch:
                    ledger = Ledger(folder, SUBJECT, CONTENTS)
                    disk = FaultyDisk(patch, ledger.path, at, how)
                    try:
                        for number in range(CHARGES):
                            released.append(ledger.charge(RELEASE, purpose(number), AMPLE))
                    except Crash:
                        pass
                if not disk.hit:
                    break
                disk.after_power_cut(kept)
                points += 1
                restarted = Ledger(folder, SUBJECT)
                held = list(restarted.entries())
                assert [e.sha256 for e in held[: len(released)]] == [e.sha256 for e in released], (how, kept, at)
                assert len(held) <= len(released) + 1, "at most the charge of the step that was never taken"
                spent = epsilon([e.event for e in released], delta=1e-5)
                assert restarted.guarantee(1e-5).epsilon >= spent
                later = Ledger(folder, Subject("ee" * 32, "image"), {"train": CONTENTS["train"]})
                assert later.guarantee(1e-5).epsilon >= spent
                # And it goes on from there.
                later.charge(RELEASE, purpose(98), AMPLE)
                restarted = Ledger(folder, SUBJECT, CONTENTS)
                restarted.charge(RELEASE, purpose(99), AMPLE)
                assert restarted.guarantee(1e-5) == later.guarantee(1e-5)
                assert len(Ledger(folder, SUBJECT).entries()) == len(held) + 1
                at += 1
    assert points >= 200, points


@pytest.mark.parametrize("step", ["write", "fsync", "fsync of the folder"])
def test_a_failing_disk_refuses_the_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    ledger = Ledger(tmp_path, SUBJECT)
    calls = 0

    def fail(file: int, *rest: Any) -> int:
        nonlocal calls
        calls += 1
        if step == "fsync of the folder" and calls == 1:
            return 0
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write" if step == "write" else "fsync", fail)
        with pytest.raises(DiskError, match="input/output error"):
            ledger.charge(RELEASE, purpose(), AMPLE)
    if step == "write":
        ledger.charge(RELEASE, purpose(), AMPLE)
    else:
        with pytest.raises(DiskError, match="check the disk"):
            ledger.charge(RELEASE, purpose(), AMPLE)
    Ledger(tmp_path, SUBJECT).charge(RELEASE, purpose(), AMPLE)


def _charge_often(folder: Path, name: str, refused: Any) -> None:
    ledger = Ledger(folder, SUBJECT)
    for number in range(8):
        try:
            ledger.charge(GaussianRelease(10.0), purpose(number, name), Budget(1.5, 1e-5))
        except BudgetError:
            with refused.get_lock():
                refused.value += 1


def test_processes_share_an_account_without_overspending(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    refused = context.Value("i", 0)
    processes = [context.Process(target=_charge_often, args=(tmp_path, f"run-{n}", refused)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    ledger = Ledger(tmp_path, SUBJECT)
    held = len(ledger.entries())
    assert held + refused.value == 24
    assert 0 < held < 24, "the budget is for some of them"
    assert ledger.guarantee(1e-5).epsilon <= 1.5
    assert epsilon([GaussianRelease(10.0, held + 1)], delta=1e-5) > 1.5, "and for not one more"
