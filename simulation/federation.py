"""A federation in one process: the daemons' methods, seeds and arithmetic, without network or journal.

On the same machine the models are bit-equal to those of real daemons with the same plan and shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from algorithms.datasets import ImageDataset
from algorithms.method import Downloads, Federation, Method, PublicSet, SiloHalf, participants
from algorithms.models import Layout, build, state_of
from algorithms.tensors import MemoryWorkspace, Payload
from privacy.plan import RunPlan
from silo.training import LocalSite, Measurement


class Simulation:
    """One run. Silos are named after their shards; ``step`` trains one round."""

    def __init__(
        self,
        plan: RunPlan,
        method: Method,
        shards: Sequence[ImageDataset],
        *,
        device: torch.device,
        public: PublicSet | None = None,
    ) -> None:
        self.plan = plan
        self.round = 0
        self._method = method
        model = build(plan.model, seed=plan.seed)
        initial = state_of(model)
        names = tuple(sorted(shard.name for shard in shards))
        self._coordinator = method.coordinator_half(Federation(Layout.of(model), plan.rounds, plan.seed, names, public))
        self._sites: dict[str, LocalSite] = {}
        self._halves: dict[str, SiloHalf] = {}
        for shard in sorted(shards, key=lambda shard: shard.name):
            site = LocalSite(shard.name, shard, build(plan.model, seed=plan.seed), plan, device=device)
            self._sites[shard.name] = site
            self._halves[shard.name] = method.silo_half(site)
            self._halves[shard.name].begin({name: tensor.clone() for name, tensor in initial.items()})
        self._latest: dict[str, Payload] = {}
        self._own: dict[str, Payload] = {}
        self._everyone: Payload | None = None

    @property
    def silos(self) -> Mapping[str, SiloHalf]:
        """The silos' halves by name."""
        return self._halves

    def step(self) -> dict[str, Measurement | None]:
        """Trains one round; returns what the silos that took part measured on their own test images."""
        plan, number = self.plan, self.round
        chosen = participants(list(self._halves), share=plan.participation, seed=plan.seed, round_number=number)
        downloads = self._coordinator.downloads(number, chosen, Downloads(self._own, self._everyone))
        uploads: dict[str, Payload] = {}
        measured: dict[str, Measurement | None] = {}
        for name in chosen:
            half = self._halves[name]
            half.train(number, downloads.for_silo(name))
            uploads[name] = half.upload()
            measured[name] = self._sites[name].measure(half.personal())
        self._latest = dict(sorted({**self._latest, **uploads}.items()))
        if number + 1 < plan.rounds or self._method.downloads_last:
            fresh = self._coordinator.aggregate(number, uploads, self._latest, MemoryWorkspace())
            self._own.update(fresh.own)
            self._everyone = fresh.everyone if fresh.everyone is not None else self._everyone
        self.round += 1
        return measured

    def finish(self) -> dict[str, Measurement | None]:
        """Hands out the last downloads and measures the final personalised models of all silos."""
        last = Downloads(self._own, self._everyone) if self._method.downloads_last else Downloads()
        measured = {}
        for name, half in self._halves.items():
            half.finish(last.for_silo(name))
            measured[name] = self._sites[name].measure(half.personal())
        return measured
