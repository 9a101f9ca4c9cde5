"""pFedSim: personalise extractors by the similarity of classifiers (Tan et al., "pFedSim: Similarity-Aware Model
Aggregation Towards Personalized Federated Learning").

For the first ⌊ρT⌋ rounds the silos run FedAvg (generalisation). Then (personalisation) silo i keeps its own classifier
φ_i and gets the extractor ω_i = Σ_j Φ_ij ω_j / Σ_j Φ_ij over all silos that the coordinator knows, the absent ones with
their last upload (Eq. 4). After the round's uploads Φ is computed anew for every pair of participants (Eq. 3):

    Φ_ij = −(1/|Y|) Σ_c log(1 − max(0, cos(φ_ic, φ_jc)))

with φ_ic the weights of class c in silo i's classifier; its bias does not count. Cosines are clipped at 1 − clip, so
that one class contributes at most −log(clip); without that, equal classifiers give an infinity in float32.

Where mixtures are blind, the cosines are made of squared distances between rows of length 1, a class each: ‖x − y‖² is
2 − 2 cos(x, y). In the personal phase nothing of a classifier is mixed; in the warm-up all of the model is, and evenly:
all silos see the weights, and would be told each other's numbers of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.declarations import (
    Blind,
    Compared,
    Condition,
    Mixing,
    Protected,
    Range,
    Share,
    Sums,
    even,
    unit_rows,
)
from medsilo.algorithms.families.robust import Aggregation, average, check_aggregation, robust_warnings
from medsilo.algorithms.families.sharing import (
    COUNT,
    Buffers,
    check_linear,
    count_part,
    count_weights,
    model_upload,
    received_tensors,
    upload_specs,
)
from medsilo.algorithms.method import (
    LATER,
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Federation,
    Method,
    Round,
    SiloSide,
    SiloWeights,
    require,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload, Stack, TensorSpec, combine
from medsilo.privacy.exposure import MODEL, Exposure

_NORM_FLOOR = 1e-8  # the paper's epsilon in Eq. 3
Variant = Literal["paper", "author"]
Diagonal = Literal["clip", "one"]


class PFedSimSilo(SiloSide):
    """Its personal model is its model as last trained."""

    method: PFedSim

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the received extractor and, in the personal phase, the own classifier."""
        self.site.load({**self.memory[PERSONAL], **received_tensors(download, self.site.layout, self.method.buffers)})
        self.site.fit(round_number)
        self.memory[PERSONAL] = state_of(self.site.model)
        self._note(round_number)

    def rehearse(self) -> None:
        """The first upload."""
        self._note(0)

    def upload(self) -> Payload:
        """The silo's model; while averages are weighted with the number of images."""
        payload = model_upload(self.memory[PERSONAL], self.site.layout, self.method.buffers)
        if self.memory["phase"]["warmup"]:
            payload[Exposure.SAMPLE_COUNT] = count_part(self.site.num_samples)
        return payload

    def _note(self, round_number: int) -> None:
        warmup = self.method.counts_images(round_number, self.site.rounds)
        self.memory["phase"] = {"warmup": torch.tensor(int(warmup))}


