"""Federated averaging (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", 2017, Algorithm 1): one global model, the average of the silos' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.method import (
    PERSONAL,
    TRAINED,
    CoordinatorHalf,
    Downloads,
    Federation,
    Method,
    SiloHalf,
    Site,
    load_parameters,
    require,
    subset,
)
from algorithms.models import state_of
from algorithms.sharing import COUNT, count_part, count_weights, model_upload
from algorithms.tensors import Payload, Stack, TensorSpec, Workspace, combine
from privacy.exposure import MODEL, Exposure


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging.

    ``weighting``: "samples" weights a silo by its number of training images, as the paper does, and so exposes
    that number; "uniform" weights all silos alike and exposes models only. With silos of equal size both are the
    same. Batch normalisation's running statistics stay at the silo.
    """

    name: ClassVar[str] = "fedavg"
    downloads_last: ClassVar[bool] = True
    measures_received: ClassVar[bool] = True
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        require(
            self.weighting in ("samples", "uniform"),
            f"fedavg: weighting is {self.weighting!r}; use samples or uniform",
        )

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The model, and with weighting by samples their number."""
        return frozenset(MODEL) | ({Exposure.SAMPLE_COUNT} if self.weighting == "samples" else set())

    @property
    def downlink(self) -> frozenset[Exposure]:
        """The average."""
        return frozenset({Exposure.PEER_DERIVED})

    def silo_half(self, site: Site) -> SiloHalf:
        """Trains the global model."""
        return FedAvgSilo(self, site)

    def coordinator_half(self, federation: Federation) -> CoordinatorHalf:
        """Averages."""
        return FedAvgCoordinator(self, federation)


class FedAvgSilo(SiloHalf):
    """Trains from the global model; its personal model is the global model with its own buffers."""

    def __init__(self, method: FedAvg, site: Site) -> None:
        super().__init__(site)
        self.method = method

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model."""
        self.finish(download)
        self.site.load(self.memory[PERSONAL])
        self.site.fit(round_number)
        self.memory[TRAINED] = state_of(self.site.model)

    def rehearse(self) -> None:
        """As if training had changed nothing."""
        self.memory[TRAINED] = self.memory[PERSONAL]

    def finish(self, download: Payload) -> None:
        """The global model becomes the silo's model, with the silo's own buffers as last trained."""
        layout = self.site.layout
        buffers = subset(self.memory.get(TRAINED, self.memory[PERSONAL]), layout.buffers)
        self.memory[PERSONAL] = {**self.memory[PERSONAL], **buffers}
        if download:
            self.memory[PERSONAL].update(load_parameters(download, Exposure.PEER_DERIVED, layout.parameters))

    def upload(self) -> Payload:
        """The trained model."""
        payload = model_upload(self.memory[TRAINED], self.site.layout)
        if self.method.weighting == "samples":
            payload[Exposure.SAMPLE_COUNT] = count_part(self.site.num_samples)
        return payload


class FedAvgCoordinator(CoordinatorHalf):
    """Averages models."""

    def __init__(self, method: FedAvg, federation: Federation) -> None:
        super().__init__(federation)
        self.method = method

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The whole model, and the number of images where it weighs."""
        del round_number, silo
        parts = self.federation.layout.model_parts()
        return {**parts, Exposure.SAMPLE_COUNT: (COUNT,)} if self.method.weighting == "samples" else parts

    def aggregate(
        self,
        round_number: int,
        uploads: Mapping[str, Payload],
        latest: Mapping[str, Payload],
        workspace: Workspace,
    ) -> Downloads:
        """One model for everyone."""
        del round_number, latest
        weights = self._weights(list(uploads.values()))
        stack = Stack.of(list(uploads.values()), MODEL)
        (average,) = combine(stack, weights.reshape(1, -1), workspace)
        return Downloads(everyone={Exposure.PEER_DERIVED: average})

    def _weights(self, uploads: Sequence[Payload]) -> Tensor:
        if self.method.weighting == "uniform":
            return torch.full((len(uploads),), 1 / len(uploads), dtype=torch.float64)
        return count_weights(uploads)
