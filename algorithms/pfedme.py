"""pFedMe (T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1): the
global model minimises the silos' Moreau envelopes, and a silo's personalised model is where its envelope is taken.

On every batch a silo looks for θ̃ = argmin CE(θ) + λ/2 ‖θ − w‖² (Eq. 3) and moves w ← w − η λ (w − θ̃), the envelope's
gradient. The coordinator sends w^{t+1} = (1 − β) w^t + β mean(w_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from medsilo.algorithms.declarations import OWN_STEPS, OneOrMore, Positive, Protected, Sums
from medsilo.algorithms.families.own_steps import check_finite, mean_gradients, trained_parameters
from medsilo.algorithms.families.partial_sharing import PartialSharingCoordinator
from medsilo.algorithms.families.two_models import GLOBAL, TwoModelSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import (
    PERSONAL,
    TRAINED,
    CoordinatorSide,
    Downloads,
    Round,
    SiloSide,
    require,
    subset,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, combine
from medsilo.privacy.exposure import MODEL, Exposure


class PFedMeSilo(TwoModelSilo):
    """Its personal model is θ̃ after the round's last batch; w goes up."""

    method: PFedMe

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs; on each batch K steps on θ and one on w."""
        self.finish(download)
        site, method = self.site, self.method
        site.load(self.memory[GLOBAL])
        site.model.train()
        theta = trained_parameters(site.model)
        w = [parameter.detach().clone() for parameter in theta.values()]
        for images, labels in site.batches(round_number):
            for _ in range(method.inner_steps):
                gradients = mean_gradients(site, images, labels)
                with torch.no_grad():
                    for parameter, gradient, centre in zip(theta.values(), gradients, w, strict=True):
                        gradient = gradient + method.proximal_weight * (parameter - centre)
                        parameter.sub_(gradient, alpha=method.inner_rate)
            with torch.no_grad():
                for centre, parameter in zip(w, theta.values(), strict=True):
                    centre -= method.step_size * method.proximal_weight * (centre - parameter)
        check_finite(w, round_number)
        self.memory[PERSONAL] = state_of(site.model)
        moved = {name: tensor.cpu() for name, tensor in zip(theta, w, strict=True)}
        self.memory[TRAINED] = {**self.memory[PERSONAL], **moved}


class PFedMeCoordinator(PartialSharingCoordinator):
    """Keeps the global model where β is not 1."""

    method: PFedMe

    def aggregate(self, ended: Round) -> Downloads:
        """One model for everyone."""
        if self.method.mixing == 1:
            return super().aggregate(ended)
        beta = self.method.mixing if GLOBAL in self.memory else 1.0
        rows = [[upload[exposure] for exposure in MODEL] for upload in ended.uploads.values()]
        weights = beta * self._weights(list(ended.uploads.values()))
        if GLOBAL in self.memory:
            rows.append([Part.of(subset(self.memory[GLOBAL], self.federation.layout.parameters))])
            weights = torch.cat([weights, torch.tensor([1 - beta], dtype=torch.float64)])
        (mixed,) = combine(Stack(rows), weights.reshape(1, -1), ended.workspace)
        self.memory[GLOBAL] = mixed.tensors()
        return Downloads(everyone={Exposure.PEER_DERIVED: mixed})


@dataclass(frozen=True)
class PFedMe(FedAvg):
    """pFedMe's hyper-parameters. Training is its own (plain gradient steps): of the plan's it takes epochs and batch
    size.

    Attributes:
        proximal_weight: λ > 0. The commands that the authors published for the paper's experiments use 15 on MNIST,
            20 on their synthetic data, and 15 to 30 after tuning.
        inner_steps: K ≥ 1 gradient steps towards θ̃ on each batch; the authors use 5. They go on from the last
            batch's θ̃.
        inner_rate: their step, above 0 and, lest they overshoot w, below 2/λ. The authors use 0.05 to 0.1 on MNIST
            and 0.01 on synthetic data and CIFAR-10.
        step_size: η > 0 with η λ ≤ 1, of w's step; the authors use 0.005 where all methods share it, and 0.01 after
            tuning.
        mixing: β > 0, 1 being the plain mean; the authors use 1, and 2 after tuning. The first round always takes 1:
            the coordinator's side does not know the starting model.
        weighting: the paper's mean is uniform.
    """

    name: ClassVar[str] = "pfedme"
    silo: ClassVar[type[SiloSide]] = PFedMeSilo
    coordinator: ClassVar[type[CoordinatorSide]] = PFedMeCoordinator
    sends: ClassVar[str] = "model; the personal one stays"
    own_steps: ClassVar[bool] = True
    takes_robust: ClassVar[bool] = False
    downloads_last: ClassVar[bool] = False
    measures_received: ClassVar[bool] = False
    under_privacy: ClassVar[Protected | str] = OWN_STEPS
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"
    proximal_weight: Positive = 15.0
    inner_steps: OneOrMore = 5
    inner_rate: Positive = 0.01
    step_size: Positive = 0.005
    mixing: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.inner_rate < 2 / self.proximal_weight,
            f"pfedme: inner_rate is {self.inner_rate}; it must lie above 0 and below 2/proximal_weight",
        )
        require(
            self.step_size * self.proximal_weight <= 1,
            f"pfedme: step_size is {self.step_size}; it must lie above 0 and be at most 1/proximal_weight",
        )
