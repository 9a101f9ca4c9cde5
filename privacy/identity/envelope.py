"""Signed documents: canonical JSON (RFC 8785) in a DSSE envelope, signed with a party's Ed25519 audit key."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib import dsse
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey  # type: ignore[attr-defined]

from medsilo.privacy.errors import JournalError
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.identity.checking import HERE, Checks
from medsilo.protos.medsilo.v1 import journal_pb2

ATTESTATION = "application/vnd.medsilo.attestation+json"
ROTATION = "application/vnd.medsilo.key-rotation+json"


def key_id(public_key: bytes) -> str:
    """How envelopes name a key: SHA-256 of its 32 bytes, as hex."""
    return hashlib.sha256(public_key).hexdigest()


def seal(document: Mapping[str, Any], payload_type: str, key: Ed25519PrivateKey) -> dsse.Envelope:
    """The document, signed."""
    envelope = dsse.Envelope(write_canonical(dict(document)), payload_type, {})
    countersign(envelope, key)
    return envelope


def countersign(envelope: dsse.Envelope, key: Ed25519PrivateKey) -> None:
    """Adds another key's signature."""
    envelope.sign(CryptoSigner(key, _public(key.public_key().public_bytes_raw())))


def unseal(envelope: dsse.Envelope, payload_type: str, public_key: bytes, *, checks: Checks = HERE) -> dict[str, Any]:
    """The document in an envelope; raises ``JournalError`` if it is not one of that type, signed with that key."""
    if envelope.payload_type != payload_type:
        raise JournalError(f"the signed document is of type {envelope.payload_type!r}, not {payload_type!r}")
    try:
        # As ``envelope.verify`` of securesystemslib does it for one key, which costs half as much again.
        signature = bytes.fromhex(envelope.signatures[key_id(public_key)].signature)
        checks.signature(public_key, signature, envelope.pae())
    except (InvalidSignature, KeyError, ValueError):
        raise JournalError(f"the signature does not hold for the audit key {key_id(public_key)[:16]}…") from None
    try:
        document = checks.document(envelope.payload)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise JournalError("the signed document is not a JSON object in canonical form (RFC 8785)")
    return document


def to_message(envelope: dsse.Envelope) -> journal_pb2.Envelope:
    """The envelope as it travels."""
    return journal_pb2.Envelope(
        payload=envelope.payload,
        payload_type=envelope.payload_type,
        signatures=[
            journal_pb2.Signature(keyid=name, sig=bytes.fromhex(signature.signature))
            for name, signature in envelope.signatures.items()
        ],
    )


def from_message(message: journal_pb2.Envelope) -> dsse.Envelope:
    """The envelope in a message."""
    signatures = {item.keyid: Signature(item.keyid, item.sig.hex()) for item in message.signatures}
    return dsse.Envelope(message.payload, message.payload_type, signatures)


def to_json(envelope: dsse.Envelope) -> dict[str, Any]:
    """The envelope in DSSE's own JSON form."""
    found: dict[str, Any] = envelope.to_dict()
    return found


def from_json(content: Any) -> dsse.Envelope:
    """The envelope in its JSON form; raises ``JournalError`` if it is not in that form, exactly."""
    try:
        signatures = {s["keyid"]: Signature(s["keyid"], _decoded(s["sig"]).hex()) for s in content["signatures"]}
        envelope = dsse.Envelope(_decoded(content["payload"]), content["payloadType"], signatures)
        same = envelope.to_dict() == content
    except (KeyError, TypeError, ValueError, binascii.Error, AttributeError):
        same = False
    if not same:
        raise JournalError("a signed document is not a DSSE envelope")
    return envelope


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _public(raw: bytes) -> SSlibKey:
    return SSlibKey(key_id(raw), "ed25519", "ed25519", {"public": raw.hex()})
