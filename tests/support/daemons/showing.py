"""A coordinator that does not keep to the protocol of blind mixtures: ``showing unit serve …`` hands each hospital the
next one's model itself, ``showing two serve …`` tells the first hospital other weights than the rest, ``showing added
serve …`` adds known numbers to the first hospital's mixture before it states what the mixtures are, ``showing after
serve …`` afterwards."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from medsilo.algorithms.protection import blind
from medsilo.algorithms.tensors import Part, Payload
from medsilo.coordinator import cli
from medsilo.coordinator.rounds.closing import Aggregator
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.secure_aggregation import ring
from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS, SPREAD_BITS, WEIGHT_BITS


def main() -> None:
    what = sys.argv.pop(1)
    weigh, mix_sealed, for_silo = blind.weigh, blind.mix_sealed, Aggregator.for_silo

    def told(weights: torch.Tensor) -> Payload:
        return {Exposure.MIXING_WEIGHTS: Part.of({"weights": weights})}

    def unit(uploads: Mapping[str, Payload], *arguments: Any) -> Any:
        _, shown = weigh(uploads, *arguments)
        return told(1024 * torch.eye(len(uploads), dtype=torch.int64).roll(1, dims=1)), shown

    def to_each(self: Aggregator, silo: str, **arguments: Any) -> Payload:
        given = for_silo(self, silo, **arguments)
        if silo == self.federation.silos[0] and Exposure.MIXING_WEIGHTS in given:
            # Others that no rule is against: its own mixture holds a little more of all others.
            found = given[Exposure.MIXING_WEIGHTS].tensors()
            weights = found["weights"].clone()
            weights[0] += 1
            weights[0, 0] -= len(weights)
            return {Exposure.MIXING_WEIGHTS: Part.of({**found, "weights": weights})}
        return given

    def with_numbers_added(mixed: Payload) -> tuple[Payload, bytes]:
        """One to the model's first number."""
        words = ring.unpack(mixed[Exposure.SEALED_MIXTURE].tensors()["words"].numpy())
        one = ring.shifted(ring.from_signed(np.array([1 << WEIGHT_BITS])), FRACTION_BITS + SPREAD_BITS)
        words[:, :1] = ring.add(words[:, :1], one)
        packed = ring.pack(words)
        return {Exposure.SEALED_MIXTURE: Part.of({"words": torch.from_numpy(packed)})}, hashlib.sha256(packed).digest()

    def added(sealed: Mapping[str, Payload], *arguments: Any) -> Any:
        mixed, digests = mix_sealed(sealed, *arguments)
        first = min(mixed)
        mixed[first], digests[0] = with_numbers_added(mixed[first])
        return mixed, digests

    def added_after(self: Aggregator, silo: str, **arguments: Any) -> Payload:
        given = for_silo(self, silo, **arguments)
        if silo == self.federation.silos[0] and Exposure.SEALED_MIXTURE in given:
            return {**given, **with_numbers_added(given)[0]}
        return given

    if what == "unit":
        blind.weigh = unit
    elif what == "added":
        blind.mix_sealed = added
    else:
        Aggregator.for_silo = {"two": to_each, "after": added_after}[what]  # type: ignore[method-assign,assignment]
    cli.main()
