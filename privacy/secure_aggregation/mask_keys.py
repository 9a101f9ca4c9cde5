"""Who masks with whom: certified mask keys, and the roster of a round.

A silo that is ready to send its update of a round makes an X25519 key and states so in a DSSE envelope, signed with its
audit key, which it answers to in its journal. A second envelope vouches for the audit key: it is signed with the TLS
key that the federation's CA has certified in the silo's name. So a coordinator alone cannot invent a silo, nor put its
own key in a silo's place. Whoever runs the CA can: against that, a hospital's consent names the others' audit keys.

The roster is all statements of a round's silos; its hash goes into every mask, so that silos which were shown
different rosters do not cancel each other's masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from securesystemslib import dsse
from securesystemslib.signer import Signature  # type: ignore[attr-defined]

from medsilo.privacy.errors import IdentityError, JournalError, RefusedError
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.files.configuration import StrictModel, explain
from medsilo.privacy.identity.certificates import Credentials, fingerprint, identity_named_by, identity_of_certificate
from medsilo.privacy.identity.envelope import from_message, key_id, seal, to_json, to_message, unseal
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.secure_aggregation.masking import PairKey, mask, pair_keys
from medsilo.protos.medsilo.v1 import journal_pb2

MASK_KEY = "application/vnd.medsilo.mask-key+json"
VOUCHER = "application/vnd.medsilo.audit-key+json"
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Voucher(StrictModel):
    """What a silo states about its audit key (Ed25519, hex), signed with the key of ``certificate`` (PEM), its own."""

    v: Literal[1] = 1
    silo: str
    audit_key: _Hex32
    certificate: Annotated[str, Field(max_length=10_000)]


class MaskKeyStatement(StrictModel):
    """What a silo states about its mask key (X25519, hex) of one round, signed with its audit key.

    ``received_sha256``: of the models that the coordinator gave the silo to train from.
    """

    v: Literal[1] = 1
    silo: str
    run: str
    plan_sha256: _Hex32
    round: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    mask_key: _Hex32
    received_sha256: _Hex32


@dataclass(frozen=True)
class Occasion:
    """The round of a run that mask keys are for."""

    federation: str
    run: str
    plan_sha256: bytes
    round: int


@dataclass(frozen=True)
class CertifiedKey:
    """A silo's mask key, with the signed statements that it was read from."""

    silo: str
    round: int
    mask_key: bytes
    received_sha256: str
    audit_key: bytes
    statement: dsse.Envelope
    voucher: dsse.Envelope

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the key that signed, and of what it signed."""
        return hashlib.sha256(self.audit_key + self.statement.pae()).digest()

    def to_message(self) -> journal_pb2.MaskKey:
        """The key as it travels."""
        return journal_pb2.MaskKey(statement=to_message(self.statement), voucher=to_message(self.voucher))


def vouch(credentials: Credentials, audit_key: Ed25519PrivateKey) -> dsse.Envelope:
    """The owner's statement of its audit key, signed with its certificate's."""
    voucher = Voucher(
        silo=credentials.identity.uri,
        audit_key=audit_key.public_key().public_bytes_raw().hex(),
        certificate=credentials.certificate_pem.decode(),
    )
    envelope = dsse.Envelope(write_canonical(voucher.model_dump(mode="json")), VOUCHER, {})
    tls_key = serialization.load_pem_private_key(credentials.private_key_pem, None)
    assert isinstance(tls_key, ec.EllipticCurvePrivateKey)
    name = fingerprint(credentials.certificate_pem)
    envelope.signatures[name] = Signature(name, tls_key.sign(envelope.pae(), ec.ECDSA(hashes.SHA256())).hex())
    return envelope


def certify(
    private: X25519PrivateKey,
    occasion: Occasion,
    received_sha256: bytes,
    *,
    identity: Identity,
    audit_key: Ed25519PrivateKey,
    voucher: dsse.Envelope,
) -> CertifiedKey:
    """A silo's statement of its mask key. ``received_sha256``: of the models that it was given to train from.
    ``voucher``: for its audit key."""
    public = private.public_key().public_bytes_raw()
    statement = MaskKeyStatement(
        silo=identity.uri,
        run=occasion.run,
        plan_sha256=occasion.plan_sha256.hex(),
        round=occasion.round,
        mask_key=public.hex(),
        received_sha256=received_sha256.hex(),
    )
    return CertifiedKey(
        silo=identity.name,
        round=occasion.round,
        mask_key=public,
        received_sha256=received_sha256.hex(),
        audit_key=audit_key.public_key().public_bytes_raw(),
        statement=seal(statement.model_dump(mode="json"), MASK_KEY, audit_key),
        voucher=voucher,
    )


def read_certified(message: journal_pb2.MaskKey, occasion: Occasion, *, ca_pem: bytes | None) -> CertifiedKey:
    """The mask key in a message; raises ``RefusedError`` unless it is a silo's of this federation, for this round, and
    both signatures and the certificate hold. Without ``ca_pem`` nobody asks who issued the certificate, and when."""
    statement = from_message(message.statement)
    try:
        identity, audit_key, voucher = _vouched(message.voucher.SerializeToString(), ca_pem)
        document = MaskKeyStatement.model_validate(unseal(statement, MASK_KEY, audit_key))
    except ValidationError as error:
        raise RefusedError(f"a mask key cannot be used: {'; '.join(explain(error, MaskKeyStatement))}") from None
    except (IdentityError, JournalError) as error:
        raise RefusedError(f"a mask key cannot be used: {error}") from None
    if document.silo != identity.uri or (identity.federation, identity.role) != (occasion.federation, "silo"):
        raise RefusedError(f"a mask key is stated by {document.silo}, and vouched for by {identity.uri}")
    if (document.run, document.plan_sha256, document.round) != (
        occasion.run,
        occasion.plan_sha256.hex(),
        occasion.round,
    ):
        raise RefusedError(f"the mask key of {identity.name} is for another run or round")
    return CertifiedKey(
        silo=identity.name,
        round=occasion.round,
        mask_key=bytes.fromhex(document.mask_key),
        received_sha256=document.received_sha256,
        audit_key=audit_key,
        statement=statement,
        voucher=voucher,
    )


def round_of(message: journal_pb2.MaskKey) -> int:
    """The round that an unchecked statement names; raises ``RefusedError`` if it names none."""
    try:
        return int(read_canonical(message.statement.payload)["round"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RefusedError("a mask key's statement names no round") from None


@lru_cache(maxsize=1024)
def _vouched(voucher: bytes, ca_pem: bytes | None) -> tuple[Identity, bytes, dsse.Envelope]:
    """Whose audit key a voucher (as it travels) is for, the key, and the voucher.

    Remembered: silos show the same one every round. A certificate that expires meanwhile is turned away by TLS.
    """
    envelope = from_message(journal_pb2.Envelope.FromString(voucher))
    try:
        document = Voucher.model_validate(read_canonical(envelope.payload))
        pem = document.certificate.encode()
        identity = identity_named_by(pem) if ca_pem is None else identity_of_certificate(pem, ca_pem)
        key = x509.load_pem_x509_certificate(pem).public_key()
        if envelope.payload_type != VOUCHER or not isinstance(key, ec.EllipticCurvePublicKey):
            raise RefusedError("a mask key's audit key is not vouched for")
        signature = bytes.fromhex(envelope.signatures[fingerprint(pem)].signature)
        key.verify(signature, envelope.pae(), ec.ECDSA(hashes.SHA256()))
    except ValidationError as error:
        raise RefusedError(f"a mask key's audit key is not vouched for: {'; '.join(explain(error, Voucher))}") from None
    except (InvalidSignature, KeyError, ValueError, RecursionError):
        raise RefusedError("a mask key's voucher is not signed with the key of its certificate") from None
    if identity.uri != document.silo:
        raise RefusedError(f"a mask key's voucher names {document.silo}, its certificate {identity.uri}")
    return identity, bytes.fromhex(document.audit_key), envelope


class Roster:
    """The silos that mask a round together, by name. Raises ``RefusedError`` if one is in it twice."""

    def __init__(self, keys: Iterable[CertifiedKey]) -> None:
        self.keys: Mapping[str, CertifiedKey] = {key.silo: key for key in sorted(keys, key=lambda key: key.silo)}
        self.sha256 = hashlib.sha256(b"".join(key.digest for key in self.keys.values())).digest()

    @classmethod
    def read(cls, messages: Iterable[journal_pb2.MaskKey], occasion: Occasion, *, ca_pem: bytes | None) -> Roster:
        """A roster as it came; raises ``RefusedError`` if a statement does not hold, or a silo stands in it twice."""
        keys = [read_certified(message, occasion, ca_pem=ca_pem) for message in messages]
        for what, values in (("silo", [k.silo for k in keys]), ("key", [k.mask_key for k in keys])):
            if len(set(values)) != len(values):
                raise RefusedError(f"a {what} stands in the roster twice")
        return cls(keys)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def silos(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.keys)

    def check(self, own: CertifiedKey, *, minimum: int, audit_keys: Mapping[str, str]) -> None:
        """Raises ``RefusedError`` unless it holds this silo's present key and at least ``minimum`` silos, all of which
        were given the same models; where ``audit_keys`` names others' (SHA-256, hex, by name), only those, with those
        keys.

        That silos were given the same defends against Pasquini, Francati and Ateniese, "Eluding Secure Aggregation in
        Federated Learning via Model Inconsistency" (CCS 2022).
        """
        mine = self.keys.get(own.silo)
        if mine is None or mine.digest != own.digest:
            raise RefusedError(f"the roster does not hold the mask key that {own.silo} gave last")
        if len(self) < minimum:
            raise RefusedError(f"the roster has {len(self)} silos ({', '.join(self.silos)}); {minimum} are the least")
        for name, key in self.keys.items():
            if key.received_sha256 != own.received_sha256:
                raise RefusedError(
                    f"{name} was given another model to train from than {own.silo}: with models made for that, a "
                    "coordinator can make one silo's part stand out in the sum"
                )
        if not audit_keys:
            return
        for name, key in self.keys.items():
            if name != own.silo and audit_keys.get(name) != key_id(key.audit_key):
                raise RefusedError(
                    f"the roster holds {name} with the audit key {key_id(key.audit_key)}, which the consent does not "
                    "name (`secure_aggregation: audit_keys:`). Ask that hospital itself for its key; nothing is sent"
                )

    def pairs(self, own: CertifiedKey, private: X25519PrivateKey) -> dict[str, PairKey]:
        """A silo's keys with each other one of the roster, by name."""
        others = {name: key.mask_key for name, key in self.keys.items() if name != own.silo}
        return dict(zip(others, pair_keys(own.silo, private, others, self.sha256), strict=True))

    def mask(self, own: CertifiedKey, private: X25519PrivateKey, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Values that only the sum over the whole roster gives away. One roster masks one vector of each silo."""
        return mask(values, self.pairs(own, private).values())

    def describe(self) -> dict[str, Any]:
        """The roster as it stands in a journal."""
        return {"silos": list(self.silos), "roster_sha256": self.sha256.hex()}

    def statements(self) -> list[dict[str, Any]]:
        """The silos' signed statements, for the journal."""
        return [{"statement": to_json(key.statement), "voucher": to_json(key.voucher)} for key in self.keys.values()]
