"""Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1):
beside the global model of federated averaging, each silo trains a model of its own that is held near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from medsilo.algorithms.declarations import Count, NonNegative, Protected, Sums
from medsilo.algorithms.families.two_models import GLOBAL, TwoModelSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import (
    PERSONAL,
    TRAINED,
    Correction,
    SiloSide,
    subset,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload


class DittoSilo(TwoModelSilo):
    """Trains w for the federation and v for itself; both see w^t as it came."""

    method: Ditto

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs on w from w^t, then v's epochs from v; λ (v − w^t) is added to v's gradients."""
        self.finish(download)
        site = self.site
        site.load(self.memory[GLOBAL])
        site.fit(round_number)
        self.memory[TRAINED] = state_of(site.model)
        site.load(self.memory[PERSONAL])
        centre = subset(self.memory[GLOBAL], site.layout.parameters)
        site.fit(
            round_number,
            correction=Correction(self.method.proximal_weight, centre),
            epochs=self.method.personal_epochs or None,
            phase="personal",
        )
        self.memory[PERSONAL] = state_of(site.model)


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Ditto's hyper-parameters.

    Attributes:
        proximal_weight: λ ≥ 0 of the personal loss CE(v) + λ/2 ‖v − w^t‖² (Eq. 2); 0 trains v alone, large values
            hold it at the global model. The paper lets a device choose among 0.1, 1 and 2 on validation data, and
            uses 1 where it has too few of them (no attacks assumed; less under strong ones).
        personal_epochs: of v's training in a round, at least 1, or 0 for the plan's: the authors' published code
            takes as many steps on v as on w.
    """

    name: ClassVar[str] = "ditto"
    silo: ClassVar[type[SiloSide]] = DittoSilo
    sends: ClassVar[str] = "model, number of images; the personal one stays"
    downloads_last: ClassVar[bool] = False
    measures_received: ClassVar[bool] = False
    under_privacy: ClassVar[Protected | str] = Protected(each_round=(None, "personal_epochs"))
    under_masks: ClassVar[Sums | str] = Sums()
    proximal_weight: NonNegative = 1.0
    personal_epochs: Count = 0
