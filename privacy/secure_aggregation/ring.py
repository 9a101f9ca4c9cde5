"""The ring in which models are sealed: polynomials of degree below 2048 modulo X^2048 + 1 and the prime q = 2^61 - 1.

Numbers are held as uint64 of 0 … q - 1 (now and then q itself, which is 0). Multiplication is exact: digits of 16 bits
are convolved by fast Fourier transforms, whose rounding stays below a hundredth of what it would take to be off by one.

>>> import numpy as np
>>> int(from_signed(np.array([-1]))[0]) == Q - 1, int(to_signed(from_signed(np.array([-7])))[0])
(True, -7)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

DEGREE = 2048
BITS = 61
Q = (1 << BITS) - 1

Words = NDArray[np.uint64]
"""Numbers modulo q."""

_Q = np.uint64(Q)
_DIGIT_BITS = 16
_DIGITS = 4
_LIMB_BITS = 21
_BLOCK = 1 << 13
_TWIST = np.exp(1j * np.pi * np.arange(DEGREE // 2) / DEGREE)


def from_signed(values: NDArray[np.int64]) -> Words:
    """Whole numbers of -q … q, modulo q."""
    return values.view(np.uint64) + (values < 0) * _Q


def to_signed(words: Words) -> NDArray[np.int64]:
    """Of each class modulo q the number nearest to 0."""
    reduced = np.where(words == _Q, np.uint64(0), words).astype(np.int64)
    return np.where(reduced > Q // 2, reduced - Q, reduced)


def add(one: Words, other: Words) -> Words:
    """The sum."""
    return _folded(one + other)


def subtract(one: Words, other: Words) -> Words:
    """The difference."""
    return _folded(one + (_Q - other))


def stream(key: bytes, count: int, *, start: int = 0) -> Words:
    """Numbers ``start`` … of the sequence that a key of 32 bytes stands for, each as good as uniform: 61 bits of each
    word of ``words``."""
    return words(key, count, start=start) & _Q


def words(key: bytes, count: int, *, start: int = 0) -> NDArray[np.uint64]:
    """Words ``start`` … of 64 bits of AES-256 in counter mode (NIST SP 800-38A). ``start`` is even."""
    counter = (start // 2).to_bytes(16, "big")
    drawn = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor().update(bytes(8 * count))
    return np.frombuffer(drawn, dtype="<u8")


def scaled(words: Words, factor: int) -> Words:
    """``factor`` times each number; the factor may be negative; its size is below 2^29."""
    low = (words & np.uint64((1 << 31) - 1)).astype(np.int64) * factor
    high = (words >> np.uint64(31)).astype(np.int64) * factor
    return add(from_signed(low), _rotated(from_signed(high), 31))


def combined(rows: Sequence[Words], weights: NDArray[np.int64]) -> Words:
    """``weights @ rows``, exactly.

    Args:
        rows: m rows of equally many numbers.
        weights: ``[n, m]``; the sizes of a row's weights add up to less than 2^31.

    Returns:
        ``[n, numbers]``.
    """
    matrix, length = weights.astype(np.float64), len(rows[0])
    found = np.empty((len(weights), length), dtype=np.uint64)
    for start in range(0, length, _BLOCK):
        block = np.stack([row[start : start + _BLOCK] for row in rows])
        total = np.zeros((len(weights), block.shape[1]), dtype=np.uint64)
        for limb in range(-(-BITS // _LIMB_BITS)):
            part = (block >> np.uint64(limb * _LIMB_BITS)) & np.uint64((1 << _LIMB_BITS) - 1)
            # Products and sums of whole numbers below 2^53 are exact in float64.
            product = (matrix @ part.astype(np.float64)).astype(np.int64)
            total = add(total, _rotated(from_signed(product), limb * _LIMB_BITS))
        found[:, start : start + _BLOCK] = total
    return found


class Factor:
    """A polynomial that many others are multiplied by: ``[DEGREE]``, uint64."""

    def __init__(self, words: Words) -> None:
        self._transforms = _transforms(words.reshape(1, DEGREE))

    def times(self, others: Words) -> Words:
        """The products with ``[b, DEGREE]``, of the same shape."""
        theirs = _transforms(others)
        found = np.zeros(others.shape, dtype=np.uint64)
        for place in range(2 * _DIGITS - 1):
            terms = [
                theirs[one] * self._transforms[place - one]
                for one in range(max(0, place - _DIGITS + 1), min(_DIGITS, place + 1))
            ]
            folded = np.fft.ifft(np.sum(terms, axis=0), axis=-1) / _TWIST
            product = np.concatenate([folded.real, folded.imag], axis=-1)
            found = add(found, _rotated(from_signed(np.rint(product).astype(np.int64)), place * _DIGIT_BITS % BITS))
        return found


def public_polynomials(context: bytes, first: int, count: int) -> Words:
    """Polynomials ``first`` … of those that everybody derives from a context: ``[count, DEGREE]``."""
    key = hashlib.sha256(b"medsilo/blind/public/v1\x00" + context).digest()
    return stream(key, count * DEGREE, start=first * DEGREE).reshape(count, DEGREE)


def _transforms(polynomials: Words) -> list[NDArray[np.complex128]]:
    """Of ``[b, DEGREE]`` each of its digits' transforms, ``[b, DEGREE/2]``, in which multiplication modulo X^DEGREE + 1
    is pointwise: the upper half of the coefficients becomes the imaginary part."""
    rest = to_signed(polynomials)
    half = 1 << (_DIGIT_BITS - 1)
    found = []
    for _ in range(_DIGITS):
        digit = ((rest + half) & ((1 << _DIGIT_BITS) - 1)) - half
        rest = (rest - digit) >> _DIGIT_BITS
        folded = digit[:, : DEGREE // 2] + 1j * digit[:, DEGREE // 2 :]
        found.append(np.fft.fft(folded * _TWIST, axis=-1))
    return found


def _rotated(words: Words, bits: int) -> Words:
    """``2^bits`` times each number: modulo a Mersenne prime a rotation."""
    if bits == 0:
        return words
    return ((words << np.uint64(bits)) & _Q) | (words >> np.uint64(BITS - bits))


def _folded(words: Words) -> Words:
    """The same numbers of at most 62 bits, below 2^61."""
    once = (words & _Q) + (words >> np.uint64(BITS))
    return once - (once >= _Q) * _Q
