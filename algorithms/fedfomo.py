"""FedFomo (Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021): a silo
gets other silos' models as they are and takes from each as much as it helps on its own validation images.

With a silo's own model θ as it was before its last training, and a candidate's θ_n, L being the loss on the silo's
validation images (Eq. 5 and 6),

    w_n = (L(θ) − L(θ_n)) / ‖θ_n − θ‖,    θ ← θ + Σ_n w_n⁺/(Σ_m w_m⁺) (θ_n − θ),    w⁺ = max(0, w).

The candidates are the peers' models and, as in the authors' published code, the silo's own trained one: else a peer
that is better by a hair would take its place. Where no candidate helps, the silo keeps its trained model. Then it
trains. The coordinator adds the w that each silo reports to the silo's row of the affinity matrix P, and sends
each silo the models of the M silos it has the highest affinity to, now and then one drawn at random instead, less
often from round to round (section 3.2, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from medsilo.algorithms.declarations import HANDED_ON, Blind, NonNegative, OneOrMore, Protected, Range, Share, Sums
from medsilo.algorithms.families.peers import SENT, PeerCoordinator, peer_models
from medsilo.algorithms.families.sharing import model_upload
from medsilo.algorithms.method import (
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Method,
    Round,
    SiloSide,
    Site,
    State,
    derive_seed,
    subset,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MODEL, Exposure

SAME = 1e-12
"""Two models at most this far apart count as identical: there is nothing to take from such a peer."""

_BEFORE = "before"
_RATED = "rated"
_RATINGS = "ratings"
_MATRIX = "matrix"
_AFFINITY = "affinity"
_BATCH = 1024
_HOPELESS = 1e6


class FedFomoSilo(SiloSide):
    """Moves its own model towards the peers that do better on its validation images, then trains it."""

    method: FedFomo

    def __init__(self, method: FedFomo, site: Site) -> None:
        super().__init__(method, site)
        site.reserve(method.validation_share)

    def train(self, round_number: int, download: Payload) -> None:
        """Combination, then E epochs from it."""
        specs = self.site.layout.parameters
        peers = list(peer_models(download, specs).values())
        if len(peers) > self.method.models:
            raise RefusedError(
                f"the coordinator sent {len(peers)} models, but the plan's are at most {self.method.models}"
            )
        own = subset(self.memory[PERSONAL], specs)
        before = self.memory.get(_BEFORE, own)
        candidates = [*peers, own]
        losses = torch.tensor([self._loss(one) for one in candidates], dtype=torch.float64)
        distances = torch.tensor([_distance(before, one) for one in candidates])
        weights = candidate_weights(self._loss(before), losses, distances)
        self.memory[_BEFORE] = _mixed(candidates, weights)
        self.site.load(self.memory[PERSONAL])
        self.site.load(self.memory[_BEFORE])
        self.site.fit(round_number)
        self.memory[PERSONAL] = state_of(self.site.model)
        ratings = torch.zeros(self.method.models)
        ratings[: len(peers)] = weights[:-1]
        self.memory[_RATED] = {_RATINGS: ratings}

    def rehearse(self) -> None:
        """As if no peer had been rated."""
        self.memory[_RATED] = {_RATINGS: torch.zeros(self.method.models)}

    def upload(self) -> Payload:
        """The trained model, and the weights in the order in which the peers' models came."""
        payload = model_upload(self.memory[PERSONAL], self.site.layout)
        return {**payload, Exposure.PEER_RATINGS: Part.of(self.memory[_RATED])}

    def _loss(self, parameters: State) -> float:
        """Mean cross entropy on the validation images, with the silo's own buffers."""
        site = self.site
        site.load(self.memory[PERSONAL])
        site.load(parameters)
        site.model.eval()
        images, labels = site.reserved_data()
        total = 0.0
        with torch.no_grad():
            for start in range(0, len(labels), _BATCH):
                logits = site.model(images[start : start + _BATCH])
                total += float(F.cross_entropy(logits, labels[start : start + _BATCH], reduction="sum"))
        return total / len(labels)


def candidate_weights(loss_before: float, losses: Tensor, distances: Tensor) -> Tensor:
    """w: what each candidate gains on the loss of the silo's model before its last training, by its distance from it.

    Args:
        loss_before: of that model.
        losses: ``Tensor[M]`` of the candidates, float64; one that is not finite counts as very large.
        distances: ``Tensor[M]`` from that model.

    Returns:
        ``Tensor[M]`` float64; 0 for a candidate that is identical to it.
    """
    losses = torch.nan_to_num(losses, nan=_HOPELESS, posinf=_HOPELESS).clamp(max=_HOPELESS)
    apart = distances > SAME
    return torch.where(apart, (loss_before - losses) / distances.double().where(apart, 1.0), 0.0)


def _distance(one: State, other: State) -> float:
    squares = [torch.linalg.vector_norm(one[name].double() - other[name].double()).square() for name in one]
    return float(torch.stack(squares).sum().sqrt())


