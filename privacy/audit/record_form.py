"""The signatures in a silo's record of a roster: of its statements, and of the certificates' keys for these."""

from __future__ import annotations

from collections.abc import Collection

from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import from_json, to_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.records import RosterRecord
from medsilo.privacy.secure_aggregation.mask_keys import Occasion, Roster
from medsilo.protos.medsilo.v1 import journal_pb2


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
