"""Federated averaging (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", 2017, Algorithm 1): one global model, the average of the silos' models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from medsilo.algorithms.declarations import Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing
from medsilo.privacy.exposure import MODEL, Exposure


@dataclass(frozen=True)
class FedAvg(PartialSharing):
    """Federated averaging: of the sharing of parameters the case in which all are shared. The personal model is the
    global model with the silo's own buffers.

    ``weighting``: "samples" weights a silo by its number of training images, as the paper does, and so exposes
    that number; "uniform" weights all silos alike and exposes models only. With silos of equal size both are the
    same. Batch normalisation's running statistics stay at the silo.
    """

    name: ClassVar[str] = "fedavg"
    sends: ClassVar[str] = "model, number of images (`weighting: uniform`: the model alone)"
    downloads_last: ClassVar[bool] = True
    measures_received: ClassVar[bool] = True
    shared_classes: ClassVar[tuple[Exposure, ...]] = MODEL
    personal_model: ClassVar[Literal["trained", "averaged"]] = "averaged"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums(from_mean=True)
