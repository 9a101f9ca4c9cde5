"""``silo train``: joins a run, trains round by round, and goes on from any crash."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.allocation import reuse_freed_memory
from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.masked_methods import check_masks, digest, required
from medsilo.algorithms.method import SiloHalf, local_metrics
from medsilo.algorithms.models import build
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload, payload_tensors
from medsilo.algorithms.transfer import check_finite
from medsilo.privacy.budget.ledger import Ledger, Subject
from medsilo.privacy.budget.sealed_keys import SealedKeys
from medsilo.privacy.consent.consent import ConsentFile, Missing, today
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import Cause, EndedError, History
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import (
    BudgetError,
    ConsentError,
    DataError,
    LateError,
    MedsiloError,
    ReceiptError,
    RefusedError,
    TrainingError,
)
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import on_disk
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.party.early_end import EarlyEnd, EndReason
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.silo.run.account import Account, budget_of, check_enough, check_promise, metrics_budget_of
from medsilo.silo.run.approval import await_approval, waits
from medsilo.silo.run.display import Display
from medsilo.silo.run.ending import Ending, conclude_alone, refuse_withdrawn
from medsilo.silo.run.masking import Masking
from medsilo.silo.run.run_state import Measured, RunState, has_ended
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import keep_plan
from medsilo.silo.training.processes import Processes, take_up
from medsilo.silo.training.site import LocalSite, Measurement, Progress, choose_device, set_threads
from medsilo.silo.uplink.uplink import UnansweredError, Uplink

if TYPE_CHECKING:
    from medsilo.silo.training.private_count import PrivateCounts

_LOOK_SECONDS = 0.5
"""How often a waiting daemon looks whether its consent still holds."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended at this silo."""

    run: str
    folder: Path
    bytes_sent: int


def train(config: SiloConfig, display: Display, *, day: Callable[[], date] = today) -> Outcome:
    """Takes part in the coordinator's run until it ends. ``day``: tells the day, UTC.

    Everything that can be wrong on this machine (consent, shard, keys, device) is checked before the first byte
    leaves. Where the run has ended, with its outcome here and the coordinator's receipt for that, the coordinator may
    have ended too: it is called for a minute, in case that it waits for a signature or has another run. Raises the
    ``MedsiloError`` that says what is wrong; where the consent has ended, the coordinator is told before that.
    """
    with on_disk(config.state):
        keep_private(config.state, display.notice)
        return _train(config, display, day)


def _train(config: SiloConfig, display: Display, day: Callable[[], date]) -> Outcome:
    reuse_freed_memory()
    history = History.read(config.journal)
    if config.withdrawal.exists() or history.withdrawal:
        raise refuse_withdrawn(config, display.notice)
    consent = ConsentFile.read(config.consent)
    if missing := consent.missing_to_ask(config.coordinator_identity, day=day()):
        error = consent.refusal(missing, f"asking {config.coordinator_identity.uri} for its plan")
        if history.last and (history.last.is_open or not history.last.told):
            cause = Cause.EXPIRED if missing.expired else Cause.NARROWED
            raise conclude_alone(config, EndedError(cause, str(error)), display.notice)
        raise error
    dataset = load_npz(config.shard)
    credentials = config.open_credentials()
    devices = [choose_device(name) for name in config.devices]
    set_threads(config.threads, len(devices))
    audit_key = load_audit_key(config.keys / "audit.key")

    def note(file: ConsentFile, problem: str | None = None) -> None:
        told = {"unusable": problem} if problem else {}
        door.note(
            "consent",
            consent=file.describe(),
            data=dataset.name,
            data_sha256=dataset.fingerprint,
            synthetic=dataset.synthetic,
            **told,
        )

    gate = ConsentGate(consent, config.coordinator_identity, withdrawal=config.withdrawal, changed=note, day=day)
    with Journal(config.journal, key=audit_key, origin=config.journal_origin) as journal:
        archive = _archive(config)
        door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=gate, archive=archive)
        note(consent)
        uplink = Uplink(config, credentials, door, notice=display.notice)
        last = history.last
        done = last if last and last.ended and has_ended(config.runs / last.run, last.plan_sha256) else None
        uplink.needed = done is None
        joined = False
        try:
            plan = uplink.get_plan()
            keep_plan(config, plan)
            run = plan.run
            uplink.needed = done is None or plan.sha256.hex() != done.plan_sha256
            gate, account, counts = _agree(config, plan, uplink, gate, dataset, door, history, display)
            masking = _masking(plan, credentials.current if credentials else None, audit_key, consent, door, history)
            with Processes(config, devices, plan, dataset) as processes:
                participation = _Participation(
                    config, plan, gate, dataset, processes, uplink, display, account, counts, masking, door
                )
                with _watching(gate, uplink):
                    await_approval(config, plan, gate, door, history, display.notice)
                    door.note("run", **_summary(plan))
                    joined = True
                    with _ending_with_the_budget():
                        participation.run()
        except UnansweredError as error:
            if done is None:
                raise
            run = done.run
            display.notice(
                f"{error}\nThe coordinator is not waited for: run {run} has ended, and it has acknowledged that. For "
                "another run, give the same command again"
            )
        except (RefusedError, ReceiptError) as error:
            if not error.recorded:
                door.note("refusal", peer=config.coordinator_identity.uri, direction="received", reason=str(error))
            raise
        except ConsentError as error:
            if not joined and not isinstance(error, EndedError):
                raise  # the plan was declined
            ended = Ending(config, door, audit_key, uplink, display.notice).conclude(error)
            if isinstance(ended, EndedError) and ended.cause == Cause.BUDGET:
                raise BudgetError(str(ended)) from None
            raise ended from None
        finally:
            uplink.close()
    return Outcome(run, config.runs / run, uplink.bytes_sent)


