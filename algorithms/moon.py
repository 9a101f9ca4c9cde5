"""MOON: federated averaging with a model-contrastive loss (Li et al., "Model-Contrastive Federated Learning", 2021,
Algorithm 1).

With features z of an image under the model in training, z_g under the global model as received and z_p under the
silo's model of its last participation, local training minimises CE + μ l_con (Eq. 4) with

    l_con = −log( exp(cos(z, z_g)/τ) / (exp(cos(z, z_g)/τ) + exp(cos(z, z_p)/τ)) )        (Eq. 3)

which draws features towards the global model's and away from the silo's own earlier ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.declarations import OWN_LOSS, NonNegative, Positive, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharingSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import PERSONAL, TRAINED, Objective, SiloSide
from medsilo.algorithms.models import Features, state_of
from medsilo.algorithms.tensors import Payload


class MoonSilo(PartialSharingSilo):
    """Federated averaging's silo side, which remembers its last trained model anyway."""

    method: Moon

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model.

        At a silo's first participation there is no earlier model: z_p would be z_g, l_con the constant log 2, so there
        is nothing to add.
        """
        previous = self.memory.get(TRAINED)
        if previous is None or not self.method.contrastive_weight:
            super().train(round_number, download)
            return
        site = self.site
        self.finish(download)
        site.load(previous)
        before = _frozen(site.model)
        site.load(self.memory[PERSONAL])
        site.fit(round_number, objective=self._objective(_frozen(site.model), before))
        self.memory[TRAINED] = state_of(site.model)

    def _objective(self, received: nn.Module, before: nn.Module) -> Objective:
        def objective(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            with Features(model) as features:
                logits = model(images)
            contrast = contrastive_loss(
                features.last,
                _features(received, images),
                _features(before, images),
                temperature=self.method.temperature,
            )
            return self.site.loss(logits, labels) + self.method.contrastive_weight * contrast

        return objective


@dataclass(frozen=True)
class Moon(FedAvg):
    """MOON's hyper-parameters, besides federated averaging's ``weighting`` (the paper weights by samples).

    Features are what goes into the classifier. The paper's networks have a projection head of two layers before it;
    among ours, fedpdc-cnn has.

    Attributes:
        contrastive_weight: μ ≥ 0; 0 makes this federated averaging. The paper chooses it by data set. 1 is the
            default of the authors' published code, whose example on CIFAR-10 uses 5.
        temperature: τ > 0; 0.5 is the default of the authors' published code.
    """

    name: ClassVar[str] = "moon"
    silo: ClassVar[type[SiloSide]] = MoonSilo
    sends: ClassVar[str] = "model, number of images"
    under_privacy: ClassVar[Protected | str] = OWN_LOSS
    under_masks: ClassVar[Sums | str] = Sums()
    contrastive_weight: NonNegative = 1.0
    temperature: Positive = 0.5


def contrastive_loss(current: Tensor, received: Tensor, before: Tensor, *, temperature: float) -> Tensor:
    """Eq. 3, the mean over a batch.

    Args:
        current: z, ``[n, ...]``.
        received: z_g, of the same shape.
        before: z_p, of the same shape.
        temperature: τ > 0.

    Returns:
        A scalar: log 2 where both are equally near.
    """
    z = current.flatten(1)
    towards = F.cosine_similarity(z, received.flatten(1))
    away = F.cosine_similarity(z, before.flatten(1))
    return F.softplus((away - towards) / temperature).mean()


def _frozen(model: nn.Module) -> nn.Module:
    """A copy as it stands: in evaluation mode, so that images do not move its running statistics."""
    return copy.deepcopy(model).eval()


def _features(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad(), Features(model) as features:
        model(images)
    return features.last
