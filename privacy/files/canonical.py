"""Canonical JSON (RFC 8785), written and read back: only the one spelling that a document has is accepted.

>>> write_canonical({"b": [True, None], "a": 1})
b'{"a":1,"b":[true,null]}'
>>> read_canonical(b'{"a":1,"b":[true,null]}')
{'a': 1, 'b': [True, None]}
"""

from __future__ import annotations

import json
import re
from typing import Any

import rfc8785

_EXACT_DIGITS = 15
"""Whole numbers of so many digits are exact in every reader of JSON."""
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")


class _UncommonError(Exception):
    """Something that Python's own JSON may spell in another way than RFC 8785."""


def _fraction(text: str) -> float:
    raise _UncommonError(text)


def _whole(text: str) -> int:
    if len(text) > _EXACT_DIGITS:
        raise _UncommonError(text)
    return int(text)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


_READER = json.JSONDecoder(parse_float=_fraction, parse_int=_whole, parse_constant=_refuse)
_UNCHECKED_READER = json.JSONDecoder(parse_constant=_refuse)
_WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def write_canonical(document: Any) -> bytes:
    """The document's one spelling.

    Raises ``ValueError`` for what has none: numbers that are not finite or beyond 2^53, half a surrogate pair, keys
    that are not strings, and what JSON does not know.
    """
    # A record passes here for every message, and the library takes as long for it as all the rest of recording it.
    return _WRITER.encode(document).encode() if _is_common(document) else rfc8785.dumps(document)


def _is_common(value: Any) -> bool:
    """Whether Python's own JSON spells it as RFC 8785 does: no fractions, large numbers, rare characters or types."""
    kind = type(value)
    if kind is str:
        return value.isascii() or _BEYOND_16_BITS.search(value) is None
    if kind is int:
        return bool(-(10**_EXACT_DIGITS) < value < 10**_EXACT_DIGITS)
    if kind is dict:
        return all(type(key) is str and _is_common(key) and _is_common(item) for key, item in value.items())
    if kind is list or kind is tuple:
        return all(map(_is_common, value))
    return value is None or kind is bool


def read_unchecked(data: bytes) -> Any:
    """What ``read_canonical`` gives if it accepts ``data``: for who leaves that to somebody else.

    Raises ``ValueError`` for what is not JSON.
    """
    try:
        return _UNCHECKED_READER.decode(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_canonical(data: bytes) -> Any:
    """The document in ``data``.

    Raises ``ValueError`` for what is not JSON, or not in canonical form: another order of keys, a key that stands
    twice, white space, another spelling of a number or a character, a number beyond 2^53.
    """
    try:
        text = data.decode()
        try:
            # Without fractions, large numbers and rare characters Python's own JSON is canonical, and far faster.
            if not text.isascii() and _BEYOND_16_BITS.search(text):
                raise _UncommonError
            found = _READER.decode(text)
            canonical = _WRITER.encode(found).encode()
        except _UncommonError:
            found = json.loads(text, parse_constant=_refuse)
            canonical = rfc8785.dumps(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if canonical != data:
        raise ValueError("it is not in canonical form (RFC 8785)")
    return found
