"""The coordinator's gRPC service: who may call, what is accepted, what is answered.

Handlers deal in bytes: every message passes the door before it is understood or sent. A request that is turned
away ends in a status with a message for the one who sent it, a row in the store and a line in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from medsilo.algorithms.protection.blind import given_alike
from medsilo.algorithms.tensors.transfer import manifest, send
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds.delivery import Delivery
from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.coordinator.service.listening import server_credentials
from medsilo.coordinator.service.patience import Patience
from medsilo.coordinator.service.refusals import BusyError, Refusals, UnsignedError
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.withdrawal import SignedWithdrawal
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.protocol import agreed, newer
from medsilo.privacy.errors import IdentityError, MedsiloError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.certificates import Credentials, fingerprint
from medsilo.privacy.identity.envelope import from_json, from_message, to_json, to_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.revocation import LiveCredentials
from medsilo.privacy.journal.records import WithdrawalRecord
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Occasion, read_certified, round_of
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION

log = logging.getLogger(__name__)

SERVICE = wire.DESCRIPTOR.services_by_name["CoordinatorService"]
ALLOWED_ROLE: dict[str, str] = {
    "GetPlan": "silo",
    "Join": "silo",
    "Withdraw": "silo",
    "GetTask": "silo",
    "SubmitUpdate": "silo",
    "Attest": "silo",
}
"""Which role a certificate must have for each RPC."""
MAX_WAIT_SECONDS = 60.0
CALLS_PER_SILO = 8
"""Calls that a silo may have open at once; it needs one, and another while a cut connection is not yet noticed."""

SHORTEST_PING_SECONDS: float = 10
"""Who asks more often whether the coordinator is there is turned away; silos ask every 20 s."""


class CoordinatorService:
    """Answers silos on behalf of one run. ``credentials`` is None in plain text on loopback."""

    def __init__(
        self,
        config: CoordinatorConfig,
        rounds: Rounds,
        store: Store,
        door: Door,
        credentials: LiveCredentials | None,
    ) -> None:
        self._config = config
        self._rounds = rounds
        self._plan = rounds.plan
        self._store = store
        self._door = door
        self._credentials = credentials
        self._audit_key = door.journal.public_key
        self._open_calls: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._refusals = Refusals(store, config.state, rounds)
        self._patience = Patience(config.message_seconds)

    @cached_property
    def _common(self) -> frozenset[Exposure]:
        """What of a task all silos of a round are given alike."""
        return given_alike(self._plan, self._config.make_method())

    def handler(self) -> Any:
        """The service's methods over raw bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE.full_name,
            {
                "GetPlan": grpc.unary_unary_rpc_method_handler(self._guard("GetPlan", self._get_plan)),
                "Join": grpc.unary_unary_rpc_method_handler(self._guard("Join", self._join)),
                "Withdraw": grpc.unary_unary_rpc_method_handler(self._guard("Withdraw", self._withdraw)),
                "GetTask": grpc.unary_stream_rpc_method_handler(self._guard_stream("GetTask", self._get_task)),
                "Attest": grpc.unary_unary_rpc_method_handler(self._guard("Attest", self._attest)),
                "SubmitUpdate": grpc.stream_unary_rpc_method_handler(self._guard("SubmitUpdate", self._submit)),
            },
        )

    def _get_plan(self, data: bytes, call: Call, context: grpc.ServicerContext) -> bytes:
        request = self._door.admit(data, wire.GetPlanRequest, call)
        silo = self._identify(request, call, context)
        if (hint := newer(request.protocol_version, f"the silo {silo}", "this coordinator")) is not None:
            log.warning("%s", hint)
        response = wire.GetPlanResponse(
            nonce=nonce(),
            plan=self._plan.to_message(),
            coordinator_certificate=self._credentials.current.certificate_pem if self._credentials else b"",
            coordinator_audit_key=self._audit_key,
            rotations=self._door.rotations(),
            time_ms=time.time_ns() // 1_000_000,
            protocol_version=PROTOCOL_VERSION,
        )
        return self._door.release([response], call)[0]

    def _join(self, data: bytes, call: Call, context: grpc.ServicerContext) -> bytes:
        request = self._door.admit(data, wire.JoinRequest, call)
        silo = self._identify(request, call, context)
        self._check_plan(request.plan_sha256)
        self._door.enrol(call.peer, request.audit_key, request.rotations)
        missing = [Exposure.from_number(number).value for number in request.missing_classes]
        if request.missing_method:
            missing.insert(0, f"method {self._plan.method.name} (or its training)")
        if request.missing_rounds:
            missing.append(f"{self._plan.rounds} rounds")
        if request.missing_privacy:
            missing.append("the run's privacy loss" if self._plan.privacy else "a run without differential privacy")
        if request.missing_masks:
            missing.append("the run's masks" if self._plan.secure_aggregation else "a run without masks")
        self._store.answer(
            self._plan.run,
            silo,
            accepted=request.accepted,
            missing=missing,
            audit_key=request.audit_key.hex(),
            certificate_sha256=call.peer_certificate_sha256,
        )
        if request.accepted:
            log.info("%s has joined run %s", silo, self._plan.run)
            self._rounds.joined(silo)
        else:
            log.warning("%s declines run %s; its consent lacks %s", silo, self._plan.run, ", ".join(missing))
        response = wire.JoinResponse(
            nonce=nonce(),
            round=self._rounds.round_number,
            attestation=self._door.attest(call.peer, since=request.seen),
        )
        return self._door.release([response], call)[0]

    def _attest(self, data: bytes, call: Call, context: grpc.ServicerContext) -> bytes:
        request = self._door.admit(data, wire.AttestRequest, call)
        self._identify(request, call, context)
        if request.HasField("attestation"):
            self._check_signed(call)
        response = wire.AttestResponse(nonce=nonce(), attestation=self._door.attest(call.peer, since=request.seen))
        return self._door.release([response], call)[0]

    def _withdraw(self, data: bytes, call: Call, context: grpc.ServicerContext) -> bytes:
        request = self._door.admit(data, wire.WithdrawRequest, call, durable=True)
        silo = self._identify(request, call, context)
        run = self._store.run_of_plan(request.plan_sha256.hex())
        member = self._store.members(run).get(silo) if run else None
        if run is None or member is None or not member.accepted:
            raise RefusedError(f"{silo} has not joined a run with this plan")
        envelope = from_message(request.statement)
        signed = SignedWithdrawal.open(envelope, bytes.fromhex(member.audit_key))
        claimed = (signed.silo, signed.coordinator, signed.run, signed.plan_sha256)
        own = Identity(self._config.federation, "silo", silo).uri
        if claimed != (own, self._config.identity.uri, run, request.plan_sha256.hex()):
            raise RefusedError("the signed withdrawal is of another hospital, coordinator or run than the call")
        kept = self._rounds.withdraw(
            run,
            silo,
            reason=signed.reason.value,
            rounds_acknowledged=signed.rounds_acknowledged,
            statement=to_json(envelope),
        )
        call.run, call.plan_sha256 = run, request.plan_sha256.hex()
        self._door.note(
            WithdrawalRecord(
                run=run,
                plan_sha256=call.plan_sha256,
                silo=own,
                rounds_acknowledged=list(kept.rounds_acknowledged),
                dropped_round=kept.dropped_round,
                cause=kept.reason,
                statement=kept.statement,
            )
        )
        log.warning("%s takes no further part in run %s: %s", silo, run, kept.reason)
        attestation = self._door.attest(call.peer, since=request.seen, durable=True)
        return self._door.release([wire.WithdrawResponse(nonce=nonce(), attestation=attestation)], call)[0]

    def _get_task(self, data: bytes, call: Call, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._door.admit(data, wire.GetTaskRequest, call)
        silo = self._identify(request, call, context)
        self._check_plan(request.plan_sha256)
        self._check_member(silo)
        self._check_signed(call)
        context.add_callback(self._rounds.wake)
        timeout = min(float(request.wait_seconds), MAX_WAIT_SECONDS)
        holds_model = request.holds_model
        key = self._mask_key(request, silo, call)
        with self._rounds.task(silo, timeout, context.is_active, holds_model=holds_model, key=key) as (order, payload):
            self._store.check_serving()
            call.round = order.round
            call.common = self._common
            task = wire.Task(nonce=nonce(), kind=order.kind, round=order.round, parts=manifest(payload))
            task.roster.extend(stated.to_message() for stated in order.roster)
            if order.kind == wire.TASK_KIND_FINISH and (early := self._rounds.early_end) is not None:
                task.MergeFrom(wire.Task(end_reason=f"END_REASON_{early.reason.name}", rounds_done=early.rounds))
            task.attestation.CopyFrom(self._door.attest(call.peer))
            for data in send(partial(self._door.release, call=call), wire.GetTaskResponse(task=task), payload):
                with self._not_forever(call, context):
                    yield data

    def _mask_key(self, request: wire.GetTaskRequest, silo: str, call: Call) -> CertifiedKey | None:
        """The mask key that a silo states for the round that is open; None for an earlier one."""
        if not request.HasField("mask_key") or self._credentials is None:
            return None
        number = self._rounds.round_number
        if round_of(request.mask_key) != number or not self._plan.is_masked(number):
            return None
        occasion = Occasion(self._config.federation, self._plan.run, self._plan.sha256, number)
        key = read_certified(request.mask_key, occasion, ca_pem=self._credentials.current.ca_pem)
        if key.silo != silo or key.audit_key != self._door.receipt_state(call.peer).peer_key:
            raise RefusedError(
                f"the mask key is {key.silo}'s, or not signed with the audit key that {silo} joined with"
            )
        return key

    def _submit(self, stream: Iterator[bytes], call: Call, context: grpc.ServicerContext) -> bytes:
        header = self._next(stream, call, context)
        if header is None or header.WhichOneof("frame") != "update":
            raise RefusedError("an update begins with its header")
        update = header.update
        silo = self._identify(update, call, context)
        self._check_plan(update.plan_sha256)
        self._check_member(silo)
        self._check_signed(call)
        call.round = update.round
        with Delivery(self._rounds, silo, update) as delivery:
            if delivery.earlier is not None:
                return self._acknowledge(call, first=delivery.earlier)
            while (message := self._next(stream, call, context)) is not None:
                if message.WhichOneof("frame") != "chunk":
                    raise RefusedError("after its header an update holds chunks only")
                delivery.take(message.chunk)
            delivery.finish()
            self._peer(context)  # once more: meanwhile its certificate may have been revoked
            # Durable, so that the receipt in the store never outlives the records that it is for.
            attestation = self._door.attest(call.peer, durable=True)
            if not delivery.accept(to_json(from_message(attestation))):
                return self._acknowledge(call, first=delivery.earlier or {})
        response = wire.SubmitUpdateResponse(nonce=nonce(), attestation=attestation)
        return self._door.release([response], call)[0]

    def _acknowledge(self, call: Call, *, first: Mapping[str, Any]) -> bytes:
        """Answers a repeated update with the word that the first one was given."""
        response = wire.SubmitUpdateResponse(
            nonce=nonce(),
            attestation=self._door.attest(call.peer),
            repeated=True,
            first=to_message(from_json(first)),
        )
        return self._door.release([response], call)[0]

    def _check_signed(self, call: Call) -> None:
        """Nothing more is taken from a silo that has not signed for what it sent before."""
        if unsigned := self._door.receipt_state(call.peer).unsigned():
            raise UnsignedError(
                f"{len(unsigned)} earlier calls of {call.peer} lack its signed word on what it sent; it has to give "
                "that first (Attest)"
            )

    def _next(
        self, stream: Iterator[bytes], call: Call, context: grpc.ServicerContext
    ) -> wire.SubmitUpdateRequest | None:
        with self._not_forever(call, context):
            data = next(stream, None)
        if data is None:
            return None
        return self._door.admit(data, wire.SubmitUpdateRequest, call)

    def _not_forever(self, call: Call, context: grpc.ServicerContext) -> AbstractContextManager[None]:
        """Cuts the call if the silo neither sends nor takes a message in time."""

        def cut() -> None:
            words = f"no message went through for {self._patience.seconds:g} s; the call is cut"
            log.warning("%s by %s: %s", call.rpc, call.peer, words)
            context.cancel()
            try:
                self._store.refuse(call.peer, call.rpc, words)
            except MedsiloError:
                log.exception("the refusal could not be stored")

        return self._patience.waiting(cut)

    def _identify(self, request: Any, call: Call, context: grpc.ServicerContext) -> str:
        """The silo that is calling: its certificate's name, which must be the one that it claims. It is answered in the
        protocol version that it names."""
        claimed: str = request.silo
        peer = self._peer(context)
        if peer is not None and peer.name != claimed:
            raise IdentityError(
                f"the certificate says {peer.name}, the message says {claimed}; each hospital uses its own keys "
                "(`silo keys`) and its own name"
            )
        if claimed not in self._config.silos:
            raise IdentityError(f"{claimed} is not one of this run's hospitals; its operator can add it under `silos:`")
        spoken = agreed(request.protocol_version, f"the silo {claimed}", "this coordinator")
        self._door.receipt_state(call.peer).version = spoken
        return claimed

    def _claimed(self, message: Message) -> str:
        """In plain text on loopback a silo is who it says it is."""
        update = getattr(message, "update", message)
        name = getattr(update, "silo", "")
        return Identity(self._config.federation, "silo", name).uri if name in self._config.silos else ""

    def _peer(self, context: grpc.ServicerContext) -> Identity | None:
        """The identity in the caller's certificate; None in plain text."""
        if self._credentials is None:
            return None
        certificate = _certificate(context)
        if certificate is None:
            raise IdentityError("no certificate; silos show the one that `coordinator ca issue` made")
        return self._credentials.identify(certificate)

    def _call(self, rpc: str, context: grpc.ServicerContext) -> Call:
        self._store.check_serving()
        peer = self._peer(context)
        if peer is not None:
            if peer.federation != self._config.federation:
                raise IdentityError(f"the certificate is of federation {peer.federation}, not of this one")
            if peer.role != ALLOWED_ROLE[rpc]:
                raise IdentityError(f"a {peer.role} may not call {rpc}")
        certificate = _certificate(context)
        return Call(
            rpc=rpc,
            peer=peer.uri if peer else "",
            peer_certificate_sha256=fingerprint(certificate) if certificate else "",
            purpose=f"run {self._plan.run}: {self._plan.method.name}",
            name_peer=self._claimed if peer is None else None,
            run=self._plan.run,
            plan_sha256=self._plan.sha256.hex(),
        )

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        """Keeps one hospital's calls from taking all of the coordinator's threads."""
        with self._counting:
            if peer and self._open_calls[peer] >= CALLS_PER_SILO:
                raise BusyError(f"{peer} has {CALLS_PER_SILO} calls open already; try again when one has ended")
            self._open_calls[peer] += 1
        try:
            yield
        finally:
            with self._counting:
                self._open_calls[peer] -= 1

    def _check_plan(self, sha256: bytes) -> None:
        if sha256 != self._plan.sha256:
            raise RefusedError("the silo has another plan than this run's; start it again to read the new one")

    def _check_member(self, silo: str) -> None:
        if self._rounds.has_withdrawn(silo):
            raise RefusedError(
                f"{silo} has withdrawn from run {self._plan.run}; it takes part again when it joins again"
            )
        if not self._rounds.is_member(silo):
            raise RefusedError(f"{silo} has not joined run {self._plan.run}")

    def _guard(
        self, rpc: str, handle: Callable[[Any, Call, grpc.ServicerContext], bytes]
    ) -> Callable[[Any, grpc.ServicerContext], bytes]:
        def guarded(request: Any, context: grpc.ServicerContext) -> bytes:
            call = None
            try:
                call = self._call(rpc, context)
                with self._counted(call.peer):
                    return handle(request, call, context)
            except Exception as error:
                self._refusals.turn_away(error, rpc, call, context)
            finally:
                if call is not None:
                    self._door.ended(call)

        return guarded

    def _guard_stream(
        self, rpc: str, handle: Callable[[bytes, Call, grpc.ServicerContext], Iterator[bytes]]
    ) -> Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]:
        def guarded(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            call = None
            try:
                call = self._call(rpc, context)
                with self._counted(call.peer):
                    yield from handle(request, call, context)
            except Exception as error:
                self._refusals.turn_away(error, rpc, call, context)
            finally:
                if call is not None:
                    self._door.ended(call)

        return guarded


def _certificate(context: grpc.ServicerContext) -> bytes | None:
    """The caller's certificate (PEM), which TLS has checked."""
    shown: Any = context.auth_context().get("x509_pem_cert")
    return bytes(shown[0]) if shown else None


def _shown(own: Credentials) -> Any:
    """What a new connection is met with."""
    return grpc.ssl_server_certificate_configuration(
        [(own.private_key_pem, own.certificate_pem)], root_certificates=own.ca_pem
    )


def serve(service: CoordinatorService, config: CoordinatorConfig, credentials: LiveCredentials | None) -> grpc.Server:
    """A started gRPC server; raises ``MedsiloError`` if the address cannot be had."""
    workers = CALLS_PER_SILO * (len(config.silos) + 1)
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rpc"),
        maximum_concurrent_rpcs=4 * workers,  # more are told to try again later: they would wait in memory
        options=[
            # A call that is compressed is refused: tensors hardly get smaller, and zeros far larger.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_concurrent_streams", 4 * CALLS_PER_SILO),
            ("grpc.server_handshake_timeout_ms", 20_000),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", int(SHORTEST_PING_SECONDS * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    server.add_generic_rpc_handlers((service.handler(),))
    health = HealthServicer()  # for load balancers and service managers: says that it serves, and nothing of a run
    health.set("", health_pb2.HealthCheckResponse.SERVING)
    health.set(SERVICE.full_name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        if credentials is None:
            server.add_insecure_port(config.listen)
        else:
            server.add_secure_port(
                config.listen, server_credentials(credentials, _shown, require_client_authentication=True)
            )
    except RuntimeError:  # its words are about gRPC's own variables
        raise MedsiloError(
            f"cannot listen on {config.listen}: another program (another coordinator?) does, or this machine does not "
            "have the address; end the other, or change `listen:`"
        ) from None
    server.start()
    return server
