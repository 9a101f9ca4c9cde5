"""What is signed with Ed25519, and how: checkpoints (C2SP's signed notes), cosignatures, and documents (DSSE)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from .form import HEX32
from .result import EvidenceError

ATTESTATION = "application/vnd.medsilo.attestation+json"
ROTATION = "application/vnd.medsilo.key-rotation+json"
MOST_SIGNS = 16_000
"""How long a note's signatures may be: there is room for those of many witnesses."""
_MOST_SIGNATURES = 64
_ED25519, _COSIGNATURE = b"\x01", b"\x04"


class Checks(Protocol):
    """Where signatures and canonical form are checked."""

    def signature(self, public_key: bytes, signature: bytes, data: bytes) -> None:
        """Raises ``InvalidSignature``, or ``ValueError`` for what is no public key."""

    def document(self, data: bytes) -> Any:
        """The document in canonical JSON; raises ``ValueError`` for any other spelling."""


class Here:
    """Checks in their place."""

    def signature(self, public_key: bytes, signature: bytes, data: bytes) -> None:
        _loaded(public_key).verify(signature, data)

    def document(self, data: bytes) -> Any:
        try:
            found = json.loads(data.decode())
            canonical = rfc8785.dumps(found)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if canonical != data:
            raise ValueError("it is not in canonical form (RFC 8785)")
        return found


HERE = Here()


@lru_cache(maxsize=1024)
def _loaded(public_key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key)


@dataclass(frozen=True)
class Checkpoint:
    """A journal's size and root hash at one moment; ``origin`` names the journal."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """The part that is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


@lru_cache(maxsize=256)
def read_note(note: str) -> Checkpoint:
    """The checkpoint of a note, its signature unseen; raises ``EvidenceError`` if it is malformed."""
    lines = note.split("\n", 5)
    try:
        if len(lines) < 5 or lines[3]:
            raise ValueError("it does not have the three lines of a checkpoint and a signature")
        checkpoint = Checkpoint(lines[0], int(lines[1]), decoded(lines[2]))
        if not note.startswith(checkpoint.text() + "\n"):
            raise ValueError("it is not in canonical form")
        if not 0 <= checkpoint.size < 2**53 or len(checkpoint.root) != 32 or not checkpoint.origin:
            raise ValueError("it does not name a journal, its size and its root hash")
    except ValueError as error:
        raise EvidenceError(f"the checkpoint cannot be used: {error}") from None
    return checkpoint


def verify_note(note: str, public_key: bytes, checks: Checks) -> None:
    """Raises ``EvidenceError`` unless a note has a signature of its origin's with that key, and it holds.

    It may carry further signatures, of witnesses, with other keys: nothing is said of these here.
    """
    checkpoint = read_note(note)
    lines = note[len(checkpoint.text()) + 1 :]
    try:
        if len(lines) > MOST_SIGNS or lines.count("\n") > _MOST_SIGNATURES:
            raise ValueError("it has more signatures than a note may have")
        if not lines.endswith("\n"):
            raise ValueError("it does not end with a signature")
        found = [blob for name, blob in map(_signature_line, lines[:-1].split("\n")) if name == checkpoint.origin]
        if not found:
            raise ValueError(f"it has no signature by {checkpoint.origin}")
        name = _key_hash(checkpoint.origin, public_key, _ED25519)
        own = [blob[4:] for blob in found if blob[:4] == name]
        if not own:
            raise ValueError("it was not signed with this key")
        for signature in own:
            checks.signature(public_key, signature, checkpoint.text().encode())
    except ValueError as error:
        raise EvidenceError(f"the checkpoint cannot be used: {error}") from None
    except InvalidSignature:
        raise EvidenceError(f"the checkpoint's signature does not hold for {checkpoint.origin}") from None


