from __future__ import annotations

import threading

from medsilo.coordinator.service.patience import Patience


def test_what_takes_too_long_is_cut_once_and_what_ends_in_time_is_not() -> None:
    patience = Patience(0.05)
    cut = threading.Event()
    for _ in range(3):  # its watcher ends when nothing waits, and comes back
        cuts: list[str] = []
        with patience.waiting(lambda: cuts.append("in time")):  # noqa: B023 the block waits for it
            pass
        cut.clear()
        with patience.waiting(lambda: (cuts.append("late"), cut.set())):  # noqa: B023
            assert cut.wait(60)
        assert cuts == ["late"]
