"""A party's keys on disk: made, loaded, and the audit key replaced."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.files.durable import fsync_folder
from medsilo.privacy.identity.identity import Identity

_PENDING = "audit.key.next"
_PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


@dataclass(frozen=True)
class KeyPaths:
    """Where a party's keys are: the private ones never leave that folder; the request goes to the CA."""

    tls_key: Path
    request: Path
    audit_key: Path
    audit_public: Path


def create_keys(directory: Path, identity: Identity) -> KeyPaths:
    """Makes a party's TLS key, certificate request and audit key. Overwrites no key.

    Where both keys exist and only the request is missing, the request is made again.
    """
    paths = KeyPaths(directory / "tls.key", directory / "tls.csr", directory / "audit.key", directory / "audit.pub")
    existing = [path for path in (paths.tls_key, paths.audit_key) if path.exists()]
    if len(existing) == 2 and not paths.request.exists():
        tls_key = load_tls_key(paths.tls_key)
        audit_key = load_audit_key(paths.audit_key)
    elif existing:
        raise IdentityError(
            f"{existing[0]} exists already and is not overwritten: certificates and signed records depend on it. To "
            f"renew a certificate send {paths.request} to the CA again; for new keys move the old ones away first"
        )
    else:
        tls_key = ec.generate_private_key(ec.SECP256R1())
        audit_key = Ed25519PrivateKey.generate()
        write_private(paths.tls_key, tls_key)
        write_private(paths.audit_key, audit_key)
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False)
        .sign(tls_key, hashes.SHA256())
    )
    write_public(paths.request, request.public_bytes(serialization.Encoding.PEM))
    _write_audit_public(paths.audit_public, audit_key)
    return paths


def pending_audit_key(directory: Path) -> Ed25519PrivateKey:
    """The audit key that is to follow the present one: made now, or by a change that was interrupted."""
    path = directory / _PENDING
    if not path.exists():
        write_private(path, Ed25519PrivateKey.generate())
    return load_audit_key(path)


def replace_audit_key(directory: Path) -> None:
    """Puts the pending audit key in the place of the present one, which is gone then."""
    key = load_audit_key(directory / _PENDING)
    (directory / _PENDING).replace(directory / "audit.key")
    fsync_folder(directory)
    _write_audit_public(directory / "audit.pub", key)


def load_audit_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs a party's journal; raises ``IdentityError`` if it is missing or others can read it."""
    key = _load_private(path, "make keys with `silo keys` (or `coordinator keys`)")
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{path}: is not an Ed25519 key; audit keys are made by `silo keys`")
    return key


def load_audit_public(path: str | Path) -> bytes:
    """A public audit key (``audit.pub``, PEM): Ed25519, 32 bytes; raises ``IdentityError`` if it is not one.

    >>> from medsilo import load_audit_public
    >>> len(load_audit_public("demo/state/hospital1/keys/audit.pub"))
    32
    """
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
    write_public(
        path,
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    )


UNUSABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What reading a certificate, request or key that is damaged has been seen to raise."""


def load_tls_key(path: Path, remedy: str = "make keys first") -> ec.EllipticCurvePrivateKey:
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


def write_private(path: Path, key: _PrivateKey) -> None:
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


def write_public(path: Path, content: bytes) -> None:
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
