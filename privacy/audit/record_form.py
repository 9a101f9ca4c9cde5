"""The form of a message's record in evidence that somebody else wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LARGEST_NUMBER = 2**53
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_HEX16 = re.compile(r"[0-9a-f]{32}")
_HEX32 = re.compile(r"[0-9a-f]{64}")


def check_form(record: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` or ``TypeError`` unless a message's record is in form."""
    if record["direction"] not in ("sent", "received"):
        raise ValueError("a message is sent or received")
    for name, pattern in (("call_id", _HEX16), ("sha256", _HEX32), ("schema_sha256", _HEX32)):
        if pattern.fullmatch(record[name]) is None:
            raise ValueError(f"{name} should be {'32' if pattern is _HEX16 else '64'} hexadecimal digits")
    for name in ("frame", "length"):
        if type(record[name]) is not int or not 0 <= record[name] < _LARGEST_NUMBER:
            raise ValueError(f"{name} should be a whole number")
    for name in ("rpc", "peer", "message_type"):
        if not isinstance(record[name], str):
            raise TypeError(f"{name} should be text")
    for name in ("plan_sha256", "run"):
        if not isinstance(record[name], str | None):
            raise TypeError(f"{name} should be text or null")
    if type(record["round"]) not in (int, type(None)):
        raise TypeError("round should be a whole number or null")
    if not isinstance(record["fields"], dict) or not isinstance(record["classes"], dict):
        raise TypeError("fields and classes should be objects")


def public_key(text: Any) -> bytes:
    if not isinstance(text, str) or _HEX32.fullmatch(text) is None:
        raise ValueError("a public key should be 64 hexadecimal digits")
    return bytes.fromhex(text)
