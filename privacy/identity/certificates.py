"""Who is who: the federation's CA, every party's keys and certificate, and the checks on them.

A party's identity is ``spiffe://FEDERATION/ROLE/NAME`` in its certificate's only URI name. TLS keys are ECDSA
P-256 (what gRPC's TLS takes); the audit key, which signs the journal, is Ed25519 and apart from them. A
coordinator's certificate also holds the DNS name ``NAME.coordinator.FEDERATION``, which silos demand of whoever
answers, wherever its address is.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, cast

from cryptography import x509
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from medsilo.privacy.errors import ClockError, IdentityError
from medsilo.privacy.files.durable import fsync_folder, write_atomically

Role = Literal["silo", "coordinator", "operator"]
"""``operator``: a person who looks at the coordinator's page; no RPC is for it."""
ROLES: tuple[Role, ...] = ("silo", "coordinator", "operator")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CLOCK_SKEW = timedelta(minutes=5)
_PENDING = "audit.key.next"
_LONGEST_NAME = 64  # X.509's limit for a common name (RFC 5280, ub-common-name)
_USAGES = {
    "silo": ExtendedKeyUsageOID.CLIENT_AUTH,
    "coordinator": ExtendedKeyUsageOID.SERVER_AUTH,
    "operator": ExtendedKeyUsageOID.CLIENT_AUTH,
}
_PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


@dataclass(frozen=True)
class Identity:
    """A party. Federation and name are lower-case letters, digits and hyphens, at most 63."""

    federation: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        for what, value in (("federation", self.federation), ("name", self.name)):
            if not _LABEL.fullmatch(value):
                raise IdentityError(
                    f"{what} {value!r} should be lower-case letters, digits and hyphens (at most 63), "
                    "for example hospital-3"
                )
        if self.role not in ROLES:
            raise IdentityError(f"role {self.role!r} should be {' or '.join(ROLES)}")

    @property
    def uri(self) -> str:
        """``spiffe://FEDERATION/ROLE/NAME``."""
        return f"spiffe://{self.federation}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """The DNS name in a coordinator's certificate."""
        return f"{self.name}.coordinator.{self.federation}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Raises ``IdentityError`` for anything but an identity."""
        match = re.fullmatch(r"spiffe://([^/]+)/([^/]+)/([^/]+)", uri)
        if match is None:
            raise IdentityError(f"{uri!r} is not an identity; it should be spiffe://FEDERATION/ROLE/NAME")
        return cls(match[1], cast("Role", match[2]), match[3])


@dataclass(frozen=True)
class KeyPaths:
    """Where a party's keys are: the private ones never leave that folder; the request goes to the CA."""

    tls_key: Path
    request: Path
    audit_key: Path
    audit_public: Path


@dataclass(frozen=True)
class Credentials:
    """A party's checked certificate and private key, and the CA that it trusts."""

    identity: Identity
    certificate_pem: bytes
    private_key_pem: bytes
    ca_pem: bytes
    certificate_sha256: str
    not_after: datetime


def create_authority(directory: Path, federation: str, *, days: int = 3650) -> Path:
    """Makes a federation's CA (``ca.key``, ``ca.pem``); returns the certificate's path. Overwrites nothing."""
    Identity(federation, "coordinator", "ca")
    path = directory / "ca.pem"
    if path.exists():
        raise IdentityError(f"{path}: exists already and is not overwritten; move it away first, with its ca.key")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{federation} federation CA"[:_LONGEST_NAME])])
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{federation}")]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    _write_private(directory / "ca.key", key)
    _write_public(path, certificate.public_bytes(serialization.Encoding.PEM))
    return path


