"""Enrolment: a gRPC service on a port of its own, where invited hospitals get their certificates.

Whoever calls has no certificate yet, so nothing of it is believed, nor recorded, before the statement in it is seen
to be signed with the key that an invitation's code gives. From then on the exchange is a hospital's like any other:
through the door, into the journal.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import DecodeError

from medsilo.coordinator.config import CoordinatorConfig, EnrolmentConfig
from medsilo.coordinator.joining.invitations import Invitations, Kept
from medsilo.coordinator.service.listening import server_credentials
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.protocol import agreed
from medsilo.privacy.errors import IdentityError, MedsiloError, RefusedError
from medsilo.privacy.exposure import attribute
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.authority import issue
from medsilo.privacy.identity.certificates import Credentials, fingerprint, identity_of_certificate
from medsilo.privacy.identity.envelope import from_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.invitation import Statement
from medsilo.privacy.identity.revocation import LiveCredentials
from medsilo.privacy.party.examination import SOON_DAYS
from medsilo.privacy.printable import check_texts, from_the_other_side
from medsilo.protos.medsilo.v1 import enrolment_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION

log = logging.getLogger(__name__)

SERVICE = wire.DESCRIPTOR.services_by_name["EnrolmentService"]
LARGEST_REQUEST = 64 << 10
FAILURES = 10
"""Failed attempts that an address has before it must wait …"""
PAUSE_SECONDS = 30.0
"""… this long for each further one."""
_REMEMBERED = 4096
_UNKNOWN = "the invitation's code is wrong, or there is none for this hospital"


class TooManyError(MedsiloError):
    """Too many failed attempts came from an address."""


class Throttle:
    """Failed attempts by address: each address may have so many, and gets one back in a while.

    ``clock``: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at: OrderedDict[str, float] = OrderedDict()
        """By address, when all its attempts will have come back."""

    def check(self, address: str) -> None:
        """Raises ``TooManyError`` if the address has to wait."""
        with self._lock:
            if self._free_at.get(address, 0.0) - self._clock() > (FAILURES - 1) * PAUSE_SECONDS:
                raise TooManyError(f"too many failed attempts to enrol; try again in {PAUSE_SECONDS:.0f} s")

    def failed(self, address: str) -> None:
        """Counts a failed attempt."""
        with self._lock:
            now = self._clock()
            self._free_at[address] = max(self._free_at.pop(address, now), now) + PAUSE_SECONDS
            if len(self._free_at) > _REMEMBERED:
                self._free_at.popitem(last=False)


