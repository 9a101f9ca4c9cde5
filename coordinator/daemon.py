"""``coordinator serve``: puts store, journal, rounds and service together and runs them until told to stop."""

from __future__ import annotations

import logging
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.tensors.memory import reuse_freed_memory
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds.rounds import REMINDER_SECONDS, Rounds
from medsilo.coordinator.service.enrolment import EnrolmentService, serve_enrolment
from medsilo.coordinator.service.service import CoordinatorService, serve
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import REMEMBER_AFTER, Door
from medsilo.privacy.door.witnessing import Witnessing
from medsilo.privacy.errors import DiskError, JournalInUseError, LeaseLostError, MedsiloError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import on_disk
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.identity.revocation import LiveCredentials
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import RunRecord
from medsilo.privacy.party import systemd as service_manager
from medsilo.privacy.witness.link import WitnessLink

log = logging.getLogger(__name__)

_IDLE_SECONDS = 2.0
"""How long nothing has to come before the newest records are signed without a message."""
_PATIENCE_SECONDS = 1.0
"""How long another process may still have the journal open, of a coordinator that ends in order or of a command."""
_FILES_PER_SILO = 10
"""Twice what was measured with 200 hospitals (docs/reliability.md)."""
_FILES_BESIDE = 256


def run(config: CoordinatorConfig, *, until_done: bool) -> None:
    """Serves until a signal arrives, the rounds fail, or (``until_done``) every silo has the end, and has
    signed for the receipt that it got for that."""
    with on_disk(config.state):
        keep_private(config.state)
        _run(config, until_done=until_done)


def _run(config: CoordinatorConfig, *, until_done: bool) -> None:
    reuse_freed_memory()
    _allow_open_files(len(config.silos))
    torch.set_num_threads(1)  # its sums are bound by memory, and often it shares the machine
    plan = config.plan()
    for warning in config.warnings():
        log.warning(warning)
    if plan.model.weights is not None:
        log.info("run %s: %s", plan.run, plan.model.weights.words)
    credentials = config.open_credentials()
    audit_key = load_audit_key(config.keys / "audit.key")
    stopped = threading.Event()
    failures: list[MedsiloError] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    def lost(error: LeaseLostError) -> None:
        failures.append(error)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    alive: list[Callable[[], bool]] = []
    service_manager.watch(lambda: all(check() for check in alive))
    store = Store(config.database)
    try:
        if store.serve(folder=config.state, seconds=config.lease_seconds, stopped=stopped, lost=lost):
            journal = _open_journal(config, audit_key, store, stopped)
            if journal is not None:
                with journal:
                    _lead(config, plan, store, journal, credentials, stopped, failures, alive, until_done=until_done)
    finally:
        store.close()
    if failures:
        raise failures[0]


def _allow_open_files(silos: int) -> None:
    """Each hospital has its connection, and at a round's end up to four files: with many, more than the 1024 that a
    process may have open unless it asks."""
    needed = _FILES_PER_SILO * silos + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        log.warning(
            "this process may have %d files and connections open, and for %d hospitals it may need %d; raise the limit "
            "(`ulimit -n`, or LimitNOFILE= of its systemd unit)",
            most,
            silos,
            needed,
        )


def _lead(
    config: CoordinatorConfig,
    plan: RunPlan,
    store: Store,
    journal: Journal,
    credentials: LiveCredentials | None,
    stopped: threading.Event,
    failures: Sequence[MedsiloError],
    alive: list[Callable[[], bool]],
    *,
    until_done: bool,
) -> None:
    gate = PlanGate(plan.downlink)
    door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=gate)
    rounds = Rounds(config, plan, config.make_method(), store, note=door.note)
    server = serve(CoordinatorService(config, rounds, store, door, credentials), config, credentials)
    enrolment = None
    if config.enrolment is not None and credentials is not None:
        enrolling = EnrolmentService(config, config.enrolment, plan, store, door, credentials)
        enrolment = serve_enrolment(enrolling, config.enrolment, credentials)
    door.note(RunRecord(run=plan.run, plan_sha256=plan.sha256.hex(), plan=plan.model_dump(mode="json")))
    rounds.start()
    log.info("run %s: %s, listening on %s", plan.run, plan.method.name, config.listen)
    threading.Thread(target=_watch, args=(config, rounds, door, stopped, until_done), daemon=True).start()
    witnessing = _witnessing(config, plan, door)
    look = _ask_when_a_round_has_ended(rounds, witnessing)
    signing = threading.Thread(target=_sign_when_idle, args=(journal, door, stopped, look), daemon=True)
    signing.start()
    alive.append(rounds.is_alive)
    service_manager.notify(f"READY=1\nSTATUS=leading run {plan.run}")
    stopped.wait()
    log.info("stopping; the same command goes on from here")
    service_manager.notify("STOPPING=1")
    rounds.stop()
    if enrolment is not None:
        enrolment.stop(grace=None)
    server.stop(grace=None if failures else 5).wait()
    signing.join()
    witnessing.close()
    if rounds.failure is not None and not failures:
        if isinstance(rounds.failure, DiskError):
            raise rounds.failure
        raise MedsiloError(
            f"the run stopped: {rounds.failure}; nothing is lost, the log says where"
        ) from rounds.failure


