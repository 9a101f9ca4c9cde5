"""The form of a record in evidence that somebody else wrote: of every one, of a message's, and of a roster's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from medsilo.privacy.audit.findings import BrokenError
from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import from_json, to_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.records import MessageRecord, RosterRecord
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.secure_aggregation.mask_keys import Occasion, Roster
from medsilo.protos.medsilo.v1 import journal_pb2

_LARGEST_NUMBER = 2**53
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_HEX16 = re.compile(r"[0-9a-f]{32}")
_HEX32 = re.compile(r"[0-9a-f]{64}")


def check_head(held: Mapping[str, Any], place: int) -> None:
    """Checks what every record has. ``place``: the number that it should have.

    Raises ``BrokenError``, or ``KeyError`` or ``TypeError`` for what has another form.
    """
    index, time = held["index"], held["time"]
    if type(index) is not int or index != place:
        raise BrokenError(place, f"it calls itself record {index!r:.40}")
    if type(held["v"]) is not int or held["v"] != 1:
        raise BrokenError(place, f"its form is version {held['v']!r:.40}, which this release does not know")
    if not (isinstance(held["self"], str) and isinstance(held["federation"], str) and isinstance(held["kind"], str)):
        raise TypeError("self, federation and kind should be text")
    if not isinstance(time, str) or _TIME.fullmatch(time) is None:
        raise BrokenError(place, f"its time {time!r:.40} is not in the form 2026-01-31T12:00:00.000Z")


def check_form(record: MessageRecord) -> None:
    """Raises ``KeyError``, ``ValueError`` or ``TypeError`` unless a message's record is in form."""
    held = vars(record)
    if held["direction"] not in ("sent", "received"):
        raise ValueError("a message is sent or received")
    for name, pattern in (("call_id", _HEX16), ("sha256", _HEX32), ("schema_sha256", _HEX32)):
        if pattern.fullmatch(held[name]) is None:
            raise ValueError(f"{name} should be {'32' if pattern is _HEX16 else '64'} hexadecimal digits")
    for name in ("frame", "length"):
        if type(held[name]) is not int or not 0 <= held[name] < _LARGEST_NUMBER:
            raise ValueError(f"{name} should be a whole number")
    for name in ("rpc", "peer", "message_type"):
        if not isinstance(held[name], str):
            raise TypeError(f"{name} should be text")
    for name in ("plan_sha256", "run"):
        if not isinstance(held[name], str | None):
            raise TypeError(f"{name} should be text or null")
    if type(held["round"]) not in (int, type(None)):
        raise TypeError("round should be a whole number or null")
    if not isinstance(held["fields"], dict) or not isinstance(held["classes"], dict):
        raise TypeError("fields and classes should be objects")


def check_bytes(record: MessageRecord, schema: StoredSchema) -> dict[str, int]:
    """The bytes of each exposure class of a message, from those of its fields; raises ``BrokenError`` unless they are
    all of it and what the record says, ``JournalError`` for a field that the schema gives no class."""
    classes = schema.classes(record.message_type, record.fields)
    missing = record.length - sum(classes.values())
    if missing:
        raise BrokenError(record.index, f"{missing} of its {record.length} bytes are unaccounted for")
    if record.classes != classes:
        raise BrokenError(record.index, "its exposure classes are not those of its fields")
    return classes


def check_roster(record: RosterRecord, audit_keys: Collection[bytes]) -> None:
    """Checks a silo's record of a roster: every signature, that all statements are for its run and round and of the
    same models, and that names and hash are theirs. Who issued the certificates the record does not tell.

    ``audit_keys``: the silo's own so far, one of which signed its statement; empty where they are not known.

    Raises ``RefusedError`` or ``JournalError`` that says what does not hold.
    """
    occasion = Occasion(record.federation, record.run, bytes.fromhex(record.plan_sha256), int(record.round))
    messages = [
        journal_pb2.MaskKey(
            statement=to_message(from_json(one["statement"])), voucher=to_message(from_json(one["voucher"]))
        )
        for one in record.statements
    ]
    roster = Roster.read(messages, occasion, ca_pem=None)
    if {"silos": record.silos, "roster_sha256": record.roster_sha256} != roster.describe():
        raise JournalError("the roster's names or hash are not those of its signed statements")
    own = roster.keys.get(Identity.parse(record.self).name)
    if own is None or (audit_keys and own.audit_key not in audit_keys):
        raise JournalError("the roster holds no statement that the journal's owner signed")
    if any(key.received_sha256 != own.received_sha256 for key in roster.keys.values()):
        raise JournalError("the roster's silos were given different models to train from")


def public_key(text: Any) -> bytes:
    if not isinstance(text, str) or _HEX32.fullmatch(text) is None:
        raise ValueError("a public key should be 64 hexadecimal digits")
    return bytes.fromhex(text)