def _archive(config: SiloConfig) -> SentArchive | None:
    if config.keep_sent_days is None:
        return None
    archive = config.sent_archive
    archive.delete_older(config.keep_sent_days)
    return archive


def _agree(
    config: SiloConfig,
    plan: RunPlan,
    uplink: Uplink,
    gate: ConsentGate,
    dataset: ImageDataset,
    door: Door,
    history: History,
    display: Display,
) -> tuple[ConsentGate, Account | None, PrivateCounts | None]:
    """The gate of a plan that consent and privacy budget cover and, where it has privacy, its account and what noises
    accuracies."""
    method = make(plan.method.name, plan.method.parameters)
    check_masks(plan, method)
    needed = required(method, plan.secure_aggregation, plan.rounds)
    if not set(needed) <= set(plan.required):
        raise RefusedError(
            f"the plan asks for {', '.join(plan.required)}, but {method.name} exposes {', '.join(needed)}: a plan must "
            "name all that its method exposes"
        )
    check_promise(plan, method)
    consent = gate.file
    earlier = history.rounds_with(plan.coordinator_identity.uri, beside=plan.sha256.hex())
    missing = consent.missing_for(plan, images=len(dataset.train), earlier_rounds=earlier)
    part = history.parts.get(plan.sha256.hex())
    if part and part.is_open:
        # A cap that was lowered on the way ends the run when it is reached, not before.
        missing = dataclasses.replace(missing, rounds=None, total_rounds=None)
    if missing:
        error = consent.refusal(missing, f"run {plan.run} ({plan.method.name})")
        door.note("refusal", **_summary(plan), reason=str(error))
        if part and part.is_open:
            raise EndedError(Cause.NARROWED, str(error))
        if not waits(consent, plan, history):
            uplink.answer(plan, missing)
        raise error
    try:
        account = _open_account(config, plan, consent, dataset, door)
        if account is not None:
            account.check_covers(method)
            if told := account.notice():
                display.notice(told)
        counts = _open_counts(config, plan, consent, dataset, door, display)
    except (BudgetError, DataError) as error:
        door.note("refusal", **_summary(plan), reason=str(error))
        if part and part.is_open:
            raise EndedError(Cause.BUDGET, str(error)) from None
        if not waits(consent, plan, history):
            uplink.answer(plan, Missing(privacy=(str(error),)))
        raise
    joining = gate.joining(plan, rounds=part.sent if part else (), earlier_rounds=earlier)
    uplink.use(door.through(joining), plan)
    return joining, account, counts


def _open_account(
    config: SiloConfig, plan: RunPlan, consent: ConsentFile, dataset: ImageDataset, door: Door
) -> Account | None:
    if plan.privacy is None:
        return None
    from medsilo.silo.training.private_training import owners_of  # Opacus takes seconds to load

    units = int(owners_of(dataset, plan.privacy.unit).max()) + 1
    check_enough(plan.privacy, consent.consent, units)
    ledger = Ledger(config.ledgers, Subject(dataset.fingerprint, plan.privacy.unit), dataset.contents)
    budget, sealed = budget_of(consent.consent, plan.privacy), _sealed_keys(config, plan)
    account = Account(ledger, plan, plan.privacy, budget, door, sealed)
    door.paid_by = account.paid_by
    return account


