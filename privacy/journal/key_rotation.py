"""A change of a party's audit key, as a signed record: the earlier key vouches for the new one, and the new one shows
that its owner has it.

Whoever knows the earlier key follows the record to the new one; without it a new key is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from securesystemslib import dsse

from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import ROTATION, countersign, key_id, seal, to_json, unseal
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import load_audit_key, pending_audit_key, replace_audit_key
from medsilo.privacy.journal.journal import Journal, current_key
from medsilo.privacy.journal.records import KeyRotationRecord, content

_KEY = re.compile(r"[0-9a-f]{64}")


def follow(statement: dsse.Envelope, party: str, known: bytes) -> bytes:
    """The audit key (Ed25519, 32 bytes) to which a party's signed change of keys leads from the known one.

    Raises ``JournalError`` unless both keys have signed it, for that party.
    """
    document = unseal(statement, ROTATION, known)
    new = document.get("new_key")
    if not (isinstance(new, str) and _KEY.fullmatch(new)):
        raise JournalError("the signed change of keys names no new key")
    unseal(statement, ROTATION, bytes.fromhex(new))
    if document.get("party") != party:
        raise JournalError(f"the signed change of keys is not one of {party:.200}")
    if document.get("old_key", known.hex()) != known.hex():
        raise JournalError("the signed change of keys is from another key")
    return bytes.fromhex(new)


def successors(
    statements: Iterable[dsse.Envelope], party: str, first: bytes
) -> tuple[list[bytes], list[dsse.Envelope]]:
    """The audit keys to which a party's signed changes lead from the first one, that among them, and these changes.

    A party that signs two changes of one key has two keys from then on: who knows the earlier one follows it to either.
    """
    keys, left = [first], list(statements)
    used: list[dsse.Envelope] = []
    while True:
        for statement, known in itertools.product(left, keys):
            with suppress(JournalError):
                new = follow(statement, party, known)
                break
        else:
            return keys, used
        left.remove(statement)
        used.append(statement)
        if new not in keys:
            keys.append(new)


def rotate(keys: Path, journal: Path, *, origin: str, identity: Identity) -> str:
    """Changes the audit key in a party's folder of keys; returns the new key's id (SHA-256, hex).

    The record is durable before the key is replaced. Interrupted at any moment, the same call goes on. Raises
    ``JournalError`` if there is no journal yet, or a daemon has it open.
    """
    old = load_audit_key(keys / "audit.key")
    known = current_key(journal)
    if known is None:
        raise JournalError(
            f"{journal}: there is no journal yet, so nobody knows the present key; to replace it, move {keys} away and "
            "make keys anew"
        )
    new = pending_audit_key(keys)
    public = new.public_key().public_bytes_raw()
    if known != public:
        document = {
            "v": 1,
            "party": identity.uri,
            "origin": origin,
            "old_key": old.public_key().public_bytes_raw().hex(),
            "new_key": public.hex(),
        }
        statement = seal(document, ROTATION, old)
        countersign(statement, new)
        with Journal(journal, key=old, origin=origin) as log:
            whose = {"federation": identity.federation, "self": identity.uri}
            record = KeyRotationRecord(**whose, public_key=public.hex(), statement=to_json(statement))
            log.append([content(record)])
    replace_audit_key(keys)
    return key_id(public)
