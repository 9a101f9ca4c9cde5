"""The run's rounds as silos and the daemon see them: thread, lock, database and time around the state machine.

``medsilo.coordinator.rounds.machine`` decides; here its decisions are carried out, under one lock. Every one is in the
database before anyone hears of it, so a coordinator that was killed goes on where it was. Nothing polls: silos' long
polls and the round's own thread wait on one condition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medsilo.algorithms.method import Method, participants
from medsilo.algorithms.protection.masked import silos_may_change
from medsilo.algorithms.tensors import FileSource, Payload
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds import weights_log
from medsilo.coordinator.rounds.closing import Aggregator
from medsilo.coordinator.rounds.comparing import Beginning
from medsilo.coordinator.rounds.kept_state import KeptState
from medsilo.coordinator.rounds.machine import (
    Aggregate,
    Machine,
    Order,
    Refuse,
    Rules,
    State,
    WriteDelivery,
)
from medsilo.coordinator.rounds.round_files import RoundFiles
from medsilo.coordinator.rounds.telling import Telling
from medsilo.coordinator.store.records import Withdrawal
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.early_end import EarlyEnd
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DiskError, StoreError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import on_disk
from medsilo.privacy.journal.records import Record
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Between two attempts to read the state from a database that did not answer."""


REMINDER_SECONDS = 600.0
"""How often the log says whom the run waits for."""


LEAST_MINUTES_TO_DELIVER = 5.0
"""How long a masked round waits for its roster's updates before it is given up, however short its deadline: a silo
that has masked for it should have the time to be started anew."""


