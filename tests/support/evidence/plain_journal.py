"""Journals without messages that are evidence all the same: the record of an audit key, and notes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.journal.journal import SEGMENT_BYTES, Journal

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
IDENTITY = "spiffe://test/silo/a"
ORIGIN = "medsilo/test/silo/a"


def open_journal(folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Journal:
    return Journal(folder, key=KEY, origin=ORIGIN, segment_bytes=segment_bytes)


def plain_record(number: int, **content: Any) -> dict[str, Any]:
    """Record 0 of a journal names its key."""
    kind = {"kind": "note"} if number else {"kind": "key", "public_key": PUBLIC.hex(), "origin": ORIGIN}
    return {**kind, "federation": "test", "self": IDENTITY, "number": number, **content}


def verified(folder: Path) -> tuple[int, int]:
    """How many records a sound journal holds, and how many of them its last checkpoint covers."""
    found = verify_evidence(folder, key=PUBLIC)
    assert found.sound, found.problem
    return found.records, found.signed
