"""``coordinator serve``: puts store, journal, rounds and service together and runs them until told to stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

import torch

from algorithms.allocation import reuse_freed_memory
from coordinator.config import CoordinatorConfig
from coordinator.rounds import Rounds
from coordinator.service import CoordinatorService, serve
from coordinator.store import Store
from privacy.door import Door
from privacy.errors import MedsiloError
from privacy.gate import PlanGate
from privacy.journal import Journal
from privacy.pki import Credentials, load_audit_key, load_credentials

log = logging.getLogger(__name__)

LAST_WORD_SECONDS = 10.0


def load_party(config: CoordinatorConfig) -> Credentials | None:
    """The coordinator's credentials; None with ``insecure: true``."""
    if config.insecure:
        return None
    files = config.tls_files
    return load_credentials(ca=files.ca, certificate=files.certificate, key=files.key, expected=config.identity)


def run(config: CoordinatorConfig, *, until_done: bool) -> None:
    """Serves until a signal arrives, the rounds fail, or (``until_done``) every silo has fetched the end."""
    reuse_freed_memory()
    torch.set_num_threads(1)  # its sums are bound by memory, and often it shares the machine
    plan = config.plan()
    method = config.make_method()
    for warning in method.warnings(len(config.silos)):
        log.warning(warning)
    credentials = load_party(config)
    audit_key = load_audit_key(config.keys / "audit.key")
    store = Store(config.database)
    with Journal(config.journal, key=audit_key, origin=config.journal_origin) as journal:
        door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=PlanGate(plan.downlink))
        rounds = Rounds(config, plan, method, store, note=door.note)
        server = serve(CoordinatorService(config, rounds, store, door, credentials), config, credentials)
        door.note("run", run=plan.run, plan_sha256=plan.sha256.hex(), plan=plan.model_dump(mode="json"))
        stopped = threading.Event()

        def stop(_number: int, _frame: FrameType | None) -> None:
            stopped.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        rounds.start()
        log.info("run %s: %s, listening on %s", plan.run, plan.method.name, config.listen)
        watcher = threading.Thread(target=_watch, args=(rounds, door, stopped, until_done), daemon=True)
        watcher.start()
        stopped.wait()
        rounds.stop()
        server.stop(grace=5).wait()
    store.close()
    if rounds.failure is not None:
        raise MedsiloError(
            f"the run stopped: {rounds.failure}; nothing is lost, the log says where"
        ) from rounds.failure


def _watch(rounds: Rounds, door: Door, stopped: threading.Event, until_done: bool) -> None:
    rounds.wait_until_done()
    if until_done and rounds.failure is None:
        # Silos that have the run's end still put their signature to what they sent last.
        deadline = time.monotonic() + LAST_WORD_SECONDS
        while not door.all_signed() and time.monotonic() < deadline and not stopped.wait(0.1):
            pass
    if until_done or rounds.failure is not None:
        stopped.set()