def create_keys(directory: Path, identity: Identity) -> KeyPaths:
    """Makes a party's TLS key, certificate request and audit key. Overwrites no key.

    Where both keys exist and only the request is missing, the request is made again.
    """
    paths = KeyPaths(directory / "tls.key", directory / "tls.csr", directory / "audit.key", directory / "audit.pub")
    existing = [path for path in (paths.tls_key, paths.audit_key) if path.exists()]
    if len(existing) == 2 and not paths.request.exists():
        tls_key = _load_tls_key(paths.tls_key)
        audit_key = load_audit_key(paths.audit_key)
    elif existing:
        raise IdentityError(
            f"{existing[0]} exists already and is not overwritten: certificates and signed records depend on it. To "
            f"renew a certificate send {paths.request} to the CA again; for new keys move the old ones away first"
        )
    else:
        tls_key = ec.generate_private_key(ec.SECP256R1())
        audit_key = Ed25519PrivateKey.generate()
        _write_private(paths.tls_key, tls_key)
        _write_private(paths.audit_key, audit_key)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False)
        .sign(tls_key, hashes.SHA256())
    )
    _write_public(paths.request, request.public_bytes(serialization.Encoding.PEM))
    _write_audit_public(paths.audit_public, audit_key)
    return paths


def pending_audit_key(directory: Path) -> Ed25519PrivateKey:
    """The audit key that is to follow the present one: made now, or by a change that was interrupted."""
    path = directory / _PENDING
    if not path.exists():
        _write_private(path, Ed25519PrivateKey.generate())
    return load_audit_key(path)


def replace_audit_key(directory: Path) -> None:
    """Puts the pending audit key in the place of the present one, which is gone then."""
    key = load_audit_key(directory / _PENDING)
    (directory / _PENDING).replace(directory / "audit.key")
    fsync_folder(directory)
    _write_audit_public(directory / "audit.pub", key)


def authority_of(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, str]:
    """The CA in a folder: its certificate, its key and its federation; raises ``IdentityError`` if they do not fit."""
    ca = _load_certificate(directory / "ca.pem", "make a CA with `coordinator ca init`")
    ca_key = _load_tls_key(directory / "ca.key")
    if ca_key.public_key() != ca.public_key():
        raise IdentityError(
            f"{directory / 'ca.key'}: is not the key of {directory / 'ca.pem'}; put back the two files that "
            "`coordinator ca init` made together"
        )
    return ca, ca_key, _single_uri(ca, directory / "ca.pem").removeprefix("spiffe://")


