"""Mixtures of models that only their recipients can open: z_i = Σ_j W_ij θ_j, by weights that everybody knows.

Silo j sends its model once, sealed: c_j = A·s_j + e_j + θ_j in ``ring``, with public polynomials A, a uniform secret
s_j of this round and attempt alone, and an error e_j (ring learning with errors: Lyubashevsky, Peikert and Regev,
EUROCRYPT 2010). Sealing is linear in (s_j, e_j, θ_j), so the coordinator, which knows no s_j, can form Σ_j W_ij c_j.
Recipient i opens that with Σ_j W_ij s_j, which is short, whatever the model's size: each silo sends W_ij s_j under
masks that cancel among the others, so that only the sum appears, and under a pad that i alone can take away, so that it
appears to i alone. Masks are bound to the roster, to the weights and to the mixtures as the coordinator has stated
them: where silos were told different ones nothing can be opened. That a mixture is one of what was sealed is checked
(``mixture_checks``) before anything is made of it.

What is known of a secret after mixtures have been opened are linear equations. What is known of the errors is the same
combinations of them, exactly; so errors are wider than learning with errors asks for, by as much as it takes for
several recipients together (``withstands``), and add their part to what is opened: about ``opening_error``. What this
stands on, what it does not give, and test vectors: ``docs/blind-mixing.md``. No cryptographer has reviewed it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.masking import PairKey
from medsilo.privacy.secure_aggregation.mixture_checks import CheckSums, sum_of_sums
from medsilo.privacy.secure_aggregation.ring import DEGREE, Factor, Words

ERROR_BITS = 53
"""The standard deviation of each coefficient of e is 2^53."""
FRACTION_BITS = 38
"""A model's numbers are multiples of 2^-38,"""
SPREAD_BITS = 31
"""and 2^31 times that in the ring, so that errors have room below them."""
WEIGHT_BITS = 10
"""A row of weights adds up to 2^10."""
LARGEST_ROW = 4 << WEIGHT_BITS
"""The sizes of a row's weights may add up to this, so that a mixture has room in the ring."""
LIMIT = 1023.0
"""The size below which a model's numbers have to stay: of 1,024 that have room, 1 is the errors'."""
LEFT_ERROR = 3.19
"""The deviation for which the Homomorphic Encryption Standard (2018) states what is secure."""
SMALLEST = 4 * DEGREE
"""Numbers that are sealed at least, zeros after the model's own. Whoever changes what opens a mixture changes every
polynomial of it in another way, so of four a change that none of them shows cannot be found."""

PIECE = 64 * DEGREE
"""Numbers at a time: what is in memory does not grow with the model."""
_UNIT_BITS = FRACTION_BITS + SPREAD_BITS + WEIGHT_BITS
_FINE_BITS = 16
_SURE = 8.0
"""No error is as many deviations wide in a model's lifetime (10^-15 a number)."""


