"""FedPDC: correction by a public data set (Zhang & Zhang, "FedPDC: Federated Learning for Public Dataset Correction").

The coordinator holds a small, balanced public set. It measures the accuracy p_i of each uploaded model on it and
averages with these weights: w ← Σ_i p_i w_i / Σ_j p_j (Eq. 4). Silos get the average and their own p_i. The result is
one global model.

The paper's local loss is CE + λ(1 − p_i) (Eq. 6–8). **p_i is a number, so its gradient is nought: training is
FedAvg's for every λ.** That is ``mode: literal``. What the paper's text wants ("closer to the global model"), and
what its proof of convergence assumes (A.1), is a proximal term: CE + λ/2 (1 − p_i) ‖w − w_global‖². That is
``mode: proximal``, which does something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medsilo.algorithms.declarations import OWN_LOSS, Blind, Condition, NonNegative, Protected, Sums
from medsilo.algorithms.families.sharing import Buffers, model_upload, received_tensors, upload_specs
from medsilo.algorithms.method import (
    ONE_FOR_ALL,
    PERSONAL,
    TRAINED,
    CoordinatorSide,
    Correction,
    Downloads,
    Federation,
    Method,
    Objective,
    Round,
    SiloSide,
    Site,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, TensorSpec, combine, payload_tensors
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import MODEL, Exposure

_HASH_BYTES = 32


class FedPDCSilo(SiloSide):
    """Trains from the global model; its personal model is the global model as last received."""

    method: FedPDC

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model, with the mode's term."""
        site, method = self.site, self.method
        if method.check_disjoint and Exposure.PUBLIC_DATA in download:
            self._check_disjoint(download[Exposure.PUBLIC_DATA].tensors())
        self.finish(download)
        centre = {spec.name: self.memory[PERSONAL][spec.name] for spec in site.layout.parameters}
        accuracy = payload_tensors(download, [Exposure.DERIVED_ACCURACY]).get("accuracy", torch.tensor(1.0))
        strength = method.penalty_of(round_number) * (1 - float(accuracy))
        site.load(self.memory[PERSONAL])
        if method.mode == "proximal":
            site.fit(round_number, correction=Correction(strength, centre))
        else:
            site.fit(round_number, objective=_objective(site, method.mode, strength))
        self.memory[TRAINED] = state_of(site.model)

    def rehearse(self) -> None:
        """As if training had changed nothing."""
        self.memory[TRAINED] = self.memory[PERSONAL]

    def finish(self, download: Payload) -> None:
        """The global model becomes the silo's model."""
        received = received_tensors(download, self.site.layout, self.method.buffers)
        self.memory[PERSONAL] = {**self.memory[PERSONAL], **received}

    def upload(self) -> Payload:
        """The trained model."""
        return model_upload(self.memory[TRAINED], self.site.layout, self.method.buffers)

    def _check_disjoint(self, tensors: Mapping[str, Tensor]) -> None:
        hashes = tensors.get("hashes")
        if hashes is None or hashes.dtype != torch.uint8 or hashes.ndim != 2 or hashes.shape[1] != _HASH_BYTES:
            raise RefusedError("the coordinator's hashes of public images are not SHA-256 hashes")
        if shared := self.site.holds_any({bytes(row.tolist()) for row in hashes}):
            raise RefusedError(
                f"{shared} of this silo's images are among the coordinator's public images; its operator has to leave "
                "them out of the public set"
            )


class FedPDCCoordinator(CoordinatorSide):
    """Remembers each silo's last accuracy and when it was measured."""

    by_silo: ClassVar[tuple[str, ...]] = ("accuracy", "measured")

    method: FedPDC

    def __init__(self, method: FedPDC, federation: Federation) -> None:
        super().__init__(method, federation)
        if federation.layout.statistics and method.buffers == "local":
            raise ConfigurationError(
                "fedpdc measures silos' models, and this one has batch normalisation, whose running statistics it "
                "needs for that: set `buffers: aggregate`, which exposes them, or take a model without it"
            )

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The whole model."""
        return upload_specs(self.federation.layout, self.method.buffers)

    def aggregate(self, ended: Round) -> Downloads:
        """The average weighted by accuracy."""
        public = self.federation.public
        if public is None:
            raise ConfigurationError("fedpdc needs public images at the coordinator")
        sent = (*MODEL, Exposure.RUNNING_STATISTICS)
        accuracies = {silo: public.accuracy(payload_tensors(upload, sent)) for silo, upload in ended.uploads.items()}
        kept = self.memory.setdefault("accuracy", {})
        kept.update({silo: torch.tensor(value, dtype=torch.float64) for silo, value in accuracies.items()})
        self.memory.setdefault("measured", {}).update({silo: torch.tensor(ended.number) for silo in ended.uploads})
        weights = accuracy_weights(torch.tensor(list(accuracies.values()), dtype=torch.float64))
        (average,) = combine(Stack.of(list(ended.uploads.values()), sent), weights.reshape(1, -1), ended.workspace)
        return Downloads(everyone={Exposure.PEER_DERIVED: average})

    def downloads(self, round_number: int, participants: Sequence[str], kept: Downloads) -> Downloads:
        """The average and the silo's own accuracy: 1 unless it took part in the round before. Hashes come first."""
        own = {}
        for silo in participants:
            payload = dict(kept.for_silo(silo))
            measured = self.memory.get("measured", {}).get(silo)
            if measured is None:
                if self.method.check_disjoint and self.federation.public is not None:
                    payload[Exposure.PUBLIC_DATA] = Part.of({"hashes": self.federation.public.hashes()})
                accuracy = 1.0
            else:
                accuracy = float(self.memory["accuracy"][silo]) if int(measured) == round_number - 1 else 1.0
            payload[Exposure.DERIVED_ACCURACY] = Part.of({"accuracy": torch.tensor(accuracy)})
            own[silo] = payload
        return Downloads(own=own, everyone=kept.everyone)


