"""Certificates that no longer count, before their time is over: the federation's revocation list (an X.509 CRL).

The list is signed by the federation's CA, so it may come by any way. Whoever reads it keeps to the newest that it has
seen: a file that is damaged, older or gone takes nothing back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.authority import authority_of
from medsilo.privacy.identity.certificates import Credentials, identity_of_certificate, load_credentials
from medsilo.privacy.identity.endpoint import TlsFiles
from medsilo.privacy.identity.identity import Identity, Role
from medsilo.privacy.identity.keys import UNUSABLE

log = logging.getLogger(__name__)

LIST = "ca.crl"


def revoke(authority: Path, name: str, *, role: Role = "silo", serial: str | None = None) -> list[str]:
    """Puts a party's certificates on the CA's list (``ca.crl``); returns their serial numbers (hex).

    All that were issued to it so far, or the one of ``serial``; one that is issued afterwards counts. Raises
    ``IdentityError`` if there is none, or the CA's files cannot be used.
    """
    ca, ca_key, federation = authority_of(authority)
    uri = Identity(federation, role, name).uri
    serials = [line["serial"] for line in _issued(authority / "issued.jsonl") if line["identity"] == uri]
    if serial is not None:
        serials = [found for found in serials if found == serial.lower()]
    if not serials:
        which = (
            "no certificate was issued" if serial is None else f"no certificate of serial number {serial} was issued"
        )
        raise IdentityError(f"{authority / 'issued.jsonl'}: {which} to {uri}; the file says which were, and to whom")
    now = datetime.now(UTC)
    path = authority / LIST
    number, revoked = _read(path, ca) if path.exists() else (0, {})
    for found in serials:
        revoked.setdefault(int(found, 16), now)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now)
        .next_update(ca.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number + 1), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    for found_serial, date in sorted(revoked.items()):
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(found_serial).revocation_date(date).build()
        )
    pem = builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    write_atomically(path, pem, mode=0o644)
    return serials


class LiveCredentials:
    """A party's certificate, key, CA and revocation list, as its files have them now.

    Files that have changed are read again; if they cannot be used (half of them may be there), what was read last
    counts on, and the log says so. Its methods may be called from any thread. Raises ``IdentityError`` as
    ``load_credentials`` does, and for a revocation list that cannot be used.
    """

    def __init__(self, files: TlsFiles, expected: Identity) -> None:
        self._files = files
        self._expected = expected
        self._lock = threading.Lock()
        self._number = 0
        self._revoked: dict[int, datetime] = {}
        self._seen = self._marks()
        self._current = self._load()
        self._take_list()

    @property
    def current(self) -> Credentials:
        """The credentials to use now."""
        with self._lock:
            marks = self._marks()
            if marks != self._seen:
                # Only once for each change, whatever comes of it: a damaged file is not read before every call.
                self._seen = marks
                for read in (self._renew, self._take_list):
                    try:
                        read()
                    except IdentityError as error:
                        log.error("%s; what was read before counts on", error)
            return self._current

    def identify(self, pem: bytes) -> Identity:
        """Whose certificate it is; raises ``IdentityError`` if it is not the CA's, not valid now, or revoked."""
        identity = identity_of_certificate(pem, self.current.ca_pem)
        serial = x509.load_pem_x509_certificate(pem).serial_number
        with self._lock:
            date = self._revoked.get(serial)
        if date is not None:
            raise IdentityError(
                f"the certificate {serial:x} of {identity.uri} was revoked on {date:%Y-%m-%d %H:%M} UTC; ask the "
                "federation's CA why, and for another (`coordinator ca issue`)"
            )
        return identity

    def _load(self) -> Credentials:
        files = self._files
        return load_credentials(ca=files.ca, certificate=files.certificate, key=files.key, expected=self._expected)

    def _renew(self) -> None:
        found = self._load()
        if found != self._current:
            log.info("%s: a new certificate, valid until %s", self._files.certificate, f"{found.not_after:%Y-%m-%d}")
            self._current = found

    def _take_list(self) -> None:
        path = self._files.revoked
        if path is None or not path.exists():
            if self._number:
                raise IdentityError(f"{path}: the revocation list is gone")
            return
        ca = x509.load_pem_x509_certificate(self._current.ca_pem)
        number, revoked = _read(path, ca)
        if number < self._number:
            raise IdentityError(f"{path}: is an older revocation list (number {number}) than the last ({self._number})")
        if number > self._number:
            log.info("%s: %d certificates are revoked", path, len(revoked))
        self._number, self._revoked = number, revoked

    def _marks(self) -> list[Any]:
        """What changes with the files."""
        return [_mark(path) for path in vars(self._files).values() if path is not None]


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, ca: x509.Certificate) -> tuple[int, dict[int, datetime]]:
    """A list's number, and its certificates' serial numbers with when they were revoked."""
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
        if found.issuer != ca.subject or not found.is_signature_valid(ca.public_key()):  # type: ignore[arg-type]
            raise ValueError("it is not signed by the federation's CA")
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        return number, {entry.serial_number: entry.revocation_date_utc for entry in found}
    except (OSError, x509.ExtensionNotFound, *UNUSABLE) as error:
        raise IdentityError(
            f"{path}: is not a revocation list that can be used: {error}; ask the CA for its {LIST}"
        ) from None


def _issued(path: Path) -> Iterator[dict[str, str]]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            yield {name: str(found[name]) for name in ("serial", "identity")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IdentityError(f"{path}: the list of issued certificates cannot be read: {error}") from None
