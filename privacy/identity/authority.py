"""A federation's certificate authority: makes it, and issues the parties' certificates."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import NameOID

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.certificates import CLOCK_SKEW, USAGES, fingerprint, load_certificate, single_uri
from medsilo.privacy.identity.identity import LONGEST_NAME, Identity, Role
from medsilo.privacy.identity.keys import UNUSABLE, create_keys, load_tls_key, write_private, write_public


def create_authority(directory: Path, federation: str, *, days: int = 3650) -> Path:
    """Makes a federation's CA (``ca.key``, ``ca.pem``); returns the certificate's path. Overwrites nothing."""
    Identity(federation, "coordinator", "ca")
    path = directory / "ca.pem"
    if path.exists():
        raise IdentityError(f"{path}: exists already and is not overwritten; move it away first, with its ca.key")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{federation} federation CA"[:LONGEST_NAME])])
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
    write_private(directory / "ca.key", key)
    write_public(path, certificate.public_bytes(serialization.Encoding.PEM))
    return path


def authority_of(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, str]:
    """The CA in a folder: its certificate, its key and its federation; raises ``IdentityError`` if they do not fit."""
    ca = load_certificate(directory / "ca.pem", "make a CA with `coordinator ca init`")
    ca_key = load_tls_key(directory / "ca.key")
    if ca_key.public_key() != ca.public_key():
        raise IdentityError(
            f"{directory / 'ca.key'}: is not the key of {directory / 'ca.pem'}; put back the two files that "
            "`coordinator ca init` made together"
        )
    return ca, ca_key, single_uri(ca, directory / "ca.pem").removeprefix("spiffe://")


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
    identity = Identity.parse(single_uri(asked, request))
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
        .add_extension(x509.ExtendedKeyUsage([USAGES[identity.role]]), critical=False)
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
    write_public(out, pem)
    return identity


def issue_to_operator(authority: Path, name: str, out: Path, *, password: str, days: int = 365) -> Identity:
    """Makes a key and a certificate for a person, and writes both as PKCS #12, encrypted with the password.

    Raises ``IdentityError`` for a CA or a name that cannot be used, a file that exists, or an empty password.
    """
    if not password:
        raise IdentityError("the file holds a private key; give it a password")
    if out.exists():
        raise IdentityError(f"{out}: exists already and is not overwritten; move it away first")
    ca = load_certificate(authority / "ca.pem", "make a CA with `coordinator ca init`")
    federation = single_uri(ca, authority / "ca.pem").removeprefix("spiffe://")
    identity = Identity(federation, "operator", name)
    with tempfile.TemporaryDirectory() as folder:
        keys = create_keys(Path(folder), identity)
        certificate = Path(folder) / "tls.pem"
        issue(authority, name, keys.request, certificate, role="operator", days=days)
        content = pkcs12.serialize_key_and_certificates(
            identity.uri.encode(),
            load_tls_key(keys.tls_key),
            x509.load_pem_x509_certificate(certificate.read_bytes()),
            [ca],
            serialization.BestAvailableEncryption(password.encode()),
        )
    write_atomically(out, content, mode=0o600)
    return identity


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
        replaced = single_uri(x509.load_pem_x509_certificate(out.read_bytes()), out)
    except (OSError, ValueError, IdentityError):
        replaced = ""
    if replaced != identity.uri:
        raise IdentityError(
            f"{out}: exists already, is not a certificate of {identity.uri} and is not overwritten; choose another "
            "file with --out"
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
        .not_valid_before(now - CLOCK_SKEW)
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
