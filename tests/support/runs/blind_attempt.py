"""One attempt at a round with blind mixtures, all parties in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.blind_mixing import (
    PIECE,
    Mix,
    Opener,
    Sealer,
    mixtures,
    sealed_size,
)
from medsilo.privacy.secure_aggregation.masking import PairKey, pair_keys
from medsilo.privacy.secure_aggregation.mixture_checks import CheckSums
from medsilo.privacy.secure_aggregation.ring import Words


def keys_of(names: tuple[str, ...], context: bytes = b"roster") -> dict[str, dict[str, PairKey]]:
    """The keys of each pair, by both names."""
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    found = {}
    for name in names:
        others = {other: key for other, key in public.items() if other != name}
        found[name] = dict(zip(others, pair_keys(name, private[name], others, context), strict=True))
    return found


def sha256_of(mixture: Words) -> bytes:
    """Of a mixture as it travels."""
    return hashlib.sha256(ring.pack(mixture)).digest()


def pieces(mixture: Words) -> list[bytes]:
    """A mixture as it travels."""
    return [ring.pack(mixture[:, start : start + PIECE]).tobytes() for start in range(0, mixture.shape[1], PIECE)]


def share_of(recipient: str, shares: Sequence[Mapping[str, Words]]) -> Words:
    """The sum of what all others gave for a recipient."""
    found = np.zeros((2, ring.DEGREE), dtype=np.uint64)
    for given in shares:
        if recipient in given:
            found = ring.add(found, given[recipient])
    return found


def check_sums(sealed: Words, mix: Mix) -> Words:
    """Of what was sealed, or mixed."""
    found = CheckSums(mix.digest)
    found.take(sealed)
    return found.sums


class Attempt:
    """Models sealed, and mixed by these weights. What is public may be changed between the steps."""

    def __init__(
        self,
        models: Mapping[str, NDArray[np.float32]],
        weights: NDArray[np.int64],
        *,
        context: bytes = b"round",
        keys: Mapping[str, Mapping[str, PairKey]] | None = None,
    ) -> None:
        self.names = tuple(models)
        self.models = dict(models)
        self.weights = weights
        self.context = context
        self.silos = {n: Sealer(n, k, context) for n, k in (keys or keys_of(self.names, context)).items()}
        self.count = len(next(iter(models.values())))
        zeros = np.zeros(sealed_size(self.count) - self.count, dtype=np.float32)
        self.sealed = {
            name: silo.seal(np.concatenate([self.models[name], zeros]), what=name) for name, silo in self.silos.items()
        }
        self.mixed = mixtures(self.sealed, self.names, weights)
        self.shares: list[dict[str, Words]] = []

    def state(self) -> Mix:
        """The coordinator states weights and mixtures, as they are now."""
        self.mix = Mix.of(self.names, self.weights, [sha256_of(self.mixed[n]) for n in self.names], self.context)
        return self.mix

    def help(self) -> None:
        """All give their shares, check sums and tags."""
        mix = self.mix if hasattr(self, "mix") else self.state()
        self.shares = [silo.shares(mix) for silo in self.silos.values()]
        self.given_sums = {name: check_sums(words, mix) for name, words in self.sealed.items()}
        self.sums = dict(self.given_sums)
        self.tags = {name: silo.tags(mix, self.sums[name]) for name, silo in self.silos.items()}

    def opener(self, name: str) -> Opener:
        """What a silo is given to open its mixture with."""
        tags = {other: given[name] for other, given in self.tags.items() if other != name}
        return Opener(share_of(name, self.shares), self.sums, tags)

    def open(self, name: str) -> NDArray[np.float32]:
        """What a silo opens, once all have helped."""
        return self.silos[name].open(pieces(self.mixed[name]), self.count, self.opener(name), self.given_sums[name])

    def opened(self) -> dict[str, NDArray[np.float32]]:
        """What every silo opens."""
        if not self.shares:
            self.help()
        return {name: self.open(name) for name in self.names}
