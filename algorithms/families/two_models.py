"""What methods do alike whose silos train a common model and one of their own."""

from __future__ import annotations

from medsilo.algorithms.families.partial_sharing import PartialSharingSilo
from medsilo.algorithms.method import TRAINED, State, load_parameters, subset
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.exposure import Exposure

GLOBAL = "global"
"""The group of a silo's memory that holds the global model, with the silo's own buffers."""


class TwoModelSilo(PartialSharingSilo):
    """A FedAvg silo that keeps the global model apart from its personal one."""

    def begin(self, initial: State) -> None:
        """Both models start alike."""
        super().begin(initial)
        self.memory[GLOBAL] = initial

    def finish(self, download: Payload) -> None:
        """The global model as it came, with the silo's own buffers as last trained; the personal one stays."""
        layout = self.site.layout
        buffers = subset(self.memory.get(TRAINED, self.memory[GLOBAL]), layout.buffers)
        received = load_parameters(download, Exposure.PEER_DERIVED, layout.parameters) if download else {}
        self.memory[GLOBAL] = {**self.memory[GLOBAL], **buffers, **received}

    def rehearse(self) -> None:
        """As if training had changed nothing."""
        self.memory[TRAINED] = self.memory[GLOBAL]