def issue(authority: Path, name: str, request: Path, out: Path, *, role: Role = "silo", days: int = 365) -> Identity:
    """Signs a party's request and writes the certificate.

    Only the public key is taken from the request, and the identity once it is the one that is meant; whatever else
    it asks for is left out. Raises ``IdentityError`` for a request that is not ``name``'s in that role, not of this
    federation, or not signed by its own key.
    """
    ca, ca_key, federation = authority_of(authority)
    try:
        asked = x509.load_pem_x509_csr(request.read_bytes())
    except FileNotFoundError:
        raise IdentityError(
            f"{request}: there is no such file; it is made by `silo keys` (or `coordinator keys`) at its owner's"
        ) from None
    except (OSError, *UNUSABLE) as error:
        raise IdentityError(f"{request}: is not a certificate request (PEM): {error}") from None
    key = _requested_key(asked, request)
    if not asked.is_signature_valid:
        raise IdentityError(f"{request}: is not signed by its own key; it was changed or damaged on the way")
    identity = Identity.parse(_single_uri(asked, request))
    if identity.federation != federation:
        raise IdentityError(f"{request}: is for federation {identity.federation}; this CA is {federation}'s")
    if identity.name != name:
        raise IdentityError(f"{request}: the request is for {identity.name}, not {name}")
    if identity.role != role:
        raise IdentityError(
            f"{request}: asks for a {identity.role}'s certificate, not a {role}'s; if that is meant, say so with "
            f"--role {identity.role}"
        )
    _check_replaceable(out, identity)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if identity.role == "coordinator":
        names.append(x509.DNSName(identity.server_name))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
    certificate = (
        _builder(subject, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGES[identity.role]]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "serial": f"{certificate.serial_number:x}",
        "identity": identity.uri,
        "sha256": fingerprint(pem),
        "not_after": certificate.not_valid_after_utc.isoformat(),
    }
    with (authority / "issued.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    _write_public(out, pem)
    return identity


def issue_to_operator(authority: Path, name: str, out: Path, *, password: str, days: int = 365) -> Identity:
    """Makes a key and a certificate for a person, and writes both as PKCS #12, encrypted with the password.

    Raises ``IdentityError`` for a CA or a name that cannot be used, a file that exists, or an empty password.
    """
    if not password:
        raise IdentityError("the file holds a private key; give it a password")
    if out.exists():
        raise IdentityError(f"{out}: exists already and is not overwritten; move it away first")
    ca = _load_certificate(authority / "ca.pem", "make a CA with `coordinator ca init`")
    federation = _single_uri(ca, authority / "ca.pem").removeprefix("spiffe://")
    identity = Identity(federation, "operator", name)
    with tempfile.TemporaryDirectory() as folder:
        keys = create_keys(Path(folder), identity)
        certificate = Path(folder) / "tls.pem"
        issue(authority, name, keys.request, certificate, role="operator", days=days)
        content = pkcs12.serialize_key_and_certificates(
            identity.uri.encode(),
            _load_tls_key(keys.tls_key),
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            [ca],
            serialization.BestAvailableEncryption(password.encode()),
        )
    write_atomically(out, content, mode=0o600)
    return identity


def load_credentials(*, ca: Path, certificate: Path, key: Path, expected: Identity) -> Credentials:
    """A party's certificate and key, checked against each other, the CA, the clock and the configuration.

    Raises ``IdentityError`` saying which file is wrong and what to do.
    """
    command = "silo keys" if expected.role == "silo" else "coordinator keys"
    by_invitation = (
        "ask the coordinator's operator for an invitation (`silo init`), or " if expected.role == "silo" else ""
    )
    root = _load_certificate(ca, "ask the federation's CA for its ca.pem")
    own = _load_certificate(
        certificate,
        f"{by_invitation}send the request made by `{command}` to the CA (`coordinator ca issue {expected.name}`)",
    )
    private = _load_tls_key(key, f"make keys with `{command}`")
    if private.public_key() != own.public_key():
        raise IdentityError(
            f"{key}: is not the key of {certificate}; ask the CA for a certificate for the present request"
        )
    _check_signature(own, root, f"{certificate}: was issued by another CA than {ca}")
    _check_dates(own, f"{certificate}", _RENEW)
    _check_dates(root, f"{ca}", _RENEW_CA)
    identity = Identity.parse(_single_uri(own, certificate))
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
    return Identity.parse(_single_uri(certificate, Path("the peer's certificate")))


def identity_named_by(pem: bytes) -> Identity:
    """Whom a certificate names, whoever issued it and whenever; raises ``IdentityError`` if it names nobody."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise IdentityError(f"the certificate cannot be read: {error}") from None
    return Identity.parse(_single_uri(certificate, Path("the certificate")))


def fingerprint(pem: bytes) -> str:
    """SHA-256 of a certificate, as hex."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def load_audit_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs a party's journal; raises ``IdentityError`` if it is missing or others can read it."""
    key = _load_private(path, "make keys with `silo keys` (or `coordinator keys`)")
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{path}: is not an Ed25519 key; audit keys are made by `silo keys`")
    return key


def load_audit_public(path: str | Path) -> bytes:
    """A public audit key (``audit.pub``, PEM): Ed25519, 32 bytes; raises ``IdentityError`` if it is not one."""
    try:
        key = serialization.load_pem_public_key(Path(path).read_bytes())
    except OSError as error:
        raise IdentityError(f"{path}: cannot be read: {error.strerror}") from None
    except UNUSABLE as error:
        raise IdentityError(f"{path}: is not a public key (PEM): {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError(f"{path}: is not an Ed25519 key; a party's audit.pub is meant")
    return key.public_bytes_raw()


def _write_audit_public(path: Path, key: Ed25519PrivateKey) -> None:
    _write_public(
        path,
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    )


def _requested_key(asked: x509.CertificateSigningRequest, where: Path) -> ec.EllipticCurvePublicKey:
    try:
        key = asked.public_key()
    except (UnsupportedAlgorithm, ValueError) as error:
        raise IdentityError(f"{where}: its key cannot be used: {error}; make it with `silo keys`") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError(f"{where}: its key is not an elliptic curve key (P-256); make it with `silo keys`")
    return key


def _check_replaceable(out: Path, identity: Identity) -> None:
    """A certificate may replace this party's earlier one and nothing else: no key, no CA, no other party's."""
    if not out.exists():
        return
    try:
        replaced = _single_uri(x509.load_pem_x509_certificate(out.read_bytes()), out)
    except (OSError, ValueError, IdentityError):
        replaced = ""
    if replaced != identity.uri:
        raise IdentityError(
            f"{out}: exists already, is not a certificate of {identity.uri} and is not overwritten; choose another "
            "file with --out"
        )


def _check_usage(certificate: x509.Certificate, where: Path, expected: Identity) -> None:
    try:
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except (x509.ExtensionNotFound, ValueError):
        usages = []
    if usages != [_USAGES[expected.role]]:
        raise IdentityError(
            f"{where}: is not made for a {expected.role}'s use alone (extended key usage); ask the CA for another "
            f"(`coordinator ca issue {expected.name} --role {expected.role}`)"
        )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    try:
        not_after = now + timedelta(days=days)
    except OverflowError:
        raise IdentityError(
            f"{days} days is longer than a certificate can be valid; choose fewer with --days"
        ) from None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(not_after)
    )


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _single_uri(holder: x509.Certificate | x509.CertificateSigningRequest, where: Path) -> str:
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


UNUSABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What reading a certificate, request or key that is damaged has been seen to raise."""


def _read_certificate(pem: bytes) -> x509.Certificate:
    """Raises ``ValueError`` for what is none. All its parts are read now: some would fail only when they are used."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        _ = certificate.public_key(), certificate.issuer, certificate.subject, certificate.extensions
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    except UNUSABLE as error:
        raise ValueError(str(error)) from None
    return certificate


def _load_certificate(path: Path, remedy: str) -> x509.Certificate:
    try:
        return _read_certificate(path.read_bytes())
    except FileNotFoundError:
        raise IdentityError(f"{path}: there is no such file; {remedy}") from None
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path}: is not a certificate (PEM): {error}; {remedy}") from None


def _load_tls_key(path: Path, remedy: str = "make keys first") -> ec.EllipticCurvePrivateKey:
    key = _load_private(path, remedy)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{path}: is not an elliptic curve key; {remedy}")
    return key


def _load_private(path: Path, remedy: str) -> _PrivateKey:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise IdentityError(f"{path}: others can read this private key; run `chmod 600 {path}`")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise IdentityError(f"{path}: there is no such file; {remedy}") from None
    except (OSError, *UNUSABLE) as error:
        raise IdentityError(f"{path}: is not a private key (PEM): {error}") from None
    return cast("_PrivateKey", key)


def _write_private(path: Path, key: _PrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise IdentityError(
            f"{path}: exists already (or its folder is a file) and is not overwritten; move it away first"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"{path}: cannot be written: {error.strerror}; check the folder's owner and space"
        ) from None


def _write_public(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.chmod(0o644)  # whatever the umask: the other party's account has to read it
        partial.replace(path)
    except OSError as error:
        raise IdentityError(
            f"{path}: cannot be written: {error.strerror}; check the folder's owner and space"
        ) from None
