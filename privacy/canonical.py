"""Canonical JSON (RFC 8785), read back: only the one spelling that a document has is accepted.

>>> read_canonical(b'{"a":1,"b":[true,null]}')
{'a': 1, 'b': [True, None]}
"""

from __future__ import annotations

import json
import re
from typing import Any

import rfc8785

_LONG_NUMBER = re.compile(r"[:,\[]-?\d{16}")


def read_canonical(data: bytes) -> Any:
    """The document in ``data``.

    Raises ``ValueError`` for what is not JSON, or not in canonical form: another order of keys, a key that stands
    twice, white space, another spelling of a number or a character, a number beyond 2^53.
    """
    fractions: list[str] = []

    def fraction(text: str) -> float:
        fractions.append(text)
        return float(text)

    def refuse(text: str) -> float:
        raise ValueError(f"{text} is not a number in JSON")

    try:
        text = data.decode()
        found = json.loads(text, parse_float=fraction, parse_constant=refuse)
        # Of text in ASCII, without fractions and large numbers, Python's own JSON is canonical, and ten times as fast.
        if fractions or not text.isascii() or _LONG_NUMBER.search(text):
            canonical = rfc8785.dumps(found)
        else:
            canonical = json.dumps(found, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if canonical != data:
        raise ValueError("it is not in canonical form (RFC 8785)")
    return found
