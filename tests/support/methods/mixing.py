"""A coordinator half whose silo-to-silo weights are known: ``i - 10 j`` of silo j's model for silo i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from medsilo.algorithms.method import CoordinatorHalf, Downloads, SiloWeights
from medsilo.algorithms.tensors import Payload, TensorSpec, Workspace
from medsilo.privacy.exposure import Exposure


class Mixing(CoordinatorHalf):
    """Hands out nothing; only its weights matter."""

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        return self.federation.layout.model_parts()

    def aggregate(
        self, round_number: int, uploads: Mapping[str, Payload], latest: Mapping[str, Payload], workspace: Workspace
    ) -> Downloads:
        ones = torch.arange(len(uploads), dtype=torch.float64)
        return Downloads(weights=SiloWeights(tuple(uploads), ones[:, None] - 10 * ones[None, :]))