class Rounds:
    """One run. ``start`` begins its thread; its methods may be called from any thread. ``note`` records something in
    the journal."""

    def __init__(
        self,
        config: CoordinatorConfig,
        plan: RunPlan,
        method: Method,
        store: Store,
        *,
        note: Callable[[Record], object] = lambda _: None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.store = store
        self.failure: BaseException | None = None
        store.open_run(plan.run, plan.canonical(), plan.sha256.hex())
        self._changed = threading.Condition()
        self._machine = Machine(_rules(config, plan, method))
        self._files = RoundFiles(config.state, plan.run, spares=2 * len(config.silos), lock=self._changed)
        self.spares = self._files.spares
        self.new_upload_path = self._files.new_upload_path
        self._aggregator = Aggregator(config, plan, method, store, self._files)
        self.expected_parts = self._aggregator.expected_parts
        self._telling = Telling(plan, frozenset(config.silos))
        self._stopping = False
        self._told_at = time.monotonic()
        self._deadline = 0.0
        self._deadline_of: tuple[int, bool] | None = None
        self._kept = KeptState(
            self._machine,
            plan,
            store,
            self._files,
            self._aggregator,
            self._telling,
            changed=self._changed,
            note=note,
        )
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)

    def start(self) -> None:
        """Begins the thread that opens and ends rounds."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waiting silos are told to ask again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def is_alive(self) -> bool:
        """Whether the lock can be had, so that decisions can be taken: false where threads wait for each other."""
        if not self._changed.acquire(timeout=30):
            return False
        self._changed.release()
        return True

    def fail(self, error: BaseException) -> None:
        """Ends the rounds: what is in memory may no longer be what is on disk."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def wait_until_done(self) -> None:
        """Returns when every member has fetched the run's end, or the rounds have failed or been stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self.failure is not None or self._state.is_done)

    def finishers(self) -> list[str]:
        """Who takes part to the run's end."""
        state = self._state
        return sorted(state.round.asked - state.withdrawn) if state.round else []

    @property
    def round_number(self) -> int:
        """The current round; the number of rounds when the run has ended."""
        return self._state.number

    @property
    def early_end(self) -> EarlyEnd | None:
        """Why the run has ended before its plan's last round; None where it has not."""
        return self._state.early_end

    @property
    def _state(self) -> State:
        return self._kept.state

    def is_member(self, silo: str) -> bool:
        """Whether the silo has accepted the plan."""
        return silo in self._state.members

    def has_withdrawn(self, silo: str) -> bool:
        """Whether the silo has taken its consent to the run back."""
        return silo in self._state.withdrawn

    def joined(self, silo: str) -> None:
        """A silo has accepted the plan, as the database says."""
        with self._kept.in_step():
            has_withdrawn = silo in self.store.withdrawals(self.plan.run)
            self._kept.take(self._machine.joined(self._state, silo, has_withdrawn=has_withdrawn))
            if self._machine.comes_too_late(self._state, silo):
                self._telling.comes_too_late(silo)

    def withdraw(
        self, run: str, silo: str, *, reason: str, rounds_acknowledged: Sequence[int], statement: Mapping[str, Any]
    ) -> Withdrawal:
        """Ends a silo's part in a run for good, this one or an earlier one; again, it changes nothing.

        The open round goes on without it. What was made of earlier rounds stays; the updates themselves are deleted.
        A round that is just being closed counts as an earlier one.
        """
        with self._kept.in_step():
            self._changed.wait_for(lambda: not self._state.closing or self._stopping or self.failure is not None)
            self._kept.check_in_step()
            if (earlier := self.store.withdrawals(run).get(silo)) is not None:
                return earlier

            def write(open_round: int | None) -> None:
                files = self.store.withdraw(
                    run,
                    silo,
                    reason=reason,
                    rounds_acknowledged=rounds_acknowledged,
                    statement=statement,
                    open_round=open_round,
                )
                self._files.delete(files)

            if run != self.plan.run:
                write(None)
            else:
                self._kept.take(self._machine.withdrawn(self._state, silo), withdraw=write)
                self._kept.let_go(silo)
                self._telling.has_withdrawn(self._state)
            return self.store.withdrawals(run)[silo]

    def wake(self) -> None:
        """Makes every waiting call look again."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def task(
        self,
        silo: str,
        timeout: float,
        is_active: Callable[[], bool],
        *,
        holds_model: bool,
        key: CertifiedKey | None = None,
    ) -> Iterator[tuple[Order, Payload]]:
        """The silo's next task and what goes with it, which stays as it is while the caller reads it.

        ``key``: in a masked round the silo's mask key, which says that it has trained. Waits for a task until
        ``timeout`` seconds have passed or the caller has gone. Raises ``StoreError`` while the database does not
        answer.
        """

        def due() -> Order | None:
            return self._machine.order(self._state, silo, key)

        with ExitStack() as reading:
            with self._kept.in_step():
                if key is not None:
                    step = self._machine.key_stated(self._state, silo, key)
                    if step.decisions:
                        self._telling.has_begun_anew(key.round, silo)
                    self._kept.take(step)
                self._changed.wait_for(
                    lambda: self._stopping or self.failure or self._kept.doubtful or not is_active() or due(), timeout
                )
                self._kept.check_in_step()
                order = due() or Order(wire.TASK_KIND_WAIT, self.round_number)
                payload: Payload = {}
                if order.kind in (wire.TASK_KIND_TRAIN, wire.TASK_KIND_FINISH):
                    at_end = order.kind == wire.TASK_KIND_FINISH
                    payload = self._aggregator.for_silo(silo, at_end=at_end, holds_model=holds_model)
                paths = [part.source.path for part in payload.values() if isinstance(part.source, FileSource)]
                reading.enter_context(self._files.reading(paths))
            yield order, payload

    def earlier_receipt(self, silo: str, round_number: int, roster_sha256: bytes = b"") -> Mapping[str, Any] | None:
        """The receipt of the silo's accepted update of that round, or None if one is due.

        ``roster_sha256``: what a masked update was masked for. Raises ``LateError`` for a round that has
        ended without it, or is masked for another roster by now, ``RefusedError`` for one that is not the silo's.
        """
        with self._kept.in_step():
            before = self._delivered_before(silo, round_number)
            answer = self._machine.offered(self._state, silo, round_number, roster_sha256, before=before)
            if isinstance(answer, Refuse):
                raise answer.error
            return self._receipt(silo, round_number) if answer else None

    def accept(
        self,
        silo: str,
        round_number: int,
        *,
        file: Path | None,
        receipt: Mapping[str, Any],
        metrics: Payload,
        roster_sha256: bytes = b"",
    ) -> Mapping[str, Any]:
        """Takes a complete, checked and durable update; returns its receipt, or that of an earlier equal one. A file
        that is not used is deleted."""
        measured = metrics[Exposure.LOCAL_METRICS].tensors() if Exposure.LOCAL_METRICS in metrics else {}
        with self._kept.in_step():
            before = self._delivered_before(silo, round_number)
            step = self._machine.delivered(self._state, silo, round_number, roster_sha256, before=before)
            (decision,) = step.decisions
            if not isinstance(decision, WriteDelivery):
                if file is not None:
                    file.unlink(missing_ok=True)
                if isinstance(decision, Refuse):
                    raise decision.error
                return self._receipt(silo, round_number)

            def write() -> None:
                self.store.deliver(
                    self.plan.run,
                    round_number,
                    silo,
                    file=self._files.name(file) if file else None,
                    receipt=receipt,
                    accuracy=float(measured["accuracy"]) if measured else None,
                    loss=float(measured["loss"]) if "loss" in measured else None,
                )

            self._kept.take(step, deliver=write)
        return receipt

    def beginning(self, silo: str, round_number: int) -> Beginning:
        """What the silo's round began with."""
        with self._kept.in_step():
            return self._aggregator.beginnings([silo], round_number)[silo]

    def _delivered_before(self, silo: str, number: int) -> bool | None:
        """Whether a silo delivered an earlier round; None if it was not asked, or the round is the present one."""
        if self._state.round is not None and number == self._state.round.number:
            return None
        state = self.store.round(self.plan.run, number)
        mine = state.participants.get(silo) if state else None
        return None if mine is None else mine.delivered_at is not None

    def _receipt(self, silo: str, number: int) -> Mapping[str, Any]:
        state = self.store.round(self.plan.run, number)
        return (state.participants[silo].receipt if state else None) or {}

    def _run(self) -> None:
        try:
            while self._step_or_wait():
                pass
        except DiskError as error:
            self.fail(error)
        except BaseException as error:
            log.exception("the run cannot go on")
            self.fail(error)

    def _step_or_wait(self) -> bool:
        """One step; without the database, or with too many files open, a pause, and then all that is in memory is read
        from it again."""
        try:
            with on_disk(self.config.state):
                return self._step()
        except StoreError as error:
            log.error("run %s waits for the database; nothing is lost: %s", self.plan.run, error)
        except DiskError as error:
            if not error.passes:
                raise
            log.error("run %s waits; nothing is lost: %s", self.plan.run, error)
        while True:
            with self._changed:
                self._kept.doubtful = True
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._stopping, timeout=PAUSE_SECONDS):
                    return False
                with suppress(StoreError), _while_it_passes(self.config.state):
                    self._kept.restore()
                    self._changed.notify_all()
                    log.info("run %s goes on", self.plan.run)
                    return True

    def _step(self) -> bool:
        """Waits for something to do and does it; False when it is to stop."""
        with self._kept.in_step():
            while (step := self._machine.due(self._state)) is None and not self._stopping and not self._kept.doubtful:
                left = self._seconds_to_deadline()
                if left is not None and left <= 0:
                    self._kept.take(self._machine.deadline_passed(self._state))
                    continue
                quiet = self._told_at + REMINDER_SECONDS - time.monotonic()
                self._changed.wait(quiet if left is None else min(quiet, left))
                if time.monotonic() - self._told_at >= REMINDER_SECONDS:
                    self._told_at = time.monotonic()
                    self._telling.waits(self._state)
            if self._stopping:
                return False
            self._kept.check_in_step()
            assert step is not None
            self._kept.take(step)
            aggregates = [decision for decision in step.decisions if isinstance(decision, Aggregate)]
            if not aggregates:
                self._told_at = time.monotonic()
        # Without the lock: meanwhile silos may ask, and late updates are turned away.
        for aggregate in aggregates:
            self._close(aggregate)
        return True

    def _close(self, due: Aggregate) -> None:
        started = time.monotonic()
        state = self.store.round(self.plan.run, due.number)
        assert state is not None
        if not due.silos and self.plan.is_masked(due.number):
            self._telling.is_given_up(self._state)
        aggregated = self._aggregator.aggregate(state, due.silos)
        with self._changed:
            self._kept.take(self._machine.closed(self._state, used=bool(aggregated.silos)), aggregated=aggregated)
        if aggregated.weights is not None:
            weights_log.add(self._files.folder, due.number, aggregated.weights)
        self._telling.ended(state, aggregated, time.monotonic() - started)
        self._aggregator.remove_what_is_old(due.number)

    def _seconds_to_deadline(self) -> float | None:
        """How long the open round's deadline is still away; None where none runs."""
        minutes, counted = self.config.run.deadline_minutes, self._machine.deadline(self._state)
        if minutes is None or counted is None:
            return None
        number, is_fixed = counted
        if is_fixed:
            minutes = max(minutes, LEAST_MINUTES_TO_DELIVER)
        if self._deadline_of != counted:
            # From here on the clock may jump: a round neither ends at once of that nor waits for a day.
            since = datetime.fromisoformat(self._kept.since(number, is_fixed=is_fixed))
            past = max(0.0, (datetime.now(UTC) - since).total_seconds())
            self._deadline_of = counted
            self._deadline = time.monotonic() + 60 * minutes - past
        return self._deadline - time.monotonic()


def _rules(config: CoordinatorConfig, plan: RunPlan, method: Method) -> Rules:
    run, masks = config.run, plan.secure_aggregation

    def draw(silos: Sequence[str], number: int) -> tuple[str, ...]:
        return participants(silos, share=plan.participation, seed=plan.seed, round_number=number)

    return Rules(
        run=plan.run,
        silos=frozenset(config.silos),
        rounds=plan.rounds,
        start_with=config.start_with,
        quorum=None if run.quorum == "all" else run.quorum,
        minimum=masks.minimum if masks else None,
        is_masked=plan.is_masked,
        binds=masks is not None and not silos_may_change(plan, method),
        draw=draw,
        all_bound=plan.is_blind,
    )


@contextmanager
def _while_it_passes(folder: Path) -> Iterator[None]:
    """Leaves what is inside where a failure of the disk may be over by itself."""
    try:
        with on_disk(folder):
            yield
    except DiskError as error:
        if not error.passes:
            raise
