"""FedProto: silos exchange the mean features of each class, and no weights (Tan et al., "FedProto: Federated Prototype
Learning across Heterogeneous Clients", 2022, Algorithm 1).

A silo's prototype of a class is the mean of its images' features (what goes into the classifier, Eq. 3). The
coordinator averages each class's prototypes over the silos that have the class (Eq. 6), and a silo trains on

    CE + λ · mean over images of MSE(features, global prototype of the image's class)

(Eq. 7). Eq. 7 measures the distance of class means; this is the distance of each image's features, averaged over a
batch. An image whose class has no global prototype has no second term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.declarations import PROTOTYPES, Blind, NonNegative, Protected, Sums
from medsilo.algorithms.families.sharing import check_linear, sample_weights
from medsilo.algorithms.method import (
    ONE_FOR_ALL,
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Federation,
    Method,
    Round,
    SiloSide,
    Site,
    State,
    load_parameters,
)
from medsilo.algorithms.models import Features, Layout, state_of
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.privacy.exposure import Exposure

_MEANS = "prototypes"
_PRESENT = "present"
_COUNTS = "label_counts"
_BATCH = 1024


class FedProtoSilo(SiloSide):
    """Continues its own model."""

    method: FedProto

    def __init__(self, method: FedProto, site: Site) -> None:
        super().__init__(method, site)
        self.specs = prototype_specs(site.layout)

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs, with the global prototypes as targets where there are some; then the silo's own prototypes."""
        site = self.site
        site.load(self.memory[PERSONAL])
        if download and self.method.prototype_weight:
            received = load_parameters(download, Exposure.PEER_DERIVED, self.specs)
            device = site.train_data()[0].device
            targets, present = received[_MEANS].to(device), received[_PRESENT].to(device) != 0
            site.fit(round_number, objective=_TowardsPrototypes(site, targets, present, self.method.prototype_weight))
        else:
            site.fit(round_number)
        self.memory[PERSONAL] = state_of(site.model)
        images, labels = site.train_data()
        self.memory[_MEANS] = prototypes(site.model, images, labels, classes=self.specs[0].shape[0])

    def rehearse(self) -> None:
        """Prototypes of no class."""
        classes, width = self.specs[0].shape
        self.memory[_MEANS] = {
            _MEANS: torch.zeros(classes, width),
            _PRESENT: torch.zeros(classes, dtype=torch.uint8),
            _COUNTS: torch.zeros(classes, dtype=torch.int64),
        }

    def upload(self) -> Payload:
        """The prototypes."""
        found = self.memory[_MEANS]
        payload = {Exposure.PROTOTYPES: Part.of({spec.name: found[spec.name] for spec in self.specs})}
        if self.method.weighting == "counts":
            payload[Exposure.LABEL_COUNTS] = Part.of({_COUNTS: found[_COUNTS]})
        return payload


@dataclass(frozen=True)
class _TowardsPrototypes:
    """The loss of a batch; ``targets`` ``[C, F]``, ``present`` ``bool [C]``."""

    site: Site
    targets: Tensor
    present: Tensor
    weight: float

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with Features(model) as features:
            logits = model(images)
        distances = (features.last - self.targets[labels]).square().mean(dim=1)
        return self.site.loss(logits, labels) + self.weight * (distances * self.present[labels]).mean()


