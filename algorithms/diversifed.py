"""DiversiFed: attract similar silos' models, repel dissimilar ones (Wu et al., "The Diversity Bonus: Learning from
Dissimilar Distributed Clients in Personalized Federated Learning").

With models w_1 … w_N flattened to D numbers, distances D_ij = ‖w_i − w_j‖₂ and d_ij = D_ij/τ, the model distance
loss of silo i is the mean over the others of log softmax_j(d_ij) (Eq. 4), and the coordinator takes one gradient
step on it: z_i = w_i − α ∇L_d(w_i) = β_ii w_i + Σ_k β_ik w_k (Eq. 6–10) with

    β_ik = α ξ_ik / (τ D_ik),   ξ_ik = 1/(N−1) − softmax_k(d_i),   β_ii = 1 − Σ_k β_ik.

ξ_ik > 0 for a silo closer than average: z_i moves towards it; ξ_ik < 0 for one farther away: z_i moves off. A
silo then trains on CE + λ/(2α) ‖w − z‖² (Eq. 7, squared norm).

Two participants: softmax of one number is 1, so ξ = 0 and z = w: DiversiFed then does nothing.

``variant: bounded`` is ours. In the paper's form each pair moves z by at most 1/(τ(N−1)) whatever the distance, so it
hardly draws models together, while nothing bounds how far they drift apart: L_d has no lower bound. The bounded form
keeps attraction of what is close and repulsion of what is far, but as shares of the distances themselves:

    z_i = w_i + α Σ_j a_ij (w_j − w_i),   a_i = softmax_j(−d_i) − ρ softmax_j(d_i),   d_ij = D_ij / (τ mean_k D_ik).

A silo's a_ij sum to 1 − ρ, their sizes to at most 1 + ρ, and d has no unit: scaling all models scales z. Where models
lie about equally far apart, all a_ij are nearly the same, and z is nearly the mean: the bounded form is then
mean-regularised learning (``mrmtl``), whose coordinator needs a sum and no single model. So it
becomes as training settles, wherever we measured it (docs/results/diversifed-on-fashion-mnist.md#mean).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.declarations import MIXTURES, Blind, Mixing, NonNegative, Positive, Protected, Range, Sums
from medsilo.algorithms.families.tethered import SAME, Tethered, pairwise_distances, squared_distances
from medsilo.algorithms.method import (
    CoordinatorSide,
    Downloads,
    Round,
    SiloWeights,
)
from medsilo.algorithms.tensors import Payload, Stack, combine
from medsilo.privacy.exposure import MODEL, Exposure


class DiversiFedCoordinator(CoordinatorSide):
    """Computes each participant's z from this round's uploads; the others of the round are its a(i)."""

    method: DiversiFed

    def aggregate(self, ended: Round) -> Downloads:
        """One z a participant."""
        models = Stack.of(list(ended.uploads.values()), MODEL)
        weights = self.method.weights(pairwise_distances(models.map(squared_distances), models.shape[0]))
        rows = combine(models, weights, ended.workspace)
        fresh: dict[str, Payload] = {
            silo: {Exposure.PEER_DERIVED: row} for silo, row in zip(ended.uploads, rows, strict=True)
        }
        if self.method.stale == "none":
            fresh = {silo: {} for silo in ended.latest} | fresh
        return Downloads(own=fresh, weights=SiloWeights(tuple(ended.uploads), weights))


@dataclass(frozen=True)
class DiversiFed(Tethered):
    """DiversiFed's hyper-parameters.

    Attributes:
        variant: "paper", or "bounded", ours (see above).
        temperature: τ > 0. The paper sweeps 0.5 … 1.1 (Tables IV–VI) and does not state the one used on PathMNIST;
            0.5 is our default because the best τ falls as silos get more alike.
        proximal_weight: λ ≥ 0; 0 makes this separate training. The paper uses 2 (section V-F); the bounded variant
            wants much less, about 0.1.
        repulsion: ρ in [0, 1), of the bounded variant alone; 0 only attracts.
        step_size: α > 0, the coordinator's step; the paper uses 1 (section V-B).
        start: what local training starts from: "own" continues the silo's own model (ours, z is only the centre
            of the proximal term), "z" starts from z.
        stale: what a silo gets that did not take part in the last round: "reuse" the z of its last participation,
            or "none".
    """

    name: ClassVar[str] = "diversifed"
    coordinator: ClassVar[type[CoordinatorSide]] = DiversiFedCoordinator
    gets: ClassVar[str] = "its own mixture of all models: drawn to similar, pushed from dissimilar ones"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = MIXTURES
    under_blind: ClassVar[Blind | str] = Blind(
        lambda method, *_: Mixing(lambda squared: method.weights(squared[0].sqrt()))
    )
    variant: Literal["paper", "bounded"] = "paper"
    temperature: Positive = 0.5
    proximal_weight: NonNegative = 2.0
    step_size: Positive = 1.0
    repulsion: Annotated[float, Range(least=0, below=1)] = 0.1
    start: Literal["own", "z"] = "own"
    stale: Literal["reuse", "none"] = "reuse"

    @property
    def tether(self) -> float:
        """λ/α (Eq. 7, Algorithm 1)."""
        return self.proximal_weight / self.step_size

    @property
    def starts_at_centre(self) -> bool:
        """Whether local training starts from z."""
        return self.start == "z"

    def weights(self, distances: Tensor) -> Tensor:
        """``Tensor[N, N]`` of distances between models to the weights of which z is made."""
        if self.variant == "paper":
            return mixing_weights(distances, temperature=self.temperature, step_size=self.step_size)
        return bounded_weights(
            distances, temperature=self.temperature, repulsion=self.repulsion, step_size=self.step_size
        )

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """Too few silos."""
        if silos < 3 and self.variant == "paper":
            return ["diversifed does nothing with fewer than three silos: z equals each silo's own model"]
        return []


def model_distance_loss(models: Tensor, *, temperature: float) -> Tensor:
    """The model distance loss of every silo (Eq. 4): mean_j(d_ij) − logsumexp_j(d_ij) over the others.

    Args:
        models: ``Tensor[N, D]``, one flattened model a row, float32 or float64.
        temperature: τ > 0.

    Returns:
        ``Tensor[N]`` of the same dtype; zeros for N = 1, where the loss is undefined.
    """
    count = len(models)
    if count < 2:
        return torch.zeros(count, dtype=models.dtype)
    scaled = _others(pairwise_distances([squared_distances(models.to(torch.float64))], count) / temperature)
    return (scaled.mean(dim=1) - torch.logsumexp(scaled, dim=1)).to(models.dtype)


def attract_repel(models: Tensor, *, temperature: float, step_size: float = 1.0) -> Tensor:
    """One gradient step on the model distance loss for every silo: z (Eq. 6).

    Args:
        models: ``Tensor[N, D]``, one flattened model a row, float32 or float64.
        temperature: τ > 0.
        step_size: α > 0.

    Returns:
        ``Tensor[N, D]`` of the same dtype, computed in float64. ‖z_i − w_i‖ is at most 2α/τ · (1 − 1/(N−1)).
    """
    exact = models.to(torch.float64)
    distances = pairwise_distances([squared_distances(exact)], len(models))
    weights = mixing_weights(distances, temperature=temperature, step_size=step_size)
    return (weights @ exact).to(models.dtype)


def mixing_weights(distances: Tensor, *, temperature: float, step_size: float) -> Tensor:
    """β of Eq. 9–10: z is ``β @ models``.

    Args:
        distances: ``Tensor[N, N]``, symmetric, float64.
        temperature: τ > 0.
        step_size: α > 0.

    Returns:
        ``Tensor[N, N]`` with rows that sum to 1; entries may be negative or above 1. The identity for N ≤ 2.
    """
    count = len(distances)
    if count < 3:
        return torch.eye(count, dtype=torch.float64)
    off_diagonal = ~torch.eye(count, dtype=torch.bool)
    softmax = torch.zeros_like(distances)
    softmax[off_diagonal] = torch.softmax(_others(distances / temperature), dim=1).reshape(-1)
    pull = 1 / (count - 1) - softmax
    apart = off_diagonal & (distances > SAME)
    weights = torch.zeros_like(distances)
    weights[apart] = step_size * pull[apart] / (temperature * distances[apart])
    weights.diagonal().copy_(1 - weights.sum(dim=1))
    return weights


def bounded_weights(distances: Tensor, *, temperature: float, repulsion: float, step_size: float) -> Tensor:
    """The bounded variant's weights: z is ``weights @ models``.

    Args:
        distances: ``Tensor[N, N]``, symmetric, float64.
        temperature: τ > 0, in units of a silo's mean distance to the others.
        repulsion: ρ in [0, 1).
        step_size: α > 0.

    Returns:
        ``Tensor[N, N]``, rows that sum to 1. Identical models count as equally far; the identity for N = 1.
    """
    count = len(distances)
    if count < 2:
        return torch.eye(count, dtype=torch.float64)
    others = _others(distances)
    mean = others.mean(dim=1, keepdim=True)
    scaled = others / (temperature * torch.where(mean > SAME, mean, torch.ones_like(mean)))
    shares = torch.softmax(-scaled, dim=1) - repulsion * torch.softmax(scaled, dim=1)
    weights = torch.zeros_like(distances)
    weights[~torch.eye(count, dtype=torch.bool)] = step_size * shares.reshape(-1)
    weights.diagonal().copy_(1 - weights.sum(dim=1))
    return weights


def _others(matrix: Tensor) -> Tensor:
    """``Tensor[N, N]`` without its diagonal: ``Tensor[N, N-1]``."""
    count = len(matrix)
    return matrix[~torch.eye(count, dtype=torch.bool)].reshape(count, count - 1)
