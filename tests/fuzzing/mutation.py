"""Damaged input: a good example, changed at random. The same seed gives the same input on every machine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

_NUMBERS = (0, 1, -1, 127, 128, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64)
_TEXTS = (
    "",
    "x",
    "\x00",
    "../../etc/passwd",
    "a" * 5000,
    "é",
    "\u202e",
    "\U0001f4a9",
    "9" * 5000,
    "-1",
    "1e999",
    "null",
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.5, 1e308, float("nan"), float("inf"), [], {}, [[]], {"": {}}, [None] * 300),
    *_NUMBERS,
    *_TEXTS,
)
_SPLICES = tuple(
    number.to_bytes(size, order)  # type: ignore[arg-type]
    for size in (1, 2, 4, 8)
    for order in ("little", "big")
    for number in (0, 1, (1 << (8 * size - 1)) - 1, 1 << (8 * size - 1), (1 << 8 * size) - 1)
)


def mutate(chance: random.Random, examples: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """One of the examples after one to twelve changes; one time in a hundred any bytes."""
    if chance.random() < 0.01:
        return chance.randbytes(chance.randrange(200))
    data = bytearray(chance.choice(examples))
    if chance.random() < 0.25 and (changed := _in_json(chance, bytes(data))) is not None:
        data = bytearray(changed)
        if chance.random() < 0.7:
            return bytes(data)
    for _ in range(min(12, 1 + int(chance.expovariate(0.7)))):
        chance.choice(_CHANGES)(chance, data, examples, tokens)
    return bytes(data)


def _place(chance: random.Random, data: bytearray) -> int:
    return chance.randrange(len(data) + 1)


def _flip(chance: random.Random, data: bytearray, *_: Any) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(chance: random.Random, data: bytearray, *_: Any) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _insert(chance: random.Random, data: bytearray, *_: Any) -> None:
    at = _place(chance, data)
    data[at:at] = chance.randbytes(chance.choice((1, 1, 2, 4, 16)))


def _number(chance: random.Random, data: bytearray, *_: Any) -> None:
    at, new = _place(chance, data), chance.choice(_SPLICES)
    data[at : at + (len(new) if chance.random() < 0.8 else 0)] = new


def _delete(chance: random.Random, data: bytearray, *_: Any) -> None:
    at = _place(chance, data)
    del data[at : at + chance.choice((1, 1, 2, 8, 64))]


def _cut(chance: random.Random, data: bytearray, *_: Any) -> None:
    if chance.random() < 0.5:
        del data[_place(chance, data) :]


def _double(chance: random.Random, data: bytearray, *_: Any) -> None:
    at = _place(chance, data)
    piece = data[at : at + chance.choice((1, 4, 32, 256))]
    data[at:at] = piece * chance.choice((1, 1, 2, 20))


def _splice(chance: random.Random, data: bytearray, examples: Sequence[bytes], _: Sequence[bytes]) -> None:
    other = chance.choice(examples)
    start = chance.randrange(len(other) + 1)
    at = _place(chance, data)
    data[at : at + chance.choice((0, 16, 1 << 30))] = other[start : start + chance.choice((8, 64, 1 << 30))]


def _token(chance: random.Random, data: bytearray, _: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    if tokens:
        at = _place(chance, data)
        data[at : at + chance.choice((0, 1, 8))] = chance.choice(tokens)


def _digits(chance: random.Random, data: bytearray, *_: Any) -> None:
    """Another number where digits stand."""
    at = [index for index, byte in enumerate(data[:4096]) if 0x30 <= byte <= 0x39]
    if at:
        index = chance.choice(at)
        data[index : index + 1] = str(chance.choice(_NUMBERS)).encode()


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None], ...] = (
    *(_flip, _flip, _set, _set, _insert, _number, _delete, _cut, _double, _splice, _token, _token, _digits),
)


def _in_json(chance: random.Random, data: bytes) -> bytes | None:
    """The same with one value of a JSON document, or of one line of JSON, replaced; None where there is no JSON."""
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    comma = lines[number].endswith(b",")
    try:
        content = json.loads(lines[number].removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict | list) or not content:
        return None
    place: Any = content
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
            break
        place = place[key]
    match chance.randrange(4):
        case 0 if isinstance(place, dict):
            del place[key]
        case 1 if isinstance(place, dict):
            place[chance.choice(_TEXTS)] = place[key]
        case _:
            place[key] = chance.choice(_VALUES)
    try:
        # In canonical form where that is possible, so that it gets past the first check.
        text = json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    except (ValueError, TypeError, UnicodeEncodeError):
        return None
    lines[number] = text + (b"," if comma else b"")
    return b"\n".join(lines)
