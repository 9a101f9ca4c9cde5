"""MR-MTL: mean-regularised multi-task learning (Liu et al., "On Privacy and Personalization in Cross-Silo Federated
Learning", NeurIPS 2022): every silo trains a model of its own, held near the mean of all.

Silo k goes on from its own w_k towards the minimum of

    F_k(w_k) + λ/2 ‖w_k − w̄‖²,

w̄ being the mean of the models that silos sent in the round before, all of them alike. In the first round there is no
w̄, and silos train plainly. The coordinator needs the mean alone, so that masks can hide the single models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from medsilo.algorithms.declarations import NonNegative, Protected, Sums
from medsilo.algorithms.families.tethered import Tethered
from medsilo.algorithms.method import ONE_FOR_ALL, CoordinatorHalf, Downloads, Round
from medsilo.algorithms.tensors import Stack, combine
from medsilo.privacy.exposure import MODEL, Exposure


class MRMTLCoordinator(CoordinatorHalf):
    """Averages this round's models."""

    def aggregate(self, ended: Round) -> Downloads:
        """w̄ for everyone."""
        count = len(ended.uploads)
        weights = torch.full((1, count), 1 / count, dtype=torch.float64)
        (mean,) = combine(Stack.of(list(ended.uploads.values()), MODEL), weights, ended.workspace)
        return Downloads(everyone={Exposure.PEER_DERIVED: mean})


@dataclass(frozen=True)
class MRMTL(Tethered):
    """MR-MTL's hyper-parameters.

    Attributes:
        proximal_weight: λ ≥ 0; 0 is separate training, and the larger it is, the more alike the models become. The
            paper searches it by data set and by privacy budget: the noisier the silos' training, the more they gain
            from each other. 0.1 is ours.
    """

    name: ClassVar[str] = "mrmtl"
    coordinator: ClassVar[type[CoordinatorHalf]] = MRMTLCoordinator
    gets: ClassVar[str] = "average, which its own model is held near"
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums()
    proximal_weight: NonNegative = 0.1

    @property
    def tether(self) -> float:
        """λ."""
        return self.proximal_weight