def _sealed_keys(config: SiloConfig, plan: RunPlan) -> SealedKeys:
    """Beside what is kept of the run: who takes that away takes them along, and trains anew under new ones."""
    return SealedKeys(config.runs / plan.run / "sealed")


def _open_counts(
    config: SiloConfig, plan: RunPlan, file: ConsentFile, dataset: ImageDataset, door: Door, display: Display
) -> PrivateCounts | None:
    """What noises accuracies of a private run; None where none leaves, as consent or shard have it."""
    if plan.privacy is None or plan.privacy.metrics is None or Exposure.LOCAL_METRICS not in file.consent.classes:
        return None
    budget = metrics_budget_of(file.consent, plan.privacy)
    if budget is None:
        display.notice("accuracies stay here: the consent has no budget for them (`privacy: metrics_epsilon`)")
        return None
    from medsilo.silo.training.private_count import PrivateCounts, held_out_owners

    try:
        owners = held_out_owners(dataset, plan.privacy.unit)
    except DataError as error:
        display.notice(f"accuracies stay here: {error}")
        return None
    subject = Subject(dataset.fingerprint, plan.privacy.unit, split="test")
    ledger = Ledger(config.ledgers, subject, dataset.contents)
    account = Account(ledger, plan, plan.privacy, budget, door, _sealed_keys(config, plan))
    training = door.paid_by
    door.paid_by = lambda call: [*training(call), *account.paid_by(call)]
    return PrivateCounts(plan.privacy.metrics, owners, account.charge)


def _masking(
    plan: RunPlan,
    credentials: Credentials | None,
    audit_key: Ed25519PrivateKey,
    consent: ConsentFile,
    door: Door,
    history: History,
) -> Masking | None:
    if plan.secure_aggregation is None:
        return None
    if credentials is None:
        raise RefusedError("masks need certificates, by which hospitals know each other; `insecure: true` has none")
    return Masking(
        plan,
        plan.secure_aggregation,
        credentials=credentials,
        audit_key=audit_key,
        consent=consent.consent,
        door=door,
        earlier=history.masked,
    )


@contextmanager
def _ending_with_the_budget() -> Iterator[None]:
    """A budget that is used up on the way ends the hospital's part in the run, as any other end of its consent."""
    try:
        yield
    except BudgetError as error:
        raise EndedError(Cause.BUDGET, str(error)) from error


def _summary(plan: RunPlan) -> dict[str, object]:
    return {"run": plan.run, "plan_sha256": plan.sha256.hex(), "plan": plan.model_dump(mode="json")}


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


