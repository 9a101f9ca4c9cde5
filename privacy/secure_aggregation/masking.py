"""Masks that cancel in a sum: fixed-point numbers, pairwise keys, streams.

After Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), section 4.0.1:
each pair of silos derives a stream that nobody else can compute; the one whose name comes first adds it, the other
subtracts it. What each sends looks random, and the sum over all is the sum of the numbers. There are no shares of keys
here to recover from silos that drop out: their round is done again (``docs/secure-aggregation.md``).

Numbers are fixed-point modulo 2^64: w·x becomes round(w·x · 2^F), so the sum over k silos is exact but for at most
k · 2^-(F+1). Nothing wraps unseen: a number whose sum over k silos might not fit is refused before it is masked.

>>> import numpy as np
>>> ones = encode(np.ones(2, dtype=np.float32), weight=3, fraction_bits=32, silos=2, what="tensor w")
>>> decode(ones + ones, fraction_bits=32)
array([6., 6.])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError, TrainingError

LARGEST_WEIGHT = 2**29 - 1
"""So that weight times a float32 is exact in float64."""

_LABEL = b"medsilo/mask/v1"
_BLOCK = 1 << 19
"""Numbers that are masked at once: a stream is never in memory as a whole."""


def encode(
    values: NDArray[np.float32], *, weight: int, fraction_bits: int, silos: int, what: str
) -> NDArray[np.uint64]:
    """``round(weight · values · 2^fraction_bits)`` modulo 2^64, of the same shape.

    ``silos``: how many such numbers are to be added; each may take its share of the range. ``what`` names the numbers
    in errors. Raises ``TrainingError`` for a number beyond ±2^63 / (silos · 2^fraction_bits), or one that is not
    finite, or a weight outside 1 … ``LARGEST_WEIGHT``.
    """
    if not 1 <= weight <= LARGEST_WEIGHT:
        raise TrainingError(f"{what}: a weight of {weight} cannot be masked; it should lie in 1 … {LARGEST_WEIGHT}")
    scaled = np.rint(values.astype(np.float64) * float(weight << fraction_bits))
    largest = (2**63 - 1) // silos
    # Of the powers of two that float64 can hold, the one below: rounding must not let a number slip past.
    limit = float(1 << (largest.bit_length() - 1))
    outside = ~(np.abs(scaled) <= limit)
    if outside.any():
        value = float(values[outside].flat[0])
        raise TrainingError(
            f"{what} holds {value:g}; with weight {weight} and {silos} silos a masked sum has room for "
            f"±{limit / float(weight << fraction_bits):.4g} (fraction_bits {fraction_bits}). Nothing of it was sent; "
            "ask the coordinator for fewer `fraction_bits`, or a smaller learning rate"
        )
    return scaled.astype(np.int64).view(np.uint64)


def decode(total: NDArray[np.uint64], *, fraction_bits: int) -> NDArray[np.float64]:
    """The sum of numbers that ``encode`` gave, once their masks have cancelled."""
    return total.view(np.int64).astype(np.float64) / float(1 << fraction_bits)


@dataclass(frozen=True)
class PairKey:
    """The key of one pair's stream; ``adds``: whether this silo adds it, and the other subtracts it."""

    key: bytes
    adds: bool


def pair_keys(name: str, private: X25519PrivateKey, others: Mapping[str, bytes], context: bytes) -> list[PairKey]:
    """This silo's keys with each of the others, whose X25519 public keys are given by name.

    Shared secret by X25519 (RFC 7748), key by HKDF-SHA256 (RFC 5869) with ``context`` as salt and both names in order
    as info: another context, another key. Raises ``RefusedError`` for a public key that gives no secret.
    """
    found = []
    for other, public in others.items():
        try:
            secret = private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise RefusedError(f"the mask key of {other} is not an X25519 key that gives a secret") from None
        info = b"\x00".join([_LABEL, *(part.encode() for part in sorted((name, other)))])
        key = HKDF(hashes.SHA256(), 32, salt=context, info=info).derive(secret)
        found.append(PairKey(key, name < other))
    return found


def mask(values: NDArray[np.uint64], keys: Iterable[PairKey]) -> NDArray[np.uint64]:
    """The values plus and minus each pair's stream (AES-256 in counter mode, NIST SP 800-38A), modulo 2^64; of the same
    length.

    A key must mask one vector and no other: the counter begins at zero.
    """
    masked = values.copy()
    streams = [(Cipher(algorithms.AES256(pair.key), modes.CTR(bytes(16))).encryptor(), pair.adds) for pair in keys]
    size = min(_BLOCK, len(masked))
    zeros = memoryview(bytes(8 * size))
    room = np.empty(8 * size + 63, dtype=np.uint8)
    for start in range(0, len(masked), _BLOCK):
        block = masked[start : start + _BLOCK]
        for cipher, adds in streams:
            written = cipher.update_into(zeros[: 8 * len(block)], room.data)
            stream = room[:written].view("<u8")
            if adds:
                np.add(block, stream, out=block)
            else:
                np.subtract(block, stream, out=block)
    return masked
