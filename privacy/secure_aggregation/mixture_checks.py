"""That a sealed mixture is what it should be of what was sealed: sums by weights that nobody could choose.

With the weights of the mixtures the coordinator states the SHA-256 of every mixture, still sealed. Of all that is drawn
a list of random numbers r for each check, and each silo j gives ‹r, c_j› of what it sealed. The coordinator knows c_j,
so that tells it nothing. A mixture z_i is Σ_j W_ij c_j only if ‹r, z_i› = Σ_j W_ij ‹r, c_j›; one that is not passes a
check with a probability of 2^-16 modulo the prime in which it differs, and all ``CHECKS`` with 2^-128 (Freivalds,
1977), and who tries many before it states one has as many chances of 2^-128.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.ring import WORD, Words

CHECKS = 8
"""How many sums, each by weights of 16 bits."""
SUMS_BYTES = CHECKS * WORD

_BLOCK = 1 << 16
"""Products of 16 and 21 bits, so many of which add up to less than 2^53: exact in float64."""
_LIMBS = ((0, 21, (0, 21, 42)), (1, 16, (0, 16)))


class CheckSums:
    """The sums of numbers that come piece by piece; ``digest``: of what was stated before."""

    def __init__(self, digest: bytes) -> None:
        self._key = hashlib.sha256(b"medsilo/blind/check/v1\x00" + digest).digest()
        self._taken = 0
        self.sums: Words = np.zeros((2, CHECKS), dtype=np.uint64)

    def take(self, numbers: Words) -> None:
        """The next ``[2, n]``."""
        for start in range(0, numbers.shape[1], _BLOCK):
            block = numbers[:, start : start + _BLOCK]
            weights = self._weights(block.shape[1])
            for prime, bits, places in _LIMBS:
                for place in places:
                    limb = (block[prime] >> np.uint64(place)) & np.uint64((1 << bits) - 1)
                    product = ring.shifted(
                        ring.from_signed((limb.astype(np.float64) @ weights).astype(np.int64)), place
                    )
                    product[1 - prime] = 0
                    self.sums = ring.add(self.sums, product)

    def _weights(self, count: int) -> NDArray[np.float64]:
        drawn = ring.words(self._key, 2 * count, start=2 * self._taken)
        self._taken += count
        return drawn.view("<u2").reshape(count, CHECKS).astype(np.float64)


def sum_of_sums(sums: list[Words], row: NDArray[np.int64]) -> Words:
    """What the sums of a mixture by a row of weights have to be, of those of what it is made of."""
    return ring.combined(sums, row.reshape(1, -1))[:, 0]