class _Participation:
    """One silo in one run."""

    def __init__(
        self,
        config: SiloConfig,
        plan: RunPlan,
        gate: ConsentGate,
        dataset: ImageDataset,
        processes: Processes,
        uplink: Uplink,
        display: Display,
        account: Account | None,
        counts: PrivateCounts | None,
        masking: Masking | None,
        door: Door,
    ) -> None:
        self._plan = plan
        self._door = door
        self._counts = counts
        self._sealed = _sealed_keys(config, plan)
        self._masking = masking
        self._uplink = uplink
        self._display = display
        self._gate = gate
        self._processes = processes
        self._synthetic = dataset.synthetic
        self._site = LocalSite(
            config.name,
            dataset,
            build(plan.model, seed=plan.seed, trusted=config.trusted_models),
            plan,
            device=processes.device,
            precision=config.precision,
            progress=self._progress,
            permit=gate.begin_steps,
            charge=account.charge if account is not None else None,
            kept=account.kept if account is not None else None,
            place=processes.place,
        )
        method = make(plan.method.name, plan.method.parameters)
        self._measures_received = method.measures_received
        self._half: SiloHalf = method.silo_half(self._site)
        self._state = RunState(config.runs / plan.run, plan, config.name, dataset)
        self._rounds = self._state.rounds
        self._validated: Measurement | None = None
        self.early_end: EarlyEnd | None = None
        memory = self._state.memory()
        with processes.together("resume", memory):
            take_up(memory, self._half, self._site)
        self._received = dict(self._state.received)
        self._last: Measurement | Measured | None = self._state.measured[-1] if self._state.measured else None

    def run(self) -> None:
        """Joins and works off tasks until the run has ended."""
        self._display.joined(self._plan, self._state.trained_rounds)
        self._uplink.answer(self._plan, None, synthetic=self._synthetic)
        while True:
            self._door.remember()
            self._display.waiting()
            task, payload = self._uplink.next_task(
                self._plan,
                holds_model=bool(self._half.memory),
                trained_rounds=self._state.trained_rounds,
                mask_key=self._mask_key(),
            )
            if task.kind == wire.TASK_KIND_FINISH:
                self.early_end = _early_end(task)
                if self.early_end is not None:
                    self._display.notice(f"run {self._plan.run} has {self.early_end.words(self._plan.rounds)}")
                self._finish(payload)
                self._uplink.part(self._plan)
                return
            if task.kind == wire.TASK_KIND_MASK:
                self._send_masked(task)
            elif self._plan.is_masked(task.round):
                self._train_masked(task.round, payload)
            else:
                self._train(task.round, payload)
            payload = {}  # as large as the model, and the next one is on its way

    def _mask_key(self) -> CertifiedKey | None:
        """The mask key for the last round trained here, if that is a masked one."""
        last = self._state.trained_rounds - 1
        if self._masking is None or last < 0 or not self._plan.is_masked(last):
            return None
        received = hashlib.sha256("".join(self._received[what] for what in ("start", "round")).encode())
        return self._masking.statement(last, received.digest())

    def _train_masked(self, round_number: int, payload: Payload) -> None:
        """The update stays here until the coordinator says with whom to mask it."""
        if round_number < self._state.trained_rounds:
            raise RefusedError(f"the coordinator asks to train round {round_number + 1}, whose mask key it was given")
        start, measured, _ = self._fit(round_number, payload)
        self._save(round_number, start, measured)

    def _send_masked(self, task: wire.Task) -> None:
        if (
            self._masking is None
            or task.round != self._state.trained_rounds - 1
            or not self._plan.is_masked(task.round)
        ):
            raise RefusedError(f"the coordinator asks for a masked update of round {task.round + 1}, which is not due")
        self._gate.begin_round(task.round)
        roster, upload = self._masking.mask(task.round, task.roster, self._half.upload())
        if self._send(task.round, upload, roster_sha256=roster.sha256):
            self._masking.used()

    def _train(self, round_number: int, payload: Payload) -> None:
        if round_number < self._state.trained_rounds:
            self._send(round_number, self._half.upload())
            return
        start, measured, upload = self._fit(round_number, payload)
        if self._plan.privacy is not None:
            # Nothing may leave that could come out in another way, after a crash, from another start or computer.
            self._save(round_number, start, measured)
            self._send(round_number, upload)
            return
        # The results reach the disk while the update is on its way; its last message waits for them.
        with ThreadPoolExecutor(1, thread_name_prefix="save") as saver:
            saving = saver.submit(self._save, round_number, start, measured)
            self._send(round_number, upload, before_last=saving.result)
            saving.result()

    def _fit(
        self, round_number: int, payload: Payload
    ) -> tuple[dict[int, Measurement | None], Measurement | None, Payload]:
        """Trains a round; what the start measured, what the outcome did, and the update."""
        self._gate.begin_round(round_number)
        start = self._begin(payload)
        given = _without_start(payload)
        if self._masking is not None:
            self._received["round"] = digest(given).hex()
        with self._processes.together("train", given, round_number=round_number):
            self._half.train(round_number, given)
        upload = self._half.upload()
        try:
            check_finite(upload)
        except RefusedError as error:
            raise TrainingError(f"round {round_number}: {error}; nothing of this round was sent") from None
        measured = self._measure(round_number)
        self._last = measured or self._last
        self._validated = self._site.validate(self._half.personal())
        if not self._measures_received:
            self._rounds = round_number + 1
        elif given:
            self._rounds = round_number
        return start, measured, upload

    def _save(self, round_number: int, start: dict[int, Measurement | None], measured: Measurement | None) -> None:
        self._state.save(
            {**self._half.memory, **self._site.optimizers},
            trained_rounds=round_number + 1,
            measurements={**start, round_number + 1: measured},
            received=self._received,
            rounds=self._rounds,
            validation=self._validated,
        )

    def _finish(self, payload: Payload) -> None:
        rounds = self._plan.rounds
        if not self._state.finished:
            start = self._begin(payload)
            given = _without_start(payload)
            with self._processes.together("finish", given):
                self._half.finish(given)
            done = self.early_end.rounds if self.early_end is not None else rounds
            if given and self._measures_received:
                self._rounds = done
            last = {done: self._measure(rounds)} if payload or not self._state.measured else {}
            self._state.save(
                {**self._half.memory, **self._site.optimizers},
                trained_rounds=self._state.trained_rounds,
                measurements={**start, **last},
                received=self._received,
                finished=True,
                rounds=self._rounds,
                validation=self._site.validate(self._half.personal()),
                early_end=self.early_end,
            )
            self._last = last.get(done) or self._last
        self._send(rounds, {})

    def _begin(self, payload: Payload) -> dict[int, Measurement | None]:
        """Takes the starting model if it came; returns what it measures."""
        if self._half.memory:
            return {}
        if Exposure.INITIAL_MODEL not in payload:
            raise RefusedError("the coordinator did not send the starting model")
        initial = payload_tensors(payload, [Exposure.INITIAL_MODEL])
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in self._site.model.state_dict().items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in initial.items()} != expected:
            raise RefusedError(
                f"the starting model does not have the names, shapes and types of {self._plan.model.name}; coordinator "
                "and silo need matching releases of the model's code"
            )
        if self._masking is not None:
            self._received["start"] = digest({Exposure.INITIAL_MODEL: payload[Exposure.INITIAL_MODEL]}).hex()
        with self._processes.together("begin", {"initial": initial}):
            self._half.begin(initial)
        return {0: self._site.measure(initial)}

    def _send(
        self,
        round_number: int,
        upload: Payload,
        *,
        before_last: Callable[[], object] = lambda: None,
        roster_sha256: bytes = b"",
    ) -> bool:
        """Sends a round's update; returns whether the coordinator took it."""
        self._gate.begin_round(round_number)
        taken = True
        try:
            self._submit(round_number, upload, before_last, roster_sha256)
        except LateError as late:
            self._display.notice(f"{late}; going on with the next task")
            taken = False
        self._sealed.settle(round_number)
        self._display.sent(round_number, self._last.accuracy if self._last else None, self._uplink.bytes_sent)
        return taken

    def _submit(
        self, round_number: int, upload: Payload, before_last: Callable[[], object], roster_sha256: bytes
    ) -> None:
        measured = self._measurement() if Exposure.LOCAL_METRICS in self._gate.allowed() else {}
        payload = {**upload, **measured}
        send = partial(
            self._uplink.submit, self._plan, round_number, before_last=before_last, roster_sha256=roster_sha256
        )
        try:
            send(payload)
        except ConsentError:
            # What is optional may have been taken out of the consent since; the rest goes without it.
            if not measured or Exposure.LOCAL_METRICS in self._gate.allowed():
                raise
            send(upload)

    def _measure(self, round_number: int) -> Measurement | None:
        measured = self._site.measure(self._half.personal())
        if measured is None or self._counts is None or Exposure.LOCAL_METRICS not in self._gate.allowed():
            return measured
        try:
            right, _ = self._site.test(self._half.personal())
            return dataclasses.replace(measured, shared=self._counts.accuracy(right, round_number=round_number))
        except BudgetError as error:
            self._display.notice(f"the accuracy stays here: {error}")
            return measured

    def _measurement(self) -> Payload:
        """What is told of the last measurement; sent again, the same noise with it."""
        last = self._last
        if last is None or (self._plan.privacy is not None and last.shared is None):
            return {}
        values = (last.accuracy, last.loss) if self._plan.privacy is None else (last.shared,)
        named = {spec.name: torch.tensor(value) for spec, value in zip(local_metrics(self._plan), values, strict=True)}
        return {Exposure.LOCAL_METRICS: Part.of(named)}

    def _progress(self, progress: Progress) -> None:
        self._gate.check(())
        self._display.training(progress)


def _early_end(task: wire.Task) -> EarlyEnd | None:
    """Why the run has ended before its plan's last round, if it has."""
    if not task.end_reason:
        return None
    known = {number: name.removeprefix("END_REASON_") for name, number in wire.EndReason.items()}
    reasons = EndReason.__members__
    return EarlyEnd(task.rounds_done, reasons.get(known.get(task.end_reason, ""), EndReason.UNKNOWN))


def _without_start(payload: Payload) -> Payload:
    """What the method itself is given."""
    given = dict(payload)
    given.pop(Exposure.INITIAL_MODEL, None)
    return given
