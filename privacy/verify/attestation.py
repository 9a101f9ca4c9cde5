"""The attestation: one party's signed document on what it has exchanged with another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .result import EvidenceError
from .signed import HEX32, MOST_SIGNS

MOST_CALLS = 500
"""Calls in one attestation; what is left waits for the next."""
_CALL_ID = re.compile(r"[0-9a-f]{32}")
_Form = Mapping[str, Callable[[Any], bool]]


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


def read_attestation(document: Any) -> Attestation:
    """The attestation in a signed document; raises ``EvidenceError`` for any other form."""
    held = _checked(document, _ATTESTATION, optional=_LATER)
    exchanges = [Exchange(**_checked(one, _EXCHANGE)) for one in held["exchanges"]]
    consistency = _checked(held["consistency"], _CONSISTENCY)
    witnessed = held.get("witnessed")
    return Attestation(
        held["by"],
        held["to"],
        tuple(exchanges),
        held["checkpoint"],
        Consistency(consistency["size"], tuple(consistency["proof"])),
        None if witnessed is None else Witnessed(**_checked(witnessed, _WITNESSED)),
    )


def _text(most: int = 1 << 24) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= most


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _hex(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _list(most: int, each: Callable[[Any], bool] = lambda _: True) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(each, value))


_ATTESTATION: _Form = {
    "v": lambda value: type(value) is int and value == 1,
    "by": _text(),
    "to": _text(),
    "exchanges": _list(MOST_CALLS),
    "checkpoint": _text(MOST_SIGNS),
    "consistency": lambda value: isinstance(value, dict),
}
_LATER: _Form = {"witnessed": lambda value: value is None or isinstance(value, dict)}
"""What may be left out. What a later release adds to attestations is named here."""
_EXCHANGE: _Form = {
    "rpc": _text(100),
    "call_id": _hex(_CALL_ID),
    "direction": lambda value: value in ("sent", "received"),
    "messages": _whole(1),
    "length": _whole(0),
    "sha256": _hex(HEX32),
    "last_index": _whole(0),
}
_CONSISTENCY: _Form = {"size": _whole(0), "proof": _list(128, _hex(HEX32))}
_WITNESSED: _Form = {"size": _whole(1), "cosignature": _text(1000)}


def _checked(content: Any, form: _Form, *, optional: _Form | None = None) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise EvidenceError("an attestation cannot be used: it is not in its form")
    wrong = [name for name, good in form.items() if name not in content or not good(content[name])]
    more = {**form, **(optional or {})}
    wrong += [name for name in content if name not in more or (name not in form and not more[name](content[name]))]
    if wrong:
        raise EvidenceError(f"an attestation cannot be used: {min(wrong):.100} is not in its form")
    return content
