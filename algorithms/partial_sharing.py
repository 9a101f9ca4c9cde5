"""What methods have in common that average all or some of the parameters: the rest never leaves the silo.

Which parameters travel follows from the model's layout. The coordinator averages them over the round's participants; a
silo puts the average in their place and keeps its own of everything else (batch normalisation's running statistics
always among it).
"""

from __future__ import annotations

from abc import abstractmethod
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
    State,
    load_parameters,
    require,
    subset,
)
from algorithms.models import Layout, state_of
from algorithms.sharing import COUNT, count_part, count_weights
from algorithms.tensors import Part, Payload, Stack, TensorSpec, Workspace, combine
from privacy.exposure import Exposure


@dataclass(frozen=True)
class PartialSharing(Method):
    """A method that averages what ``shared`` names.

    ``shared_classes``: the exposure classes that the shared parameters belong to. ``personal_model``: which model a
    silo uses. "trained": its own, as it left local training, where what is shared and what is not were fitted to each
    other; it needs no download after the last round. "averaged": the shared part as it came from the coordinator, with
    the silo's own of the rest.

    Attributes:
        weighting: "samples" weights a silo by its number of training images, and so exposes that number; "uniform"
            weights all silos alike. With silos of equal size both are the same.
    """

    shared_classes: ClassVar[tuple[Exposure, ...]] = (Exposure.MODEL_PARAMETERS_EXTRACTOR,)
    personal_model: ClassVar[Literal["trained", "averaged"]] = "trained"
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        require(
            self.weighting in ("samples", "uniform"),
            f"{self.name}: weighting is {self.weighting!r}; use samples or uniform",
        )

    def shared(self, layout: Layout) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """The parameters that travel, by exposure class; by default all of ``shared_classes``."""
        parts = layout.model_parts()
        return {exposure: parts[exposure] for exposure in self.shared_classes}

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The shared parameters, and with weighting by samples their number."""
        return frozenset(self.shared_classes) | ({Exposure.SAMPLE_COUNT} if self.weighting == "samples" else set())

    @property
    def downlink(self) -> frozenset[Exposure]:
        """The average."""
        return frozenset({Exposure.PEER_DERIVED})

    @abstractmethod
    def silo_half(self, site: Site) -> SiloHalf:
        """A fresh silo half."""

    def coordinator_half(self, federation: Federation) -> CoordinatorHalf:
        """Averages the shared parameters."""
        return PartialSharingCoordinator(self, federation)


class PartialSharingSilo(SiloHalf):
    """Trains from the shared parameters' average and the silo's own of the rest."""

    def __init__(self, method: PartialSharing, site: Site) -> None:
        super().__init__(site)
        self.method = method
        self.parts = method.shared(site.layout)
        self.shared = tuple(spec for specs in self.parts.values() for spec in specs)

    def train(self, round_number: int, download: Payload) -> None:
        """One round; without a download from where the silo was."""
        self.take(download)
        self.site.load(self.memory[PERSONAL])
        self.fit(round_number)
        averaged = self.method.personal_model == "averaged"
        self.memory[TRAINED if averaged else PERSONAL] = state_of(self.site.model)

    def fit(self, round_number: int) -> None:
        """Local training of the site's model: all of it at once, unless a method says otherwise."""
        self.site.fit(round_number)

    def take(self, download: Payload) -> None:
        """The shared parameters become the coordinator's, the others what they were when last trained."""
        personal = self.memory[PERSONAL]
        received = (
            load_parameters(download, Exposure.PEER_DERIVED, self.shared) if download else subset(personal, self.shared)
        )
        self.memory[PERSONAL] = {**self.memory.get(TRAINED, personal), **received}

    def finish(self, download: Payload) -> None:
        """Takes the last average, where the method wants it."""
        self.take(download)

    def rehearse(self) -> None:
        """As if training had changed nothing."""
        if self.method.personal_model == "averaged":
            self.memory[TRAINED] = self.memory[PERSONAL]

    def outgoing(self) -> State:
        """The state whose shared parameters go up."""
        return self.memory.get(TRAINED, self.memory[PERSONAL])

    def upload(self) -> Payload:
        """The shared parameters as trained."""
        state = self.outgoing()
        payload = {exposure: Part.of(subset(state, specs)) for exposure, specs in self.parts.items()}
        if self.method.weighting == "samples":
            payload[Exposure.SAMPLE_COUNT] = count_part(self.site.num_samples)
        return payload

    def fit_only(self, round_number: int, specs: Sequence[TensorSpec], *, epochs: int | None, phase: str) -> None:
        """Trains these parameters alone; a model may have none of them, then there is nothing to do."""
        if specs:
            self.site.fit(round_number, trainable={spec.name for spec in specs}, epochs=epochs, phase=phase)


class PartialSharingCoordinator(CoordinatorHalf):
    """Averages the shared parameters of a round's participants."""

    def __init__(self, method: PartialSharing, federation: Federation) -> None:
        super().__init__(federation)
        self.method = method
        self.parts = method.shared(federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The shared parameters, and the number of images where it weighs."""
        del round_number, silo
        return {**self.parts, Exposure.SAMPLE_COUNT: (COUNT,)} if self.method.weighting == "samples" else self.parts

    def aggregate(
        self,
        round_number: int,
        uploads: Mapping[str, Payload],
        latest: Mapping[str, Payload],
        workspace: Workspace,
    ) -> Downloads:
        """One average for everyone."""
        del round_number, latest
        payloads = list(uploads.values())
        stack = Stack.of(payloads, tuple(self.parts))
        (average,) = combine(stack, self._weights(payloads).reshape(1, -1), workspace)
        return Downloads(everyone={Exposure.PEER_DERIVED: average})

    def _weights(self, uploads: Sequence[Payload]) -> Tensor:
        if self.method.weighting == "uniform":
            return torch.full((len(uploads),), 1 / len(uploads), dtype=torch.float64)
        return count_weights(uploads)
