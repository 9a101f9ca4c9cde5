"""The ring in which models are sealed: polynomials of degree below 4096 modulo X^4096 + 1 and q = (2^61 - 1)(2^31 - 1).

A number modulo q is held as what it leaves modulo each of the two primes: ``Words``, uint64 ``[2, …]``. Multiplication
is exact: digits of 16 bits are convolved by fast Fourier transforms, whose rounding stays below a tenth of what it
would take to be off by one.

>>> import numpy as np
>>> minus_seven = shifted(from_signed(np.array([-7])), 70)
>>> float(to_real(minus_seven, 70)[0]), unpack(pack(minus_seven)).tolist() == minus_seven.tolist()
(-7.0, True)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

DEGREE = 4096
LONG = 61
SHORT = 31
"""Of 2^k - 1 k, for both primes."""
Q = ((1 << LONG) - 1) * ((1 << SHORT) - 1)
WORD = 12
"""Bytes of a number as it travels: what it leaves modulo 2^61 - 1 in eight, modulo 2^31 - 1 in four, the lowest first.
"""
LARGEST_SUM = 1 << 22
"""The sizes of whole numbers by which some numbers are multiplied and added may add up to this."""

Words = NDArray[np.uint64]
"""Numbers modulo q, ``[2, …]``: what they leave modulo 2^61 - 1 and modulo 2^31 - 1."""

_LONG, _SHORT = np.uint64((1 << LONG) - 1), np.uint64((1 << SHORT) - 1)
_DIGIT_BITS = 16
_BLOCK = 1 << 13
_AT_ONCE = 8
"""Polynomials whose transforms fit a processor's cache."""
_TWIST = np.exp(1j * np.pi * np.arange(DEGREE // 2) / DEGREE)
_INVERSE = np.uint64(pow((1 << LONG) - 1, -1, (1 << SHORT) - 1))
_TRAVELLING = np.dtype([("long", "<u8"), ("short", "<u4")])


def from_signed(values: NDArray[np.int64]) -> Words:
    """Whole numbers of -2^61 … 2^61, modulo q."""
    return np.stack([_signed(values, LONG), _signed(values, SHORT)])


def to_real(words: Words, fraction_bits: int) -> NDArray[np.float64]:
    """Of each class modulo q the number nearest to 0, over ``2^fraction_bits``."""
    long = words[0].astype(np.int64)
    low = np.where(long > int(_LONG) // 2, long - int(_LONG), long)
    # Garner: what is missing, in multiples of 2^61 - 1.
    left = _sub(words[1], _signed(low, SHORT), _SHORT)
    high = _fold_short(left * _INVERSE).astype(np.int64)
    high = np.where(high > int(_SHORT) // 2, high - int(_SHORT), high)
    unit = 2.0**-fraction_bits
    found: NDArray[np.float64] = high.astype(np.float64) * (float(int(_LONG)) * unit) + low.astype(np.float64) * unit
    return found


def add(one: Words, other: Words) -> Words:
    """The sum."""
    return np.stack([_add(one[0], other[0], _LONG), _add(one[1], other[1], _SHORT)])


def subtract(one: Words, other: Words) -> Words:
    """The difference."""
    return np.stack([_sub(one[0], other[0], _LONG), _sub(one[1], other[1], _SHORT)])


def shifted(words: Words, bits: int) -> Words:
    """``2^bits`` times each number: modulo a Mersenne prime a rotation."""
    return np.stack([_rotated(words[0], bits % LONG, LONG), _rotated(words[1], bits % SHORT, SHORT)])


def scaled(words: Words, factor: int) -> Words:
    """``factor`` times each number; its size is at most ``LARGEST_SUM``."""
    flat = words.reshape(2, -1)
    return combined([flat], np.array([[factor]]))[:, 0].reshape(words.shape)


def pack(words: Words) -> NDArray[np.uint8]:
    """Numbers ``[2, …]`` as they travel: ``[…, WORD]``."""
    found: NDArray[Any] = np.empty(words.shape[1:], dtype=_TRAVELLING)
    found["long"], found["short"] = words[0], words[1]
    return found.view(np.uint8).reshape(*words.shape[1:], WORD)


def unpack(data: NDArray[np.uint8] | bytes | memoryview) -> Words:
    """Numbers as they came ``[…, WORD]``, or as bytes; what is not below a prime is taken modulo it."""
    taken = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    shape = taken.shape[:-1] if taken.ndim > 1 else (-1,)
    found = taken.reshape(-1).view(_TRAVELLING).reshape(shape)
    return np.stack([_fold_long(found["long"]), _fold_short(found["short"].astype(np.uint64))])


def stream(key: bytes, count: int, *, start: int = 0) -> Words:
    """Numbers ``start`` … of the sequence that a key of 32 bytes stands for, each as good as uniform modulo q: of two
    words of ``words`` one for each prime."""
    drawn = words(key, 2 * count, start=2 * start)
    return np.stack([_fold_long(drawn[0::2]), _fold_short(drawn[1::2])])


def words(key: bytes, count: int, *, start: int = 0) -> NDArray[np.uint64]:
    """Words ``start`` … of 64 bits of AES-256 in counter mode (NIST SP 800-38A). ``start`` is even."""
    counter = (start // 2).to_bytes(16, "big")
    drawn = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor().update(bytes(8 * count))
    return np.frombuffer(drawn, dtype="<u8")


def combined(rows: Sequence[Words], weights: NDArray[np.int64]) -> Words:
    """``weights @ rows``, exactly.

    Args:
        rows: m rows ``[2, numbers]``.
        weights: ``[n, m]``; the sizes of a row's weights add up to at most ``LARGEST_SUM``.

    Returns:
        ``[2, n, numbers]``.
    """
    matrix, length = weights.astype(np.float64), rows[0].shape[-1]
    found = np.empty((2, len(weights), length), dtype=np.uint64)
    half = np.uint64((1 << SHORT) - 1)
    for start in range(0, length, _BLOCK):
        long, short = (np.stack([row[prime, start : start + _BLOCK] for row in rows]) for prime in (0, 1))
        # Products and sums of whole numbers below 2^53 are exact in float64.
        low, high, last = (
            (matrix @ part.astype(np.float64)).astype(np.int64)
            for part in (long & half, long >> np.uint64(SHORT), short)
        )
        found[0, :, start : start + _BLOCK] = _add(
            _signed(low, LONG), _rotated(_signed(high, LONG), SHORT, LONG), _LONG
        )
        found[1, :, start : start + _BLOCK] = _signed(last, SHORT)
    return found


class Factor:
    """A polynomial that many others are multiplied by: ``[2, DEGREE]``."""

    def __init__(self, words: Words) -> None:
        polynomial = words.reshape(2, 1, DEGREE)
        self._transforms = [_transforms(polynomial[0], LONG), _transforms(polynomial[1], SHORT)]

    def times(self, others: Words) -> Words:
        """The products with ``[2, b, DEGREE]``, of the same shape."""
        found = np.empty_like(others)
        for start in range(0, others.shape[1], _AT_ONCE):
            for which, bits in enumerate((LONG, SHORT)):
                block = others[which, start : start + _AT_ONCE]
                found[which, start : start + _AT_ONCE] = self._times(block, which, bits)
        return found

    def _times(self, others: NDArray[np.uint64], which: int, bits: int) -> NDArray[np.uint64]:
        own, theirs = self._transforms[which], _transforms(others, bits)
        found = np.zeros(others.shape, dtype=np.uint64)
        prime = np.uint64((1 << bits) - 1)
        for place in range(2 * len(own) - 1):
            terms = [
                theirs[one] * own[place - one] for one in range(max(0, place - len(own) + 1), min(len(own), place + 1))
            ]
            folded = np.fft.ifft(np.sum(terms, axis=0), axis=-1) / _TWIST
            product = _signed(np.rint(np.concatenate([folded.real, folded.imag], axis=-1)).astype(np.int64), bits)
            found = _add(found, _rotated(product, place * _DIGIT_BITS % bits, bits), prime)
        return found


def public_polynomials(context: bytes, first: int, count: int) -> Words:
    """Polynomials ``first`` … of those that everybody derives from a context: ``[2, count, DEGREE]``."""
    key = hashlib.sha256(b"medsilo/blind/public/v2\x00" + context).digest()
    return stream(key, count * DEGREE, start=first * DEGREE).reshape(2, count, DEGREE)


def _transforms(polynomials: NDArray[np.uint64], bits: int) -> list[NDArray[np.complex128]]:
    """Of ``[b, DEGREE]`` each of its digits' transforms, ``[b, DEGREE/2]``, in which multiplication modulo X^DEGREE + 1
    is pointwise: the upper half of the coefficients becomes the imaginary part."""
    rest = polynomials.astype(np.int64)
    prime = (1 << bits) - 1
    rest = np.where(rest > prime // 2, rest - prime, rest)
    half = 1 << (_DIGIT_BITS - 1)
    found = []
    for _ in range(-(-bits // _DIGIT_BITS)):
        digit = ((rest + half) & ((1 << _DIGIT_BITS) - 1)) - half
        rest = (rest - digit) >> _DIGIT_BITS
        folded = digit[:, : DEGREE // 2] + 1j * digit[:, DEGREE // 2 :]
        found.append(np.fft.fft(folded * _TWIST, axis=-1))
    return found


def _signed(values: NDArray[np.int64], bits: int) -> NDArray[np.uint64]:
    """Whole numbers of -2^61 … 2^61 modulo one prime."""
    words = values.view(np.uint64)
    return (
        _fold_long(words + (_LONG << np.uint64(1))) if bits == LONG else _fold_short(words + (_SHORT << np.uint64(31)))
    )


def _rotated(words: NDArray[np.uint64], by: int, bits: int) -> NDArray[np.uint64]:
    if by == 0:
        return words
    prime = np.uint64((1 << bits) - 1)
    return ((words << np.uint64(by)) & prime) | (words >> np.uint64(bits - by))


def _add(one: NDArray[np.uint64], other: NDArray[np.uint64], prime: np.uint64) -> NDArray[np.uint64]:
    return _below(one + other, prime)


def _sub(one: NDArray[np.uint64], other: NDArray[np.uint64], prime: np.uint64) -> NDArray[np.uint64]:
    return _below(one + (prime - other), prime)


def _below(words: NDArray[np.uint64], prime: np.uint64) -> NDArray[np.uint64]:
    """Of numbers below twice a prime; of a number below the prime itself the difference wraps to above it."""
    found: NDArray[np.uint64] = np.minimum(words, words - prime)
    return found


def _fold_long(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Any words modulo 2^61 - 1."""
    once = (words & _LONG) + (words >> np.uint64(LONG))
    return _below(once, _LONG)


def _fold_short(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Any words modulo 2^31 - 1."""
    for _ in range(2):
        words = (words & _SHORT) + (words >> np.uint64(SHORT))
    once = (words & _SHORT) + (words >> np.uint64(SHORT))
    return _below(once, _SHORT)
