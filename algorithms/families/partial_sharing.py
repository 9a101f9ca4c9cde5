"""What methods have in common that average all or some of the parameters: the rest never leaves the silo.

Which parameters travel follows from the model's layout. The coordinator averages them over the round's participants; a
silo puts the average in their place and keeps its own of everything else (batch normalisation's running statistics
always among it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.families.robust import Aggregation, average, check_aggregation, robust_warnings
from medsilo.algorithms.families.sharing import COUNT, count_part, count_weights
from medsilo.algorithms.method import (
    LATER,
    ONE_FOR_ALL,
    PERSONAL,
    TRAINED,
    CoordinatorSide,
    Downloads,
    Federation,
    Method,
    Round,
    SiloSide,
    Site,
    State,
    load_parameters,
    require,
    subset,
)
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, TensorSpec
from medsilo.privacy.exposure import Exposure


class PartialSharingSilo(SiloSide):
    """Trains from the shared parameters' average and the silo's own of the rest."""

    method: PartialSharing

    def __init__(self, method: PartialSharing, site: Site) -> None:
        super().__init__(method, site)
        self.parts = method.shared(site.layout)
        self.shared = tuple(spec for specs in self.parts.values() for spec in specs)

    def train(self, round_number: int, download: Payload) -> None:
        """One round; without a download from where the silo was."""
        self.take(download)
        self.site.load(self.memory[PERSONAL])
        self.memory.pop(TRAINED, None)  # its buffers are in the personal model; while training there is no room for it
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
        if self.method.counts_images:
            payload[Exposure.SAMPLE_COUNT] = count_part(self.site.num_samples)
        return payload

    def fit_only(self, round_number: int, specs: Sequence[TensorSpec], *, epochs: int | None, phase: str) -> None:
        """Trains these parameters alone; a model may have none of them, then there is nothing to do."""
        if specs:
            self.site.fit(round_number, trainable={spec.name for spec in specs}, epochs=epochs, phase=phase)


class PartialSharingCoordinator(CoordinatorSide):
    """Averages the shared parameters of a round's participants."""

    method: PartialSharing

    def __init__(self, method: PartialSharing, federation: Federation) -> None:
        super().__init__(method, federation)
        self.parts = method.shared(federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The shared parameters, and the number of images where it weighs."""
        return {**self.parts, Exposure.SAMPLE_COUNT: (COUNT,)} if self.method.counts_images else self.parts

    def aggregate(self, ended: Round) -> Downloads:
        """One average for everyone."""
        payloads = list(ended.uploads.values())
        stack = Stack.of(payloads, tuple(self.parts))
        method = self.method
        mixed = average(
            stack, self._weights(payloads), ended.workspace, aggregation=method.aggregation, trim=method.trim
        )
        return Downloads(everyone={Exposure.PEER_DERIVED: mixed})

    def _weights(self, uploads: Sequence[Payload]) -> Tensor:
        if not self.method.counts_images:
            return torch.full((len(uploads),), 1 / len(uploads), dtype=torch.float64)
        return count_weights(uploads)


@dataclass(frozen=True)
class PartialSharing(Method):
    """A method that averages what ``shared`` names.

    ``shared_classes``: the exposure classes that the shared parameters belong to. ``takes_robust``: whether one average
    is all that the coordinator makes of them, so that it can be a robust one. ``personal_model``: which model a
    silo uses. "trained": its own, as it left local training, where what is shared and what is not were fitted to each
    other; it needs no download after the last round. "averaged": the shared part as it came from the coordinator, with
    the silo's own of the rest.

    Attributes:
        weighting: "samples" weights a silo by its number of training images, and so exposes that number; "uniform"
            weights all silos alike. With silos of equal size both are the same.
        aggregation: "mean"; or, against poisoned updates, "trimmed_mean" or "median" of each number
            (``medsilo.algorithms.families.robust``). These count silos alike, so that numbers of images do not travel.
        trim: the share of silos to leave out at either end of a trimmed mean, in (0, 0.5).
    """

    silo: ClassVar[type[SiloSide]] = PartialSharingSilo
    coordinator: ClassVar[type[CoordinatorSide]] = PartialSharingCoordinator
    gets: ClassVar[str] = "average"
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    shared_classes: ClassVar[tuple[Exposure, ...]] = (Exposure.MODEL_PARAMETERS_EXTRACTOR,)
    personal_model: ClassVar[Literal["trained", "averaged"]] = "trained"
    takes_robust: ClassVar[bool] = True
    weighting: Literal["samples", "uniform"] = "samples"
    aggregation: Aggregation = field(default="mean", metadata=LATER)
    trim: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_aggregation(self.name, self.aggregation, self.trim)
        require(
            self.takes_robust or self.aggregation == "mean",
            f"{self.name}: aggregation is {self.aggregation}; its coordinator computes with sums, so only mean will do",
        )

    @property
    def counts_images(self) -> bool:
        """Whether silos send numbers of images, to be weighted by."""
        return self.weighting == "samples" and self.aggregation == "mean"

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """What a robust average can withstand."""
        return robust_warnings(self.name, self.aggregation, self.trim, silos)

    def shared(self, layout: Layout) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """The parameters that travel, by exposure class; by default all of ``shared_classes``."""
        parts = layout.model_parts()
        return {exposure: parts[exposure] for exposure in self.shared_classes}

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The shared parameters, and with weighting by samples their number."""
        return frozenset(self.shared_classes) | ({Exposure.SAMPLE_COUNT} if self.counts_images else set())
