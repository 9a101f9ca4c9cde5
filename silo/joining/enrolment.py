"""Enrolling with an invitation: the coordinator is believed by its CA's fingerprint, the hospital by the code's key.

One message leaves, through the door and into the journal like any other: the hospital's name, its certificate request,
its public audit key and a signature. The code and the private keys stay here.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.consent.consent import Consent, ConsentFile
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.protocol import agreed, spoken_instead
from medsilo.privacy.errors import IdentityError, RefusedError, UnreachableError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.certificates import fingerprint, identity_of_certificate
from medsilo.privacy.identity.envelope import to_message
from medsilo.privacy.identity.invitation import Invitation, Statement
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import ConsentRecord
from medsilo.protos.medsilo.v1 import enrolment_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.protos.versions import PROTOCOL_VERSION
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import keep_plan
from medsilo.silo.state.proxy import ProxyConfig
from medsilo.silo.uplink.channel import channel_credentials, open_channel, said, shown_certificates

ANSWER_SECONDS = 60
_METHOD = f"/{wire.DESCRIPTOR.services_by_name['EnrolmentService'].full_name}/Enrol"


@dataclass(frozen=True)
class Enrolled:
    """``plan``: of the run that the coordinator leads. ``skew_seconds``: how far its clock is ahead of this one's."""

    plan: RunPlan
    skew_seconds: float


def trusted_authority(invitation: Invitation, *, proxy: ProxyConfig | None = None) -> bytes:
    """The CA's certificate (PEM), from whoever answers, if it has the invitation's fingerprint.

    That its owner knows the key of a certificate which this CA issued to the coordinator is seen when it is spoken to.
    Raises ``IdentityError`` for any other CA.
    """
    shown = shown_certificates(invitation.enrolment_address, invitation.coordinator_identity, proxy=proxy)
    for pem in shown:
        if fingerprint(pem) == invitation.ca_sha256:
            return pem
    found = f"{fingerprint(shown[-1])[:16]}…" if shown else "none"
    raise IdentityError(
        f"what answers at {invitation.enrolment_address} is not the coordinator of the invitation: the invitation "
        f"names the CA {invitation.ca_sha256[:16]}…, and there it is {found}. Nothing was sent. Somebody may be in "
        "between: ask the coordinator's operator, by telephone, for the fingerprint (`coordinator invite --list`)"
    )


def enrol(config: SiloConfig, invitation: Invitation, ca: bytes, audit_key: Ed25519PrivateKey) -> Enrolled:
    """Sends the certificate request and puts certificate and CA in their places.

    May be done again after it was interrupted: the same keys get the same certificate. Raises ``UnreachableError`` if
    there is no answer, ``RefusedError`` for a refusal, ``IdentityError`` if the answer is not the coordinator's.
    """
    coordinator = invitation.coordinator_identity
    # Whoever gives the invitation to `silo init` agrees to this much, and the journal says so.
    consent = Consent(
        coordinator=coordinator.uri, exposures=("PROTOCOL", "IDENTITY"), expires=invitation.expires.date()
    )
    file = ConsentFile(None, consent, hashlib.sha256(invitation.line.encode()).hexdigest())
    request_pem = (config.keys / "tls.csr").read_bytes()
    with Journal(config.journal, key=audit_key, origin=config.journal_origin) as journal:
        gate = ConsentGate(file, coordinator, withdrawal=config.withdrawal)
        door = Door(journal, identity=config.identity.uri, federation=config.federation, gate=gate)
        door.note(ConsentRecord(consent=file.describe(), purpose="enrolment"))

        def ask(version: int) -> wire.EnrolResponse:
            call = Call(
                rpc="Enrol", peer=coordinator.uri, peer_certificate_sha256="", purpose="asking for a certificate"
            )
            request = wire.EnrolRequest(
                nonce=nonce(),
                silo=config.name,
                protocol_version=version,
                certificate_request=request_pem,
                statement=to_message(Statement.sign(invitation, request_pem, audit_key)),
                rotations=door.rotations(),
            )
            try:
                (data,) = door.release([request], call)
                return door.admit(_ask(invitation, ca, data, config.proxy), wire.EnrolResponse, call, durable=True)
            finally:
                door.ended(call)

        try:
            answer = ask(PROTOCOL_VERSION)
        except RefusedError as error:
            if (version := spoken_instead(str(error))) is None:
                raise
            answer = ask(version)
        agreed(answer.protocol_version, "the coordinator", "this silo")
        if identity_of_certificate(answer.coordinator_certificate, ca) != coordinator:
            raise IdentityError(f"the answer shows the certificate of another party than {coordinator.uri}")
        if identity_of_certificate(answer.certificate, ca) != config.identity:
            raise IdentityError(
                f"the certificate in the answer is not for {config.identity.uri}; nothing was kept of it"
            )
        plan = RunPlan.from_message(answer.plan)
        if plan.coordinator_identity != coordinator:
            raise RefusedError(f"the plan in the answer names {plan.coordinator_identity.uri} as its coordinator")
        door.enrol(coordinator.uri, answer.coordinator_audit_key, answer.rotations)
        skew = answer.time_ms / 1000 - time.time()
    files = config.tls_files
    keep_plan(config, plan)
    write_atomically(files.ca, ca, mode=0o644)
    write_atomically(files.certificate, answer.certificate, mode=0o644)
    config.open_credentials()
    return Enrolled(plan, skew)


def _ask(invitation: Invitation, ca: bytes, data: bytes, proxy: ProxyConfig | None) -> bytes:
    address = invitation.enrolment_address
    with open_channel(address, invitation.coordinator_identity, channel_credentials(ca), proxy=proxy) as channel:
        call = channel.unary_unary(_METHOD).future(data)
        try:
            answer: bytes = call.result(timeout=ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            call.cancel()
            raise UnreachableError(f"the coordinator at {address} does not answer within {ANSWER_SECONDS} s") from None
        except grpc.RpcError as error:
            raise _explain(error, invitation) from None
    return answer


def _explain(error: grpc.RpcError, invitation: Invitation) -> Exception:
    code, details = error.code(), said(error)
    address = invitation.enrolment_address
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details:
        return IdentityError(
            f"what answers at {address} shows the federation's CA and has no valid certificate of "
            f"{invitation.coordinator_identity.uri} by it: {details}\nNothing was sent. Somebody may be in between: "
            "ask the coordinator's operator by telephone"
        )
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return RefusedError(f"the coordinator at {address} does not enrol this hospital: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(f"what answers at {address} enrols nobody: {details}")
    return UnreachableError(
        f"the coordinator at {address} gave no certificate ({code.name}: {details}); run the same command again"
    )
