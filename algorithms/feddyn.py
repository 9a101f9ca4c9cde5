"""FedDyn (Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1): every silo
adds a linear term to its loss that makes the silos' optima agree with the federation's.

Silo k minimises L_k(θ) − ⟨λ_k, θ⟩ + α/2 ‖θ − θ^{t−1}‖² and then sets λ_k ← λ_k − α (θ_k − θ^{t−1}). With N silos, of
which P_t took part, the coordinator keeps h and sends θ^t:

    h^t = h^{t−1} − α/N Σ_{k ∈ P_t} (θ_k − θ^{t−1}),    θ^t = mean_{k ∈ P_t} θ_k − h^t/α.

Only h/α is ever needed, so that is what the coordinator keeps, and α is the silos' alone.

The coordinator's side does not know the starting model. The first round therefore only finds the starting point:
silos train with the proximal term, nobody changes λ or h, and θ^1 is the plain mean. From there on everything is the
paper's, which leaves the starting point open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from medsilo.algorithms.declarations import Positive, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharingCoordinator, PartialSharingSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import (
    PERSONAL,
    TRAINED,
    CoordinatorSide,
    Correction,
    Downloads,
    Round,
    SiloSide,
    subset,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, combine
from medsilo.privacy.exposure import MODEL, Exposure

_LINEAR = "linear"
_GLOBAL = "global"
_DRIFT = "drift"


class FedDynSilo(PartialSharingSilo):
    """Keeps −λ_k, the linear term's gradient, from round to round."""

    method: FedDyn

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model; α (w − θ^{t−1}) − λ_k is added to every gradient."""
        self.finish(download)
        layout, alpha = self.site.layout, self.method.strength
        self.site.load(self.memory[PERSONAL])
        start = subset(self.memory[PERSONAL], layout.parameters)
        linear = self.memory.get(_LINEAR) or {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        self.site.fit(round_number, correction=Correction(alpha, start, linear))
        trained = state_of(self.site.model)
        self.memory[TRAINED] = trained
        if download:
            self.memory[_LINEAR] = {name: linear[name] + alpha * (trained[name] - start[name]) for name in start}


class FedDynCoordinator(PartialSharingCoordinator):
    """Keeps the global model and h/α."""

    def aggregate(self, ended: Round) -> Downloads:
        """θ^t for everyone."""
        if _GLOBAL not in self.memory:
            fresh = super().aggregate(ended)
            assert fresh.everyone is not None
            self.memory[_GLOBAL] = fresh.everyone[Exposure.PEER_DERIVED].tensors()
            self.memory[_DRIFT] = {name: torch.zeros_like(t) for name, t in self.memory[_GLOBAL].items()}
            return fresh
        specs = self.federation.layout.parameters
        models = [[upload[exposure] for exposure in MODEL] for upload in ended.uploads.values()]
        kept = [[Part.of(subset(self.memory[group], specs))] for group in (_GLOBAL, _DRIFT)]
        weights = self._weights(list(ended.uploads.values()))
        share = len(ended.uploads) / (len(self.federation.silos) or len(ended.latest))
        # Columns: the ended.uploads, θ^{t−1}, h^{t−1}/α.
        drift = torch.cat([-share * weights, torch.tensor([share, 1.0], dtype=torch.float64)])
        model = torch.cat([weights, torch.zeros(2, dtype=torch.float64)]) - drift
        new_model, new_drift = combine(Stack([*models, *kept]), torch.stack([model, drift]), ended.workspace)
        self.memory[_GLOBAL], self.memory[_DRIFT] = new_model.tensors(), new_drift.tensors()
        return Downloads(everyone={Exposure.PEER_DERIVED: new_model})


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """FedDyn's hyper-parameters.

    Attributes:
        strength: α > 0; small values trust the silos' data, large ones hold models near the global one. The paper
            searches by data set; 0.01 is what the authors' published example on CIFAR-10 uses.
        weighting: the paper's mean is uniform. With "samples" the mean of the models is weighted, and h's with it.
    """

    name: ClassVar[str] = "feddyn"
    silo: ClassVar[type[SiloSide]] = FedDynSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedDynCoordinator
    sends: ClassVar[str] = "model"
    gets: ClassVar[str] = "corrected average"
    takes_robust: ClassVar[bool] = False
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"
    strength: Positive = 0.01
