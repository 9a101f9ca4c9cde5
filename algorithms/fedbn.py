"""FedBN: federated averaging of everything but batch normalisation (Li et al., "FedBN: Federated Learning on Non-IID
Features via Local Batch Normalization", 2021, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from medsilo.algorithms.declarations import Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharing
from medsilo.algorithms.models import ARCHITECTURES, WITH_BATCH_NORMALISATION, Layout
from medsilo.algorithms.tensors import TensorSpec
from medsilo.privacy.exposure import MODEL, Exposure


@dataclass(frozen=True)
class FedBN(PartialSharing):
    """FedBN. Batch normalisation's scales, shifts and running statistics stay at the silo; all else is averaged. The
    personal model is the average with the silo's own batch normalisation.

    Without batch normalisation in the model, this is federated averaging (of the same weighting) to the last bit.

    ``weighting``: Algorithm 1 averages all silos alike, "uniform", which exposes less than "samples".
    """

    name: ClassVar[str] = "fedbn"
    sends: ClassVar[str] = "model without batch normalisation"
    downloads_last: ClassVar[bool] = True
    measures_received: ClassVar[bool] = True
    shared_classes: ClassVar[tuple[Exposure, ...]] = MODEL
    personal_model: ClassVar[Literal["trained", "averaged"]] = "averaged"
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"

    def shared(self, layout: Layout) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """All parameters but batch normalisation's."""
        own = frozenset(layout.normalisation)
        return {
            exposure: tuple(spec for spec in specs if spec.name not in own)
            for exposure, specs in layout.model_parts().items()
        }

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """What it takes for FedBN to be more than federated averaging."""
        if model in WITH_BATCH_NORMALISATION:
            return []
        has_none = f"{model} has none" if model in ARCHITECTURES else f"if {model} has none"
        return [
            f"fedbn keeps batch normalisation local; {has_none}, this is fedavg: choose a model with it, such as "
            f"{' or '.join(WITH_BATCH_NORMALISATION)}"
        ]