def whole_weights(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """The weights of mixtures ``[N, N]``, whose rows add up to 1, as whole numbers of which 2^10 stand for 1; what
    rounding leaves over goes to a silo's own model."""
    found = np.rint(np.asarray(weights) * (1 << WEIGHT_BITS)).astype(np.int64)
    np.fill_diagonal(found, 0)
    np.fill_diagonal(found, (1 << WEIGHT_BITS) - found.sum(axis=1))
    return found


def opening_error(row: NDArray[np.int64]) -> float:
    """The standard deviation of what errors add to each number of a mixture by this row of weights."""
    return float(np.linalg.norm(row.astype(np.float64))) * 2.0 ** (ERROR_BITS - _UNIT_BITS)


def sealed_size(count: int) -> int:
    """How many numbers are sealed of a model of ``count``."""
    return max(count, SMALLEST)


def withstands(weights: NDArray[np.int64]) -> int:
    """How many recipients, whichever they are, may give all they know to the coordinator, and the rest is still sealed.

    What c recipients' mixtures leave unknown of the errors lies in the kernel of their rows V of weights, without the
    columns of their own. By Cramer's rule that has vectors made of minors, as columns of a matrix whose norm is at most
    √det(V Vᵀ). Where the errors are √2·3.19 times as wide as that, what is left contains errors 3.19 wide in every
    direction (Peikert, CRYPTO 2010). Whichever rows these are, √det(V Vᵀ) is at most the product of the c longest rows'
    norms, and of the c largest singular values of all.

    Args:
        weights: ``[N, N]``.
    """
    others = weights.astype(np.float64)
    np.fill_diagonal(others, 0)
    norms = np.sort(np.linalg.norm(others, axis=1))[::-1]
    bounds = [np.cumsum(np.log2(np.maximum(sizes, 1))) for sizes in (norms, np.linalg.svd(others, compute_uv=False))]
    return int(np.count_nonzero(np.minimum(*bounds) <= ERROR_BITS - np.log2(np.sqrt(2) * LEFT_ERROR)))


@dataclass(frozen=True)
class Mix:
    """What all silos must have been told alike.

    Attributes:
        silos: sorted names.
        weights: whole numbers ``[N, N]``; row i makes the mixture of silo i.
        digest: SHA-256 of all here, together with the roster.
        mixtures: SHA-256 of each silo's mixture, sealed and as it travels.
    """

    silos: tuple[str, ...]
    weights: NDArray[np.int64]
    digest: bytes
    mixtures: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls, silos: tuple[str, ...], weights: NDArray[np.int64], mixtures: Sequence[bytes], roster_sha256: bytes
    ) -> Mix:
        """Weights for the silos of a roster, and the mixtures that they make."""
        found = hashlib.sha256(b"medsilo/blind/mix/v2\x00" + roster_sha256)
        found.update("\x00".join(silos).encode() + b"\x00" + weights.astype("<i8").tobytes())
        found.update(b"".join(mixtures))
        return cls(silos, weights, found.digest(), tuple(mixtures))

    def row(self, silo: str) -> NDArray[np.int64]:
        """The weights of a silo's mixture."""
        return np.asarray(self.weights[self.silos.index(silo)])

    def weight(self, recipient: str, sender: str) -> int:
        """How much of ``sender``'s model ``recipient`` gets, of 2^10."""
        return int(self.weights[self.silos.index(recipient), self.silos.index(sender)])

    def mixture(self, silo: str) -> bytes:
        """SHA-256 of a silo's mixture."""
        return self.mixtures[self.silos.index(silo)]


@dataclass(frozen=True)
class Opener:
    """What a recipient is given to open its mixture with: the ``share`` of all others together ``[2, DEGREE]``, and by
    name of silo the check ``sums`` of what it sealed ``[2, CHECKS]`` and the ``tags`` that say they are its own."""

    share: Words
    sums: Mapping[str, Words]
    tags: Mapping[str, bytes]


