"""A run may have any number of rounds: what the coordinator keeps in memory does not grow with them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

from tests.support.rounds.waiting import NAMES, Run


def test_rounds_that_are_over_leave_no_names_of_files_in_memory(tmp_path: Path) -> None:
    one = Run(tmp_path, rounds=1000)

    def play(numbers: Iterable[int]) -> int:
        for number in numbers:
            for name in NAMES:
                with one.rounds.task(name, 60, lambda: True, holds_model=number > 0) as (order, _):
                    assert order.round == number
            one.deliver(*NAMES, number=number)
            one.until(lambda after=number + 1: one.rounds.round_number == after)
        gc.collect()
        return sum(issubclass(type(held), Path) and "round-" in str(held) for held in gc.get_objects())

    try:
        one.join(*NAMES)
        before = play(range(4))
        assert play(range(4, 16)) < before + 6  # one name a round would be twelve
    finally:
        one.rounds.stop()
        one.store.close()
