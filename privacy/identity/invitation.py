"""An invitation: the one line with which a hospital enrols, and what it proves with it.

    medsilo:1/HOST:PORT/ENROLMENT-PORT/FEDERATION/COORDINATOR/HOSPITAL/CA-SHA256/CODE/EXPIRES

The hospital believes whoever answers at that address only if the federation's CA has that fingerprint. The code, 128
random bits, never travels again: it gives an Ed25519 key, of which the coordinator keeps the public half alone. What
the hospital signs with it names its certificate request and its audit key, so nobody between the two can put other
keys in their place, and nobody who reads the coordinator's disk can enrol.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, ValidationError
from securesystemslib import dsse

from medsilo.privacy.errors import ConfigurationError, IdentityError, JournalError, RefusedError
from medsilo.privacy.files.configuration import StrictModel
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.identity.envelope import countersign, seal, unseal
from medsilo.privacy.identity.identity import Identity

ENROLMENT = "application/vnd.medsilo.enrolment+json"
_SCHEME = "medsilo:1"
_CODE_BYTES = 16
_CODE = re.compile(r"[a-z2-7]{26}")
_PARTS = 9
_HEX32 = r"^[0-9a-f]{64}$"
_TIME = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True)
class Invitation:
    """``host`` and ``port``: of the coordinator; ``enrolment_port``: where it enrols. ``ca_sha256``: hex. ``expires``:
    UTC, to the second."""

    host: str
    port: int
    enrolment_port: int
    federation: str
    coordinator: str
    silo: str
    ca_sha256: str
    code: str
    expires: datetime

    @property
    def line(self) -> str:
        """As it is sent to the hospital."""
        address = f"{_bracketed(self.host)}:{self.port}/{self.enrolment_port}"
        names = f"{self.federation}/{self.coordinator}/{self.silo}"
        return f"{_SCHEME}/{address}/{names}/{self.ca_sha256}/{self.code}/{self.expires:{_TIME}}"

    @property
    def address(self) -> str:
        """``host:port`` of the coordinator."""
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def enrolment_address(self) -> str:
        """``host:port`` of its enrolment."""
        return f"{_bracketed(self.host)}:{self.enrolment_port}"

    @property
    def coordinator_identity(self) -> Identity:
        """Who has to answer."""
        return Identity(self.federation, "coordinator", self.coordinator)

    @property
    def silo_identity(self) -> Identity:
        """Who is invited."""
        return Identity(self.federation, "silo", self.silo)

    @property
    def key(self) -> Ed25519PrivateKey:
        """What the code gives: HKDF-SHA-256 (RFC 5869) over its 16 bytes, bound to the invited identity."""
        code = base64.b32decode(self.code.upper() + "=" * 6)
        derived = HKDF(SHA256(), 32, salt=None, info=f"medsilo enrolment {self.silo_identity.uri}".encode())
        return Ed25519PrivateKey.from_private_bytes(derived.derive(code))

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads the line; spaces and line breaks, as mail programs add them, do no harm.

        Raises ``ConfigurationError`` for what is no invitation, or was cut on its way.
        """
        parts = "".join(line.split()).strip("'\"").split("/")
        if parts[0] != _SCHEME:
            raise ConfigurationError(
                f"{line.strip()[:60]!r} is not an invitation; it is the line beginning with {_SCHEME}/ that "
                "`coordinator invite` prints"
            )
        try:
            if len(parts) != _PARTS:
                raise ValueError(f"it has {len(parts)} parts between slashes of {_PARTS}")
            address, enrolment_port, federation, coordinator, silo, ca, code, expires = parts[1:]
            host, port = split_address(address)
            if re.fullmatch(_HEX32, ca) is None or _CODE.fullmatch(code) is None:
                raise ValueError("a part of it was changed")
            found = cls(
                host=host,
                port=port,
                enrolment_port=_port(enrolment_port),
                federation=federation,
                coordinator=coordinator,
                silo=silo,
                ca_sha256=ca,
                code=code,
                expires=datetime.strptime(expires, _TIME).replace(tzinfo=UTC),
            )
            _ = found.silo_identity, found.coordinator_identity, found.key
        except (ValueError, IdentityError) as error:
            raise ConfigurationError(
                f"the invitation is damaged ({error}); copy the whole line, or ask for another (`coordinator invite`)"
            ) from None
        return found


def new_code() -> str:
    """A one-time code of 128 random bits, as 26 letters and digits."""
    return base64.b32encode(secrets.token_bytes(_CODE_BYTES)).decode().rstrip("=").lower()


class Statement(StrictModel):
    """What a hospital signs with the invitation's key and its audit key.

    ``request_sha256``: of the certificate request's bytes. ``audit_key``: Ed25519, hex. ``ca_sha256``: of the CA's
    certificate that it trusts.
    """

    v: Literal[1] = 1
    silo: str = Field(max_length=300)
    coordinator: str = Field(max_length=300)
    ca_sha256: str = Field(pattern=_HEX32)
    request_sha256: str = Field(pattern=_HEX32)
    audit_key: str = Field(pattern=_HEX32)

    @classmethod
    def sign(cls, invitation: Invitation, request: bytes, audit_key: Ed25519PrivateKey) -> dsse.Envelope:
        """The statement for a certificate request."""
        statement = cls(
            silo=invitation.silo_identity.uri,
            coordinator=invitation.coordinator_identity.uri,
            ca_sha256=invitation.ca_sha256,
            request_sha256=hashlib.sha256(request).hexdigest(),
            audit_key=audit_key.public_key().public_bytes_raw().hex(),
        )
        envelope = seal(statement.model_dump(), ENROLMENT, invitation.key)
        countersign(envelope, audit_key)
        return envelope

    @classmethod
    def open(cls, envelope: dsse.Envelope, public_key: bytes) -> Statement:
        """Raises ``RefusedError`` unless it is signed with the invitation's key and with the audit key that it "
        "names."""
        try:
            found = cls.model_validate(unseal(envelope, ENROLMENT, public_key))
            unseal(envelope, ENROLMENT, bytes.fromhex(found.audit_key))
        except (JournalError, ValidationError):
            raise RefusedError("the invitation's code is wrong") from None
        return found


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{text!r} is not a port")
    return int(text)
