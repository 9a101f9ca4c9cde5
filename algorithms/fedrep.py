"""FedRep: a shared representation, fitted after the silo's own head (Collins et al., "Exploiting Shared
Representations for Personalized Federated Learning", 2021, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from medsilo.algorithms.declarations import OneOrMore, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing, PartialSharingSilo
from medsilo.algorithms.method import SiloSide


class FedRepSilo(PartialSharingSilo):
    """Fits the head to the body, then the body to the head."""

    method: FedRep

    def fit(self, round_number: int) -> None:
        """Two trainings, each with an optimiser and an order of images of its own."""
        layout, method = self.site.layout, self.method
        self.fit_only(round_number, layout.classifier, epochs=method.head_epochs, phase="head")
        self.fit_only(round_number, layout.extractor, epochs=method.body_epochs, phase="body")


@dataclass(frozen=True)
class FedRep(PartialSharing):
    """FedRep. A round trains the classifier on the frozen extractor first, then the extractor under the frozen
    classifier; the extractor is averaged, the classifier stays. These two numbers of epochs take the place of the
    plan's. The personal model is the one that local training left (ours).

    While the extractor's parameters are frozen, batch normalisation's running statistics still follow the images.

    Attributes:
        head_epochs: for the classifier, at least 1; the paper's experiments use 10 on all data sets (section 5).
        body_epochs: for the extractor, at least 1; the paper's experiments use 1 or 5, by data set (section 5).
        weighting: Algorithm 1 averages all participants alike, "uniform", which exposes less than "samples".
    """

    name: ClassVar[str] = "fedrep"
    silo: ClassVar[type[SiloSide]] = FedRepSilo
    sends: ClassVar[str] = "extractor"
    under_privacy: ClassVar[Protected | str] = Protected(each_round=("head_epochs", "body_epochs"))
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"
    head_epochs: OneOrMore = 10
    body_epochs: OneOrMore = 1
