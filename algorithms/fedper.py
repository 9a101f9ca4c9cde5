"""FedPer: shared base layers, personal last layer (Arivazhagan et al., "Federated Learning with Personalization
Layers", 2019, Algorithms 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from medsilo.algorithms.declarations import Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing


@dataclass(frozen=True)
class FedPer(PartialSharing):
    """FedPer. Extractor and classifier are trained together; the extractor is averaged, the classifier stays.

    The paper varies how many last layers are personal; here it is the classifier alone, its smallest choice. The
    personal model is the one that local training left (ours).

    ``weighting``: the paper's γ_j is a silo's share of all images, "samples".
    """

    name: ClassVar[str] = "fedper"
    sends: ClassVar[str] = "extractor, number of images"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums()
