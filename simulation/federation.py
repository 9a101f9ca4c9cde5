"""A federation in one process: the daemons' methods, seeds and arithmetic, without network or journal.

On the same machine the models are bit-equal to those of real daemons with the same plan and shards, unless the plan has
differential privacy: what that draws is secret, and never the same twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import (
    Downloads,
    Federation,
    Method,
    PublicSet,
    Round,
    SiloSide,
    SiloWeights,
    State,
    participants,
)
from medsilo.algorithms.models import Layout, build_start, state_of, whole_state
from medsilo.algorithms.models.given_weights import sent_names
from medsilo.algorithms.protection.private import check
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.privacy.budget.accounting import (
    Event,
    GaussianRelease,
    Guarantee,
    SampledGaussian,
    SharedGaussian,
    describe,
    epsilon,
    read,
)
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import BudgetError, ConfigurationError, DataError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.measuring import Measurement
from medsilo.silo.training.site import LocalSite
from medsilo.simulation.batched import Engine, train_round
from medsilo.simulation.checkpoint import CheckpointReader, CheckpointWriter

if TYPE_CHECKING:
    from medsilo.silo.training.private_training import Charge

_CHECKPOINT_VERSION = 1


@dataclass(frozen=True)
class SiloRound:
    """One silo's round.

    Attributes:
        round: from 0; the number of rounds stands for what is handed out after the last one.
        silo: its name.
        took_part: whether it was one of the round's participants.
        measured: its personalised model on its own test images after the round, also where it did not take part;
            None without test images.
        up: bytes of tensors that it sent, by exposure class.
        down: bytes of tensors that it was sent, the starting model included.
    """

    round: int
    silo: str
    took_part: bool
    measured: Measurement | None
    up: Mapping[Exposure, int] = field(default_factory=dict)
    down: Mapping[Exposure, int] = field(default_factory=dict)


class Simulation:
    """One run. Silos are named after their shards; ``step`` trains one round.

    All silos take turns with one module: what is a silo's own is its side's memory. ``engine`` trains them together;
    the default, one after the other, gives the daemons' bits. ``trusted``: own model factories that the plan may name.
    ``weights``: files and folders in which the weights are that the plan starts from. ``features``: where what a fixed
    extractor makes of a shard's images is kept, for every later simulation of that shard; in memory alone by default.
    ``last`` is what happened in the last round (or at the
    end), silo by silo; ``weights`` the silo-to-silo weights of the last round, if its method has such. A plan with
    privacy is trained with DP-SGD, each silo with noise of its own that nobody can repeat: such runs are not bit-equal
    to any other. ``spent`` then says what each silo's training has cost in this simulation; no hospital's ledger is
    charged.
    """

    def __init__(
        self,
        plan: RunPlan,
        method: Method,
        shards: Sequence[ImageDataset],
        *,
        device: torch.device,
        public: PublicSet | None = None,
        engine: Engine | None = None,
        trusted: tuple[str, ...] = (),
        weights: Sequence[Path] = (),
        features: Path | None = None,
    ) -> None:
        self.plan = plan
        self.round = 0
        self.last: list[SiloRound] = []
        self.weights: SiloWeights | None = None
        self._method = method
        if plan.privacy is not None:
            check(method)
            if engine is not None:
                raise ConfigurationError(
                    "with differential privacy silos are trained one after the other: engine: alone"
                )
        self._engine = engine
        shards = sorted(shards, key=lambda shard: shard.name)
        self._model = build_start(plan.model, seed=plan.seed, trusted=trusted, weights=weights)
        initial = state_of(self._model)
        whole = whole_state(self._model)
        self._initial_bytes = Part.of({name: whole[name] for name in sent_names(plan.model, self._model)}).nbytes
        names = tuple(shard.name for shard in shards)
        federation = Federation(
            Layout.of(self._model),
            plan.training_rounds,
            plan.seed,
            silos=names,
            input_shape=plan.model.input_shape,
            public=public,
        )
        self._coordinator = method.coordinator_side(federation)
        self._shards = {shard.name: shard for shard in shards}
        self._charges: dict[str, list[Event]] = {name: [] for name in names}
        self._sites: dict[str, LocalSite] = {}
        self._sides: dict[str, SiloSide] = {}
        for shard in shards:
            site = self._sites[shard.name] = self._site(shard, device, features)
            self._sides[shard.name] = method.silo_side(site)
            self._sides[shard.name].begin({name: tensor.clone() for name, tensor in initial.items()})
        self._latest: dict[str, Payload] = {}
        self._own: dict[str, Payload] = {}
        self._everyone: Payload | None = None
        self._started: set[str] = set()
        self._measured: dict[str, Measurement | None] = {}

    def _site(self, shard: ImageDataset, device: torch.device, features: Path | None) -> LocalSite:
        return LocalSite(
            shard.name,
            shard,
            self._model,
            self.plan,
            device=device,
            charge=self._charger(shard.name),
            # Of one data set each: files of another are deleted when one is written.
            features=features and features / shard.fingerprint,
        )

    @property
    def silos(self) -> Mapping[str, SiloSide]:
        """The silos' sides by name."""
        return self._sides

    @property
    def spent(self) -> Mapping[str, Guarantee]:
        """What each silo's training has cost so far, at the plan's δ; empty without privacy."""
        if (found := self.plan.privacy) is None:
            return {}
        return {
            name: Guarantee(epsilon(own, delta=found.delta), found.delta, found.unit)
            for name, own in self._charges.items()
        }

    def _charger(self, silo: str) -> Charge:
        def charge(round_number: int, phase: str, event: Event, reads: str) -> Paid:
            del round_number, phase, reads
            own, planned = [*self._charges[silo], event], self.plan.privacy
            assert planned is not None
            if sum(one.steps for one in own if isinstance(one, SampledGaussian)) > planned.steps:
                raise BudgetError(f"{silo} would take more steps than the plan's {planned.steps}")
            if sum(one.releases for one in own if isinstance(one, SharedGaussian)) > planned.steps:
                raise BudgetError(f"{silo} would take more steps than the plan's {planned.steps}")
            averages = sum(one.releases for one in own if isinstance(one, GaussianRelease))
            if averages > sum(release.times for release in planned.releases):
                raise BudgetError(f"{silo} would release more averages than the plan's")
            self._charges[silo] = own
            return unsealed()

        return charge

    def step(self) -> dict[str, Measurement | None]:
        """Trains one round; returns what the silos that took part measured on their own test images.

        For a method whose personalised model is what is received (``measures_received``), that is measured with
        what this round's aggregation gave; for others, right after local training.
        """
        plan, number = self.plan, self.round
        chosen = participants(list(self._sides), share=plan.participation, seed=plan.seed, round_number=number)
        downloads = self._coordinator.downloads(number, chosen, Downloads(self._own, self._everyone))
        uploads: dict[str, Payload] = {}
        down = {name: self._received_bytes(name, downloads.for_silo(name)) for name in chosen}
        if self._engine is not None:
            train_round({n: self._sides[n] for n in chosen}, number, downloads, self._sites, self._engine)
        for name in chosen:
            side = self._sides[name]
            if self._engine is None:
                side.train(number, downloads.for_silo(name))
            # In the place of its last one, which would otherwise keep a model of the round before in memory.
            uploads[name] = self._latest[name] = side.upload()
            # No silo finds another's gradients in the module that they share.
            self._model.zero_grad(set_to_none=True)
        self._latest = dict(sorted(self._latest.items()))
        self.weights = None
        if number + 1 < plan.training_rounds or self._method.downloads_last:
            self._aggregate(number, uploads)
        self.round += 1
        self._measure(chosen)
        self.last = [
            SiloRound(
                number,
                name,
                name in uploads,
                self._measured[name],
                _bytes(uploads.get(name, {})),
                down.get(name, {}),
            )
            for name in self._sides
        ]
        return {name: self._measured[name] for name in chosen}

    def finish(self) -> dict[str, Measurement | None]:
        """Hands out the last downloads and measures the final personalised models of all silos."""
        last = Downloads(self._own, self._everyone) if self._method.downloads_last else Downloads()
        self.last = []
        for name, side in self._sides.items():
            download = last.for_silo(name)
            down = self._received_bytes(name, download)
            side.finish(download)
            self._measured[name] = self._sites[name].measure(side.personal())
            self.last.append(SiloRound(self.plan.training_rounds, name, False, self._measured[name], {}, down))
        return dict(self._measured)

    def save(self, path: Path, *, notes: Any = None) -> None:
        """Keeps everything that the next rounds depend on in one file, which appears whole.

        ``notes`` is JSON of the caller's, given back by ``load``.
        """
        writer = CheckpointWriter()
        state = {
            "version": _CHECKPOINT_VERSION,
            **self._identity(),
            "round": self.round,
            "silos": {name: writer.memory(side.memory) for name, side in self._sides.items()},
            "optimizers": {name: writer.memory(site.optimizers) for name, site in self._sites.items()},
            "coordinator": writer.memory(self._coordinator.memory),
            "latest": {name: writer.payload(payload) for name, payload in self._latest.items()},
            "own": {name: writer.payload(payload) for name, payload in self._own.items()},
            "everyone": None if self._everyone is None else writer.payload(self._everyone),
            "started": sorted(self._started),
            "charges": {name: [describe(event) for event in own] for name, own in self._charges.items()},
            "measured": {name: m and astuple(m) for name, m in self._measured.items()},
            "notes": notes,
        }
        writer.write(path, state)

    def load(self, path: Path) -> Any:
        """Goes back to where ``save`` was; returns its notes.

        Raises ``DataError`` for a file that is damaged, or of another plan or other data.
        """
        reader = CheckpointReader(path)
        state = reader.state
        if {key: state.get(key) for key in self._identity()} != self._identity():
            raise DataError(
                f"{path}: is of a run with another plan, or on other data; delete it to begin this run anew, or put "
                "the experiment's file and data back as they were"
            )
        if state["version"] != _CHECKPOINT_VERSION:
            raise DataError(f"{path}: was written by another release; delete it to begin this run anew")
        self.round = state["round"]
        for name, side in self._sides.items():
            side.memory = reader.memory(state["silos"][name])
            self._sites[name].optimizers = reader.memory(state.get("optimizers", {}).get(name, {}))
        self._coordinator.memory = reader.memory(state["coordinator"])
        self._latest = {name: reader.payload(numbers) for name, numbers in state["latest"].items()}
        self._own = {name: reader.payload(numbers) for name, numbers in state["own"].items()}
        self._everyone = None if state["everyone"] is None else reader.payload(state["everyone"])
        self._started = set(state["started"])
        for name, own in state.get("charges", {}).items():
            self._charges[name] = [read(event) for event in own]
        self._measured = {name: m and Measurement(*m) for name, m in state["measured"].items()}
        return state["notes"]

    def _identity(self) -> dict[str, Any]:
        fingerprints = {name: shard.fingerprint for name, shard in self._shards.items()}
        return {"plan": self.plan.sha256.hex(), "shards": fingerprints}

    def _aggregate(self, number: int, uploads: Mapping[str, Payload]) -> None:
        fresh = self._coordinator.aggregate(Round(number, uploads, self._latest, MemoryWorkspace()))
        self._own.update(fresh.own)
        self._everyone = fresh.everyone if fresh.everyone is not None else self._everyone
        self.weights = fresh.weights

    def _measure(self, chosen: Iterable[str]) -> None:
        """Brings every silo's measurement up to date; a model that did not change is not measured again."""
        chosen = set(chosen)
        for name, side in self._sides.items():
            if self._method.measures_received:
                self._measured[name] = self._sites[name].measure(self._as_received(name))
            elif name in chosen or name not in self._measured:
                self._measured[name] = self._sites[name].measure(side.personal())

    def _as_received(self, name: str) -> State:
        """The personalised model that the silo would have if it took its download now; the side stays as it is."""
        side = self._sides[name]
        memory, optimizers = side.memory, dict(self._sites[name].optimizers)
        side.memory = {g: {key: tensor.clone() for key, tensor in state.items()} for g, state in memory.items()}
        try:
            side.finish(Downloads(self._own, self._everyone).for_silo(name))
            return side.personal()
        finally:
            side.memory, self._sites[name].optimizers = memory, optimizers

    def _received_bytes(self, name: str, download: Payload) -> dict[Exposure, int]:
        """Bytes by class of a download; a silo's first holds the starting model too."""
        start = {} if name in self._started else {self.plan.model.start: self._initial_bytes}
        self._started.add(name)
        return {**start, **_bytes(download)}


def _bytes(payload: Payload) -> dict[Exposure, int]:
    return {exposure: part.nbytes for exposure, part in payload.items()}
