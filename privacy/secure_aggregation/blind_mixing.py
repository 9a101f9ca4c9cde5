"""Mixtures of models that only their recipients can open: z_i = Σ_j W_ij θ_j, by weights that everybody knows.

Silo j sends its model once, sealed: c_j = A·s_j + e_j + θ_j in ``ring``, with public polynomials A, a uniform secret
s_j of this round and attempt alone, and an error e_j (ring learning with errors: Lyubashevsky, Peikert and Regev,
EUROCRYPT 2010). Sealing is linear in (s_j, e_j, θ_j), so the coordinator, which knows no s_j, can form Σ_j W_ij c_j.
Recipient i opens that with Σ_j W_ij s_j, which is short, whatever the model's size: each silo sends W_ij s_j under
masks that cancel among the others, so that only the sum appears, and under a pad that i alone can take away, so that it
appears to i alone. Masks are bound to the roster and to the weights: where silos were told different ones nothing can
be opened.

What is known of a secret after a mixture has been opened is a linear equation, and leaves what it does not determine
uniform, for q is prime. What is known of the errors is their mixture; so they are wider than learning with errors asks
for (``ERROR``), and add their part to what is opened: about ``opening_error``. What this stands on, what it does not
give, and test vectors: ``docs/blind-mixing.md``. No cryptographer has reviewed it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from numpy.typing import NDArray

from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.masking import PairKey
from medsilo.privacy.secure_aggregation.ring import DEGREE, Factor, Words

ERROR = float(1 << 22)
"""The standard deviation of each coefficient of e."""
FRACTION_BITS = 38
"""A model's numbers are multiples of 2^-38."""
WEIGHT_BITS = 10
"""A row of weights adds up to 2^10."""
LARGEST_ROW = 4 << WEIGHT_BITS
"""The sizes of a row's weights may add up to this, so that a mixture has room in the ring."""
LIMIT = ring.Q // 2 / (LARGEST_ROW << FRACTION_BITS)
"""The size below which a model's numbers have to stay: about 1,024."""

_BLOCK = 64
"""Polynomials at a time: what is in memory does not grow with the model."""


