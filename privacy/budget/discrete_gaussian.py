"""Many whole numbers k with probability proportional to exp(-k²/2σ²), exactly, at the speed of arrays.

Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithms 1 to 3, for whole σ.
All of it comes down to coins that fall with rational probabilities. A coin is 62 random bits that are held against its
probability in floating point; where that is so near that rounding could matter, against the probability itself, as
whole numbers without end. So no rounding is in what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Words = Callable[[int], npt.NDArray[np.uint64]]
"""Gives so many secret random words of 64 bits."""
Fractions = Callable[[int], tuple[int, int]]
"""The exact probability (or exponent) of one of many: numerator and denominator."""

LARGEST_DEVIATION = 1 << 45

_BITS = 62
_NEAR = 2.0**-36
"""More than floating point is off by, here; 2^-40 would be enough."""
_FAR = 64
"""So many deviations from 0 all is computed in whole numbers."""


def draw(count: int, deviation: int, words: Words) -> npt.NDArray[np.int64]:
    """Independent numbers: ``int64 [count]``.

    Raises ``ValueError`` for a deviation outside 1 … ``LARGEST_DEVIATION``.
    """
    if not 1 <= deviation <= LARGEST_DEVIATION:
        raise ValueError(f"the noise's deviation is {deviation}; it must be a whole number of 1 … 2^45")
    found: list[npt.NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        drawn = _laplace(2 * missing + 16, deviation + 1, words)
        kept = drawn[_accepted(drawn, deviation, words)][:missing]
        found.append(kept)
        missing -= len(kept)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _accepted(drawn: npt.NDArray[np.int64], deviation: int, words: Words) -> npt.NDArray[np.bool_]:
    """Which numbers of the Laplace distribution with scale t = σ + 1 are kept: each with probability
    exp(-(|y| - σ²/t)²/2σ²)."""
    variance, scale = deviation**2, deviation + 1

    def exact(at: int) -> tuple[int, int]:
        return (abs(int(drawn[at])) * scale - variance) ** 2, 2 * variance * scale**2

    distances = np.abs(drawn)
    exponents = (distances - variance / scale) ** 2 / (2.0 * variance)
    whole = np.floor(exponents)
    rest = exponents - whole
    unsure = (rest < _NEAR) | (rest > 1 - _NEAR) | (distances > _FAR * deviation)
    whole[unsure] = 0
    kept = _coins(np.where(unsure, 0.0, rest), lambda at: _fraction_of(exact(at)), words)
    alive = np.flatnonzero(kept & (whole > 0))
    while len(alive):
        kept[alive] = _coins(np.ones(len(alive)), lambda _: (1, 1), words)
        whole[alive] -= 1
        alive = alive[kept[alive] & (whole[alive] > 0)]
    for at in np.flatnonzero(unsure).tolist():
        kept[at] = _coin(*exact(at), words)
    return kept


def _laplace(count: int, scale: int, words: Words) -> npt.NDArray[np.int64]:
    """Numbers k with probability proportional to exp(-|k|/scale) (Algorithm 2); at most so many."""
    start = _below(count, scale, words)
    start = start[_coins(start / scale, lambda at: (int(start[at]), scale), words)]
    whole = np.zeros(len(start), np.int64)
    alive = np.arange(len(start))
    while len(alive):
        alive = alive[_coins(np.ones(len(alive)), lambda _: (1, 1), words)]
        whole[alive] += 1
    sizes = start + scale * whole
    negative = (words(len(sizes)) & np.uint64(1)).astype(bool)
    found: npt.NDArray[np.int64] = np.where(negative, -sizes, sizes)[~(negative & (sizes == 0))]
    return found


def _coins(exponents: npt.NDArray[np.float64], exact: Fractions, words: Words) -> npt.NDArray[np.bool_]:
    """Coins that fall with probability exp(-γ), γ in [0, 1] (Algorithm 1)."""
    fallen = np.zeros(len(exponents), bool)
    alive, draws = np.arange(len(exponents)), 1
    while len(alive):
        thrown = words(len(alive)) >> np.uint64(64 - _BITS)
        chances = exponents[alive] / draws
        difference = thrown.astype(np.float64) / 2.0**_BITS - chances
        below = difference < 0
        for place in np.flatnonzero(np.abs(difference) < _NEAR):
            numerator, denominator = exact(int(alive[place]))
            below[place] = _is_below(int(thrown[place]), numerator, denominator * draws, words)
        fallen[alive[~below]] = draws % 2 == 1
        alive, draws = alive[below], draws + 1
    return fallen


def _is_below(thrown: int, numerator: int, denominator: int, words: Words) -> bool:
    """Whether a number from [0, 1) that begins with these bits is less than a fraction; where further bits decide, they
    are drawn."""
    whole, rest = divmod(numerator << _BITS, denominator)
    return thrown < whole or (thrown == whole and _whole_below(denominator, words) < rest)


def _coin(numerator: int, denominator: int, words: Words) -> bool:
    """One coin that falls with probability exp(-numerator/denominator), of any size, in whole numbers alone."""
    whole, rest = divmod(numerator, denominator)
    return all(_small_coin(1, 1, words) for _ in range(whole)) and _small_coin(rest, denominator, words)


def _small_coin(numerator: int, denominator: int, words: Words) -> bool:
    draws = 1
    while _whole_below(denominator * draws, words) < numerator:
        draws += 1
    return draws % 2 == 1


def _below(count: int, end: int, words: Words) -> npt.NDArray[np.int64]:
    """Whole numbers of 0 … end - 1, each as likely as any other; at most so many."""
    shift = np.uint64(64 - max(1, (end - 1).bit_length()))
    drawn = words(count) >> shift
    return drawn[drawn < end].astype(np.int64)


def _whole_below(end: int, words: Words) -> int:
    size = (end - 1).bit_length()
    while True:
        drawn = int.from_bytes(words(size // 64 + 1).tobytes(), "little") & ((1 << size) - 1)
        if drawn < end:
            return drawn


def _fraction_of(exponent: tuple[int, int]) -> tuple[int, int]:
    return exponent[0] % exponent[1], exponent[1]
