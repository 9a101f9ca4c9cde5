"""How far models lie apart, for a coordinator that sees no model: one number a pair of silos, and nothing else.

For each pair both silos derive the same random words r, s and t, which nobody else knows. With the first silo's numbers
x and the second's y, in fixed point modulo 2^64, the first sends x + r and <x,x> + 2<x,s> + t, the second y + s and
<y,y> + 2<r,y> + 2<r,s> - t. Of the four the coordinator makes

    ‖x - y‖² = (<x,x> + 2<x,s> + t) + (<y,y> + 2<r,y> + 2<r,s> - t) - 2<x + r, y + s>.

Three of the four are uniform and independent, and the fourth follows from them and the result: so the coordinator
learns the result, whatever it can compute (a private simultaneous message protocol: Feige, Kilian and Naor, STOC 1994).
A silo that colludes with the coordinator knows r, s and t, and so gives away its partner's x or y.

These are not models' numbers but a count sketch of them (Charikar, Chen and Farach-Colton, ICALP 2002): each is added
to one of ``size`` buckets with a random sign, both public; buckets are filled evenly, so that no choice of a context
leaves a number alone in one. The squared distance is that of the sketches: right on
average, with a standard deviation of at most √(2/size) of itself. A model of no more than ``size`` numbers is its own
sketch, and its distances are right up to rounding. Where several distances of a pair are asked for (one a class of
classifiers, say), each is of a row of its own, with randomness of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from medsilo.privacy.errors import TrainingError
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.masking import PairKey

SIZE = 512
"""How many numbers a sketch has at most, unless the plan says otherwise."""
FRACTION_BITS = 20
LARGEST = float(1 << (62 - 2 * FRACTION_BITS))
"""Squared distances have to stay below this."""

_BLOCK = 1 << 16
_WORD = (1 << 64) - 1
_Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Message:
    """What one silo of a pair sends for one distance: ``hidden`` words ``[size]`` and one ``scalar``."""

    hidden: _Words
    scalar: int


def sketch(values: NDArray[np.float32], *, size: int, context: bytes) -> NDArray[np.float64]:
    """A count sketch ``[min(n, size)]`` of numbers ``[n]``; the same buckets and signs for all who name a context."""
    if len(values) <= size:
        return values.astype(np.float64)
    return hashed(values, size=size, key=hashlib.sha256(b"medsilo/blind/sketch/v2\x00" + context).digest())


def hashed(values: NDArray[np.float32], *, size: int, key: bytes) -> NDArray[np.float64]:
    """The sums ``[size]`` of numbers ``[n]``, each with a sign, in buckets that a key of 32 bytes draws: of each
    ``size`` numbers in a row one goes into each bucket."""
    found = np.zeros(size, dtype=np.float64)
    step = size * 2 * max(1, _BLOCK // (2 * size))
    for start in range(0, len(values), step):
        piece = values[start : start + step].astype(np.float64)
        rows = np.zeros(-(-len(piece) // size) * size)
        rows[: len(piece)] = piece
        drawn = ring.words(key, len(rows), start=start).reshape(-1, size)
        signs = 1.0 - 2.0 * (drawn & np.uint64(1)).astype(np.float64)
        buckets = np.argsort(drawn >> np.uint64(1), axis=1, kind="stable")
        found += np.bincount(buckets.reshape(-1), rows * signs.reshape(-1), minlength=size)
    return found


def messages(sketched: NDArray[np.float64], keys: Mapping[str, PairKey]) -> dict[str, list[Message]]:
    """What a silo sends for each other one, whose distances to it the coordinator is to learn: one for each of the rows
    ``[K, size]``.

    Raises ``TrainingError`` for numbers whose distances have no room.
    """
    norm = float(np.square(sketched).sum(axis=1).max(initial=0.0))
    if not norm < LARGEST / 4:
        raise TrainingError(
            f"the model's squared norm is {norm:.4g}; distances under masks have room for {LARGEST / 4:.4g}. Nothing "
            "of it was sent; use a smaller learning rate"
        )
    rows = np.rint(sketched * (1 << FRACTION_BITS)).astype(np.int64).view(np.uint64)
    return {
        other: [
            _message(own, pair.adds, randomness)
            for own, randomness in zip(rows, _randomness(pair, *rows.shape), strict=True)
        ]
        for other, pair in keys.items()
    }


def squared_distance(one: Message, other: Message) -> float:
    """Of a pair's two messages the squared distance of what they were made from."""
    total = (one.scalar + other.scalar - 2 * _dot(one.hidden, other.hidden)) & _WORD
    return float(total - (1 << 64) if total >> 63 else total) / (1 << 2 * FRACTION_BITS)


def _message(own: _Words, adds: bool, randomness: _Words) -> Message:
    """Of one row; ``randomness``: r, s and t."""
    first, second, scalar = randomness[: len(own)], randomness[len(own) : -1], int(randomness[-1])
    if adds:
        return Message(own + first, _dot(own, own) + 2 * _dot(own, second) + scalar & _WORD)
    total = _dot(own, own) + 2 * _dot(first, own) + 2 * _dot(first, second) - scalar
    return Message(own + second, total & _WORD)


def _randomness(pair: PairKey, rows: int, size: int) -> _Words:
    """``[rows, 2 size + 1]``."""
    key = HKDFExpand(hashes.SHA256(), 32, b"medsilo/blind/distance/v1").derive(pair.key)
    # Nothing here is drawn for two messages: the keys are of one attempt at one round.
    return ring.words(key, rows * (2 * size + 1)).reshape(rows, 2 * size + 1)


def _dot(one: _Words, other: _Words) -> int:
    """Modulo 2^64."""
    return int((one * other).sum(dtype=np.uint64))
