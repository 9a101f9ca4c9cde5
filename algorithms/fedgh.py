"""FedGH: one prediction head for all, trained at the coordinator on the silos' class means (Yi et al., "FedGH:
Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023, Algorithm 1).

After local training a silo sends r_c, the mean feature of its images of class c, for each class that it has. The
coordinator takes each (r_c, c) as one training sample of the head: θ ← θ − η ∇ CE(W r_c + b, c). The silo goes on
from its own extractor and the received head. No weights of an extractor ever leave a silo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medsilo.algorithms.declarations import PROTOTYPES, Blind, OneOrMore, Positive, Protected, Sums
from medsilo.algorithms.families.class_statistics import class_sums, linear_shape
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
    derive_seed,
    load_parameters,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.privacy.exposure import Exposure

_MEANS = "means"
_PRESENT = "present"
_PROTOTYPES = "prototypes"
_HEAD = "head"


class FedGHSilo(SiloSide):
    """Its personal model: its own extractor, and the received head, both trained on."""

    def __init__(self, method: FedGH, site: Site) -> None:
        super().__init__(method, site)
        linear_shape("fedgh", site.layout)

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the own extractor and the received head, then one pass for the class means."""
        site = self.site
        site.load(self.memory[PERSONAL])
        if download:
            site.load(load_parameters(download, Exposure.PEER_DERIVED, site.layout.classifier))
        site.fit(round_number)
        self.memory[PERSONAL] = state_of(site.model)
        sums, counts = class_sums(site)
        means = sums / counts.clamp(min=1).unsqueeze(1)
        self.memory[_PROTOTYPES] = {_MEANS: means.to(torch.float32), _PRESENT: (counts > 0).to(torch.uint8)}

    def rehearse(self) -> None:
        """No class present."""
        classes, features = linear_shape("fedgh", self.site.layout)
        self.memory[_PROTOTYPES] = {
            _MEANS: torch.zeros(classes, features),
            _PRESENT: torch.zeros(classes, dtype=torch.uint8),
        }

    def upload(self) -> Payload:
        """Class means, zero where the silo has no image of a class, and which classes it has."""
        return {Exposure.PROTOTYPES: Part.of(self.memory[_PROTOTYPES])}


class FedGHCoordinator(CoordinatorSide):
    """Keeps and trains the head."""

    method: FedGH

    def __init__(self, method: FedGH, federation: Federation) -> None:
        super().__init__(method, federation)
        self._classes, self._features = linear_shape("fedgh", federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """One mean a class, present or not: the message's size tells nothing."""
        means = TensorSpec(_MEANS, (self._classes, self._features))
        return {Exposure.PROTOTYPES: (means, TensorSpec(_PRESENT, (self._classes,), "U8"))}

    def aggregate(self, ended: Round) -> Downloads:
        """Trains the head on this round's prototypes; one head for everyone."""
        samples, labels = [], []
        for upload in ended.uploads.values():
            tensors = upload[Exposure.PROTOTYPES].tensors()
            present = tensors[_PRESENT] != 0
            samples.append(tensors[_MEANS][present])
            labels.append(present.nonzero().squeeze(1))
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self.federation.seed, "fedgh", "order", ended.number))
        order = torch.cat([torch.randperm(sum(map(len, labels)), generator=generator)] * self.method.passes)
        weight, *bias = self.federation.layout.classifier
        head = self._head()
        trained = train_head(
            head[weight.name],
            head[bias[0].name] if bias else None,
            torch.cat(samples)[order],
            torch.cat(labels)[order],
            learning_rate=self.method.server_learning_rate,
        )
        specs = self.federation.layout.classifier
        self.memory[_HEAD] = {spec.name: tensor for spec, tensor in zip(specs, trained, strict=True)}
        return Downloads(everyone=self._payload())

    def downloads(self, round_number: int, participants: Sequence[str], kept: Downloads) -> Downloads:
        """The head as it stands, the first one included."""
        return kept if kept.everyone is not None else Downloads(everyone=self._payload())

    def _payload(self) -> Payload:
        return {Exposure.PEER_DERIVED: Part.of(self._head())}

    def _head(self) -> State:
        """The head; at first uniform in ±1/√F, as PyTorch draws a linear layer."""
        if _HEAD in self.memory:
            return self.memory[_HEAD]
        generator = torch.Generator().manual_seed(derive_seed(self.federation.seed, "fedgh", "head"))
        bound = 1 / math.sqrt(self._features)
        return {
            spec.name: torch.empty(spec.shape).uniform_(-bound, bound, generator=generator)
            for spec in self.federation.layout.classifier
        }


@dataclass(frozen=True)
class FedGH(Method):
    """FedGH's hyper-parameters.

    Attributes:
        server_learning_rate: η > 0 of the head's SGD at the coordinator; 0.01 is the default of the authors' published
            code, at the silos as well.
        passes: how often a round's prototypes are gone through, at least 1; Algorithm 1 goes through them once.

    Decided here: the coordinator draws the first head from the run's seed and hands it out in the first round, so
    that extractors and the head that will replace theirs belong together from the start; the order of the prototypes
    is drawn by seed and round, so that no silo always has the last word.
    """

    name: ClassVar[str] = "fedgh"
    silo: ClassVar[type[SiloSide]] = FedGHSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedGHCoordinator
    sends: ClassVar[str] = "mean features of each class, and which classes it has"
    gets: ClassVar[str] = "a head trained on them"
    uploads: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PROTOTYPES})
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    under_privacy: ClassVar[Protected | str] = PROTOTYPES
    under_masks: ClassVar[Sums | str] = "the coordinator trains a head on every single silo's prototypes"
    under_blind: ClassVar[Blind | str] = (
        "it mixes no models: the coordinator trains a head on every single silo's prototypes, step by step"
    )
    server_learning_rate: Positive = 0.01
    passes: OneOrMore = 1


def train_head(
    weight: Tensor, bias: Tensor | None, samples: Tensor, labels: Tensor, *, learning_rate: float
) -> tuple[Tensor, ...]:
    """SGD on the cross entropy, one step a sample, in the given order (Algorithm 1), computed in float64.

    Args:
        weight: ``Tensor[C, F]``.
        bias: ``Tensor[C]`` or None.
        samples: ``Tensor[n, F]``.
        labels: ``Tensor[n]``, in 0 … C − 1.
        learning_rate: η > 0.

    Returns:
        The new weight, and the new bias where there is one, float32.
    """
    weight = weight.to(torch.float64, copy=True)
    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.to(torch.float64, copy=True)
    for sample, label in zip(samples.to(torch.float64), labels.tolist(), strict=True):
        # The cross entropy's gradient in the logits: softmax minus the label's unit vector.
        gradient = torch.softmax(weight @ sample + shift, dim=0)
        gradient[label] -= 1
        weight -= learning_rate * torch.outer(gradient, sample)
        if bias is not None:
            shift -= learning_rate * gradient
    trained = (weight,) if bias is None else (weight, shift)
    return tuple(tensor.to(torch.float32) for tensor in trained)
