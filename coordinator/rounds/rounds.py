"""The run's rounds: who takes part, when a round ends, and what the method makes of it.

All decisions are taken here, under one lock; every one is in the store before anyone hears of it, so a coordinator
that was killed goes on where it was. Nothing polls: silos' long polls and the round's own thread wait on one
condition.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medsilo.algorithms.method import Downloads, Federation, Method, Round, local_metrics, participants
from medsilo.algorithms.models import Layout
from medsilo.algorithms.protection.masked import masked_specs, mean_of, silos_may_change
from medsilo.algorithms.tensors import FileSource, Part, Payload, TensorSpec, Workspace
from medsilo.algorithms.tensors.files import PROCESS, FileWorkspace, Spares, read_payload, write_payload
from medsilo.algorithms.tensors.memory import return_freed_memory
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds import weights_log
from medsilo.coordinator.rounds.changes import compare
from medsilo.coordinator.rounds.comparing import Beginning, products_of_changes
from medsilo.coordinator.rounds.masked_round import MaskedRound
from medsilo.coordinator.rounds.round_files import named, read_memory
from medsilo.coordinator.store.records import EVERYONE, Change, RoundState, Withdrawal
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DiskError, LateError, RefusedError, StoreError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.files.durable import on_disk
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


_ONE_SET_OF_SILOS = (
    "the sums of one run are of the same hospitals in every round, for two that differ by a few would give away what "
    "those sent. It gets the run's end, and can take part in the next run"
)


@dataclass(frozen=True)
class Order:
    """A silo's next task."""

    kind: wire.TaskKind
    round: int
    roster: tuple[CertifiedKey, ...] = ()


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
        note: Callable[..., object] = lambda _kind, **_content: None,
    ) -> None:
        self._note = note
        self._masks: MaskedRound | None = None
        self._bound: tuple[str, ...] | None = None
        self._members: set[str]
        self._finished: bool
        self.early_end: EarlyEnd | None
        self._round: RoundState | None
        self._withdrawn: set[str]
        self.config = config
        self.plan = plan
        self.store = store
        self.folder = config.state / "runs" / plan.run
        self.failure: BaseException | None = None
        model = config.build_model()
        store.open_run(plan.run, plan.canonical(), plan.sha256.hex())
        self._method = method
        self._binds = plan.secure_aggregation is not None and not silos_may_change(plan, method)
        self._initial = self.folder / "initial.safetensors"
        if not self._initial.exists() or not store.members(plan.run):  # the plan may have been corrected
            write_payload(self._initial, {Exposure.INITIAL_MODEL: Part.of(model.state_dict())})
        self.spares = Spares(self.folder / "spare", most=2 * len(config.silos))
        self._federation = Federation(
            Layout.of(model),
            plan.rounds,
            plan.seed,
            tuple(sorted(config.silos)),
            plan.model.input_shape,
            config.open_public(model),
        )
        del model
        return_freed_memory()
        self._changed = threading.Condition()
        self._stopping = False
        self._told_at = time.monotonic()
        self._deadline = 0.0
        self._deadline_of: tuple[int, str] | None = None
        self._readers: Counter[Path] = Counter()
        for partial in self.folder.glob("round-*/.*.partial"):
            partial.unlink()
        self._restore()
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
            self._changed.wait_for(lambda: self._stopping or self.failure is not None or self._all_done())

    def finishers(self) -> list[str]:
        """Who takes part to the run's end."""
        with self._changed:
            return sorted(set(self._round.participants) - self._withdrawn) if self._round else []

    @property
    def round_number(self) -> int:
        """The current round; the number of rounds when the run has ended."""
        state = self._round
        return state.number if state else 0

    def joined(self, silo: str) -> None:
        """A silo has accepted the plan."""
        with self._in_step():
            self._members.add(silo)
            self._withdrawn.discard(silo)
            if self._finished and self._round is not None and silo not in self._round.participants:
                self.store.admit_participant(self.plan.run, self.plan.rounds, silo)
                self._refresh()
            if self._bound is not None and silo not in self._bound and self.plan.is_masked(self._next_number):
                log.warning(
                    "run %s: %s has come too late for the masked rounds: %s", self.plan.run, silo, _ONE_SET_OF_SILOS
                )
            self._changed.notify_all()

    def is_member(self, silo: str) -> bool:
        """Whether the silo has accepted the plan."""
        return silo in self._members

    def has_withdrawn(self, silo: str) -> bool:
        """Whether the silo has taken its consent to the run back."""
        return silo in self._withdrawn

    def withdraw(
        self, run: str, silo: str, *, reason: str, rounds_acknowledged: Sequence[int], statement: Mapping[str, Any]
    ) -> Withdrawal:
        """Ends a silo's part in a run for good, this one or an earlier one; again, it changes nothing.

        The open round goes on without it. What was made of earlier rounds stays; the updates themselves are deleted.
        A round that is just being closed counts as an earlier one.
        """
        with self._in_step():
            self._changed.wait_for(lambda: not self._closing or self._stopping or self.failure is not None)
            self._check_in_step()
            if (earlier := self.store.withdrawals(run).get(silo)) is not None:
                return earlier
            files = self.store.withdraw(
                run,
                silo,
                reason=reason,
                rounds_acknowledged=rounds_acknowledged,
                statement=statement,
                open_round=self._left_by(silo) if run == self.plan.run else None,
            )
            for name in files:
                (self.config.state / name).unlink(missing_ok=True)
            if run == self.plan.run:
                self._withdrawn.add(silo)
                self._members.discard(silo)
                self._let_go(silo)
                self._refresh()
                self._changed.notify_all()
                if len(self._members) == 1 and self._round is not None:
                    log.warning("run %s goes on with %s alone: no other hospital is left in it", run, *self._members)
            return self.store.withdrawals(run)[silo]

    def _left_by(self, silo: str) -> int | None:
        """The round that is to go on without a silo: an open one; at the end, if the end was not fetched."""
        state = self._round
        mine = state.participants.get(silo) if state else None
        if state is None or mine is None or state.closed_at is not None:
            return None
        return None if self._finished and mine.delivered_at is not None else state.number

    def _let_go(self, silo: str) -> None:
        """What is left of a silo that has withdrawn is not used, nor handed out, any more."""
        self._half.forget(silo)
        self._kept.pop(silo, None)
        pattern = re.compile(rf"upload-{re.escape(silo)}-[0-9a-f]{{16}}\.safetensors")
        for path in self.folder.glob("round-*/upload-*"):
            if pattern.fullmatch(path.name):
                path.unlink(missing_ok=True)
        if Exposure.PEER_MODELS in self._method.downlink and self._kept:
            # These hold single hospitals' models as they are: until the round ends, nobody gets any.
            self.store.forget_downloads(self.plan.run)
            self._kept.clear()
            self._prepare()

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
        with self._in_step():
            if key is not None:
                self._take_key(silo, key)
            self._changed.wait_for(
                lambda: self._stopping or self.failure or self._doubtful or not is_active() or self._order(silo, key),
                timeout,
            )
            self._check_in_step()
            order = self._order(silo, key) or Order(wire.TASK_KIND_WAIT, self.round_number)
            payload = self._download(silo, order, holds_model=holds_model)
            paths = [part.source.path for part in payload.values() if isinstance(part.source, FileSource)]
            self._readers.update(paths)
        try:
            yield order, payload
        finally:
            with self._changed:
                self._readers -= Counter(paths)  # keeps no path that nobody reads any more

    def _download(self, silo: str, order: Order, *, holds_model: bool) -> Payload:
        if order.kind in (wire.TASK_KIND_WAIT, wire.TASK_KIND_MASK):
            return {}
        given: Payload = dict(self._current.for_silo(silo))
        if order.kind == wire.TASK_KIND_FINISH and not self._method.downloads_last:
            given = {}
        if not holds_model:
            given = {**read_payload(self._initial), **given}
        return given

    def expected_parts(self, silo: str, round_number: int) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """What an update must hold, the optional parts included."""
        parts = {} if round_number == self.plan.rounds else self._half.upload_parts(round_number, silo)
        found = {exposure: tuple(specs) for exposure, specs in parts.items()}
        if self.plan.is_masked(round_number):
            found = {Exposure.MASKED_UPDATE: masked_specs(parts)}
        if Exposure.LOCAL_METRICS in self.plan.optional:
            found[Exposure.LOCAL_METRICS] = local_metrics(self.plan)
        return found

    def earlier_receipt(self, silo: str, round_number: int, roster_sha256: bytes = b"") -> Mapping[str, Any] | None:
        """The receipt of the silo's accepted update of that round, or None if one is due.

        ``roster_sha256``: what a masked update was masked for. Raises ``LateError`` for a round that has
        ended without it, or is masked for another roster by now, ``RefusedError`` for one that is not the silo's.
        """
        with self._in_step():
            current = self._round
            state = current
            if current is None or round_number != current.number:
                state = self.store.round(self.plan.run, round_number)
            mine = state.participants.get(silo) if state else None
            if state is None or mine is None:
                raise RefusedError(
                    f"round {round_number} is not one that {silo} was asked to train; the run is in round "
                    f"{self.round_number}"
                )
            masks = self._masks
            if masks is not None and masks.number == round_number and not masks.is_for(roster_sha256):
                raise LateError(f"round {round_number} is done again with fresh masks; this update is not used")
            if mine.delivered_at is not None:
                return mine.receipt or {}
            if state is not current or state.closed_at is not None or self._closing:
                raise LateError(
                    f"round {round_number} has ended without {silo}; the run is in round {self.round_number}, and "
                    "this update is not used"
                )
            return None

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
        """Takes a complete, checked and durable update; returns its receipt, or that of an earlier equal one."""
        measured = metrics[Exposure.LOCAL_METRICS].tensors() if Exposure.LOCAL_METRICS in metrics else {}
        with self._in_step():
            if silo in self._withdrawn:
                if file is not None:
                    file.unlink(missing_ok=True)
                raise RefusedError(f"{silo} has withdrawn from run {self.plan.run}; this update is not used")
            try:
                earlier = self.earlier_receipt(silo, round_number, roster_sha256)
            except LateError:
                if file is not None:
                    file.unlink(missing_ok=True)
                raise
            if earlier is not None:
                return earlier
            state = self._round
            mine = self.store.deliver(
                self.plan.run,
                round_number,
                silo,
                file=str(file.relative_to(self.config.state)) if file else None,
                receipt=receipt,
                accuracy=float(measured["accuracy"]) if measured else None,
                loss=float(measured["loss"]) if "loss" in measured else None,
            )
            if self._masks is not None:
                self._masks.offers.pop(silo, None)  # a key masks one update
            if state is not None:  # an update is taken in an open round only
                self._round = replace(state, participants={**state.participants, silo: mine})
            self._changed.notify_all()
        return receipt

    def beginning(self, silo: str, round_number: int) -> Beginning:
        """What the silo's round began with."""
        with self._in_step():
            return self._beginnings([silo], round_number)[silo]

    def _beginnings(self, silos: Iterable[str], round_number: int) -> dict[str, Beginning]:
        """What each silo's round began with."""
        earlier = self.store.latest_files(self.plan.run, before=round_number)
        initial = read_payload(self._initial)
        return {
            silo: Beginning(
                (
                    self._current.for_silo(silo),
                    *self._payloads({silo: earlier[silo]} if silo in earlier else {}).values(),
                    initial,
                )
            )
            for silo in silos
        }

    def _changes(self, round_number: int, uploads: Mapping[str, Payload]) -> dict[str, Change]:
        """What is said of each silo's change; nothing of masked rounds, whose updates nobody sees."""
        models = {s: upload for s, upload in uploads.items() if any(exposure in upload for exposure in MODEL)}
        if self._masks is not None or not models:
            return {}
        products = products_of_changes(models, self._beginnings(models, round_number))
        return dict(zip(models, compare(products), strict=True))

    def new_upload_path(self, silo: str, round_number: int) -> Path:
        """Where an upload is to lie; never twice the same, so that two at once do not touch each other's."""
        return self._round_folder(round_number) / f"upload-{silo}-{secrets.token_hex(8)}.safetensors"

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """The lock, while memory and database say the same.

        Where the database fails to answer it may or may not have kept a change; until memory has been read from it
        again, nothing is decided, and every caller gets its ``StoreError``.
        """
        with self._changed:
            self._check_in_step()
            try:
                yield
            except (StoreError, DiskError):
                self._doubtful = True
                self._changed.notify_all()
                raise

    def _check_in_step(self) -> None:
        if self._doubtful:
            raise StoreError("the database has failed to answer, and has not been read again yet")

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
                self._doubtful = True
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._stopping, timeout=PAUSE_SECONDS):
                    return False
                with suppress(StoreError), _while_it_passes(self.config.state):
                    self._restore()
                    self._changed.notify_all()
                    log.info("run %s goes on", self.plan.run)
                    return True

    def _step(self) -> bool:
        """Waits for something to do and does it; False when it is to stop."""
        with self._in_step():
            while not self._stopping and not self._doubtful and not self._ready():
                left = None if self._finished else self._seconds_to_deadline()
                quiet = self._told_at + REMINDER_SECONDS - time.monotonic()
                self._changed.wait(quiet if left is None else min(quiet, left))
                if time.monotonic() - self._told_at >= REMINDER_SECONDS:
                    self._remind()
            if self._stopping:
                return False
            self._check_in_step()
            if self._deserted():
                self._end_early()
                return True
            if self._round is None or self._round.closed_at is not None:
                self._open_next()
                return True
            if self._masks is not None and (silos := self._next_roster(self._masks)):
                self._fix_roster(self._masks, silos)
                return True
            self._closing = True
            closing = self._round
        # Without the lock: meanwhile silos may ask, and late updates are turned away.
        self._close(closing)
        return True

    def _remind(self) -> None:
        """Says whom the run waits for, so that nobody has to guess why nothing happens."""
        self._told_at = time.monotonic()
        state, plan = self._round, self.plan
        if state is None or state.closed_at is not None:
            missing = sorted(set(self.config.silos) - self._members - self._withdrawn)
            what = "to join"
        else:
            missing = [silo for silo, mine in state.participants.items() if mine.delivered_at is None]
            what = "to fetch the end" if self._finished else f"to deliver round {state.number + 1} of {plan.rounds}"
        if missing:
            log.warning("run %s waits for %s %s", plan.run, ", ".join(missing), what)

    def _ready(self) -> bool:
        if self._finished:
            return False
        if self._deserted():
            return True
        if self._round is None:
            here = len(self.config.silos) - len(self._withdrawn)
            return len(self._members) >= min(self.config.start_with or here, here) and self._enough(0)
        if self._round.closed_at is not None:
            return self._enough(self._round.number + 1)
        if self._masks is not None:
            return self._next_roster(self._masks) is not None or self._is_decided(self._masks, self._round)
        return self._may_close(self._round)

    def _enough(self, number: int) -> bool:
        """Whether there are enough silos for a round, if it is a masked one."""
        masks = self.plan.secure_aggregation
        if masks is None or not self.plan.is_masked(number):
            return True
        return len(self._chosen(number)) >= masks.minimum

    def _chosen(self, number: int) -> tuple[str, ...]:
        plan = self.plan
        if self._bound is not None and plan.is_masked(number):
            return self._bound
        return participants(sorted(self._members), share=plan.participation, seed=plan.seed, round_number=number)

    def _next_roster(self, masks: MaskedRound) -> tuple[str, ...] | None:
        state, quorum, left = self._round, self.config.run.quorum, self._seconds_to_deadline()
        if state is None or self._is_lost(masks, state):
            return None
        overdue = quorum != "all" and left is not None and left <= 0 and self._bound is None
        return masks.ready(state.participants, quorum=0 if quorum == "all" else quorum, overdue=overdue)

    def _fix_roster(self, masks: MaskedRound, silos: tuple[str, ...]) -> None:
        run, number = self.plan.run, masks.number
        masks.fixed_at = self.store.fix_roster(run, number, silos)
        if self._binds and self._bound is None:
            self._bound = silos
            if out := sorted((self._members | set(self.config.silos)) - set(silos) - self._withdrawn):
                log.warning(
                    "run %s: %s take%s no part in the masked rounds: %s",
                    run,
                    ", ".join(out),
                    "s" if len(out) == 1 else "",
                    _ONE_SET_OF_SILOS,
                )
        roster = masks.fix(silos)
        self._note("roster", run=run, plan_sha256=self.plan.sha256.hex(), round=number, **roster.describe())
        log.info("round %d of %d: %s mask their updates", number + 1, self.plan.rounds, ", ".join(silos))
        self._changed.notify_all()

    def _is_decided(self, masks: MaskedRound, state: RoundState) -> bool:
        """Whether all of a roster have delivered, or it is certain that they never will."""
        return _complete(masks, state) or self._is_lost(masks, state)

    def _is_lost(self, masks: MaskedRound, state: RoundState) -> bool:
        """Whether a masked round can come to no sum: its silos cannot be others once a roster is fixed."""
        if masks.silos is None:
            return len(state.participants) < masks.minimum
        if not set(masks.silos) <= set(state.participants):
            return True
        if self._bound is not None:
            return False  # it waits for them: the next round would need the same silos
        left = self._seconds_to_deadline()
        return self.config.run.quorum != "all" and left is not None and left <= 0 and not _complete(masks, state)

    def _take_key(self, silo: str, key: CertifiedKey) -> None:
        masks, state = self._masks, self._round
        mine = state.participants.get(silo) if state else None
        if masks is None or mine is None or masks.number != key.round or self._closing:
            return
        masks.offers[silo] = key
        if mine.delivered_at is None and masks.has_lost_its_key(silo, key):
            log.warning("round %d: %s has begun anew; all mask again with fresh keys", masks.number + 1, silo)
            self._mask_again(masks)
        self._changed.notify_all()

    def _mask_again(self, masks: MaskedRound) -> None:
        masks.roster = None
        for name in self.store.restart_round(self.plan.run, masks.number):
            (self.config.state / name).unlink(missing_ok=True)
        self._refresh()

    def _open_masks(self) -> None:
        """Prepares the round that is open, if it is a masked one; of one that was cut short, by a crash or a
        database that failed to answer, all deliver again."""
        self._masks, state, plan = None, self._round, self.plan.secure_aggregation
        if plan is None or state is None or state.closed_at is not None or not self.plan.is_masked(state.number):
            return
        self._masks = MaskedRound(state.number, plan.minimum)
        if fixed := self.store.roster(self.plan.run, state.number):
            self._masks.silos, self._masks.fixed_at = fixed
            self._mask_again(self._masks)

    def _may_close(self, state: RoundState) -> bool:
        asked = len(state.participants)
        delivered = sum(p.delivered_at is not None for p in state.participants.values())
        if delivered == asked:
            return True
        quorum = self.config.run.quorum
        needed = asked if quorum == "all" else min(quorum, asked)
        left = self._seconds_to_deadline()
        return delivered >= needed and left is not None and left <= 0

    def _seconds_to_deadline(self) -> float | None:
        minutes = self.config.run.deadline_minutes
        if minutes is None or self._round is None or self._round.closed_at is not None:
            return None
        if self._masks is not None and self._bound is not None:
            return None  # nothing is done without one of these
        fixed = self._masks.fixed_at if self._masks is not None else None
        opened = fixed or self._round.opened_at
        if fixed is not None:
            minutes = max(minutes, LEAST_MINUTES_TO_DELIVER)
        if self._deadline_of != (self._round.number, opened):
            # From here on the clock may jump: a round neither ends at once of that nor waits for a day.
            past = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(opened)).total_seconds())
            self._deadline_of = (self._round.number, opened)
            self._deadline = time.monotonic() + 60 * minutes - past
        left = self._deadline - time.monotonic()
        # Past the deadline and short of the quorum only a delivery changes anything.
        return left if left > 0 or self._quorum_reached() else None

    def _quorum_reached(self) -> bool:
        if self._round is None or self.config.run.quorum == "all":
            return False
        if (masks := self._masks) is not None:
            there = len(set(masks.offers) & set(self._round.participants))
            return masks.silos is not None or there >= max(masks.minimum, self.config.run.quorum)
        delivered = sum(p.delivered_at is not None for p in self._round.participants.values())
        return delivered >= min(self.config.run.quorum, len(self._round.participants))

    def _deserted(self) -> bool:
        """Whether all hospitals have withdrawn: before the start all that may take part, later all that did; of a
        masked run, one without whom there is no further sum."""
        if self._lacks_a_masker():
            return not self._closing
        if self._members or not self._withdrawn:
            return False
        return self._round is not None or self._withdrawn >= set(self.config.silos)

    def _lacks_a_masker(self) -> bool:
        """Whether masked rounds are left, and too few hospitals for a sum, or not those of the sums before."""
        masks = self.plan.secure_aggregation
        if masks is None or not self.plan.is_masked(self._next_number):
            return False
        left = set(self.config.silos) - self._withdrawn
        return len(left) < masks.minimum or not left.issuperset(self._bound or ())

    @property
    def _next_number(self) -> int:
        """The round that is open, or is to be opened next."""
        closed = self._round is not None and self._round.closed_at is not None
        return self.round_number + (1 if closed else 0)

    def _end_early(self) -> None:
        run, state = self.plan.run, self._round
        if state is not None and state.closed_at is None:
            self.store.close_round(run, state.number, downloads={}, memory_file=self.store.memory_file(run))
        done = 0 if state is None else state.number if state.closed_at is None else state.number + 1
        reason, words = self._why_early()
        self.early_end = EarlyEnd(done, reason)
        self.store.finish_run(run, self.plan.rounds, sorted(self._members), early=self.early_end)
        self._finished = True
        log.warning(
            "run %s: %s, so it ends %s; what was made of them stays%s",
            run,
            words,
            self.early_end.when(self.plan.rounds),
            ". A new run (new `name`, new `seed`) can begin without" if self._bound else "",
        )
        self._masks = None
        self._refresh()
        self._prepare()
        self._changed.notify_all()

    def _why_early(self) -> tuple[EndReason, str]:
        """For all, and in the operator's own words, which name hospitals."""
        if not self._members:
            return EndReason.WITHDRAWN, "every hospital has withdrawn"
        if not (gone := sorted(self._withdrawn.intersection(self._bound or ()))):
            return EndReason.TOO_FEW_FOR_MASKS, "too many hospitals have withdrawn for a masked sum"
        return EndReason.WITHDRAWN_FROM_MASKS, (
            f"{', '.join(gone)} {'has' if len(gone) == 1 else 'have'} withdrawn, and a masked sum over the others, "
            "held against those before, would give away what the withdrawn sent"
        )

    def _open_next(self) -> None:
        number = 0 if self._round is None else self._round.number + 1
        plan = self.plan
        self._told_at = time.monotonic()
        if number == plan.rounds:
            self.store.finish_run(plan.run, number, sorted(self._members))
            self._finished = True
            log.info("run %s: all %d rounds have ended", plan.run, plan.rounds)
        else:
            chosen = self._chosen(number)
            self.store.open_round(plan.run, number, chosen)
            log.info("round %d of %d is open for %s", number + 1, plan.rounds, ", ".join(chosen))
        self._refresh()
        self._open_masks()
        self._prepare()
        self._changed.notify_all()

    def _close(self, state: RoundState) -> None:
        started = time.monotonic()
        workspace = FileWorkspace(self._round_folder(state.number), self.spares)
        files = {s: p.file for s, p in state.participants.items() if p.file is not None}
        if self._masks is None:
            uploads = self._payloads(files)
            latest = self._unmasked(self._payloads(self.store.latest_files(self.plan.run)))
        else:
            uploads = latest = self._sum_up(self._masks, state, files, workspace)
        delivered = {s for s, p in state.participants.items() if p.delivered_at is not None and s in uploads}
        fresh = Downloads()
        if delivered and (state.number + 1 < self.plan.rounds or self._method.downloads_last):
            fresh = self._half.aggregate(Round(state.number, uploads, latest, workspace))
        changes = self._changes(state.number, uploads)
        written = {silo: self._files(silo, payload, state.number) for silo, payload in named(fresh).items()}
        memory_file = self._save_memory(state.number)
        with self._changed:
            if self._masks is not None and not uploads:
                self._mask_again(self._masks)  # what was delivered counts for nothing
            self.store.close_round(
                self.plan.run, state.number, downloads=written, memory_file=memory_file, changes=changes
            )
            self._keep(written)
            self._masks = None
            self._closing = False
            self._refresh()
            self._changed.notify_all()
        if fresh.weights is not None:
            weights_log.add(self.folder, state.number, fresh.weights)
        late = sorted(set(state.participants) - delivered)
        for silo, change in changes.items():
            if change.unusual:
                log.warning("round %d: %s's change is unusual: %s", state.number + 1, silo, ", ".join(change.unusual))
        log.info(
            "round %d of %d has ended with %d update%s%s (%.2f s at the coordinator)",
            state.number + 1,
            self.plan.rounds,
            len(delivered),
            "" if len(delivered) == 1 else "s",
            f"; late: {', '.join(late)}" if late else "",
            time.monotonic() - started,
        )
        self._forget(state.number)

    def _sum_up(
        self, masks: MaskedRound, state: RoundState, files: Mapping[str, str], workspace: Workspace
    ) -> dict[str, Payload]:
        """The mean of a whole roster's updates in each silo's place; nothing where the round is given up."""
        if not _complete(masks, state) or masks.silos is None or self.plan.secure_aggregation is None:
            log.warning(
                "round %d is given up: not all of %s have delivered, and a sum over others would give single updates "
                "away",
                state.number + 1,
                ", ".join(masks.silos or sorted(state.participants)),
            )
            return {}
        parts = self._half.upload_parts(state.number, masks.silos[0])
        masked = list(self._payloads({silo: files[silo] for silo in masks.silos}).values())
        try:
            mean = mean_of(masked, parts, self.plan.secure_aggregation, workspace)
        except RefusedError as error:
            log.warning("round %d is given up: %s", state.number + 1, error)
            return {}
        return dict.fromkeys(masks.silos, mean)

    @staticmethod
    def _unmasked(payloads: Mapping[str, Payload]) -> dict[str, Payload]:
        return {silo: payload for silo, payload in payloads.items() if Exposure.MASKED_UPDATE not in payload}

    def _order(self, silo: str, key: CertifiedKey | None = None) -> Order | None:
        state = self._round
        if state is None or state.closed_at is not None or self._closing:
            return None
        mine = state.participants.get(silo)
        if mine is None or mine.delivered_at is not None:
            # A silo that asks again after the end has lost the answer: the end is told as often as it is asked.
            return Order(wire.TASK_KIND_FINISH, state.number) if self._finished else None
        if (masks := self._masks) is not None and key is not None and key.round == masks.number:
            # It has trained, and waits to hear with whom to mask.
            due = masks.roster if masks.is_due(silo, key) else None
            return Order(wire.TASK_KIND_MASK, state.number, tuple(due.keys.values())) if due else None
        return Order(wire.TASK_KIND_FINISH if self._finished else wire.TASK_KIND_TRAIN, state.number)

    def _all_done(self) -> bool:
        state = self._round
        return (
            self._finished
            and state is not None
            and all(participant.delivered_at for participant in state.participants.values())
        )

    def _restore(self) -> None:
        """Reads everything from the store."""
        run = self.plan.run
        self._doubtful = True
        self.store.settle()
        self._closing = False
        self._half = self._method.coordinator_half(self._federation)
        self._withdrawn = set(self.store.withdrawals(run))
        accepted = {name for name, m in self.store.members(run).items() if m.accepted} - self._withdrawn
        self._members = accepted & set(self.config.silos)
        self._finished = self.store.is_finished(run)
        self._bound = self.store.first_roster(run) if self._binds else None
        self.early_end = self.store.early_end(run)
        self._refresh()
        self._kept: dict[str, Payload] = {}
        self._keep(self.store.downloads(run))
        if name := self.store.memory_file(run):
            self._half.memory = read_memory(self.config.state / name)
        self._open_masks()
        self._prepare()
        for silo in sorted(self._withdrawn):
            self._let_go(silo)
        self._doubtful = False

    def _refresh(self) -> None:
        self._round = self.store.last_round(self.plan.run)

    def _prepare(self) -> None:
        kept = Downloads(
            own={silo: payload for silo, payload in self._kept.items() if silo != EVERYONE},
            everyone=self._kept.get(EVERYONE),
        )
        names = sorted(self._round.participants) if self._round else []
        self._current = kept if self._finished else self._half.downloads(self.round_number, names, kept)

    def _keep(self, files: Mapping[str, Mapping[str, str]]) -> None:
        for silo, by_class in files.items():
            payload = {}
            for exposure, name in by_class.items():
                (part,) = read_payload(self.config.state / name).values()
                payload[Exposure(exposure)] = part
            self._kept[silo] = payload

    def _files(self, silo: str, payload: Payload, round_number: int) -> dict[str, str]:
        """Where each part of a download lies; a part that is still in memory is written first."""
        found = {}
        for exposure, part in payload.items():
            if isinstance(part.source, FileSource):
                path = part.source.path
            else:
                name = "everyone" if silo == EVERYONE else f"silo-{silo}"
                path = self._round_folder(round_number) / f"download-{name}-{exposure}-{PROCESS}.safetensors"
                write_payload(path, {exposure: part})
            found[exposure.value] = str(path.relative_to(self.config.state))
        return found

    def _payloads(self, files: Mapping[str, str]) -> dict[str, Payload]:
        return {silo: read_payload(self.config.state / files[silo]) for silo in sorted(files)}

    def _save_memory(self, round_number: int) -> str | None:
        memory = self._half.memory
        if not memory:
            return None
        path = self._round_folder(round_number) / f"memory-{PROCESS}.safetensors"
        flat = {f"{group}/{name}": tensor for group, state in memory.items() for name, tensor in state.items()}
        write_payload(path, {Exposure.PROTOCOL: Part.of(flat)})
        return str(path.relative_to(self.config.state))

    def _forget(self, closed: int) -> None:
        """Removes tensors of rounds that nothing needs any more."""
        needed = {self.config.state / name for name in self.store.latest_files(self.plan.run).values()}
        for by_class in self.store.downloads(self.plan.run).values():
            needed.update(self.config.state / name for name in by_class.values())
        for folder in self.folder.glob("round-*"):
            if int(folder.name.removeprefix("round-")) > closed - self.config.keep_rounds:
                continue
            for path in folder.iterdir():
                if path in needed:
                    continue
                with self._changed:
                    # A file that a slow silo is still being sent must not be written over under its hands; one of a
                    # silo that withdrew just now is gone.
                    if self._readers[path] == 0 and path.exists():
                        self.spares.give(path)
            if not any(folder.iterdir()):
                folder.rmdir()

    def _round_folder(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}"


@contextmanager
def _while_it_passes(folder: Path) -> Iterator[None]:
    """Leaves what is inside where a failure of the disk may be over by itself."""
    try:
        with on_disk(folder):
            yield
    except DiskError as error:
        if not error.passes:
            raise


def _complete(masks: MaskedRound, state: RoundState) -> bool:
    """Whether all of a roster have delivered for it."""
    if masks.roster is None:
        return False
    found = (state.participants.get(silo) for silo in masks.roster.silos)
    return all(mine is not None and mine.delivered_at is not None for mine in found)