@dataclass(frozen=True)
class FedPDC(Method):
    """FedPDC's hyper-parameters.

    Attributes:
        mode: "literal" adds the constant λ(1 − p) to the loss that is shown, and changes no model; "proximal" pulls
            towards the global model with strength λ(1 − p); "scale" multiplies the loss by 1 + λ(1 − p), which
            for SGD is a larger learning rate for weak silos (not recommended).
        penalty: λ ≥ 0; the paper finds 10 best among 0.1, 1, 5, 10 (section V-C).
        adaptive: λ = 0.5 · round instead, rounds counted from 1 (Eq. 9).
        penalty_max: λ is at most this.
        check_disjoint: silos compare the public images' hashes with their own images, and refuse the run if they share
            any. Nothing leaves for that.
        buffers: "aggregate" sends batch normalisation's running statistics and averages them like parameters. A model
            that has them needs that: without them the coordinator cannot measure it.
    """

    name: ClassVar[str] = "fedpdc"
    silo: ClassVar[type[SiloSide]] = FedPDCSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedPDCCoordinator
    sends: ClassVar[str] = "model"
    gets: ClassVar[str] = "average weighted by accuracy on public images, its own accuracy, hashes of those images"
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    downloads_last: ClassVar[bool] = True
    needs_public: ClassVar[bool] = True
    measures_received: ClassVar[bool] = True
    under_privacy: ClassVar[Protected | str] = Protected(
        conditions=(
            Condition("mode", ("proximal",), OWN_LOSS),
            Condition(
                "check_disjoint",
                (False,),
                "whether a silo holds one of the coordinator's images is an answer about its patients; compare them "
                "before the run",
            ),
        )
    )
    under_masks: ClassVar[Sums | str] = "the coordinator measures every single model on public images"
    under_blind: ClassVar[Blind | str] = (
        "its one mean goes by accuracies that the coordinator measures on single models, and to have hospitals measure "
        "their own would mean to hand them its public images and to believe what they say; not built"
    )
    mode: Literal["literal", "proximal", "scale"] = "literal"
    penalty: NonNegative = 10.0
    adaptive: bool = False
    penalty_max: NonNegative = 50.0
    check_disjoint: bool = True
    buffers: Buffers = "local"

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The model; what the coordinator measures on it is made from that."""
        statistics = {Exposure.RUNNING_STATISTICS} if self.buffers == "aggregate" else set()
        return frozenset(MODEL) | statistics

    @property
    def downlink(self) -> frozenset[Exposure]:
        """The average, the silo's own accuracy on public images, and those images' hashes."""
        hashes = {Exposure.PUBLIC_DATA} if self.check_disjoint else set()
        return frozenset({Exposure.PEER_DERIVED, Exposure.DERIVED_ACCURACY} | hashes)

    def penalty_of(self, round_number: int) -> float:
        """λ in a round, counted from 0."""
        wanted = adaptive_penalty(round_number + 1) if self.adaptive else self.penalty
        return min(wanted, self.penalty_max)


def accuracy_weights(accuracies: Tensor) -> Tensor:
    """Eq. 4's weights: accuracies over their sum; all alike where every accuracy is 0.

    Args:
        accuracies: ``Tensor[N]``, shares in [0, 1].

    Returns:
        ``Tensor[N]`` of the same dtype that sums to 1.
    """
    values = accuracies.to(torch.float64)
    total = values.sum()
    weights = values / total if total > 0 else torch.full_like(values, 1 / max(1, len(values)))
    return weights.to(accuracies.dtype)


def adaptive_penalty(round_number: int) -> float:
    """λ = 0.5 n in round n, counted from 1 (Eq. 9)."""
    return 0.5 * round_number


def _objective(site: Site, mode: str, strength: float) -> Objective:
    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        entropy = site.loss(model(images), labels)
        return entropy + strength if mode == "literal" else (1 + strength) * entropy

    return loss