class EnrolmentService:
    """Answers invited hospitals.

    Raises ``IdentityError`` if the CA's folder is not that of the own certificate's CA.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        settings: EnrolmentConfig,
        plan: RunPlan,
        store: Store,
        door: Door,
        credentials: LiveCredentials,
    ) -> None:
        self._config = config
        self._settings = settings
        self._plan = plan
        self._store = store
        self._door = door
        self._credentials = credentials
        self._invitations = Invitations(config.invitations)
        self._throttle = Throttle()
        self._one_by_one = threading.Lock()
        _check_authority(settings.ca, credentials.current)

    def handler(self) -> grpc.GenericRpcHandler:
        """The service's methods over raw bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE.full_name, {"Enrol": grpc.unary_unary_rpc_method_handler(self._guarded)}
        )

    def _guarded(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        address = context.peer().rpartition(":")[0]  # the port is another one each time
        try:
            self._throttle.check(address)
            self._store.check_serving()
            request, invitation, statement = self._believe(data)
        except TooManyError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except (RefusedError, DecodeError) as error:
            self._throttle.failed(address)
            words = from_the_other_side(str(error))  # it may quote what came
            log.warning("an attempt to enrol from %s failed: %s", address, words)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, words if isinstance(error, RefusedError) else _UNKNOWN)
        except Exception:
            log.exception("enrolment failed")
            context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot enrol now; its log says why")
        silo = Identity(self._config.federation, "silo", request.silo)
        call = Call(
            rpc="Enrol",
            peer=silo.uri,
            peer_certificate_sha256="",
            purpose=f"enrolment of {silo.name}",
            run=self._plan.run,
            plan_sha256=self._plan.sha256.hex(),
        )
        try:
            with self._one_by_one:
                return self._enrol(data, request, call, silo, invitation, statement)
        except (RefusedError, IdentityError) as error:
            self._throttle.failed(address)
            words = from_the_other_side(str(error))
            log.warning("%s could not enrol, from %s: %s", silo.name, address, words)
            self._store.refuse(silo.uri, "Enrol", words)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, words)
        except Exception:
            log.exception("enrolment of %s failed", silo.name)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator cannot enrol now; its log says why")
        finally:
            self._door.ended(call)
        raise AssertionError("unreachable: abort raises")

    def _believe(self, data: bytes) -> tuple[wire.EnrolRequest, Kept, Statement]:
        """The request, once it is seen to be by someone who has an invitation's code; no word before tells which
        hospitals are invited."""
        attribute(data, wire.EnrolRequest.DESCRIPTOR)
        request = wire.EnrolRequest.FromString(data)
        check_texts(request)
        agreed(request.protocol_version, "the silo", "this coordinator")
        envelope = from_message(request.statement)
        try:
            silo = Identity(self._config.federation, "silo", request.silo)
        except IdentityError:
            raise RefusedError(_UNKNOWN) from None
        own = (
            silo.uri,
            self._config.identity.uri,
            fingerprint(self._credentials.current.ca_pem),
            hashlib.sha256(request.certificate_request).hexdigest(),
        )
        for invitation in reversed(self._invitations.all()):
            if invitation.silo != request.silo:
                continue
            try:
                statement = Statement.open(envelope, bytes.fromhex(invitation.public_key))
            except RefusedError:
                continue
            if (statement.silo, statement.coordinator, statement.ca_sha256, statement.request_sha256) == own:
                return request, invitation, statement
        raise RefusedError(_UNKNOWN)

    def _enrol(
        self,
        data: bytes,
        request: wire.EnrolRequest,
        call: Call,
        silo: Identity,
        invitation: Kept,
        statement: Statement,
    ) -> bytes:
        audit_key = bytes.fromhex(statement.audit_key)
        try:
            key = _requested_key(request.certificate_request)
            keys = hashlib.sha256(key + audit_key).hexdigest()
            self._invitations.check(invitation, keys)
            self._door.check_key(silo.uri, audit_key, request.rotations)
            self._invitations.use(invitation, keys)
        except (RefusedError, IdentityError) as error:
            # Others may know an invitation's line. What they send must not be acknowledged to the hospital.
            self._door.turn_away(data, wire.EnrolRequest, call, error)
            raise
        self._door.enrol(silo.uri, audit_key, request.rotations)
        self._door.admit(data, wire.EnrolRequest, call, durable=True)
        self._door.receipt_state(silo.uri).version = agreed(request.protocol_version, "the silo", "this coordinator")
        response = wire.EnrolResponse(
            nonce=nonce(),
            certificate=self._certificate(silo, request.certificate_request, key),
            coordinator_certificate=self._credentials.current.certificate_pem,
            coordinator_audit_key=self._door.journal.public_key,
            rotations=self._door.rotations(),
            plan=self._plan.to_message(),
            time_ms=time.time_ns() // 1_000_000,
            protocol_version=PROTOCOL_VERSION,
        )
        log.info("%s has enrolled", silo.name)
        return self._door.release([response], call)[0]

    def _certificate(self, silo: Identity, request: bytes, key: bytes) -> bytes:
        """The certificate for a key; the one that was issued already, where there is one that is not to be renewed."""
        folder = self._config.state / "enrolled"
        folder.mkdir(mode=0o700, exist_ok=True)
        out = folder / f"{silo.name}.pem"
        if out.exists() and (issued := self._issued(out, silo, key)) is not None:
            return issued
        asked = folder / f"{silo.name}.csr"
        write_atomically(asked, request)
        try:
            issue(self._settings.ca, silo.name, asked, out, days=self._settings.days)
        except IdentityError as error:
            # Its words name files on this machine.
            log.error("the certificate of %s could not be issued: %s", silo.name, error)
            raise RefusedError("the coordinator did not sign the certificate request; its log says why") from None
        return out.read_bytes()

    def _issued(self, path: Path, silo: Identity, key: bytes) -> bytes | None:
        pem = path.read_bytes()
        try:
            same = identity_of_certificate(pem, self._credentials.current.ca_pem) == silo
        except IdentityError:
            return None  # expired, or of an earlier CA
        found = x509.load_pem_x509_certificate(pem)
        lasting = found.not_valid_after_utc - datetime.now(UTC) > timedelta(days=SOON_DAYS)
        return pem if same and lasting and _public_bytes(found.public_key()) == key else None


def serve_enrolment(service: EnrolmentService, settings: EnrolmentConfig, credentials: LiveCredentials) -> grpc.Server:
    """A started gRPC server, to which callers show no certificate; raises ``MedsiloError`` if the address cannot be
    had.

    It shows the CA's certificate besides its own: that is what a hospital holds against its invitation.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="enrolment"),
        maximum_concurrent_rpcs=8,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", LARGEST_REQUEST),
            ("grpc.max_connection_age_ms", 60_000),
            ("grpc.max_connection_idle_ms", 30_000),
        ],
    )
    server.add_generic_rpc_handlers((service.handler(),))

    def shown(own: Credentials) -> grpc.ServerCertificateConfiguration:
        chain = own.certificate_pem.rstrip() + b"\n" + own.ca_pem
        return grpc.ssl_server_certificate_configuration([(own.private_key_pem, chain)])

    try:
        server.add_secure_port(
            settings.listen, server_credentials(credentials, shown, require_client_authentication=False)
        )
    except RuntimeError:  # its words are about gRPC's own variables
        raise MedsiloError(
            f"cannot listen on {settings.listen} for enrolment: another program (another coordinator?) does, or this "
            "machine does not have the address; end the other, or change `enrolment: listen:`"
        ) from None
    server.start()
    log.info("hospitals that were invited enrol on %s", settings.listen)
    return server


def _check_authority(folder: Path, credentials: Credentials) -> None:
    certificate = folder / "ca.pem"
    for path in (certificate, folder / "ca.key"):
        if not path.is_file():
            raise IdentityError(
                f"{path}: there is no such file; `enrolment:` signs with the CA's key. If the CA is kept on another "
                "machine, take `enrolment:` out of the configuration and sign requests there (docs/joining.md)"
            )
    if fingerprint(certificate.read_bytes()) != fingerprint(credentials.ca_pem):
        raise IdentityError(f"{certificate}: is another CA than the one of this coordinator's own certificate")


def _requested_key(request: bytes) -> bytes:
    try:
        asked = x509.load_pem_x509_csr(request)
        return _public_bytes(asked.public_key())
    except Exception:
        raise RefusedError("the certificate request cannot be read; make the keys anew with `silo init`") from None


def _public_bytes(key: object) -> bytes:
    public: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public
