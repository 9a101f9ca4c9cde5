"""A coordinator that has silos help it with weights of its own: ``showing unit serve …`` hands each hospital the next
one's model itself, ``showing two serve …`` tells the first hospital other weights than the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from medsilo.algorithms.protection import blind
from medsilo.algorithms.tensors import Part, Payload
from medsilo.coordinator import cli
from medsilo.coordinator.rounds.closing import Aggregator
from medsilo.privacy.exposure import Exposure


def main() -> None:
    what = sys.argv.pop(1)
    weigh, for_silo = blind.weigh, Aggregator.for_silo

    def told(weights: torch.Tensor) -> Payload:
        return {Exposure.MIXING_WEIGHTS: Part.of({"weights": weights})}

    def unit(uploads: Mapping[str, Payload], *arguments: Any) -> Any:
        _, shown = weigh(uploads, *arguments)
        return told(1024 * torch.eye(len(uploads), dtype=torch.int64).roll(1, dims=1)), shown

    def to_each(self: Aggregator, silo: str, **arguments: Any) -> Payload:
        given = for_silo(self, silo, **arguments)
        if silo == self.federation.silos[0] and Exposure.MIXING_WEIGHTS in given:
            # Others that no rule is against: its own mixture holds a little more of all others.
            weights = given[Exposure.MIXING_WEIGHTS].tensors()["weights"].clone()
            weights[0] += 1
            weights[0, 0] -= len(weights)
            return told(weights)
        return given

    if what == "unit":
        blind.weigh = unit
    else:
        Aggregator.for_silo = to_each  # type: ignore[method-assign,assignment]
    cli.main()
