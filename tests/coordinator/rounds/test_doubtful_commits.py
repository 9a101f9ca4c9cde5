"""A database that goes away while it is asked to keep something may have kept it or not: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medsilo.coordinator.rounds import rounds
from medsilo.privacy.errors import StoreError
from tests.support.rounds.withdrawing import NAMES, RECEIPT, ROUNDS, Run

WRITES = ("open_round", "deliver", "close_round", "finish_run", "withdraw", "admit_participant")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, {"name": "fedavg"})
    yield made
    made.close()


@pytest.mark.parametrize("kept", [True, False])
def test_whether_or_not_a_failing_database_kept_a_change_the_run_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Each kind of change fails once."""
    monkeypatch.setattr(rounds, "PAUSE_SECONDS", 0.01)
    failed = []

    def failing(name: str) -> Callable[..., Any]:
        write = getattr(run.store, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if name in failed:
                return write(*arguments, **options)
            failed.append(name)
            if kept:
                write(*arguments, **options)
            raise StoreError("the connection was lost")

        return call

    def insist(step: Callable[[], Any]) -> Any:
        """As silos do: the same call again until it is answered."""
        found: list[Any] = []

        def answered() -> bool:
            try:
                found.append(step())
            except StoreError:
                return False
            return True

        run.until(answered)
        return found[0]

    deliver = run.deliver
    monkeypatch.setattr(run, "deliver", lambda *update: insist(lambda: deliver(*update)))
    for name in WRITES:
        monkeypatch.setattr(run.store, name, failing(name))
    for name in NAMES:
        insist(lambda name=name: run.join(name))  # type: ignore[misc]
    for number in range(ROUNDS):
        run.opened(number)
        for name in NAMES if number < ROUNDS - 1 else NAMES[1:]:
            insist(lambda name=name: run.work(name))  # type: ignore[misc]
        if number == ROUNDS - 1:
            assert insist(lambda: run.withdraw(NAMES[0])).dropped_round is None
    run.opened(ROUNDS)
    insist(lambda: run.join(NAMES[0]))
    for name in NAMES:
        insist(lambda name=name: run.work(name))  # type: ignore[misc]
    run.rounds.wait_until_done()
    assert set(failed) == set(WRITES)
    states = run.store.rounds("r")
    assert [state.number for state in states] == list(range(ROUNDS + 1))
    for state in states:
        expected = NAMES[1:] if state.number == ROUNDS - 1 else NAMES
        assert {name: p.receipt for name, p in state.participants.items()} == dict.fromkeys(expected, RECEIPT)
