"""Gossip: what a coordinator has shown of its journal to one hospital, told to the others in that hospital's own word.

Each hospital cosigns the checkpoints that it is shown. The coordinator hands these lines on, each with the proof that
the journal which it shows here continues what it showed there. It cannot make up such a line, nor the proof where the
two are not one journal: so a hospital that is shown a second one finds out with the next message, and stops. What a
coordinator leaves out nobody sees; whose word came last, and when, ``audit verify`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medsilo.privacy.door.attestation import Shown
from medsilo.privacy.errors import ReceiptError
from medsilo.privacy.identity.identity import is_silo
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note, verify, verify_cosignature
from medsilo.privacy.journal.merkle import EMPTY_ROOT, check_consistency, proven_beginning

_SCHEME = "spiffe://"


@dataclass(frozen=True)
class Word:
    """A hospital's word on the own journal: that it was shown ``note``, and its line under that. ``key``: its audit
    key."""

    party: str
    key: bytes
    note: str
    cosignature: str

    @property
    def size(self) -> int:
        """How many records the checkpoint covers."""
        return read_note(self.note).size

    def shown(self, proof: Sequence[bytes]) -> Shown:
        """It for another hospital; ``proof``: that the own checkpoint there continues this one."""
        return Shown(
            party=self.party,
            public_key=self.key.hex(),
            checkpoint=self.note,
            cosignature=self.cosignature,
            proof=tuple(node.hex() for node in proof),
        )


@dataclass(frozen=True)
class Heard:
    """A hospital's word that came through a coordinator: ``size`` of the journal that it was shown, by ``time``
    (seconds since 1970, by its own clock)."""

    size: int
    time: int


class ForkError(ReceiptError):
    """The other side shows another journal here than elsewhere. ``proof``: what proves that to anyone
    (``medsilo.privacy.audit.fork_proof``), where what it said suffices; else None."""

    def __init__(self, what: str, proof: Mapping[str, Any] | None) -> None:
        super().__init__(what)
        self.proof = proof


def check_shown(shown: Shown, *, own: str, peer: str, peer_key: bytes, here: str) -> Heard:
    """Checks what ``peer`` says that it showed another hospital against the checkpoint that it shows ``here``.

    ``own``: this party.

    Raises ``ForkError`` if it keeps two journals; ``ReceiptError`` or ``JournalError`` for what is no such word.
    """
    key = bytes.fromhex(shown.public_key)
    if not is_silo(shown.party) or shown.party == own:
        raise ReceiptError(f"{peer} tells what it showed {shown.party:.200}, which is no other hospital")
    there, now = verify(shown.checkpoint, peer_key), read_note(here)
    origin = f"medsilo/{shown.party.removeprefix(_SCHEME)}"
    time = verify_cosignature(shown.cosignature, shown.checkpoint, origin, key)
    if there.origin != now.origin:
        raise ReceiptError(f"{peer} has shown {shown.party} the journal {there.origin}, and here {now.origin}")
    proof = [bytes.fromhex(node) for node in shown.proof]
    if not check_consistency(there.size, there.root, now.size, now.root, proof):
        raise ForkError(
            f"{peer} shows two journals: the {now.size} records that it shows here do not continue the {there.size} "
            f"that it has shown {shown.party}, as that has signed. Nothing more is sent. Keep this journal, and tell "
            "the other hospitals",
            _proof(shown, own, peer, peer_key, there, here, proof),
        )
    return Heard(there.size, time)


def _proof(
    shown: Shown, own: str, peer: str, peer_key: bytes, there: Checkpoint, here: str, proof: Sequence[bytes]
) -> dict[str, Any] | None:
    """Two signed views that no journal gives: their roots over as many records as were shown there differ."""
    now = read_note(here)
    beginning, nodes = proven_beginning(there.size, now.size, now.root, proof), list(shown.proof)
    if there.size == now.size:
        beginning, nodes = EMPTY_ROOT, []
    if beginning is None or beginning == there.root:
        return None
    size = 0 if there.size == now.size else there.size
    empty = {"size": 0, "root": EMPTY_ROOT.hex(), "proof": []}
    return {
        "form": "medsilo-two-histories",
        "v": 1,
        "party": peer,
        "public_key": peer_key.hex(),
        "rotations": [],
        "views": [
            {"shown_to": own, "checkpoint": here, "size": size, "root": beginning.hex(), "proof": nodes},
            {"shown_to": shown.party, "checkpoint": shown.checkpoint, **empty},
        ],
    }
