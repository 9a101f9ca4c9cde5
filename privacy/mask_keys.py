"""Who masks with whom: certified mask keys, and the roster of a round.

A silo that is ready to send its update of a round makes an X25519 key and states so in a DSSE envelope with two
signatures: by its audit key, which it answers to in its journal, and by the TLS key that the federation's CA has
certified in its name. So a coordinator alone cannot invent a silo, nor put its own key in a silo's place. Whoever runs
the CA can: against that, a hospital names the others' audit keys in its consent.

The roster is all statements of a round's silos; its hash goes into every mask, so that silos which were shown
different rosters do not cancel each other's masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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

from privacy.canonical import read_canonical
from privacy.configuration import StrictModel, explain
from privacy.envelope import key_id, seal, to_json, unseal
from privacy.errors import IdentityError, JournalError, RefusedError
from privacy.masking import mask, pair_keys
from privacy.pki import Credentials, Identity, fingerprint, identity_of_certificate

MASK_KEY = "application/vnd.medsilo.mask-key+json"
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MaskKeyStatement(StrictModel):
    """What a silo states about its mask key of one round: X25519, 32 bytes as hex.

    ``received_sha256``: of the models that the coordinator gave the silo to train from. ``audit_key``: the key of the
    statement's one signature (Ed25519). ``certificate``: the silo's own (PEM), whose key is the other's.
    """

    v: Literal[1] = 1
    silo: str
    run: str
    plan_sha256: _Hex32
    round: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    mask_key: _Hex32
    received_sha256: _Hex32
    audit_key: _Hex32
    certificate: Annotated[str, Field(max_length=10_000)]


@dataclass(frozen=True)
class Occasion:
    """The round of a run that mask keys are for."""

    federation: str
    run: str
    plan_sha256: bytes
    round: int


@dataclass(frozen=True)
class CertifiedKey:
    """A silo's mask key as its checked statement gives it."""

    silo: str
    round: int
    mask_key: bytes
    received_sha256: str
    audit_key: bytes
    envelope: dsse.Envelope

    @property
    def digest(self) -> bytes:
        """SHA-256 of the signed statement."""
        return hashlib.sha256(self.envelope.pae()).digest()


def certify(
    private: X25519PrivateKey,
    occasion: Occasion,
    received_sha256: bytes,
    *,
    credentials: Credentials,
    audit_key: Ed25519PrivateKey,
) -> CertifiedKey:
    """This silo's statement of its mask key, signed with its audit key and with its certificate's.

    ``received_sha256``: of the models that it was given to train from.
    """
    public = private.public_key().public_bytes_raw()
    audit_public = audit_key.public_key().public_bytes_raw()
    statement = MaskKeyStatement(
        silo=credentials.identity.uri,
        run=occasion.run,
        plan_sha256=occasion.plan_sha256.hex(),
        round=occasion.round,
        mask_key=public.hex(),
        received_sha256=received_sha256.hex(),
        audit_key=audit_public.hex(),
        certificate=credentials.certificate_pem.decode(),
    )
    envelope = seal(statement.model_dump(mode="json"), MASK_KEY, audit_key)
    tls_key = serialization.load_pem_private_key(credentials.private_key_pem, None)
    assert isinstance(tls_key, ec.EllipticCurvePrivateKey)
    name = fingerprint(credentials.certificate_pem)
    envelope.signatures[name] = Signature(name, tls_key.sign(envelope.pae(), ec.ECDSA(hashes.SHA256())).hex())
    return CertifiedKey(
        credentials.identity.name, occasion.round, public, received_sha256.hex(), audit_public, envelope
    )


def read_certified(envelope: dsse.Envelope, occasion: Occasion, *, ca_pem: bytes) -> CertifiedKey:
    """The mask key in a statement; raises ``RefusedError`` unless it is a silo's of this federation, for this round,
    and both signatures and the certificate hold."""
    try:
        statement = MaskKeyStatement.model_validate(read_canonical(envelope.payload))
        audit_key = bytes.fromhex(statement.audit_key)
        unseal(envelope, MASK_KEY, audit_key)
        pem = statement.certificate.encode()
        identity, tls_key = _certified(pem, ca_pem)
        tls_key.verify(
            bytes.fromhex(envelope.signatures[fingerprint(pem)].signature), envelope.pae(), ec.ECDSA(hashes.SHA256())
        )
    except ValidationError as error:
        raise RefusedError(f"a mask key's statement: {'; '.join(explain(error, MaskKeyStatement))}") from None
    except (InvalidSignature, KeyError, ValueError, RecursionError):
        raise RefusedError("a mask key's statement is not signed with the key of its certificate") from None
    except (IdentityError, JournalError) as error:
        raise RefusedError(f"a mask key's statement: {error}") from None
    if identity.uri != statement.silo or (identity.federation, identity.role) != (occasion.federation, "silo"):
        raise RefusedError(f"a mask key's statement names {statement.silo}, its certificate {identity.uri}")
    if (statement.run, statement.plan_sha256, statement.round) != (
        occasion.run,
        occasion.plan_sha256.hex(),
        occasion.round,
    ):
        raise RefusedError(f"the mask key of {identity.name} is for another run or round")
    return CertifiedKey(
        identity.name,
        occasion.round,
        bytes.fromhex(statement.mask_key),
        statement.received_sha256,
        audit_key,
        envelope,
    )


def round_of(envelope: dsse.Envelope) -> int:
    """The round that an unchecked statement names; raises ``RefusedError`` if it names none."""
    try:
        return int(read_canonical(envelope.payload)["round"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RefusedError("a mask key's statement names no round") from None


@lru_cache(maxsize=1024)
def _certified(pem: bytes, ca_pem: bytes) -> tuple[Identity, ec.EllipticCurvePublicKey]:
    """A certificate's identity and key. Remembered: silos show the same one every round; a certificate that expires
    while a daemon runs is turned away by TLS."""
    identity = identity_of_certificate(pem, ca_pem)
    key = x509.load_pem_x509_certificate(pem).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise IdentityError(f"the certificate of {identity.uri} has no elliptic curve key")
    return identity, key


class Roster:
    """The silos that mask a round together, by name. Raises ``RefusedError`` if one is in it twice."""

    def __init__(self, keys: Iterable[CertifiedKey]) -> None:
        self.keys: Mapping[str, CertifiedKey] = {key.silo: key for key in sorted(keys, key=lambda key: key.silo)}
        self.sha256 = hashlib.sha256(b"".join(key.digest for key in self.keys.values())).digest()

    @classmethod
    def read(cls, envelopes: Sequence[dsse.Envelope], occasion: Occasion, *, ca_pem: bytes) -> Roster:
        """A roster as it came; raises ``RefusedError`` if a statement does not hold, or a silo stands in it twice."""
        keys = [read_certified(envelope, occasion, ca_pem=ca_pem) for envelope in envelopes]
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

    def mask(self, own: CertifiedKey, private: X25519PrivateKey, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Values that only the sum over the whole roster gives away. One roster masks one vector of each silo."""
        others = {name: key.mask_key for name, key in self.keys.items() if name != own.silo}
        return mask(values, pair_keys(own.silo, private, others, self.sha256))

    def describe(self) -> dict[str, Any]:
        """The roster as it stands in a journal."""
        return {"silos": list(self.silos), "roster_sha256": self.sha256.hex()}

    def statements(self) -> list[dict[str, Any]]:
        """The silos' signed statements, for the journal."""
        return [to_json(key.envelope) for key in self.keys.values()]