def whole_weights(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """The weights of mixtures ``[N, N]``, whose rows add up to 1, as whole numbers of which 2^10 stand for 1; what
    rounding leaves over goes to a silo's own model."""
    found = np.rint(np.asarray(weights) * (1 << WEIGHT_BITS)).astype(np.int64)
    np.fill_diagonal(found, 0)
    np.fill_diagonal(found, (1 << WEIGHT_BITS) - found.sum(axis=1))
    return found


def opening_error(row: NDArray[np.int64]) -> float:
    """The standard deviation of what errors add to each number of a mixture by this row of weights."""
    return float(np.linalg.norm(row.astype(np.float64))) * ERROR / (1 << (FRACTION_BITS + WEIGHT_BITS))


@dataclass(frozen=True)
class Mix:
    """What all silos must have been told alike: ``silos`` (sorted names), whole ``weights`` [N, N] whose row i makes
    the mixture of silo i, and ``digest``, SHA-256 of what both stand for together with the roster."""

    silos: tuple[str, ...]
    weights: NDArray[np.int64]
    digest: bytes

    @classmethod
    def of(cls, silos: tuple[str, ...], weights: NDArray[np.int64], roster_sha256: bytes) -> Mix:
        """Weights for the silos of a roster."""
        found = hashlib.sha256(b"medsilo/blind/mix/v1\x00" + roster_sha256)
        found.update("\x00".join(silos).encode() + b"\x00" + weights.astype("<i8").tobytes())
        return cls(silos, weights, found.digest())

    def row(self, silo: str) -> NDArray[np.int64]:
        """The weights of a silo's mixture."""
        return np.asarray(self.weights[self.silos.index(silo)])

    def weight(self, recipient: str, sender: str) -> int:
        """How much of ``sender``'s model ``recipient`` gets, of 2^10."""
        return int(self.weights[self.silos.index(recipient), self.silos.index(sender)])


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
        """A model's next numbers ``[n]``, sealed: ``[n]`` words. Pieces of a model are sealed in order, each but the
        last of a multiple of 2048 numbers.

        Raises ``TrainingError`` naming ``what`` for a number that is not finite, or beyond ±``LIMIT``.
        """
        if self._is_kept:
            raise ValueError("a secret that was kept seals nothing")
        if self._sealed % DEGREE:
            raise ValueError("a piece of a multiple of 2048 numbers has to come before")
        check_room(values, what=what)
        wide = values.astype(np.float64)
        sealed = np.empty(len(values), dtype=np.uint64)
        for start in range(0, len(values), _BLOCK * DEGREE):
            piece = wide[start : start + _BLOCK * DEGREE] * float(1 << FRACTION_BITS)
            piece += self._noise.gaussian(piece.shape, ERROR)
            pad = _products(self._factor, self._context, self._sealed + start, len(piece))
            sealed[start : start + len(piece)] = ring.add(pad, ring.from_signed(np.rint(piece).astype(np.int64)))
        self._sealed += len(values)
        return sealed

    def shares(self, mix: Mix) -> dict[str, Words]:
        """What each other silo needs of this one to open its mixture: ``[2048]`` words each, of which nobody but the
        recipient can learn anything, and it nothing but their sum.

        Raises ``RefusedError`` where it is asked a second time, of other weights: two mixtures of the same models may
        give away one of them.
        """
        if self._mix is not None and self._mix.digest != mix.digest:
            raise RefusedError("the same models are asked for by other weights: two mixtures of them may give one away")
        if set(mix.silos) != {self._name, *self._keys}:
            raise RefusedError(f"weights are for {', '.join(mix.silos)}, which are not the silos of the roster")
        self._mix = mix
        found = {silo: ring.scaled(self._secret, mix.weight(silo, self._name)) for silo in self._keys}
        for other, pair in self._keys.items():
            masks = ring.stream(_key(pair, b"mask", mix.digest), len(mix.silos) * DEGREE)
            for recipient in found:
                if recipient != other:
                    mask = masks[DEGREE * (place := mix.silos.index(recipient)) : DEGREE * (place + 1)]
                    change = ring.add if pair.adds else ring.subtract
                    found[recipient] = change(found[recipient], mask)
            found[other] = ring.add(found[other], _pad(pair, mix, self._name, other))
        return found

    def open(self, mixture: Words, share: Words) -> NDArray[np.float32]:
        """This silo's mixture: of ``Σ_j W_ij c_j`` and the sum of the others' shares the numbers, ``[n]`` float32.

        Raises ``RefusedError`` where what comes out is no mixture of models: shares and seals are not of one attempt.
        """
        assert self._mix is not None, "the shares for the others come first"
        mix = self._mix
        secret = ring.add(share, ring.scaled(self._secret, mix.weight(self._name, self._name)))
        for other, pair in self._keys.items():
            secret = ring.subtract(secret, _pad(pair, mix, other, self._name))
        factor = Factor(secret)
        opened = np.empty(len(mixture), dtype=np.float32)
        for start in range(0, len(mixture), _BLOCK * DEGREE):
            piece = mixture[start : start + _BLOCK * DEGREE]
            numbers = ring.to_signed(ring.subtract(piece, _products(factor, self._context, start, len(piece))))
            opened[start : start + len(piece)] = numbers / float(1 << (FRACTION_BITS + WEIGHT_BITS))
        # What does not open is spread over all the ring, four times as wide as models' numbers.
        sizes, room = np.abs(opened), LIMIT * float(np.abs(mix.row(self._name)).sum()) / (1 << WEIGHT_BITS)
        if (sizes > room * (1 + 1e-6)).any() or np.median(sizes) > LIMIT:
            raise RefusedError(
                f"the mixture for {self._name} does not open: what the other silos gave, what they had sealed and the "
                "weights do not belong together"
            )
        return opened


def check_room(values: NDArray[np.float32], *, what: str) -> None:
    """Raises ``TrainingError`` naming ``what`` for a number that is not finite, or beyond ±``LIMIT``."""
    outside = ~(np.abs(values.astype(np.float64)) < LIMIT)
    if outside.any():
        raise TrainingError(
            f"{what} holds {float(values[outside].flat[0]):g}; a blind mixture has room for ±{LIMIT:.4g}. Nothing "
            "of it was sent; a smaller learning rate, or images scaled to smaller numbers, keep models smaller"
        )


def mixtures(sealed: Mapping[str, Words], mix: Mix) -> dict[str, Words]:
    """The coordinator's part: every silo's mixture of what was sealed, still sealed."""
    rows = ring.combined([sealed[silo] for silo in mix.silos], mix.weights)
    return dict(zip(mix.silos, rows, strict=True))


def share_of(recipient: str, shares: Sequence[Mapping[str, Words]]) -> Words:
    """The sum of what all others gave for a recipient."""
    found = np.zeros(DEGREE, dtype=np.uint64)
    for given in shares:
        if recipient in given:
            found = ring.add(found, given[recipient])
    return found


def _products(factor: Factor, context: bytes, start: int, count: int) -> Words:
    """Numbers ``start`` … of A·s."""
    polynomials = ring.public_polynomials(context, start // DEGREE, -(-count // DEGREE))
    return factor.times(polynomials).reshape(-1)[:count]


def _pad(pair: PairKey, mix: Mix, sender: str, recipient: str) -> Words:
    """What hides a share from all but its recipient."""
    return ring.stream(_key(pair, b"pad", mix.digest, sender.encode(), recipient.encode()), DEGREE)


def _key(pair: PairKey, *context: bytes) -> bytes:
    info = b"\x00".join([b"medsilo/blind/v1", *context])
    return HKDFExpand(hashes.SHA256(), 32, info).derive(pair.key)
