"""One silo in one run: round after round, from the task to the receipt."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import SiloSide, local_metrics
from medsilo.algorithms.models import build, whole_state
from medsilo.algorithms.models.given_weights import find_weights, sent_names, whole_start
from medsilo.algorithms.protection.masked import digest
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload, payload_tensors
from medsilo.algorithms.tensors.memory import return_freed_memory
from medsilo.algorithms.tensors.transfer import check_finite
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import BudgetError, ConsentError, LateError, RefusedError, TrainingError
from medsilo.privacy.exposure import STARTS, Exposure
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.silo.run.account import Account, sealed_keys
from medsilo.silo.run.blinding import Blinding
from medsilo.silo.run.display import Display
from medsilo.silo.run.masking import Masking
from medsilo.silo.run.run_state import Measured, RunState
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.measuring import Measurement, Progress
from medsilo.silo.training.processes import FROZEN, Processes, take_up
from medsilo.silo.training.site import LocalSite
from medsilo.silo.uplink.uplink import Uplink

if TYPE_CHECKING:
    from medsilo.silo.training.private_count import PrivateCounts

T = TypeVar("T")


class Participation:
    """One silo in one run. ``settled``: called when a round's update has been taken, or refused as late."""

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
        *,
        settled: Callable[[], object] = lambda: None,
    ) -> None:
        self._settled = settled
        self._plan = plan
        self._door = door
        self._account = account
        self._counts = counts
        self._sealed = sealed_keys(config, plan)
        self._masking = masking
        self._uplink = uplink
        self._display = display
        self._gate = gate
        self._processes = processes
        self._synthetic = dataset.synthetic
        self._site = LocalSite(
            config.name,
            dataset,
            build(plan.model, seed=plan.seed, trusted=config.trusted_models, weights=config.weights),
            plan,
            device=processes.device,
            precision=config.precision,
            progress=self._progress,
            permit=self._in_run(gate.begin_steps),
            charge=self._in_run(account.charge) if account is not None else None,
            kept=account.kept if account is not None else None,
            place=processes.place,
            features=config.features,
        )
        method = make(plan.method.name, plan.method.parameters)
        self._measures_received = method.measures_received
        self._side: SiloSide = method.silo_side(self._site)
        self._state = RunState(config.runs / plan.run, plan, config.name, dataset)
        self._rounds = self._state.rounds
        self._validated: Measurement | None = None
        self.early_end: EarlyEnd | None = None
        self._weights = config.weights
        frozen = self._state.frozen()
        memory = {**({FROZEN: frozen} if frozen else {}), **self._state.memory()}
        if plan.model.weights is not None and plan.model.weights.brought and not memory:
            find_weights(plan.model.weights, config.weights)  # before anything is asked for
        with processes.together("resume", memory):
            take_up(memory, self._side, self._site)
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
                holds_model=bool(self._side.memory),
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
            if self._state.finished:
                # What is kept here since then was never meant to leave: a model chosen by validation images, say.
                raise RefusedError(f"the coordinator asks for round {task.round + 1} of a run that it has ended")
            if task.kind == wire.TASK_KIND_MASK:
                self._send_masked(task)
            elif self._plan.is_masked(task.round):
                self._train_masked(task.round, payload)
            elif self._plan.is_blind:
                self._help_to_open(task.round, payload)
            else:
                self._train(task.round, payload)
            self._uplink.note_egress()
            payload = {}  # as large as the model, and the next one is on its way
            self._let_go()

    def _let_go(self) -> None:
        """While the silo waits, its memory is what its files hold: pages that the system may take back. What training
        and sending took goes back too."""
        take_up(self._state.memory(), self._side, self._site)
        return_freed_memory()

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
        if self._masking is not None:
            self._masking.settled(round_number)

    def _send_masked(self, task: wire.Task) -> None:
        if (
            self._masking is None
            or task.round != self._state.trained_rounds - 1
            or not self._plan.is_masked(task.round)
        ):
            raise RefusedError(f"the coordinator asks for a masked update of round {task.round + 1}, which is not due")
        self._gate.begin_round(task.round)
        roster, upload = self._masking.mask(task.round, task.roster, self._upload(), self._site.noised)
        if self._send(task.round, upload, roster_sha256=roster.sha256):
            self._masking.used()

    def _upload(self) -> Payload:
        """A round's update before it is covered."""
        return self._side.blind_upload() if self._plan.is_blind else self._side.upload()

    def _help_to_open(self, round_number: int, payload: Payload) -> None:
        """Gives what others need to open their mixtures of what was sealed in the round before."""
        if not isinstance(self._masking, Blinding) or round_number != self._state.trained_rounds:
            raise RefusedError(f"the coordinator asks to open mixtures in round {round_number + 1}, which is not due")
        self._gate.begin_round(round_number)
        self._send(round_number, self._masking.shares(round_number, _without_start(payload)), measured=False)

    def _train(self, round_number: int, payload: Payload) -> None:
        if round_number < self._state.trained_rounds:
            self._send(round_number, self._side.upload())
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
            self._received["round"] = self._masking.received(given)
            given = self._masking.opened(round_number, given)
        trained = round_number // self._plan.rounds_each
        with self._failing_openly():
            with self._processes.together("train", given, round_number=trained):
                self._side.train(trained, given)
            upload = self._side.upload()
            try:
                check_finite(upload)
            except RefusedError as error:
                raise TrainingError(f"round {round_number}: {error}; nothing of this round was sent") from None
        measured = self._measure(round_number)
        self._last = measured or self._last
        self._validated = self._site.validate(self._side.personal())
        if not self._measures_received:
            self._rounds = trained + 1
        elif given:
            self._rounds = trained
        return start, measured, upload

    @contextmanager
    def _failing_openly(self) -> Iterator[None]:
        """A training that fails by what came out of it is on record: that it failed cannot be hidden."""
        try:
            yield
        except TrainingError:
            if self._account is not None:
                self._account.failed()
            raise

    def _save(self, round_number: int, start: dict[int, Measurement | None], measured: Measurement | None) -> None:
        self._state.save(
            {**self._side.memory, **self._site.optimizers},
            trained_rounds=round_number + 1,
            frozen=self._site.frozen(),
            plain=self._site.plain(self._side.personal()),
            measurements={**start, round_number // self._plan.rounds_each + 1: measured},
            received=self._received,
            rounds=self._rounds,
            validation=self._validated,
        )

    def _finish(self, payload: Payload) -> None:
        rounds = self._plan.rounds
        if not self._state.finished:
            start = self._begin(payload)
            given = {} if self._plan.is_blind else _without_start(payload)
            with self._failing_openly(), self._processes.together("finish", given):
                self._side.finish(given)
            # A round of training whose mixtures nobody opened has been trained all the same.
            done = -(-(self.early_end.rounds if self.early_end is not None else rounds) // self._plan.rounds_each)
            if given and self._measures_received:
                self._rounds = done
            last = {done: self._measure(rounds)} if payload or not self._state.measured else {}
            self._state.save(
                {**self._side.memory, **self._site.optimizers},
                trained_rounds=self._state.trained_rounds,
                frozen=self._site.frozen(),
                plain=self._site.plain(self._side.personal()),
                measurements={**start, **last},
                received=self._received,
                finished=True,
                rounds=self._rounds,
                validation=self._site.validate(self._side.personal()),
                early_end=self.early_end,
            )
            if self._masking is not None:
                self._masking.settled(rounds)
            self._last = last.get(done) or self._last
        self._send(rounds, {})

    def _begin(self, payload: Payload) -> dict[int, Measurement | None]:
        """Takes the starting model if it came; returns what it measures."""
        if self._side.memory:
            return {}
        model = self._plan.model
        if sent_names(model, self._site.model) and model.start not in payload:
            raise RefusedError("the coordinator did not send the starting model")
        given = payload_tensors(payload, [model.start] if model.start in payload else [])
        initial = whole_start(model, self._site.model, given, self._weights)
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in whole_state(self._site.model).items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in initial.items()} != expected:
            raise RefusedError(
                f"the starting model does not have the names, shapes and types of {model.name}; coordinator "
                "and silo need matching releases of the model's code"
            )
        if self._masking is not None:
            self._received["start"] = digest({model.start: Part.of(initial)}).hex()
            self._masking.begun(initial)
        with self._processes.together("begin", {"initial": initial}):
            begun = self._site.start(initial)
            self._side.begin(begun)
        return {0: self._site.measure(begun)}

    def _send(
        self,
        round_number: int,
        upload: Payload,
        *,
        before_last: Callable[[], object] = lambda: None,
        roster_sha256: bytes = b"",
        measured: bool = True,
    ) -> bool:
        """Sends a round's update, with what was ``measured`` where it may leave; returns whether the coordinator took
        it."""
        self._gate.begin_round(round_number)
        taken = True
        try:
            self._submit(round_number, upload, before_last, roster_sha256, measured=measured)
        except LateError as late:
            self._display.notice(f"{late}; going on with the next task")
            taken = False
        self._sealed.settle(round_number)
        self._settled()
        self._display.sent(round_number, self._last.accuracy if self._last else None, self._uplink.bytes_sent)
        return taken

    def _submit(
        self,
        round_number: int,
        upload: Payload,
        before_last: Callable[[], object],
        roster_sha256: bytes,
        *,
        measured: bool,
    ) -> None:
        extra = self._measurement() if measured and Exposure.LOCAL_METRICS in self._gate.allowed() else {}
        payload = {**upload, **extra}
        send = partial(
            self._uplink.submit, self._plan, round_number, before_last=before_last, roster_sha256=roster_sha256
        )
        try:
            send(payload)
        except ConsentError:
            # What is optional may have been taken out of the consent since; the rest goes without it.
            if not extra or Exposure.LOCAL_METRICS in self._gate.allowed():
                raise
            send(upload)

    def _measure(self, round_number: int) -> Measurement | None:
        measured = self._site.measure(self._side.personal())
        if measured is None or self._counts is None or Exposure.LOCAL_METRICS not in self._gate.allowed():
            return measured
        try:
            right, _ = self._site.test(self._side.personal())
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

    def _in_run(self, count: Callable[..., T]) -> Callable[..., T]:
        """What is counted by rounds of training, counted by those of the run in which they are trained."""
        return lambda trained, *rest: count(trained * self._plan.rounds_each, *rest)

    def _progress(self, progress: Progress) -> None:
        self._gate.check(())
        self._display.training(progress)


def _without_start(payload: Payload) -> Payload:
    """What the method itself is given."""
    return {exposure: part for exposure, part in payload.items() if exposure not in STARTS}


def _early_end(task: wire.Task) -> EarlyEnd | None:
    """Why the run has ended before its plan's last round, if it has."""
    if not task.end_reason:
        return None
    known = {number: name.removeprefix("END_REASON_") for name, number in wire.EndReason.items()}
    reasons = EndReason.__members__
    return EarlyEnd(task.rounds_done, reasons.get(known.get(task.end_reason, ""), EndReason.UNKNOWN))
