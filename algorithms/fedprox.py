"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2): federated
averaging whose local training is held near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from medsilo.algorithms.declarations import NonNegative, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharingSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import PERSONAL, TRAINED, Correction, SiloSide, subset
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload


class FedProxSilo(PartialSharingSilo):
    """Trains from the global model towards the silo's data, pulled back to where it started."""

    method: FedProx

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model; μ (w − w^t) is added to every gradient."""
        self.finish(download)
        start = self.memory[PERSONAL]
        self.site.load(start)
        self.memory.pop(TRAINED, None)
        centre = subset(start, self.site.layout.parameters)
        self.site.fit(round_number, correction=Correction(self.method.proximal_weight, centre))
        self.memory[TRAINED] = state_of(self.site.model)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with the local loss CE + μ/2 ‖w − w^t‖² (section 3.2), w^t being the global model.

    Attributes:
        proximal_weight: μ ≥ 0; 0 is FedAvg. 1 is what the authors' published commands use on the paper's synthetic
            sets, and what the SCAFFOLD paper compares with. The authors say that no μ suits all data and propose to
            search 0.001, 0.01, 0.1, 0.5 and 1.
    """

    name: ClassVar[str] = "fedprox"
    silo: ClassVar[type[SiloSide]] = FedProxSilo
    sends: ClassVar[str] = "model, number of images"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums()
    proximal_weight: NonNegative = 1.0
