"""The silo's only way out: one gRPC channel to the coordinator, every message through the door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message
from securesystemslib import dsse

from medsilo.privacy.consent.consent import Missing
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.protocol import agreed, newer, spoken_instead
from medsilo.privacy.errors import IdentityError, MedsiloError, RefusedError
from medsilo.privacy.identity.certificates import Credentials, fingerprint
from medsilo.privacy.identity.endpoint import is_loopback
from medsilo.privacy.identity.envelope import to_message
from medsilo.privacy.identity.revocation import LiveCredentials
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1.tensor_pb2 import TensorChunk
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.proxy import proxies_in_environment
from medsilo.silo.uplink.channel import channel_credentials, open_channel
from medsilo.silo.uplink.confinement import Confinement
from medsilo.silo.uplink.explaining import UnansweredError
from medsilo.silo.uplink.waiting import Waiting

if TYPE_CHECKING:
    from medsilo.algorithms.tensors import Payload
    from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey

WAIT_SECONDS = 50
ANSWER_SECONDS = 60
STALLED_SECONDS: float = 600
"""How long nothing of tensors may move, in either direction: a message of a megabyte takes so long at 14 kbit/s."""
PARTING_SECONDS: float = 60
"""How long a silo calls whose run has ended: it needs nothing more of the coordinator, which may have ended too."""
_SERVICE = wire.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
T = TypeVar("T")


class Uplink:
    """Calls the coordinator. A call that fails for a passing reason (network, restart) is made again, for ever,
    with growing pauses; ``notice`` is told before each pause. While the coordinator is not ``needed``, it is given up
    after ``PARTING_SECONDS`` with ``UnansweredError``.

    Every answer must carry the coordinator's signed receipt for what was asked; every request carries the silo's for
    the answers before. After a call that was cut, both sides first exchange what they know, so that no update leaves
    while an earlier message's receipt may still be had.
    """

    def __init__(
        self,
        config: SiloConfig,
        credentials: LiveCredentials | None,
        door: Door,
        *,
        notice: Callable[[str], None],
        confined: Confinement | None = None,
    ) -> None:
        self._config = config
        self._credentials = credentials
        self._door = door
        self._notice = notice
        self._confined = confined
        self._confined_since: int | None = None
        self._plan: RunPlan | None = None
        self._peer_certificate_sha256 = ""
        self._in_step = False
        self.bytes_sent = 0
        self.needed = True
        self._waiting = Waiting(config, notice, (lambda: "") if confined is None else confined.met)
        self._shown: Credentials | None = None
        self._channel = self._connect()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def note_egress(self) -> None:
        """Records what the kernel has counted so far, where it confines this process."""
        if self._confined is None:
            return
        if self._confined_since is None:
            self._confined_since = len(self._door.journal)
        self._door.note(self._confined.record(self._confined_since))

    def use(self, door: Door, plan: RunPlan | None) -> None:
        """From now on messages belong to this plan and pass this door."""
        self._door = door
        self._plan = plan
        self._waiting.interrupted.clear()

    def interrupt(self) -> None:
        """Cuts the call or pause under way short, from another thread: the gate is to be asked again."""
        self._waiting.interrupt()

    def get_plan(self) -> RunPlan:
        """The coordinator's plan; from then on its protocol version is spoken with it, if that is the older one.

        Raises ``IdentityError`` if the answer is not the configured coordinator's, ``RefusedError`` if it speaks no
        version that this silo works with.
        """
        state = self._door.receipt_state(self._peer)
        state.version = OLDEST_VERSION

        def ask(version: int, attempt: int) -> RunPlan:
            request = wire.GetPlanRequest(nonce=nonce(), silo=self._config.name, protocol_version=version)
            with self._calling("GetPlan", attempt, "asking for the run's plan") as call:
                response = self._door.admit(self._unary(request, call), wire.GetPlanResponse, call)
            if self._credentials is not None:
                certificate = response.coordinator_certificate
                if self._credentials.identify(certificate) != self._config.coordinator_identity:
                    raise IdentityError(
                        f"the coordinator at {self._config.coordinator.address} shows the certificate of another "
                        f"party than {self._config.coordinator_identity.uri}"
                    )
                self._peer_certificate_sha256 = fingerprint(certificate)
            state.version = agreed(response.protocol_version, "the coordinator", "this silo")
            if (hint := newer(response.protocol_version, "the coordinator", "this silo")) is not None:
                self._notice(hint)
            plan = RunPlan.from_message(response.plan)
            if plan.coordinator_identity != self._config.coordinator_identity:
                raise RefusedError(f"the plan names {plan.coordinator_identity.uri} as its coordinator")
            self._door.enrol(self._peer, response.coordinator_audit_key, response.rotations)
            return plan

        try:
            return self._persistently(partial(ask, PROTOCOL_VERSION))
        except RefusedError as error:
            if (version := spoken_instead(str(error))) is None:
                raise
            self._notice(f"the coordinator speaks protocol version {version}, so this silo does; it can be upgraded")
        return self._persistently(partial(ask, version))

    def answer(self, plan: RunPlan, missing: Missing | None, *, synthetic: bool = False) -> None:
        """Tells the coordinator yes, or no and what the consent lacks; and whether the images are synthetic."""

        def tell(attempt: int) -> None:
            with self._calling("Join", attempt, "answering the plan") as call:
                request = wire.JoinRequest(
                    nonce=nonce(),
                    silo=self._config.name,
                    plan_sha256=plan.sha256,
                    audit_key=self._door.journal.public_key,
                    accepted=not missing,
                    missing_classes=[exposure.number for exposure in missing.classes] if missing else [],
                    missing_method=bool(missing and (missing.method or missing.training)),
                    missing_rounds=bool(missing and (missing.rounds or missing.total_rounds) is not None),
                    missing_privacy=bool(missing and missing.privacy),
                    missing_masks=bool(missing and missing.masks),
                    synthetic=synthetic,
                    rotations=self._door.rotations(),
                    seen=self._door.receipt_state(self._peer).seen.size,
                    protocol_version=PROTOCOL_VERSION,
                )
                self._door.admit(self._unary(request, call), wire.JoinResponse, call)
                self._door.check_receipt(call)
            self._in_step = True

        self._persistently(tell)

    def part(self, plan: RunPlan) -> None:
        """Gives and takes the last signatures of a run that has ended. Coordinators with ``--until-done`` wait for
        them; one that has gone is not waited for long: the receipt for the run's end is here already."""

        def sign(attempt: int) -> None:
            self._keep_step(plan, attempt, seconds=PARTING_SECONDS)
            self._attest(plan.sha256, attempt, seconds=PARTING_SECONDS)

        try:
            self._persistently(sign, seconds=PARTING_SECONDS)
        except MedsiloError as error:
            if not isinstance(error, UnansweredError) and not isinstance(error.__cause__, grpc.RpcError):
                raise
            self._notice(f"{error}; its last answer stays without this silo's receipt")

    def withdraw(self, run: str, plan_sha256: bytes, signed: dsse.Envelope, *, seconds: float) -> None:
        """Tells the coordinator that this silo's part has ended; raises if it cannot be told within ``seconds``."""

        def tell(attempt: int) -> None:
            with self._calling("Withdraw", attempt, "ending this hospital's part") as call:
                call.run, call.plan_sha256 = run, plan_sha256.hex()
                request = wire.WithdrawRequest(
                    nonce=nonce(),
                    silo=self._config.name,
                    plan_sha256=plan_sha256,
                    statement=to_message(signed),
                    seen=self._door.receipt_state(self._peer).seen.size,
                    protocol_version=PROTOCOL_VERSION,
                )
                answer = self._unary(request, call, seconds=seconds)
                self._door.admit(answer, wire.WithdrawResponse, call, durable=True)
                self._door.check_receipt(call)
            self._in_step = True
            self._attest(plan_sha256, attempt)

        self._persistently(tell, seconds=seconds)

    def next_task(
        self, plan: RunPlan, *, holds_model: bool, trained_rounds: int, mask_key: CertifiedKey | None = None
    ) -> tuple[wire.Task, Payload]:
        """The next task with its tensors; waits for one as long as it takes.

        ``mask_key``: in a masked round that is trained, this silo's. The tensors of a round that
        is already trained here are not fetched again.
        """

        from medsilo.algorithms.protection.blind import given_alike  # with PyTorch
        from medsilo.algorithms.registry import make

        common = given_alike(plan, make(plan.method.name, plan.method.parameters))

        def ask(attempt: int) -> tuple[wire.Task, Payload] | None:
            self._keep_step(plan, attempt)
            with self._calling("GetTask", attempt, "waiting for a task") as call:
                call.common = common
                request = wire.GetTaskRequest(
                    nonce=nonce(),
                    silo=self._config.name,
                    plan_sha256=plan.sha256,
                    wait_seconds=WAIT_SECONDS,
                    holds_model=holds_model,
                    attestation=self._door.attest(self._peer),
                    mask_key=None if mask_key is None else mask_key.to_message(),
                    protocol_version=PROTOCOL_VERSION,
                )
                data = self._release(request, call)
                stream = self._waiting.begin(
                    self._channel.unary_stream(f"/{_SERVICE}/GetTask")(data, wait_for_ready=False)
                )
                try:
                    return self._read_task(stream, call, plan, trained_rounds)
                finally:
                    stream.cancel()

        while True:
            if (found := self._persistently(ask)) is not None:
                return found

    def submit(
        self,
        plan: RunPlan,
        round_number: int,
        payload: Payload,
        *,
        before_last: Callable[[], object],
        roster_sha256: bytes = b"",
    ) -> None:
        """Sends a round's update; returns when the coordinator's receipt for it is in the journal.

        ``before_last`` is called before the last message is sent: without that the update counts for nothing.
        ``roster_sha256``: of a masked update, what it was masked for.
        Raises ``LateError`` if the round has ended meanwhile, ``RefusedError`` if the update is not acceptable,
        ``ReceiptError`` if the receipt is not.
        """

        from medsilo.algorithms.tensors.transfer import manifest, send

        def upload(attempt: int) -> None:
            self._keep_step(plan, attempt)
            with self._calling("SubmitUpdate", attempt, f"update of round {round_number}") as call:
                call.round = round_number
                header = wire.SubmitUpdateRequest(
                    update=wire.Update(
                        nonce=nonce(),
                        silo=self._config.name,
                        plan_sha256=plan.sha256,
                        round=round_number,
                        parts=manifest(payload),
                        attestation=self._door.attest(self._peer),
                        roster_sha256=roster_sha256,
                        protocol_version=PROTOCOL_VERSION,
                    )
                )
                failure: list[Exception] = []
                messages = _hold_last(send(partial(self._door.release, call=call), header, payload), before_last)
                begun: Future[Any] = Future()
                messages = _end_at_failure(self._counted(messages), failure, lambda: begun.result().cancel())
                begun.set_result(self._channel.stream_unary(f"/{_SERVICE}/SubmitUpdate").future(messages))
                try:
                    data = self._waiting.answer(begun.result(), STALLED_SECONDS)
                except (grpc.RpcError, UnansweredError):
                    # What went wrong on our own side of the stream is no answer of the other's.
                    if failure:
                        raise failure[0] from None
                    raise
                response = self._door.admit(data, wire.SubmitUpdateResponse, call, durable=True)
                if response.repeated:
                    # Of this call perhaps only the beginning was read: what counts is the first one's receipt.
                    self._door.check_earlier_receipt(response.first, call)
                else:
                    self._door.check_receipt(call)

        self._persistently(upload)

    def _keep_step(self, plan: RunPlan, attempt: int, *, seconds: float = ANSWER_SECONDS) -> None:
        """After a call that was cut neither side knows what the other had of it: they say so before anything else."""
        if attempt > 1 or not self._in_step:
            self._attest(plan.sha256, attempt, in_step=False, seconds=seconds)

    def _attest(
        self, plan_sha256: bytes, attempt: int, *, in_step: bool = True, seconds: float = ANSWER_SECONDS
    ) -> None:
        with self._calling("Attest", attempt, "exchanging receipts") as call:
            request = wire.AttestRequest(
                nonce=nonce(),
                silo=self._config.name,
                plan_sha256=plan_sha256,
                seen=self._door.receipt_state(self._peer).seen.size,
                attestation=self._door.attest(self._peer) if in_step and self._in_step else None,
                protocol_version=PROTOCOL_VERSION,
            )
            answer = self._unary(request, call, seconds=seconds)
            self._door.admit(answer, wire.AttestResponse, call, durable=True)
            self._door.check_receipt(call)
        self._in_step = True

    def _read_task(
        self, stream: Any, call: Call, plan: RunPlan, trained_rounds: int
    ) -> tuple[wire.Task, Payload] | None:
        # The coordinator may take WAIT_SECONDS until there is a task.
        first = self._waiting.next_of(stream, WAIT_SECONDS + ANSWER_SECONDS)
        frame = self._door.admit(first, wire.GetTaskResponse, call) if first is not None else None
        if frame is None or frame.WhichOneof("frame") != "task":
            raise RefusedError("the coordinator's answer does not begin with a task")
        self._door.check_receipt(call)
        task = frame.task
        call.round = task.round
        if task.kind == wire.TASK_KIND_WAIT:
            return None
        if task.round > plan.rounds or (task.kind == wire.TASK_KIND_TRAIN and task.round == plan.rounds):
            raise RefusedError(f"round {task.round} lies beyond the plan's {plan.rounds} rounds")
        if task.kind == wire.TASK_KIND_TRAIN and task.round < trained_rounds:
            return task, {}
        return task, _read_payload(task, plan, self._chunks(stream, call))

    def _chunks(self, stream: Any, call: Call) -> Iterator[TensorChunk]:
        while (data := self._waiting.next_of(stream, STALLED_SECONDS)) is not None:
            yield self._door.admit(data, wire.GetTaskResponse, call).chunk

    def _unary(self, request: Message, call: Call, *, seconds: float = ANSWER_SECONDS) -> bytes:
        data = self._release(request, call)
        return self._waiting.answer(self._channel.unary_unary(f"/{_SERVICE}/{call.rpc}").future(data), seconds)

    def _release(self, message: Message, call: Call) -> bytes:
        (data,) = self._counted(iter(self._door.release([message], call)))
        return data

    def _counted(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for data in messages:
            # Messages are recorded several at once; the consent may end between two of them.
            self._door.gate.check(())
            self.bytes_sent += len(data)
            self._waiting.moved()
            yield data

    @property
    def _peer(self) -> str:
        return self._config.coordinator_identity.uri

    @contextmanager
    def _calling(self, rpc: str, attempt: int, purpose: str) -> Iterator[Call]:
        if self._credentials is not None and self._credentials.current != self._shown:
            # A connection shows one certificate as long as it lasts.
            self._channel.close()
            self._channel = self._connect()
        call = Call(
            rpc=rpc,
            peer=self._peer,
            peer_certificate_sha256=self._peer_certificate_sha256,
            purpose=purpose,
            run=self._plan.run if self._plan else None,
            plan_sha256=self._plan.sha256.hex() if self._plan else None,
            attempt=attempt,
        )
        try:
            yield call
        except BaseException:
            self._in_step = False
            raise
        finally:
            self._door.ended(call)

    def _persistently(self, action: Callable[[int], T], *, seconds: float | None = None) -> T:
        if seconds is None and not self.needed:
            seconds = PARTING_SECONDS
        # What cut a call may be the end of the consent.
        return self._waiting.persistently(action, check=lambda: self._door.gate.check(()), seconds=seconds)

    def _connect(self) -> grpc.Channel:
        address, proxy = self._config.coordinator.address, self._config.proxy
        if proxy is None and (named := proxies_in_environment()) and not is_loopback(address):
            self._notice(
                f"{', '.join(named)} in the environment: not followed; a proxy counts if the configuration has `proxy:`"
            )
        credentials = None
        if self._credentials is not None:
            self._shown = self._credentials.current
            credentials = channel_credentials(self._shown.ca_pem, self._shown)
        way_out = self._confined.way_out if self._confined is not None else None
        return open_channel(address, self._config.coordinator_identity, credentials, proxy=proxy, way_out=way_out)


def _read_payload(task: wire.Task, plan: RunPlan, chunks: Iterable[TensorChunk]) -> Payload:
    """A task's tensors, which have to be what the plan announces and the task says."""
    from medsilo.algorithms.tensors.transfer import MemorySink, Receiver, check_finite, read_manifest

    parts = read_manifest(task.parts)
    if extra := set(parts) - set(plan.downlink):
        raise RefusedError(f"the coordinator sends {', '.join(sorted(extra))}, which the plan does not announce")
    sink = MemorySink(parts)
    receiver = Receiver(parts, sink)
    for chunk in chunks:
        receiver.take(chunk)
    receiver.finish()
    payload = sink.payload()
    check_finite({exposure: payload[exposure] for exposure in receiver.unchecked})
    return payload


def _hold_last(messages: Iterator[bytes], action: Callable[[], object]) -> Iterator[bytes]:
    held = next(messages)
    for following in messages:
        yield held
        held = following
    action()
    yield held


def _end_at_failure(messages: Iterator[bytes], failure: list[Exception], cut: Callable[[], object]) -> Iterator[bytes]:
    """Keeps what went wrong on this side and cuts the call: of gRPC's own handling a stack of calls would be logged."""
    try:
        yield from messages
    except Exception as error:
        failure.append(error)
        cut()
