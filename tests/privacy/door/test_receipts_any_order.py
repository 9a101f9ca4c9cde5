"""Whatever is cut, lost or killed, and in whatever order: in the end both have signed for all that arrived."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.evidence.two_parties import Line

few = st.integers(0, 2)


class Calls(RuleBasedStateMachine):
    """A hospital's calls, each answered, or cut wherever it can be; and both sides killed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="any-order-"))
        self.no_disk = mock.patch("os.fsync", return_value=None)
        self.no_disk.start()
        self.line = Line(self.folder)

    @initialize()
    def join(self) -> None:
        self.line.join()

    @rule(chunks=few)
    def a_task(self, chunks: int) -> None:
        self.line.task(chunks)

    @rule(chunks=few)
    def an_update(self, chunks: int) -> None:
        self.line.upload(chunks)

    @rule(chunks=few, up=st.integers(0, 1), down=few)
    def a_task_is_cut(self, chunks: int, up: int, down: int) -> None:
        self.line.task(chunks, up=up, down=min(down, chunks))

    @rule(chunks=few, up=few)
    def an_update_is_cut(self, chunks: int, up: int) -> None:
        self.line.upload(chunks, up=up, answered=False)

    @rule(chunks=few, down=few, more=few)
    def a_task_is_cut_and_the_coordinator_goes_on(self, chunks: int, down: int, more: int) -> None:
        self.line.task(chunks, down=min(down, chunks), lingers=True)
        self.goes_on(-1, more)

    @rule(chunks=few, up=few, more=few)
    def an_update_is_cut_and_the_coordinator_goes_on(self, chunks: int, up: int, more: int) -> None:
        self.line.upload(chunks, up=up, answered=False, lingers=True)
        self.goes_on(-1, more)

    @rule(arrives=st.booleans(), attested=st.booleans())
    def an_exchange_is_cut(self, arrives: bool, attested: bool) -> None:
        self.line.exchange(attested=attested and self.line.in_step, arrives=arrives, answered=False)

    @rule(number=st.integers(-1, 1), steps=few)
    def goes_on(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.line.late(number)

    @rule()
    def cut_calls_are_noticed(self) -> None:
        self.line.notice_all()

    @rule()
    def the_hospital_is_killed(self) -> None:
        self.line.restart_silo()
        self.line.join()

    @rule()
    def the_coordinator_is_killed(self) -> None:
        self.line.restart_coordinator()

    def teardown(self) -> None:
        try:
            self.line.notice_all()
            if not self.line.task():
                # The first call after a kill or a cut may find the two out of step; the next one does not.
                assert self.line.task(), "the coordinator goes on refusing"
            assert self.line.upload()
            self.line.part()
            self.line.assert_vouched()
        finally:
            self.no_disk.stop()
            self.line.close()
            shutil.rmtree(self.folder)


TestCalls = Calls.TestCase
TestCalls.settings = settings(
    max_examples=80, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
