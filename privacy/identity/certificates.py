"""Who is who: the federation's CA, every party's keys and certificate, and the checks on them.

A party's identity is ``spiffe://FEDERATION/ROLE/NAME`` in its certificate's only URI name. TLS keys are ECDSA
P-256 (what gRPC's TLS takes); the audit key, which signs the journal, is Ed25519 and apart from them. A
coordinator's certificate also holds the DNS name ``NAME.coordinator.FEDERATION``, which silos demand of whoever
answers, wherever its address is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from medsilo.privacy.errors import ClockError, IdentityError
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import UNUSABLE, load_tls_key

CLOCK_SKEW = timedelta(minutes=5)
USAGES = {
    "silo": ExtendedKeyUsageOID.CLIENT_AUTH,
    "coordinator": ExtendedKeyUsageOID.SERVER_AUTH,
    "operator": ExtendedKeyUsageOID.CLIENT_AUTH,
}


@dataclass(frozen=True)
class Credentials:
    """A party's checked certificate and private key, and the CA that it trusts."""

    identity: Identity
    certificate_pem: bytes
    private_key_pem: bytes
    ca_pem: bytes
    certificate_sha256: str
    not_after: datetime


def load_credentials(*, ca: Path, certificate: Path, key: Path, expected: Identity) -> Credentials:
    """A party's certificate and key, checked against each other, the CA, the clock and the configuration.

    Raises ``IdentityError`` saying which file is wrong and what to do.
    """
    command = "silo keys" if expected.role == "silo" else "coordinator keys"
    by_invitation = (
        "ask the coordinator's operator for an invitation (`silo init`), or " if expected.role == "silo" else ""
    )
    root = load_certificate(ca, "ask the federation's CA for its ca.pem")
    own = load_certificate(
        certificate,
        f"{by_invitation}send the request made by `{command}` to the CA (`coordinator ca issue {expected.name}`)",
    )
    private = load_tls_key(key, f"make keys with `{command}`")
    if private.public_key() != own.public_key():
        raise IdentityError(
            f"{key}: is not the key of {certificate}; ask the CA for a certificate for the present request"
        )
    _check_signature(own, root, f"{certificate}: was issued by another CA than {ca}")
    _check_dates(own, f"{certificate}", _RENEW)
    _check_dates(root, f"{ca}", _RENEW_CA)
    identity = Identity.parse(single_uri(own, certificate))
    if identity != expected:
        raise IdentityError(
            f"{certificate}: the certificate says {identity.uri}, the configuration says {expected.uri}; use the "
            "certificate issued for this party, or correct `name` and `federation`"
        )
    _check_usage(own, certificate, expected)
    return Credentials(
        identity=identity,
        certificate_pem=certificate.read_bytes(),
        private_key_pem=key.read_bytes(),
        ca_pem=ca.read_bytes(),
        certificate_sha256=fingerprint(certificate.read_bytes()),
        not_after=own.not_valid_after_utc,
    )


def identity_of_certificate(pem: bytes, ca_pem: bytes) -> Identity:
    """Whose certificate it is; raises ``IdentityError`` if the CA did not sign it or its time is over."""
    try:
        certificate, root = _read_certificate(pem), _read_certificate(ca_pem)
    except ValueError as error:
        raise IdentityError(f"the peer's certificate cannot be read: {error}") from None
    _check_signature(certificate, root, "the peer's certificate was issued by another CA")
    _check_dates(certificate, "the peer's certificate", _RENEW)
    _check_dates(root, "the federation's CA certificate", _RENEW_CA)
    return Identity.parse(single_uri(certificate, Path("the peer's certificate")))


def identity_named_by(pem: bytes) -> Identity:
    """Whom a certificate names, whoever issued it and whenever; raises ``IdentityError`` if it names nobody."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise IdentityError(f"the certificate cannot be read: {error}") from None
    return Identity.parse(single_uri(certificate, Path("the certificate")))


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, as hex."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def _check_usage(certificate: x509.Certificate, where: Path, expected: Identity) -> None:
    try:
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, ValueError):
        usages = []
    if usages != [USAGES[expected.role]]:
        raise IdentityError(
            f"{where}: is not made for a {expected.role}'s use alone (extended key usage); ask the CA for another "
            f"(`coordinator ca issue {expected.name} --role {expected.role}`)"
        )


def single_uri(holder: x509.Certificate | x509.CertificateSigningRequest, where: Path) -> str:
    try:
        names = holder.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *UNUSABLE):
        names = x509.SubjectAlternativeName([])
    uris: Sequence[str] = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise IdentityError(f"{where}: should name exactly one identity (URI), but names {len(uris)}")
    return uris[0]


def _check_signature(certificate: x509.Certificate, root: x509.Certificate, complaint: str) -> None:
    try:
        certificate.verify_directly_issued_by(root)
    except (*UNUSABLE, InvalidSignature):
        raise IdentityError(
            f"{complaint} ({certificate.issuer.rfc4514_string()}; trusted is {root.subject.rfc4514_string()}, SHA-256 "
            f"{root.fingerprint(hashes.SHA256()).hex()[:16]}…); all parties of a federation need one and the same CA"
        ) from None


_RENEW = (
    "ask the coordinator's operator for a new invitation (`silo init`), or send the request (tls.csr) to the CA again "
    "(`coordinator ca issue`)"
)
_RENEW_CA = "the federation needs a new CA (`coordinator ca init`) and all its parties new certificates"


def _check_dates(certificate: x509.Certificate, where: str, remedy: str) -> None:
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise IdentityError(
            f"{where}: expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{now:%Y-%m-%d %H:%M}. If that is wrong, put the clock right; if not, {remedy}"
        )
    if now < certificate.not_valid_before_utc:
        raise ClockError(
            f"{where}: is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and this machine's "
            f"clock says {now:%Y-%m-%d %H:%M}; check the clock"
        )


def _read_certificate(pem: bytes) -> x509.Certificate:
    """Raises ``ValueError`` for what is none. All its parts are read now: some would fail only when they are used."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        _ = certificate.public_key(), certificate.issuer, certificate.subject, certificate.extensions
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except UNUSABLE as error:
        raise ValueError(str(error)) from None
    return certificate


def load_certificate(path: Path, remedy: str) -> x509.Certificate:
    try:
        return _read_certificate(path.read_bytes())
    except FileNotFoundError:
        raise IdentityError(f"{path}: there is no such file; {remedy}") from None
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path}: is not a certificate (PEM): {error}; {remedy}") from None
