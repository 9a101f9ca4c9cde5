"""The state machine's state under one lock, in step with the database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from medsilo.coordinator.rounds.closing import Aggregated, Aggregator
from medsilo.coordinator.rounds.machine import (
    AdmitToEnd,
    CloseRound,
    Decision,
    FinishRun,
    FixRoster,
    Machine,
    OpenRound,
    RestartRound,
    Round,
    State,
    Step,
    Stored,
    WriteDelivery,
    WriteWithdrawal,
)
from medsilo.coordinator.rounds.round_files import RoundFiles
from medsilo.coordinator.rounds.telling import Telling
from medsilo.coordinator.store.records import RoundState
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DiskError, StoreError
from medsilo.privacy.journal.records import Record, RosterRecord


class KeptState:
    """The state, which changes when what was decided is in the database (``take``), and not before.

    ``changed`` is the lock, and tells of changes. ``doubtful``: the database has failed to answer, and may or may not
    have kept a change; until ``restore`` has read it again, nothing is decided. ``note`` records something in the
    journal.
    """

    def __init__(
        self,
        machine: Machine,
        plan: RunPlan,
        store: Store,
        files: RoundFiles,
        aggregator: Aggregator,
        telling: Telling,
        *,
        changed: threading.Condition,
        note: Callable[[Record], object],
    ) -> None:
        self._machine = machine
        self._plan = plan
        self._store = store
        self._files = files
        self._aggregator = aggregator
        self._telling = telling
        self._note = note
        self.changed = changed
        self.state = State()
        self.restore()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """The lock, while memory and database say the same; raises ``StoreError`` while they may not."""
        with self.changed:
            self.check_in_step()
            try:
                yield
            except (StoreError, DiskError):
                self.doubtful = True
                self.changed.notify_all()
                raise

    def check_in_step(self) -> None:
        """Raises ``StoreError`` while memory and database may not say the same."""
        if self.doubtful:
            raise StoreError("the database has failed to answer, and has not been read again yet")

    def take(
        self,
        step: Step,
        *,
        deliver: Callable[[], object] | None = None,
        withdraw: Callable[[int | None], object] | None = None,
        aggregated: Aggregated | None = None,
    ) -> None:
        """Carries out what was decided, and only then makes memory say so. ``deliver``, ``withdraw``: write an update,
        a withdrawal; ``aggregated``: what came of the round that closes."""
        for decision in step.decisions:
            if isinstance(decision, WriteWithdrawal):
                assert withdraw is not None
                withdraw(decision.open_round)
            elif isinstance(decision, WriteDelivery):
                assert deliver is not None
                deliver()
            elif isinstance(decision, CloseRound):
                assert aggregated is not None
                self._close(decision.number, aggregated)
            else:
                self._write(decision)
        before, self.state = self.state, step.state
        for decision in step.decisions:
            if isinstance(decision, (OpenRound, FinishRun)):
                self.prepare()
            self._tell(decision, before)
        self.changed.notify_all()

    def restore(self) -> None:
        """Reads everything from the database."""
        with self.changed:
            self.doubtful = True
            self._store.settle()
            step = self._machine.restored(stored(self._store, self._plan.run))
            self._aggregator.restore()
            self.take(step)
            self.prepare()
            for silo in sorted(self.state.withdrawn):
                self.let_go(silo)
            self.doubtful = False

    def let_go(self, silo: str) -> None:
        """What is left of a silo that has withdrawn is not used, nor handed out, any more."""
        if self._aggregator.forget(silo):
            self.prepare()

    def prepare(self) -> None:
        """Makes what silos are to be given now."""
        names = sorted(self.state.round.asked) if self.state.round else []
        self._aggregator.prepare(self.state.number, names, finished=self.state.finished)

    def since(self, number: int, *, is_fixed: bool) -> str:
        """Since when a round is open, or its roster is fixed (UTC, ISO 8601)."""
        found = self._store.roster(self._plan.run, number) if is_fixed else None
        if found is not None:
            return found[1]
        state = self._store.round(self._plan.run, number)
        assert state is not None
        return state.opened_at

    def _write(self, decision: Decision) -> None:
        store, run = self._store, self._plan.run
        match decision:
            case OpenRound(number, silos):
                store.open_round(run, number, silos)
            case FinishRun(silos, early, closes):
                store.finish_run(run, self._plan.rounds, silos, early=early, closes=closes)
            case AdmitToEnd(silo):
                store.admit_participant(run, self._plan.rounds, silo)
            case FixRoster(number, silos):
                store.fix_roster(run, number, silos)
            case RestartRound(number):
                self._files.delete(store.restart_round(run, number))

    def _close(self, number: int, aggregated: Aggregated) -> None:
        self._store.close_round(
            self._plan.run,
            number,
            downloads=aggregated.downloads,
            memory_file=aggregated.memory_file,
            changes=aggregated.changes,
        )
        self._aggregator.closed(aggregated)

    def _tell(self, decision: Decision, before: State) -> None:
        state = self.state
        match decision:
            case OpenRound(number, silos):
                self._telling.opened(number, silos)
            case FinishRun():
                self._telling.finished(state)
            case FixRoster(number, silos) if state.masks is not None and (roster := state.masks.roster) is not None:
                run, plan_sha256 = self._plan.run, self._plan.sha256.hex()
                self._note(RosterRecord(run=run, plan_sha256=plan_sha256, round=number, **roster.describe()))
                self._telling.mask(number, silos, before=before, after=state)


def stored(store: Store, run: str) -> Stored:
    """What the database says of a run."""
    last = store.last_round(run)
    roster = store.roster(run, last.number) if last else None
    return Stored(
        accepted=frozenset(name for name, member in store.members(run).items() if member.accepted),
        withdrawn=frozenset(store.withdrawals(run)),
        finished=store.is_finished(run),
        early_end=store.early_end(run),
        round=_round(last) if last else None,
        first_roster=store.first_roster(run),
        roster=roster[0] if roster else None,
    )


def _round(state: RoundState) -> Round:
    delivered = frozenset(silo for silo, mine in state.participants.items() if mine.delivered_at is not None)
    return Round(state.number, frozenset(state.participants), delivered, state.closed_at is not None)
