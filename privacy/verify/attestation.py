"""The attestation: one party's signed document on what it has exchanged with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .form import HEX16, HEX32, Form, items, matching, text, whole, wrong
from .result import EvidenceError
from .signed import MOST_SIGNS

MOST_CALLS = 500
"""Calls in one attestation; what is left waits for the next."""


@dataclass(frozen=True)
class Exchange:
    """One call's messages in one direction, as the signer has them. ``sha256``: over the SHA-256 digests of the
    messages, in order. ``last_index``: record of the last of them in the signer's journal."""

    rpc: str
    call_id: str
    direction: str
    messages: int
    length: int
    sha256: str
    last_index: int


@dataclass(frozen=True)
class Consistency:
    """RFC 6962 proof that the signer's journal continues the one of ``size`` records that the other saw last."""

    size: int
    proof: tuple[str, ...]


@dataclass(frozen=True)
class Witnessed:
    """The other side's last checkpoint that the signer has verified, and the signer's line under it."""

    size: int
    cosignature: str


@dataclass(frozen=True)
class Attestation:
    """What the signer (``by``) has received from, and sent to, the other side (``to``); ``checkpoint``: its own."""

    by: str
    to: str
    exchanges: tuple[Exchange, ...]
    checkpoint: str
    consistency: Consistency
    witnessed: Witnessed | None
    shown: tuple[Mapping[str, Any], ...] = ()
    """What the signer has shown to others, in their own signed words; who reads more than one side checks them."""


def read_attestation(document: Any) -> Attestation:
    """The attestation in a signed document; raises ``EvidenceError`` for any other form."""
    held = _checked(document, _ATTESTATION, _LATER)
    witnessed = held.get("witnessed")
    consistency = _checked(held["consistency"], _CONSISTENCY)
    return Attestation(
        held["by"],
        held["to"],
        tuple(Exchange(**_checked(one, _EXCHANGE)) for one in held["exchanges"]),
        held["checkpoint"],
        Consistency(consistency["size"], tuple(consistency["proof"])),
        None if witnessed is None else Witnessed(**_checked(witnessed, _WITNESSED)),
        tuple(held.get("shown", ())),
    )


def _checked(content: Any, form: Form, optional: Form | None = None) -> dict[str, Any]:
    if (name := wrong(content, form, optional)) is not None:
        raise EvidenceError(f"an attestation cannot be used: {name:.100} is not in its form")
    found: dict[str, Any] = content
    return found


_ATTESTATION: Form = {
    "v": whole(1, 1),
    "by": text(),
    "to": text(),
    "exchanges": items(MOST_CALLS),
    "checkpoint": text(MOST_SIGNS),
    "consistency": lambda value: isinstance(value, dict),
}
_LATER: Form = {
    "witnessed": lambda value: value is None or isinstance(value, dict),
    "shown": items(4, lambda value: isinstance(value, dict)),
}
"""What may be left out. What a later release adds to attestations is named here."""
_EXCHANGE: Form = {
    "rpc": text(100),
    "call_id": matching(HEX16),
    "direction": lambda value: value in ("sent", "received"),
    "messages": whole(1),
    "length": whole(0),
    "sha256": matching(HEX32),
    "last_index": whole(0),
}
_CONSISTENCY: Form = {"size": whole(0), "proof": items(128, matching(HEX32))}
_WITNESSED: Form = {"size": whole(1), "cosignature": text(1000)}
