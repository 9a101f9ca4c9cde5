"""FedBABU: the body is trained together under a head that nobody trains, the head is fitted at the end (Oh et al.,
"FedBABU: Toward Enhanced Representation for Federated Image Classification", 2022, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from medsilo.algorithms.declarations import Count, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing, PartialSharingSilo
from medsilo.algorithms.method import PERSONAL, SiloSide
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload


class FedBABUSilo(PartialSharingSilo):
    """Trains the body under the frozen head; everything at the end."""

    method: FedBABU

    def fit(self, round_number: int) -> None:
        """The plan's epochs on the extractor alone."""
        self.fit_only(round_number, self.site.layout.extractor, epochs=None, phase="training")

    def finish(self, download: Payload) -> None:
        """The last average, then the whole model on the silo's own images."""
        self.take(download)
        if epochs := self.method.fine_tune_epochs:
            self.site.load(self.memory[PERSONAL])
            self.site.fit(self.site.rounds - 1, epochs=epochs, phase="fine-tuning")
            self.memory[PERSONAL] = state_of(self.site.model)


@dataclass(frozen=True)
class FedBABU(PartialSharing):
    """FedBABU. The classifier keeps its start, which all silos have in common, so only the extractor is trained and
    averaged. After the last round each silo fine-tunes the whole model on its own images.

    During the run a silo's model is the average extractor under the untrained classifier; what is measured at the end
    is the fine-tuned one.

    Attributes:
        fine_tune_epochs: at the end, at least 0; 0 leaves the common model. 5 is customary: the replication of the
            paper's CIFAR-10 results among the Flower baselines uses it; PFLlib's default is 10.
        weighting: the paper weights by numbers of images, "samples".
    """

    name: ClassVar[str] = "fedbabu"
    silo: ClassVar[type[SiloSide]] = FedBABUSilo
    sends: ClassVar[str] = "extractor, number of images"
    downloads_last: ClassVar[bool] = True
    made_at_end: ClassVar[bool] = True
    personal_model: ClassVar[Literal["trained", "averaged"]] = "averaged"
    under_privacy: ClassVar[Protected | str] = Protected(at_end=("fine_tune_epochs",))
    under_masks: ClassVar[Sums | str] = Sums()
    fine_tune_epochs: Count = 5
