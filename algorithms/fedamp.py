"""FedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1):
silos with similar models are drawn to each other, the more the more similar they are.

With A(x) = 1 − exp(−x/σ) and models w_1 … w_N, the coordinator makes one gradient step of size α on
Σ_{i<j} A(‖w_i − w_j‖²) (Eq. 3 and 5):

    u_i = ξ_ii w_i + Σ_{j≠i} ξ_ij w_j,   ξ_ij = α A'(‖w_i − w_j‖²),   A'(x) = exp(−x/σ)/σ,   ξ_ii = 1 − Σ_{j≠i} ξ_ij.

A silo then trains its own model on CE + λ/(2α) ‖w − u‖² (Eq. 6). Norms are squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medsilo.algorithms.declarations import MIXTURES, Blind, Mixing, NonNegative, Positive, Protected, Sums
from medsilo.algorithms.families.tethered import Tethered, pairwise_distances, squared_distances
from medsilo.algorithms.method import (
    CoordinatorSide,
    Downloads,
    Round,
    SiloWeights,
)
from medsilo.algorithms.tensors import Stack, combine
from medsilo.privacy.exposure import MODEL, Exposure


class FedAMPCoordinator(CoordinatorSide):
    """Computes u from every silo's last model, and for every silo: one that was absent keeps its place."""

    method: FedAMP

    def aggregate(self, ended: Round) -> Downloads:
        """One u a silo."""
        models = Stack.of(list(ended.latest.values()), MODEL)
        distances = pairwise_distances(models.map(squared_distances), len(ended.latest))
        weights = attention(distances.square(), sigma=self.method.sigma, step_size=self.method.step_size)
        rows = combine(models, weights, ended.workspace)
        own = {silo: {Exposure.PEER_DERIVED: row} for silo, row in zip(ended.latest, rows, strict=True)}
        return Downloads(own=own, weights=SiloWeights(tuple(ended.latest), weights))


@dataclass(frozen=True)
class FedAMP(Tethered):
    """FedAMP's hyper-parameters.

    The paper needs u to be a convex combination, which it gets from a small α (section 4); where Σ_{j≠i} ξ_ij would
    exceed 1, a silo's ξ_ij are scaled down to that sum (ours), so that many near-identical models become their mean
    and do not overshoot it.

    Attributes:
        step_size: α > 0. 1 is PFLlib's default, and ours. The FedCAC authors' comparison (ResNet-8 on CIFAR-10) uses
            10,000, a tenth of it after every 30 rounds, with λ = 1 and σ = 100: at first u is then the others'
            weighted mean alone, and the proximal term next to nothing.
        proximal_weight: λ ≥ 0; 0 is separate training. 1 is customary (PFLlib, FedCAC's authors).
        sigma: σ > 0, the squared distance at which attraction has fallen to 1/e. σ and α have to be tuned by task:
            they depend on the size of the model and on how far a round of training goes. 10 is ours.
            After a first round of ten epochs of Adam (0.001) we measured median squared distances of 4.5 (the
            DiversiFed paper's CNN, 160 images a silo) and 8 (an MLP of 64 units, 300 images). At σ = 1 and α = 1 the
            others' weights in u then sum to 0.004 at most for the MLP: FedAMP is separate training there. At 100 all
            pairs look alike and ξ_ij, at most α/σ, is small again. At 10 the others have 0.3 (MLP) and 0.7 (CNN) of u
            after the first round, similar silos more than dissimilar ones. Look at your own models' distances.
    """

    name: ClassVar[str] = "fedamp"
    coordinator: ClassVar[type[CoordinatorSide]] = FedAMPCoordinator
    gets: ClassVar[str] = "its own mixture of similar models"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = MIXTURES
    under_blind: ClassVar[Blind | str] = Blind(
        lambda method, *_: Mixing(lambda squared: attention(squared[0], sigma=method.sigma, step_size=method.step_size))
    )
    step_size: Positive = 1.0
    proximal_weight: NonNegative = 1.0
    sigma: Positive = 10.0

    @property
    def tether(self) -> float:
        """λ/α (Eq. 6)."""
        return self.proximal_weight / self.step_size

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """Too few silos."""
        return ["fedamp does nothing with one silo: u equals its own model"] if silos < 2 else []


def attention(squared: Tensor, *, sigma: float, step_size: float) -> Tensor:
    """ξ: u is ``ξ @ models``.

    Args:
        squared: ``Tensor[N, N]``, squared distances, float64.
        sigma: σ > 0.
        step_size: α > 0.

    Returns:
        ``Tensor[N, N]``, no entry negative, rows that sum to 1.
    """
    weights = step_size / sigma * torch.exp(-squared / sigma)
    weights.fill_diagonal_(0)
    weights /= weights.sum(dim=1, keepdim=True).clamp(min=1)
    weights.diagonal().copy_((1 - weights.sum(dim=1)).clamp(min=0))
    return weights