class PFedSimCoordinator(CoordinatorSide):
    """Keeps the similarities of all silos, and which of them have been in the personal phase."""

    method: PFedSim

    def __init__(self, method: PFedSim, federation: Federation) -> None:
        super().__init__(method, federation)
        self._warmup = method.warmup_rounds(federation.rounds)
        check_linear(method.name, federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The whole model, and while averages are weighted the number of images."""
        parts = upload_specs(self.federation.layout, self.method.buffers)
        if self.method.counts_images(round_number, self.federation.rounds):
            parts[Exposure.SAMPLE_COUNT] = (COUNT,)
        return parts

    def aggregate(self, ended: Round) -> Downloads:
        """The average during the warm-up; then an extractor for every silo that has been in the personal phase.

        The others keep the warm-up's last average: also a silo that joins late begins with it.
        """
        if ended.number < self._warmup:
            stack = Stack.of(list(ended.uploads.values()), (*MODEL, Exposure.RUNNING_STATISTICS))
            robust = self.method.aggregation != "mean"
            weights = torch.empty(0) if robust else count_weights(ended.uploads.values())
            aggregation, trim = self.method.aggregation, self.method.trim
            mixed = average(stack, weights, ended.workspace, aggregation=aggregation, trim=trim)
            return Downloads(everyone={Exposure.PEER_DERIVED: mixed})
        similarity = self._update(ended.uploads)
        silos = self.federation.silos
        places = [index for index, silo in enumerate(silos) if similarity[index, index] > 0 and silo in ended.latest]
        known = tuple(silos[index] for index in places)
        weights = normalised_rows(similarity[places][:, places])
        shared = (Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.RUNNING_STATISTICS)
        rows = combine(Stack.of([ended.latest[silo] for silo in known], shared), weights, ended.workspace)
        own = {silo: {Exposure.PEER_DERIVED: row} for silo, row in zip(known, rows, strict=True)}
        return Downloads(own=own, weights=SiloWeights(known, weights))

    def forget(self, silo: str) -> None:
        """Its similarities to others go; with a new update they are computed anew."""
        super().forget(silo)
        if "similarity" in self.memory:
            matrix = self.memory["similarity"]["matrix"].clone()
            place = self.federation.silos.index(silo)
            matrix[place, :] = matrix[:, place] = 0
            self.memory["similarity"] = {"matrix": matrix}

    def _update(self, uploads: Mapping[str, Payload]) -> Tensor:
        """Φ with the pairs of this round's participants computed anew; a silo without a row has 0 on the diagonal."""
        silos = self.federation.silos
        stored = self.memory.get("similarity", {}).get("matrix")
        matrix = torch.zeros(len(silos), len(silos), dtype=torch.float64) if stored is None else stored.clone()
        present = torch.tensor([silos.index(silo) for silo in uploads])
        weight = self.federation.layout.classifier[0].name
        heads = torch.stack(
            [u[Exposure.MODEL_PARAMETERS_CLASSIFIER].tensors()[weight].to(torch.float64) for u in uploads.values()]
        )
        method = self.method
        matrix[present.unsqueeze(1), present] = classifier_similarity(
            heads, variant=method.variant, clip=method.clip, diagonal=method.diagonal
        )
        self.memory["similarity"] = {"matrix": matrix}
        return matrix


@dataclass(frozen=True)
class PFedSim(Method):
    """pFedSim's hyper-parameters.

    Attributes:
        warmup_share: ρ in [0, 1], the share of rounds that are FedAvg; the paper uses 0.5, and finds 0.3 … 0.7 alike
            (Table 6). 1 is FedAvg, 0 begins with personalisation.
        variant: "paper" is Eq. 3; "author" is what the published code computes: the cosines' mean over classes first,
            then max(0, ·), then −log(1 − ·), and no exchange at all for a silo whose similarities add up to nothing.
        clip: in (0, 1): cosines are at most 1 − clip.
        diagonal: a silo's weight for itself: "clip" takes −log(clip), what Eq. 3 with the clip gives for equal
            classifiers and what the published code uses; "one" is the identity matrix that Algorithm 2 starts from.
        buffers: batch normalisation's running statistics stay at the silo ("local", as in the code of the paper's
            time), or are averaged with the extractor's weights ("aggregate"), which exposes them.
        aggregation, trim: of the warm-up's average, as FedAvg's. Later mixtures are made by similarity.
    """

    name: ClassVar[str] = "pfedsim"
    silo: ClassVar[type[SiloSide]] = PFedSimSilo
    coordinator: ClassVar[type[CoordinatorSide]] = PFedSimCoordinator
    sends: ClassVar[str] = "model; number of images during the warm-up; running statistics with `buffers: aggregate`"
    gets: ClassVar[str] = "average, then its own mixture of extractors, by similarity of classifiers"
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = Sums(
        lambda method, rounds: method.warmup_rounds(rounds),
        otherwise="without warm-up rounds it compares single classifiers from the first round on",
    )
    under_blind: ClassVar[Blind | str] = Blind(
        lambda method, number, rounds: method.mixing(number, rounds),
        conditions=(Condition("aggregation", ("mean",), "a robust one compares single models' numbers"),),
    )
    warmup_share: Share = 0.5
    variant: Variant = "paper"
    clip: Annotated[float, Range(above=0, below=1)] = 1e-4
    diagonal: Diagonal = "clip"
    buffers: Buffers = "local"
    aggregation: Aggregation = field(default="mean", metadata=LATER)
    trim: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_aggregation(self.name, self.aggregation, self.trim)
        require(
            self.aggregation == "mean" or self.warmup_share > 0,
            f"pfedsim: aggregation is {self.aggregation} of the warm-up's average, and warmup_share is 0",
        )

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """What the warm-up's average can withstand."""
        found = robust_warnings(self.name, self.aggregation, self.trim, silos)
        return [f"{text} (in the warm-up; later mixtures are not robust)" for text in found]

    def counts_images(self, round_number: int, rounds: int) -> bool:
        """Whether silos send numbers of images in that round, to be weighted by."""
        return self.aggregation == "mean" and round_number < self.warmup_rounds(rounds)

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The model, during the warm-up the number of images, and running statistics where they travel."""
        statistics = {Exposure.RUNNING_STATISTICS} if self.buffers == "aggregate" else set()
        counts = {Exposure.SAMPLE_COUNT} if self.warmup_share > 0 and self.aggregation == "mean" else set()
        return frozenset(MODEL) | counts | statistics

    def mixing(self, number: int, rounds: int) -> Mixing:
        """What is done in a round of training where mixtures are blind."""
        statistics = {Exposure.RUNNING_STATISTICS} if self.buffers == "aggregate" else set()
        if number < self.warmup_rounds(rounds):
            return Mixing(lambda squared: even(squared.shape[1]), frozenset({*MODEL, *statistics}), compared=None)
        return Mixing(
            lambda squared: normalised_rows(self._similarity(squared)),
            frozenset({Exposure.MODEL_PARAMETERS_EXTRACTOR, *statistics}),
            Compared(
                Exposure.MODEL_PARAMETERS_CLASSIFIER,
                unit_rows if self.variant == "paper" else _joined_rows,
            ),
        )

    def _similarity(self, squared: Tensor) -> Tensor:
        """Φ of squared distances ``Tensor[K, N, N]`` between rows of length 1."""
        cosines = (1 - squared / 2).permute(1, 2, 0)
        return similarity_of(cosines, variant=self.variant, clip=self.clip, diagonal=self.diagonal)

    def warmup_rounds(self, rounds: int) -> int:
        """T_g = ⌊ρT⌋."""
        return math.floor(self.warmup_share * rounds)


def classifier_similarity(
    classifiers: Tensor, *, variant: Variant = "paper", clip: float = 1e-4, diagonal: Diagonal = "clip"
) -> Tensor:
    """Φ between silos' classifiers (Eq. 3).

    Args:
        classifiers: ``Tensor[N, C, F]``, float32 or float64: the weights (without bias) of C classes. A row of zeros
            has cosine 0 with everything.
        variant: see ``PFedSim``; "author" clips as well, so that equal classifiers do not give an infinity.
        clip: cosines (for "author": their mean over classes) are at most ``1 - clip``.
        diagonal: "clip" for −log(clip), "one" for 1.

    Returns:
        ``Tensor[N, N]`` of the same dtype, symmetric, entries from 0 to −log(clip), computed in float64.
    """
    rows = classifiers.to(torch.float64)
    # Scaling each row by its largest entry first keeps squares of very large and very small weights finite.
    rows = rows / rows.abs().amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    norms = torch.linalg.vector_norm(rows, dim=2)
    products = torch.einsum("icf,jcf->ijc", rows, rows)
    cosines = products / (norms.unsqueeze(1) * norms.unsqueeze(0) + _NORM_FLOOR)
    return similarity_of(cosines, variant=variant, clip=clip, diagonal=diagonal).to(classifiers.dtype)


def similarity_of(cosines: Tensor, *, variant: Variant, clip: float, diagonal: Diagonal) -> Tensor:
    """Φ of cosines ``Tensor[N, N, C]``: ``Tensor[N, N]``."""
    if variant == "author":
        similarity = -torch.log1p(-cosines.mean(dim=2).clamp(0, 1 - clip))
    else:
        similarity = -torch.log1p(-cosines.clamp(0, 1 - clip)).mean(dim=2)
    similarity.fill_diagonal_(-math.log(clip) if diagonal == "clip" else 1.0)
    return similarity


def _joined_rows(weight: Tensor) -> Tensor:
    """All of a classifier's rows as one of length 1: what two of them tell is the mean of the classes' cosines."""
    rows = unit_rows(weight)
    return rows.reshape(1, -1) / math.sqrt(len(rows))


def personalize_extractors(extractors: Tensor, similarity: Tensor) -> Tensor:
    """Eq. 4: each silo's mean of all extractors, weighted by its row of similarities.

    Args:
        extractors: ``Tensor[N, D]``, one flattened extractor a row.
        similarity: ``Tensor[N, N]``, entries of 0 or more; a row that adds up to 0 keeps its own extractor.

    Returns:
        ``Tensor[N, D]`` of the extractors' dtype, computed in float64.
    """
    return (normalised_rows(similarity) @ extractors.to(torch.float64)).to(extractors.dtype)


def normalised_rows(similarity: Tensor) -> Tensor:
    """Rows divided by their sums, float64; a row of zeros becomes the identity's."""
    similarity = similarity.to(torch.float64)
    sums = similarity.sum(dim=1, keepdim=True)
    identity = torch.eye(len(similarity), dtype=torch.float64)
    return torch.where(sums > 0, similarity / torch.where(sums > 0, sums, torch.ones_like(sums)), identity)