class FedProtoCoordinator(CoordinatorSide):
    """Averages each class over this round's silos that have it.

    A class that none of them has keeps the average of the last round in which one had it (ours; the paper's silos all
    take part in every round).
    """

    method: FedProto

    def __init__(self, method: FedProto, federation: Federation) -> None:
        super().__init__(method, federation)
        self.specs = prototype_specs(federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """Prototypes, and the numbers of images where they weigh."""
        parts: dict[Exposure, Sequence[TensorSpec]] = {Exposure.PROTOTYPES: self.specs}
        if self.method.weighting == "counts":
            parts[Exposure.LABEL_COUNTS] = (TensorSpec(_COUNTS, self.specs[1].shape, "I64"),)
        return parts

    def aggregate(self, ended: Round) -> Downloads:
        """The global prototypes for everyone."""
        parts = [upload[Exposure.PROTOTYPES].tensors() for upload in ended.uploads.values()]
        present = torch.stack([part[_PRESENT] for part in parts]) != 0
        counts = present.to(torch.int64)
        if self.method.weighting == "counts":
            counts = torch.stack(
                [upload[Exposure.LABEL_COUNTS].tensors()[_COUNTS] for upload in ended.uploads.values()]
            )
        averages = average_prototypes(torch.stack([part[_MEANS] for part in parts]), present, counts)
        found = present.any(dim=0)
        before = self.memory.get(_MEANS)
        if before is not None:
            averages = torch.where(found[:, None], averages, before[_MEANS])
            found = found | (before[_PRESENT] != 0)
        self.memory[_MEANS] = {_MEANS: averages, _PRESENT: found.to(torch.uint8)}
        return Downloads(everyone={Exposure.PEER_DERIVED: Part.of(self.memory[_MEANS])})


@dataclass(frozen=True)
class FedProto(Method):
    """FedProto's hyper-parameters.

    The personal model is the silo's own. It is measured by its own classifier (ours, so that it is a model like any
    other); the paper classifies an image by the nearest prototype instead (section 4.3).

    Raises ``ConfigurationError``, when its sides are made, for a model whose last layer is not linear.

    Attributes:
        prototype_weight: λ ≥ 0, the weight of the distance to the global prototypes; 0 makes this separate training.
            1 is the default of the authors' published code.
        weighting: how the silos' prototypes of a class are averaged: "uniform", all alike, or "counts", by their
            numbers of images of the class, as the paper does, which exposes these numbers. The weights sum to 1; the
            paper's Eq. 6 divides by the number of silos once more, which would only shrink the prototypes.
    """

    name: ClassVar[str] = "fedproto"
    silo: ClassVar[type[SiloSide]] = FedProtoSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedProtoCoordinator
    sends: ClassVar[str] = "mean features of each class, and which classes it has"
    gets: ClassVar[str] = "their averages"
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    under_privacy: ClassVar[Protected | str] = PROTOTYPES
    under_masks: ClassVar[Sums | str] = (
        "a class's mean is weighted by which silos have that class, so the coordinator needs to know which"
    )
    under_blind: ClassVar[Blind | str] = (
        "it sends no model, but prototypes, and the coordinator needs to know which silos have a class"
    )
    prototype_weight: NonNegative = 1.0
    weighting: Literal["uniform", "counts"] = "uniform"

    @property
    def uploads(self) -> frozenset[Exposure]:
        """Prototypes, and which classes the silo has; with weighting by counts, how many images of each."""
        return frozenset({Exposure.PROTOTYPES}) | ({Exposure.LABEL_COUNTS} if self.weighting == "counts" else set())

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """A silo alone."""
        return ["fedproto with one silo holds it to its own prototypes of the round before"] if silos < 2 else []


def prototype_specs(layout: Layout) -> tuple[TensorSpec, TensorSpec]:
    """Prototypes ``[C, F]`` and which of them mean something, ``uint8 [C]``, for a model with a linear classifier."""
    check_linear(FedProto.name, layout)
    classes, width = layout.classifier[0].shape
    return TensorSpec(_MEANS, (classes, width)), TensorSpec(_PRESENT, (classes,), "U8")


def prototypes(model: nn.Module, images: Tensor, labels: Tensor, *, classes: int) -> State:
    """The mean features of each class, with the model in evaluation mode (Eq. 3).

    Args:
        model: its features have F numbers.
        images: ``[n, C, H, W]``.
        labels: ``[n]``.
        classes: C.

    Returns:
        "prototypes" ``float32 [C, F]``, zeros for a class without images; "present" ``uint8 [C]``, whether a class has
        images; "label_counts" ``int64 [C]``, how many. On the CPU.
    """
    members = F.one_hot(labels, classes)
    counts = members.sum(dim=0)
    model.eval()
    shares = []
    with torch.no_grad(), Features(model) as features:
        for start in range(0, len(labels), _BATCH):
            model(images[start : start + _BATCH])
            # A product instead of a scattered sum, whose order a GPU does not keep.
            shares.append(members[start : start + _BATCH].T.to(torch.float64) @ features.last.to(torch.float64))
    means = torch.stack(shares).sum(dim=0) / counts.clamp(min=1)[:, None]
    return {
        _MEANS: means.to("cpu", torch.float32),
        _PRESENT: (counts > 0).to("cpu", torch.uint8),
        _COUNTS: counts.cpu(),
    }


def average_prototypes(means: Tensor, present: Tensor, counts: Tensor) -> Tensor:
    """Global prototypes (Eq. 6, with weights that sum to 1), computed in float64.

    Args:
        means: ``float32 [N, C, F]``, each silo's prototypes.
        present: ``bool [N, C]``, which of them mean something; the others do not count, whatever they hold.
        counts: ``[N, C]``, weights of the silos for each class; where none of a class's is above 0, all its silos
            weigh alike.

    Returns:
        ``float32 [C, F]``; zeros for a class that no silo has.
    """
    averages = torch.zeros(means.shape[1:], dtype=torch.float64)
    for index in range(means.shape[1]):
        silos = present[:, index]
        if silos.any():
            averages[index] = sample_weights(counts[silos, index]) @ means[silos, index].to(torch.float64)
    return averages.to(torch.float32)
