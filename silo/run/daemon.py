"""``silo train``: joins a run, trains round by round, and goes on from any crash."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.tensors.memory import reuse_freed_memory
from medsilo.privacy.audit.fork_proof import ForkProof
from medsilo.privacy.consent.consent import ConsentFile, today
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.gate import ConsentGate, WitnessGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import EndedError, History
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.door.door import Door
from medsilo.privacy.door.gossip import ForkError
from medsilo.privacy.door.witnessing import Witnessing
from medsilo.privacy.errors import (
    BudgetError,
    ConsentError,
    MedsiloError,
    ReceiptError,
    RefusedError,
)
from medsilo.privacy.files.durable import on_disk
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord, RefusalRecord, RunRecord
from medsilo.privacy.witness.link import WitnessLink
from medsilo.silo.run.agreement import agree, open_masking, summary
from medsilo.silo.run.approval import await_approval
from medsilo.silo.run.display import Display
from medsilo.silo.run.ending import Ending, conclude_alone, refuse_withdrawn
from medsilo.silo.run.participation import Participation
from medsilo.silo.run.run_state import has_ended
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import keep_plan
from medsilo.silo.training.device import choose_device, set_threads
from medsilo.silo.training.processes import Processes
from medsilo.silo.uplink.channel import connect
from medsilo.silo.uplink.confinement import Confinement
from medsilo.silo.uplink.explaining import UnansweredError
from medsilo.silo.uplink.uplink import Uplink

_LOOK_SECONDS = 0.5
"""How often a waiting daemon looks whether its consent still holds."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended at this silo."""

    run: str
    folder: Path
    bytes_sent: int


def train(
    config: SiloConfig,
    display: Display,
    *,
    day: Callable[[], date] = today,
    confined: Confinement | None = None,
) -> Outcome:
    """Takes part in the coordinator's run until it ends. ``day``: tells the day, UTC. ``confined``: how this process
    is kept from the network, where the kernel does that.

    Everything that can be wrong on this machine (consent, shard, keys, device) is checked before the first byte
    leaves. Where the run has ended, with its outcome here and the coordinator's receipt for that, the coordinator may
    have ended too: it is called for a minute, in case that it waits for a signature or has another run. Raises the
    ``MedsiloError`` that says what is wrong; where the consent has ended, the coordinator is told before that.
    """
    with on_disk(config.state):
        keep_private(config.state, display.notice)
        reuse_freed_memory()
        return _train(config, display, day, confined)


def _train(config: SiloConfig, display: Display, day: Callable[[], date], confined: Confinement | None) -> Outcome:
    history = History.read(config.journal)
    consent = _consent_to_ask(config, history, display, day)
    dataset = load_npz(config.shard)
    credentials = config.open_credentials()
    devices = [choose_device(name) for name in config.devices]
    set_threads(config.threads, len(devices))
    audit_key = load_audit_key(config.keys / "audit.key")

    def note(file: ConsentFile, problem: str | None = None) -> None:
        _note_consent(door, file, dataset, problem)

    gate = ConsentGate(consent, config.coordinator_identity, withdrawal=config.withdrawal, changed=note, day=day)
    with Journal(config.journal, key=audit_key, origin=config.journal_origin) as journal:
        archive = _archive(config)
        door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=gate, archive=archive)
        note(consent)
        uplink = Uplink(config, credentials, door, notice=display.notice, confined=confined)
        uplink.note_egress()
        last = history.last
        done = last if last and last.ended and has_ended(config.runs / last.run, last.plan_sha256) else None
        uplink.needed = done is None
        door.receipt_state(config.coordinator_identity.uri).named = _audit_keys(config, consent)
        joined = False
        try:
            with _keeping_proof(config), _noting_refusals(door, config.coordinator_identity.uri):
                plan = uplink.get_plan()
                keep_plan(config, plan)
                run = plan.run
                uplink.needed = done is None or plan.sha256.hex() != done.plan_sha256
                gate, account, counts = agree(config, plan, uplink, gate, dataset, door, history, display)
                blind, current = config.runs / run / "blind.json", credentials.current if credentials else None
                masking = open_masking(plan, blind, current, audit_key, gate, door, history)
                witnessing = _witnessing(config, plan, door, gate, display, confined)
                with Processes(config, devices, plan, dataset) as processes, closing(witnessing):
                    participation = Participation(
                        *(config, plan, gate, dataset, processes, uplink, display, account, counts, masking, door),
                        settled=witnessing.due,
                    )
                    with _watching(gate, uplink):
                        await_approval(config, plan, gate, door, history, display.notice)
                        with gate.held():  # the file may have been changed since it was held against the plan
                            gate.check(())
                            door.note(RunRecord(**summary(plan)))
                        joined = True
                        with _ending_with_the_budget():
                            participation.run()
        except UnansweredError as error:
            if done is None:
                raise
            run = done.run
            _not_waited_for(display, error, run)
        except ConsentError as error:
            if not joined and not isinstance(error, EndedError):
                raise  # the plan was declined
            ended = Ending(config, door, audit_key, uplink, display.notice).conclude(error)
            over = isinstance(ended, EndedError) and ended.cause == Cause.BUDGET
            raise (BudgetError(str(ended)) if over else ended) from None
        finally:
            uplink.note_egress()
            uplink.close()
    return Outcome(run, config.runs / run, uplink.bytes_sent)


