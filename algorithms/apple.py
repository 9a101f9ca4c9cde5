"""APPLE (Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022,
Algorithm 1): every silo has a core model that all others may download, and learns how much of each to take.

Silo i's personalised model is w_i = Σ_j p_ij c_j over all core models, its own c_i included (Eq. 2). It trains c_i
and its directed relationships p_i together on (Eq. 4)

    CE(w_i) + λ(r) μ/2 ‖p_i − p_0‖²,    λ(r) = (1 + cos(π r/L))/2 for r < L, then 0;

the others' cores stay as they came. The gradient of c_i is p_ii times that of w_i, 1/n at first: as in the authors'
published code its learning rate is n times the plan's, n being the number of cores combined, so that the core learns
as fast as a model that is trained alone. At first λ holds p_i at p_0, where all take from all, and then lets it go. p_i
never leaves the silo.

The paper's p_0 is each silo's share of all images, a number that would have to be told to everyone; here it is
uniform. A silo knows whose cores it has seen: as k newcomers join n − k others, they enter with 1/n and the others'
p are scaled by (n − k)/n, so that the sum stays what it was (ours; with everyone there from the second round on it is
the paper's p_0). Before any core has come, p_ii = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medsilo.algorithms.declarations import HANDED_ON, Blind, Count, NonNegative, Positive, Protected, Share, Sums
from medsilo.algorithms.families.peers import PeerCoordinator, peer_models
from medsilo.algorithms.families.sharing import model_upload
from medsilo.algorithms.method import (
    PERSONAL,
    CoordinatorSide,
    Method,
    SiloSide,
    State,
    derive_seed,
    subset,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.exposure import MODEL, Exposure

_CORE = "core"
_PEERS = "peers"
_RELATIONSHIPS = "relationships"


class AppleSilo(SiloSide):
    """Its personal model is the combination; its core goes up."""

    method: Apple

    def begin(self, initial: State) -> None:
        """Core and personal model start alike."""
        super().begin(initial)
        self.memory[_CORE] = initial

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs on the core and on p."""
        site = self.site
        peers = self._peers(download)
        old = {
            silo: float(value) for silo, value in self.memory.get(_RELATIONSHIPS, {site.name: torch.ones(())}).items()
        }
        names = [site.name, *sorted(peers)]
        combination = Combination(
            [with_newcomers(old, names)[name] for name in names],
            [peers[name] for name in names[1:]],
            next(site.model.parameters()).device,
            unit=unit_of_rate(self.method.relationship_rate, site.training.optimizer),
        )
        strength = self.method.penalty * penalty_weight(round_number, self.method.penalty_share * site.rounds)

        def objective(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            core = {name: p for name, p in model.named_parameters() if p.requires_grad}
            loss = site.loss(functional_call(model, combination.of(core), (images,)), labels)
            distance = combination.relationships - 1 / len(names)
            return loss + strength / 2 * distance.square().sum()

        site.load(self.memory[_CORE])
        site.fit(round_number, objective=objective, extra=combination) if peers else site.fit(round_number)
        core = state_of(site.model)
        self.memory[_CORE] = core
        learnt = combination.relationships.detach().cpu()
        self.memory[_RELATIONSHIPS] = {name: learnt[place].clone() for place, name in enumerate(names)}
        with torch.no_grad():
            own = {name: parameter.detach() for name, parameter in site.model.named_parameters()}
            mixed = combination.of(subset(own, site.layout.parameters))
        self.memory[PERSONAL] = {**core, **{name: tensor.detach().cpu().clone() for name, tensor in mixed.items()}}
        if self.method.models:
            self.memory[_PEERS] = {f"{silo}/{name}": t for silo, peer in peers.items() for name, t in peer.items()}

    def upload(self) -> Payload:
        """The core model."""
        return model_upload(self.memory[_CORE], self.site.layout)

    def _peers(self, download: Payload) -> dict[str, State]:
        """The last core of every silo that one has come from."""
        peers: dict[str, State] = {}
        for key, tensor in self.memory.get(_PEERS, {}).items():
            silo, _, name = key.partition("/")
            peers.setdefault(silo, {})[name] = tensor
        return {**peers, **peer_models(download, self.site.layout.parameters)}


class Combination(nn.Module):
    """Σ_j p_j c_j of the own core, which is trained elsewhere, and the others', which are not trained.

    What is trained is p in the given unit, p / unit: with one learning rate for all parameters, that is a learning rate
    of p's own.
    """

    def __init__(
        self, relationships: Sequence[float], others: Sequence[State], device: torch.device, *, unit: float
    ) -> None:
        super().__init__()
        self._unit = unit
        self.in_units = nn.Parameter(torch.tensor(relationships, device=device) / unit)
        names = others[0] if others else {}
        self._others = {name: torch.stack([other[name] for other in others]).to(device) for name in names}

    @property
    def relationships(self) -> Tensor:
        """p, ``Tensor[1 + M]``, the own first."""
        return self._unit * self.in_units

    def of(self, core: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The combination's parameters by name; ``core`` gets its gradient n times as large."""
        relationships = self.relationships
        own, rest = relationships[0], relationships[1:]
        if not len(rest):
            return {name: own * tensor for name, tensor in core.items()}
        faster = {name: t.detach() + len(relationships) * (t - t.detach()) for name, t in core.items()}
        return {name: own * t + torch.tensordot(rest, self._others[name], dims=1) for name, t in faster.items()}


def with_newcomers(relationships: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Relationships to all of ``names``: newcomers get 1/n, the others' are scaled so that the sum stays.

    >>> with_newcomers({"a": 0.75, "b": 0.25}, ["a", "b", "c", "d"])
    {'a': 0.375, 'b': 0.125, 'c': 0.25, 'd': 0.25}
    """
    new = [name for name in names if name not in relationships]
    kept = 1 - len(new) / len(names)
    return {name: kept * relationships[name] if name in relationships else 1 / len(names) for name in names}


def unit_of_rate(rate: float, optimizer: str) -> float:
    """The unit in which a number has to be trained to move as if its learning rate were ``rate`` times as high.

    In units of u, the gradient is u times as large, and a step counts u times as much. SGD's steps are proportional to
    the gradient, which makes u²; Adam's do not depend on its scale, which makes u.
    """
    return math.sqrt(rate) if optimizer == "sgd" else rate


def penalty_weight(round_number: int, rounds: float) -> float:
    """λ(r): falls from 1 to 0 along half a cosine in ``rounds`` rounds, then stays 0."""
    return (1 + math.cos(math.pi * round_number / rounds)) / 2 if round_number < rounds else 0.0


class AppleCoordinator(PeerCoordinator):
    """Hands out core models: all of them, or some drawn at random."""

    method: Apple

    def choose(self, round_number: int, silo: str, available: Sequence[str]) -> list[str]:
        """All others, or M of them, drawn anew in each round."""
        if not 0 < self.method.models < len(available):
            return list(available)
        generator = torch.Generator().manual_seed(derive_seed(self.federation.seed, "peers", silo, round_number))
        order = torch.randperm(len(available), generator=generator)[: self.method.models].tolist()
        return [available[index] for index in sorted(order)]


@dataclass(frozen=True)
class Apple(Method):
    """APPLE's hyper-parameters. Core model and relationships share the plan's optimiser, each with its learning rate.

    Attributes:
        models: M ≥ 0, how many other silos' cores a silo gets in a round, drawn at random (the paper's silo asks for
            those it has the strongest relationship to, which would tell the coordinator p); 0 for all, the paper's
            default. With a limit, a silo keeps the last core that it got of each, as the paper's does.
        penalty: μ ≥ 0, of the term that holds p at p_0; 0.1 is the default of the authors' published code (which
            leaves out Eq. 4's ½, so that their 0.1 acts as 0.2 does here).
        penalty_share: L as a share of the run's rounds, 0 … 1; 0 leaves the term out. 0.1 is the default of the
            authors' published code (in which λ falls exponentially by default, along the cosine as an option).
        relationship_rate: the learning rate of p as a share of the plan's, above 0. The authors' published code takes
            0.001 and 0.01: a tenth.
    """

    name: ClassVar[str] = "apple"
    silo: ClassVar[type[SiloSide]] = AppleSilo
    coordinator: ClassVar[type[CoordinatorSide]] = AppleCoordinator
    sends: ClassVar[str] = "model"
    gets: ClassVar[str] = "**other silos' models as they are**"
    uploads: ClassVar[frozenset[Exposure]] = frozenset(MODEL)
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_MODELS})
    under_privacy: ClassVar[Protected | str] = (
        "it learns its weights of other silos' models on a loss of its own, which nothing clips or noises"
    )
    under_masks: ClassVar[Sums | str] = HANDED_ON
    under_blind: ClassVar[Blind | str] = HANDED_ON
    models: Count = 0
    penalty: NonNegative = 0.1
    penalty_share: Share = 0.1
    relationship_rate: Positive = 0.1