class Sealer:
    """A silo's part in one attempt at one round: seals its model, helps to open mixtures once, opens its own.

    What is sealed under a lost ``seed`` cannot be opened by anybody any more; whoever keeps one makes a sealer of it
    that opens, and seals nothing: under one secret one model is sealed, once.

    Args:
        name: the silo's.
        keys: those that it shares with each other silo of the roster, for this attempt alone.
        context: what the public polynomials are derived from; the same for all, another for each attempt.
        seed: of the secret, 32 bytes, where it was kept; a fresh one by default.
        mix: the weights for which shares were given already, where it was kept.
    """

    def __init__(
        self,
        name: str,
        keys: Mapping[str, PairKey],
        context: bytes,
        *,
        seed: bytes | None = None,
        mix: Mix | None = None,
    ) -> None:
        self._name = name
        self._keys = dict(keys)
        self._context = context
        self._is_kept = seed is not None
        self.seed = seed or secrets.token_bytes(32)
        self._secret = ring.stream(self.seed, DEGREE)
        self._factor = Factor(self._secret)
        self._noise = NoiseSource()
        self._sealed = 0
        self._mix = mix

    def seal(self, values: NDArray[np.float32], *, what: str) -> Words:
        """A model's next numbers ``[n]``, sealed: ``[2, n]``. Pieces of a model are sealed in order, each but the last
        of a multiple of ``DEGREE`` numbers.

        Raises ``TrainingError`` naming ``what`` for a number that is not finite, or beyond ±``LIMIT``.
        """
        if self._is_kept:
            raise ValueError("a secret that was kept seals nothing")
        if self._sealed % DEGREE:
            raise ValueError(f"a piece of a multiple of {DEGREE} numbers has to come before")
        check_room(values, what=what)
        sealed = np.empty((2, len(values)), dtype=np.uint64)
        for start in range(0, len(values), PIECE):
            piece = values[start : start + PIECE].astype(np.float64) * float(1 << FRACTION_BITS)
            hidden = _products(self._factor, self._context, self._sealed + start, len(piece))
            spread = ring.shifted(ring.from_signed(np.rint(piece).astype(np.int64)), SPREAD_BITS)
            noised = ring.add(spread, ring.from_signed(_errors(self._noise, len(piece))))
            sealed[:, start : start + len(piece)] = ring.add(hidden, noised)
        self._sealed += len(values)
        return sealed

    def shares(self, mix: Mix) -> dict[str, Words]:
        """What each other silo needs of this one to open its mixture: ``[2, DEGREE]`` each, of which nobody but the
        recipient can learn anything, and it nothing but their sum.

        Raises ``RefusedError`` where it is asked a second time, of other weights: two mixtures of the same models may
        give away one of them.
        """
        if self._mix is not None and self._mix.digest != mix.digest:
            raise RefusedError("the same models are asked for by other weights: two mixtures of them may give one away")
        if set(mix.silos) != {self._name, *self._keys}:
            raise RefusedError(f"weights are for {', '.join(mix.silos)}, which are not the silos of the roster")
        self._mix = mix
        column = mix.weights[:, [mix.silos.index(self._name)]]
        found = ring.combined([self._secret], column)
        for other, pair in self._keys.items():
            key, change = _key(pair, b"mask", mix.digest), ring.add if pair.adds else ring.subtract
            for recipient in range(len(mix.silos)):
                if mix.silos[recipient] != other:
                    masks = ring.stream(key, DEGREE, start=recipient * DEGREE)
                    found[:, recipient] = change(found[:, recipient], masks)
        given = {other: found[:, mix.silos.index(other)] for other in self._keys}
        return {other: ring.add(given[other], _pad(pair, mix, self._name, other)) for other, pair in self._keys.items()}

    def tags(self, mix: Mix, sums: Words) -> dict[str, bytes]:
        """By which each other silo knows this one's check sums."""
        return {other: _tag(pair, mix, self._name, sums) for other, pair in self._keys.items()}

    def open(
        self, pieces: Iterable[bytes | memoryview], count: int, opener: Opener, own_sums: Words
    ) -> NDArray[np.float32]:
        """This silo's mixture: of ``Σ_j W_ij c_j``, as it travels in pieces of ``PIECE`` numbers, the model's numbers
        ``[count]``. ``own_sums``: the check sums that this silo itself gave.

        Raises ``RefusedError`` for a mixture that is not the one that was stated, or not one of what was sealed, and
        where what comes out is no mixture of models: shares and seals are not of one attempt.
        """
        assert self._mix is not None, "the shares for the others come first"
        mix = self._mix
        self._check_sums(mix, opener, own_sums)
        factor = Factor(self._unmasked(mix, opener.share))
        row = mix.row(self._name)
        opened = np.empty(count, dtype=np.float32)
        stated, checks, start, wide = hashlib.sha256(), CheckSums(mix.digest), 0, 0
        room = LIMIT * float(np.abs(row).sum()) / (1 << WEIGHT_BITS)
        is_in_range = True
        for piece in pieces:
            stated.update(piece)
            numbers = ring.unpack(piece)
            checks.take(numbers)
            size = numbers.shape[1]
            bare = ring.subtract(numbers, _products(factor, self._context, start, size))
            values = ring.to_real(bare, _UNIT_BITS)
            own, zeros = values[: max(0, count - start)], values[max(0, count - start) :]
            opened[start : start + len(own)] = own
            wide += int(np.count_nonzero(np.abs(own) > LIMIT))
            is_in_range &= bool((np.abs(own) <= room * (1 + 1e-6)).all())
            is_in_range &= bool((np.abs(zeros) <= _SURE * opening_error(row)).all())
            start += size
        if stated.digest() != mix.mixture(self._name):
            raise RefusedError(
                f"mixture_as_stated: the mixture for {self._name} is not the one that the coordinator stated with the "
                "weights"
            )
        if (checks.sums != sum_of_sums([opener.sums[silo] for silo in mix.silos], row)).any():
            raise RefusedError(
                f"mixture_of_sealed: the mixture for {self._name} is not made of the models that were sealed, by the "
                "weights that were told: something was added to it, or it is another one"
            )
        # What does not open is spread over all the ring, four times as wide as models' numbers.
        if start != sealed_size(count) or not is_in_range or wide > count // 2:
            raise RefusedError(
                f"the mixture for {self._name} does not open: what the other silos gave, what they had sealed and the "
                "weights do not belong together"
            )
        return opened

    def _check_sums(self, mix: Mix, opener: Opener, own_sums: Words) -> None:
        if (opener.sums[self._name] != own_sums).any():
            raise RefusedError(
                f"check_sums: those that are told to be of {self._name} are not what it gave for these weights and "
                "mixtures"
            )
        for other, pair in self._keys.items():
            expected = _tag(pair, mix, other, opener.sums[other])
            if not hmac.compare_digest(expected, opener.tags[other]):
                raise RefusedError(
                    f"check_sums: those that came for {other} are not what {other} gave for these weights and mixtures"
                )

    def _unmasked(self, mix: Mix, share: Words) -> Words:
        """The sum of all silos' secrets, each by its weight."""
        secret = ring.add(share, ring.scaled(self._secret, mix.weight(self._name, self._name)))
        for other, pair in self._keys.items():
            secret = ring.subtract(secret, _pad(pair, mix, other, self._name))
        return secret