def _mixed(candidates: Sequence[State], weights: Tensor) -> State:
    """θ moved to the candidates that help; the last of them, the silo's own, where none does."""
    gains, own = weights.clamp(min=0), candidates[-1]
    if gains.sum() == 0:
        return own
    shares = (gains / gains.sum()).tolist()
    # The shares sum to 1, so that θ cancels out of θ + Σ share (θ_n − θ).
    return {
        name: sum(
            (s * one[name].double() for s, one in zip(shares, candidates, strict=True) if s), start=torch.zeros(())
        ).to(tensor.dtype)
        for name, tensor in own.items()
    }


class FedFomoCoordinator(PeerCoordinator):
    """Keeps P, silos in the order of their names, and whose models went where in the round."""

    method: FedFomo

    by_silo: ClassVar[tuple[str, ...]] = (SENT,)

    def forget(self, silo: str) -> None:
        """Its ratings, and the others' of it, count no more."""
        super().forget(silo)
        if _AFFINITY in self.memory:
            matrix = self._matrix().clone()
            matrix[self._place(silo), :] = matrix[:, self._place(silo)] = 0
            self.memory[_AFFINITY] = {_MATRIX: matrix}

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The whole model and M ratings."""
        ratings = (TensorSpec(_RATINGS, (self.method.models,)),)
        return {**super().upload_parts(round_number, silo), Exposure.PEER_RATINGS: ratings}

    def downloads(self, round_number: int, participants: Sequence[str], kept: Downloads) -> Downloads:
        """M models each, by affinity."""
        self.memory[SENT] = {silo: torch.full((self.method.models,), -1) for silo in participants}
        return super().downloads(round_number, participants, kept)

    def aggregate(self, ended: Round) -> Downloads:
        """Adds the round's ratings to P."""
        matrix = self._matrix().clone()
        for silo, upload in ended.uploads.items():
            sent = self.memory.get(SENT, {}).get(silo)
            if sent is not None:
                ratings = upload[Exposure.PEER_RATINGS].tensors()[_RATINGS]
                matrix[self._place(silo), sent[sent >= 0]] += ratings[sent >= 0]
        self.memory[_AFFINITY] = {_MATRIX: matrix}
        return super().aggregate(ended)

    def choose(self, round_number: int, silo: str, available: Sequence[str]) -> list[str]:
        """ε-greedy on the silo's row of P, ties broken at random; noted, so that ratings find their column."""
        row = self._matrix()[self._place(silo)]
        seed = derive_seed(self.federation.seed, "peers", silo, round_number)
        places = epsilon_greedy(
            row,
            [self._place(other) for other in available],
            self.method.models,
            explore=self.method.exploration(round_number),
            seed=seed,
        )
        self.memory[SENT][silo][: len(places)] = torch.tensor(places, dtype=torch.int64)
        return [self.federation.silos[place] for place in places]

    def _place(self, silo: str) -> int:
        return self.federation.silos.index(silo)

    def _matrix(self) -> Tensor:
        count = len(self.federation.silos)
        return self.memory[_AFFINITY][_MATRIX] if _AFFINITY in self.memory else torch.zeros(count, count)


@dataclass(frozen=True)
class FedFomo(Method):
    """FedFomo's hyper-parameters.

    Attributes:
        models: M ≥ 1, how many peers' models a silo gets in a round; all of them where there are no more. 5 is
            customary (PFLlib, FL-bench); what the authors' published commands call 5 models is 4 peers'.
        explore: ε in 0 … 1, the probability that a place goes to a silo drawn at random, in the first round; the
            authors use 0.3.
        explore_decay: by how much ε falls with each round, until it is 0; at least 0, at which ε stays. The authors
            use 0.05.
        validation_share: of the training images, set aside to weigh peers with; above 0, below 1. The paper takes
            20 %.
    """

    name: ClassVar[str] = "fedfomo"
    silo: ClassVar[type[SiloSide]] = FedFomoSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedFomoCoordinator
    sends: ClassVar[str] = "model, ratings of others' models"
    gets: ClassVar[str] = "**other silos' models as they are**"
    uploads: ClassVar[frozenset[Exposure]] = frozenset({*MODEL, Exposure.PEER_RATINGS})
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_MODELS})
    under_privacy: ClassVar[Protected | str] = (
        "it rates other silos' models on the silo's own images, and the ratings have no mechanism"
    )
    under_masks: ClassVar[Sums | str] = HANDED_ON
    under_blind: ClassVar[Blind | str] = HANDED_ON
    models: OneOrMore = 5
    explore: Share = 0.3
    explore_decay: NonNegative = 0.05
    validation_share: Annotated[float, Range(above=0, below=1)] = 0.2

    def exploration(self, round_number: int) -> float:
        """ε in that round, counted from 0."""
        return max(0.0, self.explore - self.explore_decay * round_number)


def epsilon_greedy(values: Tensor, available: Sequence[int], count: int, *, explore: float, seed: int) -> list[int]:
    """Up to ``count`` of the available places, sorted: one after the other the one of the highest value, or, with
    probability ``explore``, any."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(available), generator=generator).tolist()
    left = [available[index] for index in order]
    chosen: list[int] = []
    while left and len(chosen) < count:
        at_random = bool(torch.rand((), generator=generator) < explore)
        place = left[0] if at_random else max(left, key=lambda place: float(values[place]))
        left.remove(place)
        chosen.append(place)
    return sorted(chosen)