def _witnessing(
    config: SiloConfig, plan: RunPlan, door: Door, gate: ConsentGate, display: Display, confined: Confinement | None
) -> Witnessing:
    def dial(address: str) -> socket.socket:
        way_out = None if confined is None else confined.way_to_witnesses(config.dialled(address))
        return connect(address, proxy=config.proxy, way_out=way_out)

    return Witnessing(
        [WitnessLink(witness, dial) for witness in config.witnesses],
        door,
        lambda key: WitnessGate(gate, key.text),
        config.state,
        run=plan.run,
        plan_sha256=plan.sha256.hex(),
        notice=display.notice,
    )


def _consent_to_ask(config: SiloConfig, history: History, display: Display, day: Callable[[], date]) -> ConsentFile:
    """The consent, if the coordinator may be asked for its plan with it; raises why not."""
    if config.withdrawal.exists() or history.withdrawal:
        raise refuse_withdrawn(config, display.notice)
    consent = ConsentFile.read(config.consent)
    if missing := consent.missing_to_ask(config.coordinator_identity, day=day()):
        error = consent.refusal(missing, f"asking {config.coordinator_identity.uri} for its plan")
        if history.last and (history.last.is_open or not history.last.told):
            cause = Cause.EXPIRED if missing.expired else Cause.NARROWED
            raise conclude_alone(config, EndedError(cause, str(error)), display.notice)
        raise error
    return consent


def _not_waited_for(display: Display, error: UnansweredError, run: str) -> None:
    display.notice(
        f"{error}\nThe coordinator is not waited for: run {run} has ended, and it has acknowledged that. For "
        "another run, give the same command again"
    )


def _note_consent(door: Door, file: ConsentFile, dataset: ImageDataset, problem: str | None) -> None:
    told: dict[str, Any] = {"unusable": problem} if problem else {}
    door.note(
        ConsentRecord(
            consent=file.describe(),
            data=dataset.name,
            data_sha256=dataset.fingerprint,
            synthetic=dataset.synthetic,
            **told,
        )
    )


@contextmanager
def _noting_refusals(door: Door, peer: str) -> Iterator[None]:
    """What of the other side's is refused here stands in the journal."""
    try:
        yield
    except (RefusedError, ReceiptError) as error:
        if not error.recorded:
            door.note(RefusalRecord(peer=peer, direction="received", reason=str(error)))
        raise


def _audit_keys(config: SiloConfig, consent: ConsentFile) -> dict[str, str]:
    """SHA-256 of other hospitals' audit keys, by identity, where the consent names them."""
    masks = consent.consent.secure_aggregation
    names = {} if masks is None else masks.audit_keys
    return {Identity(config.federation, "silo", name).uri: key for name, key in names.items()}


@contextmanager
def _keeping_proof(config: SiloConfig) -> Iterator[None]:
    """What proves to anyone that the coordinator shows two journals is kept in a file of its own."""
    try:
        yield
    except ForkError as error:
        if error.proof is None:
            raise
        proof = ForkProof.model_validate(error.proof)
        found = proof.check()
        proof.write(config.fork_proof)
        kept = ForkError(
            f"{error}. PROOF: {found.sentence()}: {config.fork_proof}, which anyone checks with `audit verify`",
            error.proof,
        )
        kept.recorded = error.recorded
        raise kept from None


def _archive(config: SiloConfig) -> SentArchive | None:
    if config.keep_sent_days is None:
        return None
    archive = config.sent_archive
    archive.delete_older(config.keep_sent_days)
    return archive


@contextmanager
def _ending_with_the_budget() -> Iterator[None]:
    """A budget that is used up on the way ends the hospital's part in the run, as any other end of its consent."""
    try:
        yield
    except BudgetError as error:
        raise EndedError(Cause.BUDGET, str(error)) from error


@contextmanager
def _watching(gate: ConsentGate, uplink: Uplink) -> Iterator[None]:
    """Meanwhile a consent that ends cuts short what the uplink waits for; the gate then says why."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                gate.check(())
            except MedsiloError:
                uplink.interrupt()

    thread = threading.Thread(target=watch, name="consent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