def check_room(values: NDArray[np.float32], *, what: str) -> None:
    """Raises ``TrainingError`` naming ``what`` for a number that is not finite, or beyond ±``LIMIT``."""
    for start in range(0, len(values), PIECE):
        piece = values[start : start + PIECE]
        outside = ~(np.abs(piece) < LIMIT)
        if not outside.any():
            continue
        raise TrainingError(
            f"{what} holds {float(piece[outside].flat[0]):g}; a blind mixture has room for ±{LIMIT:.4g}. Nothing "
            "of it was sent; a smaller learning rate, or images scaled to smaller numbers, keep models smaller"
        )


def mixtures(sealed: Mapping[str, Words], silos: Sequence[str], weights: NDArray[np.int64]) -> dict[str, Words]:
    """The coordinator's part: every silo's mixture of what was sealed, still sealed."""
    rows = ring.combined([sealed[silo] for silo in silos], weights)
    return {silo: rows[:, place] for place, silo in enumerate(silos)}


def add_shares(totals: Words, shares: Words, *, without: int) -> None:
    """Adds what one silo gave for all others ``[2, N - 1, DEGREE]``, by their names, to what there is for each silo
    ``[2, N, DEGREE]``. ``without``: the giver's place."""
    others = [place for place in range(totals.shape[1]) if place != without]
    totals[:, others] = ring.add(totals[:, others], shares)


def _errors(noise: NoiseSource, count: int) -> NDArray[np.int64]:
    """Normal numbers of 2^53, rounded. A float64 of that size has no bits left below 1, so the last 16 are drawn by
    themselves. That, and what float64 rounds of the rest, changes a probability by less than a thousandth of itself."""
    coarse = np.rint(noise.gaussian((count,), 2.0 ** (ERROR_BITS - _FINE_BITS))).astype(np.int64)
    fine = np.frombuffer(secrets.token_bytes(2 * count), dtype="<u2").astype(np.int64)
    return (coarse << _FINE_BITS) + fine - (1 << (_FINE_BITS - 1))


def _products(factor: Factor, context: bytes, start: int, count: int) -> Words:
    """Numbers ``start`` … of A·s."""
    polynomials = ring.public_polynomials(context, start // DEGREE, -(-count // DEGREE))
    return factor.times(polynomials).reshape(2, -1)[:, :count]


def _pad(pair: PairKey, mix: Mix, sender: str, recipient: str) -> Words:
    """What hides a share from all but its recipient."""
    return ring.stream(_key(pair, b"pad", mix.digest, sender.encode(), recipient.encode()), DEGREE)


def _tag(pair: PairKey, mix: Mix, sender: str, sums: Words) -> bytes:
    key = _key(pair, b"sums", mix.digest, sender.encode())
    return hmac.digest(key, ring.pack(sums).tobytes(), "sha256")


def _key(pair: PairKey, *context: bytes) -> bytes:
    info = b"\x00".join([b"medsilo/blind/v2", *context])
    return HKDFExpand(hashes.SHA256(), 32, info).derive(pair.key)
