"""Randomness that protects patients: noise and samples that nobody can foresee or repeat.

A generator that the coordinator could seed would let it subtract the noise exactly, and one that begins anew each round
gives the same noise twice, whose difference shows the sums without any. So the key comes from the operating system,
never from a plan, and a generator can be neither copied, saved nor taken along into a forked process.
"""

from __future__ import annotations

import os
import secrets
import threading
from fractions import Fraction
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from randomgen import ChaCha

_ROUNDS = 20
_SUMMANDS = 4


class NoiseSource:
    """A ChaCha20 stream (Bernstein 2008) under a key of 256 bits from the operating system.

    Its methods may be called from any thread. A process forked from this one draws from a stream of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        """Independent normal numbers with mean 0: float64 of the given shape.

        Each is the sum of four with half the deviation. The exact bits of a single floating-point draw can tell which
        values it cannot have been added to (Mironov 2012); to invert a sum of several is not feasible (Holohan and
        Braghin, "Secure Random Sampling in Differential Privacy", 2021, section 5).

        Args:
            shape: of the result.
            deviation: the standard deviation, at least 0 and finite.
        """
        if not 0 <= deviation < float("inf"):
            raise ValueError(f"the noise's standard deviation is {deviation}; it must be 0 or more, and finite")
        with self._lock:
            generator = self._own()
            total = generator.standard_normal(shape)
            for _ in range(_SUMMANDS - 1):
                total += generator.standard_normal(shape)
        total *= deviation / 2
        return np.asarray(total)

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        """A Poisson sample: each of 0 … count - 1 with probability ``rate``, independently. May be empty."""
        if not 0 < rate <= 1:
            raise ValueError(f"the sampling rate is {rate}; it must lie in (0, 1]")
        with self._lock:
            drawn = self._own().random(count)
        return np.flatnonzero(drawn < rate).astype(np.int64)

    def shuffled(self, count: int) -> npt.NDArray[np.int64]:
        """0 … count - 1 in random order."""
        with self._lock:
            return self._own().permutation(count).astype(np.int64)

    def discrete_laplace(self, epsilon: float) -> int:
        """A whole number k with probability proportional to exp(-ε|k|), exactly: only whole random numbers are drawn.

        Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithm 2.

        Args:
            epsilon: above 0 and finite.
        """
        if not 0 < epsilon < float("inf"):
            raise ValueError(f"epsilon is {epsilon}; it must be above 0, and finite")
        s, t = Fraction(epsilon).as_integer_ratio()
        while True:
            start = secrets.randbelow(t)
            if not _happens_with_exponential(start, t):
                continue
            whole = 0
            while _happens_with_exponential(1, 1):
                whole += 1
            size = (start + t * whole) // s
            negative = secrets.randbelow(2)
            if not (negative and size == 0):
                return -size if negative else size

    def _own(self) -> np.random.Generator:
        if os.getpid() != self._process:
            self._begin()
        return self._generator

    def _begin(self) -> None:
        self._process = os.getpid()
        key = int.from_bytes(secrets.token_bytes(32), "little")
        self._generator = np.random.Generator(ChaCha(key=key, rounds=_ROUNDS))

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise source cannot be copied: the copy would give the same noise again")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a noise source cannot be saved: loaded twice, it would give the same noise twice")


def _happens_with_exponential(numerator: int, denominator: int) -> bool:
    """True with probability exp(-numerator/denominator), where that is at most 1 (the paper's Algorithm 1)."""
    draws = 1
    while secrets.randbelow(denominator * draws) < numerator:
        draws += 1
    return draws % 2 == 1
