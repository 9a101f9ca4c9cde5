"""Randomness that protects patients: noise, samples and whatever else a private training draws, unknown to all others.

A generator that the coordinator could seed would let it subtract the noise exactly, and one that begins anew each round
gives the same noise twice, whose difference shows the sums without any. So the key comes from the operating system,
never from a plan, and a generator can be neither copied, saved nor taken along into a forked process. What was begun
with a key that is sealed on disk (``medsilo.privacy.budget.sealed_keys``) is drawn again from that key, and is then the
same release.
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

from medsilo.privacy.budget.discrete_gaussian import draw

KEY_BYTES = 32
_ROUNDS = 20
_SUMMANDS = 4


class NoiseSource:
    """A ChaCha20 stream (Bernstein 2008) under a key of 256 bits: 32 secret bytes, by default the operating system's.

    The same calls under the same key give the same numbers. Its methods may be called from any thread. A process forked
    from this one draws from a stream of its own, under another key.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._lock = threading.Lock()
        self._begin(secrets.token_bytes(KEY_BYTES) if key is None else key)

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
        """A Poisson sample: each of 0 … count - 1 with probability ``rate``, independently. May be empty; a rate of 1
        takes all, and draws nothing."""
        if not 0 < rate <= 1:
            raise ValueError(f"the sampling rate is {rate}; it must lie in (0, 1]")
        if rate == 1:
            return np.arange(count, dtype=np.int64)
        with self._lock:
            drawn = self._own().random(count)
        return np.flatnonzero(drawn < rate).astype(np.int64)

    def shuffled(self, count: int) -> npt.NDArray[np.int64]:
        """0 … count - 1 in random order."""
        with self._lock:
            return self._own().permutation(count).astype(np.int64)

    def uniform(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Independent numbers from [0, 1): float32 of the given shape."""
        with self._lock:
            return self._own().random(shape, dtype=np.float32)

    def seed(self) -> int:
        """A seed of 63 bits for a generator whose draws do not leave, such as PyTorch's own for dropout."""
        return self._below(1 << 63)

    def discrete_laplace(self, epsilon: float) -> int:
        """A whole number k with probability proportional to exp(-ε|k|), exactly: only whole random numbers are drawn.

        Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithm 2.

        Args:
            epsilon: above 0 and finite.
        """
        if not 0 < epsilon < float("inf"):
            raise ValueError(f"epsilon is {epsilon}; it must be above 0, and finite")
        return self._laplace(*Fraction(epsilon).as_integer_ratio())

    def _laplace(self, s: int, t: int) -> int:
        """A whole number k with probability proportional to exp(-|k|·s/t) (Algorithm 2)."""
        while True:
            start = self._below(t)
            if not self._happens_with_exponential(start, t):
                continue
            whole = 0
            while self._happens_with_exponential(1, 1):
                whole += 1
            size = (start + t * whole) // s
            negative = self._below(2)
            if not (negative and size == 0):
                return -size if negative else size

    def discrete_gaussian(self, deviation: float) -> int:
        """A whole number k with probability proportional to exp(-k²/2σ²), exactly (the same paper's Algorithm 3).

        Args:
            deviation: σ above 0 and finite; the standard deviation, but for very small ones.
        """
        if not 0 < deviation < float("inf"):
            raise ValueError(f"the noise's deviation is {deviation}; it must be above 0, and finite")
        variance = Fraction(deviation) ** 2
        scale = int(deviation) + 1
        while True:
            drawn = self._laplace(1, scale)
            exponent = (abs(drawn) - variance / scale) ** 2 / (2 * variance)
            whole, rest = divmod(exponent, 1)
            if all(self._happens_with_exponential(1, 1) for _ in range(int(whole))) and self._happens_with_exponential(
                *rest.as_integer_ratio()
            ):
                return drawn

    def discrete_gaussians(self, count: int, deviation: int) -> npt.NDArray[np.int64]:
        """Many independent ones of the same distribution, as exactly: int64 ``[count]``.

        Args:
            count: how many.
            deviation: σ, a whole number of 1 … 2^45.
        """
        return draw(count, deviation, self._words)

    def _words(self, count: int) -> npt.NDArray[np.uint64]:
        with self._lock:
            return np.frombuffer(self._own().bytes(8 * count), dtype="<u8")

    def _happens_with_exponential(self, numerator: int, denominator: int) -> bool:
        """True with probability exp(-numerator/denominator), where that is at most 1 (the paper's Algorithm 1)."""
        draws = 1
        while self._below(denominator * draws) < numerator:
            draws += 1
        return draws % 2 == 1

    def _below(self, end: int) -> int:
        """A whole number of 0 … end - 1, each as likely as any other: those beyond are drawn again."""
        size = (end - 1).bit_length()
        while True:
            with self._lock:
                drawn = int.from_bytes(self._own().bytes(size // 8 + 1), "little") & ((1 << size) - 1)
            if drawn < end:
                return drawn

    def _own(self) -> np.random.Generator:
        if os.getpid() != self._process:
            self._begin(secrets.token_bytes(KEY_BYTES))
        return self._generator

    def _begin(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the noise's key has {len(key)} bytes; it must have {KEY_BYTES}")
        self._process = os.getpid()
        self._generator = np.random.Generator(ChaCha(key=int.from_bytes(key, "little"), rounds=_ROUNDS))

    def __copy__(self) -> NoReturn:
        raise TypeError("a noise source cannot be copied: the copy would give the same noise again")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a noise source cannot be saved: loaded twice, it would give the same noise twice")