def verify_cosignature(line: str, note: str, name: str, public_key: bytes, checks: Checks) -> None:
    """Raises ``EvidenceError`` unless ``line`` is a cosignature of ``name`` under a note (C2SP's tlog-cosignature)."""
    try:
        found, blob = _signature_line(line)
        if found != name:
            raise ValueError(f"it has no signature by {name}")
        if blob[:4] != _key_hash(name, public_key, _COSIGNATURE) or len(blob) != 76:
            raise ValueError("it was not made with this key")
        text, time = note.partition("\n\n")[0], int.from_bytes(blob[4:12], "big")
        checks.signature(public_key, blob[12:], f"cosignature/v1\ntime {time}\n{text}\n".encode())
    except ValueError as error:
        raise EvidenceError(f"the cosignature of {name} cannot be used: {error}") from None
    except InvalidSignature:
        raise EvidenceError(f"the cosignature of {name} is not for this checkpoint") from None


def key_id(public_key: bytes) -> str:
    """How envelopes and people name a key: SHA-256 of its 32 bytes, as hex."""
    return hashlib.sha256(public_key).hexdigest()


def public_key(text: Any) -> bytes:
    """A public key from its hexadecimal digits; raises ``ValueError``."""
    if not isinstance(text, str) or HEX32.fullmatch(text) is None:
        raise ValueError("a public key should be 64 hexadecimal digits")
    return bytes.fromhex(text)


def payload_of(envelope: Any) -> tuple[str, bytes, dict[str, bytes]]:
    """Type, payload and signatures (by key) of a DSSE envelope; raises ``EvidenceError`` for any other form."""
    try:
        signatures = {one["keyid"]: decoded(one["sig"]) for one in envelope["signatures"]}
        kind, payload = envelope["payloadType"], decoded(envelope["payload"])
        same = envelope == {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": kind,
            "signatures": [{"keyid": k, "sig": base64.b64encode(v).decode()} for k, v in signatures.items()],
        }
    except (KeyError, TypeError, ValueError):
        same = False
    if not same or not isinstance(kind, str):
        raise EvidenceError("a signed document is not a DSSE envelope")
    return kind, payload, signatures


def unseal(envelope: Any, payload_type: str, public_key: bytes, checks: Checks) -> dict[str, Any]:
    """The document in an envelope; raises ``EvidenceError`` if it is not one of that type, signed with that key."""
    kind, payload, signatures = payload_of(envelope)
    if kind != payload_type:
        raise EvidenceError(f"the signed document is of type {kind!r}, not {payload_type!r}")
    name = kind.encode()
    signed = b"DSSEv1 %d %b %d %b" % (len(name), name, len(payload), payload)
    try:
        checks.signature(public_key, signatures[key_id(public_key)], signed)
    except (InvalidSignature, KeyError, ValueError):
        raise EvidenceError(f"the signature does not hold for the audit key {key_id(public_key)[:16]}…") from None
    try:
        document = checks.document(payload)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise EvidenceError("the signed document is not a JSON object in canonical form (RFC 8785)")
    return document


def follow(statement: Mapping[str, Any], party: str, known: bytes, checks: Checks) -> bytes:
    """The key to which a party's signed change of keys leads from the known one.

    Raises ``EvidenceError`` unless both keys have signed it, for that party.
    """
    document = unseal(statement, ROTATION, known, checks)
    new = document.get("new_key")
    if not isinstance(new, str) or HEX32.fullmatch(new) is None:
        raise EvidenceError("the signed change of keys names no new key")
    unseal(statement, ROTATION, bytes.fromhex(new), checks)
    if document.get("party") != party:
        raise EvidenceError(f"the signed change of keys is not one of {party:.200}")
    if document.get("old_key", known.hex()) != known.hex():
        raise EvidenceError("the signed change of keys is from another key")
    return bytes.fromhex(new)


def decoded(text: str) -> bytes:
    """What base64 stands for; raises ``ValueError``."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("it is not base64") from None


def _signature_line(line: str) -> tuple[str, bytes]:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.rpartition(" ")
    if dash != "—" or not name:
        raise ValueError("it has a line that is no signature")
    blob = decoded(encoded)
    if base64.b64encode(blob).decode() != encoded or len(blob) < 5:
        raise ValueError("its signature is not in canonical base64")
    return name, blob


def _key_hash(name: str, public_key: bytes, kind: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + kind + public_key).digest()[:4]