def _witnessing(config: CoordinatorConfig, plan: RunPlan, door: Door) -> Witnessing:
    return Witnessing(
        [WitnessLink(witness) for witness in config.witnesses],
        door,
        lambda _key: PlanGate([Exposure.CHECKPOINT]),
        config.state,
        run=plan.run,
        plan_sha256=plan.sha256.hex(),
    )


def _ask_when_a_round_has_ended(rounds: Rounds, witnessing: Witnessing) -> Callable[[], None]:
    """What looks whether witnesses are to be asked."""
    known = rounds.round_number

    def look() -> None:
        nonlocal known
        if rounds.round_number != known:
            known = rounds.round_number
            witnessing.due()

    return look


def _sign_when_idle(
    journal: Journal, door: Door, stopped: threading.Event, look: Callable[[], None] = lambda: None
) -> None:
    """Records are signed with the next message; where none comes for a while, so that evidence of them can be had. Now
    and then, and at the end, the next start is saved from reading them all. ``look``: called as often as it looks."""
    before = -1
    while not stopped.wait(_IDLE_SECONDS):
        look()
        if len(journal) == before > journal.signed:
            try:
                journal.checkpoint()
            except MedsiloError as error:
                log.warning("the newest records could not be signed yet: %s", error)
        before = len(journal)
        _remember(door)
    _remember(door, after=1)


def _remember(door: Door, *, after: int = REMEMBER_AFTER) -> None:
    try:
        door.remember(after=after)
    except MedsiloError as error:
        log.warning("the next start has to read the whole journal: %s", error)


def _open_journal(
    config: CoordinatorConfig, key: Ed25519PrivateKey, store: Store, stopped: threading.Event
) -> Journal | None:
    """The journal; None if ``stopped`` came first. From a coordinator that has lost its lease and still has the journal
    open, as it hangs, it is taken away; a command that has it open for a moment is waited for.
    """
    began = time.monotonic()
    while not stopped.is_set():
        hangs = time.monotonic() - began > _PATIENCE_SECONDS
        try:
            return Journal(
                config.journal,
                key=key,
                origin=config.journal_origin,
                allowed=store.check_serving,
                take_over=store.is_shared and hangs,
            )
        except JournalInUseError:
            if not store.is_shared:
                raise
        stopped.wait(0.2)
    return None


def _watch(config: CoordinatorConfig, rounds: Rounds, door: Door, stopped: threading.Event, until_done: bool) -> None:
    rounds.wait_until_done()
    if until_done:
        _await_signatures(config, rounds, door, stopped)
    if until_done or rounds.failure is not None:
        stopped.set()


def _await_signatures(config: CoordinatorConfig, rounds: Rounds, door: Door, stopped: threading.Event) -> None:
    """Waits until all have signed for what they sent last. A silo that did has the receipt for the run's end on disk,
    so that it needs no coordinator any more, whenever it is started again."""
    told_at = time.monotonic()
    while rounds.failure is None and not stopped.wait(0.1):
        rounds.wait_until_done()  # at the end, too, a silo may join
        parties = {silo: Identity(config.federation, "silo", silo).uri for silo in rounds.finishers()}
        left = [silo for silo, uri in parties.items() if not door.has_parted(uri)]
        if not left:
            return
        if time.monotonic() - told_at >= REMINDER_SECONDS:
            told_at = time.monotonic()
            log.warning("run %s waits for %s to sign for its end", rounds.plan.run, ", ".join(left))
