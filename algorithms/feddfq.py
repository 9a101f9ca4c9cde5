"""FedDFQ: personalisation by data identifiers ("FedDFQ: Personalized Federated Learning Based on Data Feature
Quantification").

Three parts, each of which can be switched off (the paper's ablation, Table 2):

* DIEM: a silo's data identifier f is the mean over its training images of each image's column profile (the mean over
  channels, then over rows; Eq. 1–2): as many numbers as an image is wide. Similarity is the cosine (Eq. 4).
* FELPA (Algorithm 1): silo i gets the extractor W_i = Σ_j s_ij W_j, with s_ij = max(0, cos(f_i, f_j)) divided by its
  row's sum. The classifier stays the silo's own.
* AGAM (Algorithm 2): silo i also gets the others' classifier gradients, scaled by s_ij, and takes them one after
  another into a step on its classifier, keeping one only if the loss on its training images falls.

What this exposes: every silo's mean image profile and, with AGAM, its classifier's gradient to the coordinator; and the
gradient, scaled but otherwise as it is, **to every other silo**. Shares of the classes can be read off such a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.algorithms.declarations import (
    MIXTURES,
    Average,
    Blind,
    Compared,
    Condition,
    Count,
    Mixing,
    Protected,
    Sums,
    even,
    unit_rows,
)
from medsilo.algorithms.families.sharing import Buffers, check_linear, model_upload, received_tensors, upload_specs
from medsilo.algorithms.method import (
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Federation,
    Method,
    Round,
    SiloSide,
    SiloWeights,
    Site,
)
from medsilo.algorithms.models import Features, classifier_of, state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, TensorSpec, combine
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure

_IDENTIFIER = "identifier"
_CHOICE = "choice"
_BATCH = 1024
Normalisation = Literal["clamp", "softmax", "minmax"]


class FedDFQSilo(SiloSide):
    """Loads the mixed extractor, tries the others' gradients on its classifier, trains everything."""

    method: FedDFQ

    def __init__(self, method: FedDFQ, site: Site) -> None:
        super().__init__(method, site)
        check_linear(method.name, site.layout)

    def train(self, round_number: int, download: Payload) -> None:
        """AGAM and E epochs; the mean gradient of the classifier is taken down on the way."""
        site, method = self.site, self.method
        site.load({**self.memory[PERSONAL], **received_tensors(download, site.layout, method.buffers)})
        if Exposure.CLASSIFIER_GRADIENT in download:
            self._try_gradients(round_number, download[Exposure.CLASSIFIER_GRADIENT].tensors())
        if method.agam:
            meter = _GradientMeter(site.model)
            steps = site.fit(round_number, watch=meter.add)
            self.memory["gradient"] = meter.gradient(method.gradient, steps, site.training.learning_rate)
        else:
            site.fit(round_number)
        self.memory[PERSONAL] = state_of(site.model)
        # The coordinator answers whoever's identifier it has; a silo without an answer sends it (again).
        self.memory["answered"] = {"yes": torch.tensor(int(bool(download)))}
        if method.diem and _IDENTIFIER not in self.memory:
            self.memory[_IDENTIFIER] = {"profile": self.identifier(round_number)}

    def rehearse(self) -> None:
        """The first upload, with an identifier of ones."""
        self.memory["answered"] = {"yes": torch.tensor(0)}
        if self.method.diem:
            shape = (self.site.num_classes,) if self.method.per_class else ()
            self.memory[_IDENTIFIER] = {"profile": torch.ones(*shape, self.site.input_shape[2])}
        if self.method.agam:
            self.memory["gradient"] = {spec.name: torch.zeros(spec.shape) for spec in self.site.layout.classifier}

    def upload(self) -> Payload:
        """The extractor, the classifier's gradient, and the identifier if the coordinator has not got it."""
        payload = model_upload(self.memory[PERSONAL], self.site.layout, self.method.buffers)
        del payload[Exposure.MODEL_PARAMETERS_CLASSIFIER]
        if self.method.agam:
            payload[Exposure.CLASSIFIER_GRADIENT] = Part.of(self.memory["gradient"])
        if self.method.diem and not self.memory["answered"]["yes"]:
            payload[Exposure.DATA_IDENTIFIER] = Part.of(self.memory[_IDENTIFIER])
        return payload

    def blind_upload(self) -> Payload:
        """The identifier in every round: the coordinator keeps none."""
        found = dict(self.upload())
        if self.method.diem:
            found[Exposure.DATA_IDENTIFIER] = Part.of(self.memory[_IDENTIFIER])
        return found

    def identifier(self, round_number: int) -> Tensor:
        """The silo's data identifier: ``Tensor[W]``, or ``Tensor[C, W]`` with ``per_class``."""
        scaled = self._scaled
        if not self.method.per_class:
            mean = self.site.average(
                _IDENTIFIER,
                lambda images, _: column_profiles(scaled(images)),
                round_number=round_number,
                lasting=self.method.centre != "none",
            )
            return mean.to(torch.float32)
        images, labels = self.site.train_data()
        images = scaled(images)
        profiles = torch.zeros(self.site.num_classes, images.shape[3])
        for label in sorted(set(labels.tolist())):
            profiles[label] = data_identifier(images[labels == label]).cpu()
        return profiles

    def _scaled(self, images: Tensor) -> Tensor:
        return images / 2 + 0.5 if self.method.centre == "none" else images

    def _try_gradients(self, round_number: int, tensors: Mapping[str, Tensor]) -> None:
        site = self.site
        if round_number == 0:
            raise RefusedError("the coordinator sent classifier gradients before any silo has trained")
        path, classifier = classifier_of(site.model)
        if not isinstance(classifier, nn.Linear):
            raise ConfigurationError("feddfq works on the classifier's weights; the model's last layer must be linear")
        ranks = sorted({name.split("/")[0] for name in tensors})
        expected = [f"{rank}/{spec.name}" for rank in ranks for spec in site.layout.classifier]
        shapes = {spec.name: spec.shape for spec in site.layout.classifier}
        if list(tensors) != expected or any(t.shape != shapes[n.partition("/")[2]] for n, t in tensors.items()):
            raise RefusedError("the coordinator's classifier gradients do not have the classifier's names and shapes")
        names = [spec.name.removeprefix(f"{path}.") for spec in site.layout.classifier]
        # Copied: until a choice is made, the model is used as it is.
        head = _joined({name: tensor.detach().clone() for name, tensor in classifier.named_parameters()}, names)
        device, bias, rate = head.device, "bias" in names, site.training.learning_rate
        gradients = torch.stack(
            [_joined({n: tensors[f"{rank}/{path}.{n}"].to(device) for n in names}, names) for rank in ranks]
        )
        if self.method.selection == "greedy":
            images, labels = site.train_data()
            ones = torch.ones(len(ranks), device=device)  # the coordinator has scaled them
            head, _ = accumulate_gradients(
                _features(site.model, images, bias), labels, head, gradients, ones, learning_rate=rate
            )
        else:
            head = self._best_beginning(round_number, head, rate * gradients.cumsum(dim=0), bias)
        classifier.load_state_dict(_split(head, names))

    def _best_beginning(self, round_number: int, head: Tensor, steps: Tensor, bias: bool) -> Tensor:
        """The head after the step with which the mean loss is least; ``steps``: ``Tensor[K, C, F]``."""
        length = float(torch.linalg.vector_norm(steps.to(torch.float64), dim=(1, 2)).max())
        if length == 0:
            return head
        model = self.site.model

        def changes(images: Tensor, labels: Tensor) -> Tensor:
            # By the longest step's length: how far a bound on it reaches then does not depend on the learning rate.
            return loss_changes(_features(model, images, bias), labels, head, steps) / length

        means = self.site.average(_CHOICE, changes, round_number=round_number)
        best = int(means.argmin())
        return head - steps[best] if means[best] < 0 else head


class FedDFQCoordinator(CoordinatorSide):
    """Keeps identifiers; mixes extractors and passes on gradients."""

    by_silo: ClassVar[tuple[str, ...]] = (_IDENTIFIER,)

    method: FedDFQ

    def __init__(self, method: FedDFQ, federation: Federation) -> None:
        super().__init__(method, federation)
        check_linear(method.name, federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """Extractor, gradient, and the identifier of a silo that has not been answered yet."""
        layout, method = self.federation.layout, self.method
        parts = upload_specs(layout, method.buffers)
        del parts[Exposure.MODEL_PARAMETERS_CLASSIFIER]
        if method.agam:
            parts[Exposure.CLASSIFIER_GRADIENT] = layout.classifier
        if method.diem and silo not in self.memory.get(_IDENTIFIER, {}):
            width = self.federation.input_shape[2]
            classes = layout.classifier[0].shape[0]
            parts[Exposure.DATA_IDENTIFIER] = (
                TensorSpec("profile", (classes, width) if method.per_class else (width,)),
            )
        return parts

    def aggregate(self, ended: Round) -> Downloads:
        """Each participant's extractor, and the others' scaled gradients."""
        silos = list(ended.uploads)
        weights = self._weights(ended.uploads)
        shared = (Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.RUNNING_STATISTICS)
        stack = Stack.of(list(ended.uploads.values()), shared)
        if self.method.felpa == "global":
            mean = weights.mean(dim=0, keepdim=True)
            rows = combine(stack, mean, ended.workspace) * len(silos)
            given = mean.expand(len(silos), -1)
        else:
            rows = combine(stack, weights, ended.workspace)
            given = weights
        own: dict[str, Payload] = {}
        for index, silo in enumerate(silos):
            payload = {Exposure.PEER_DERIVED: rows[index]}
            if candidates := self._candidates(index, weights[index], ended.uploads):
                payload[Exposure.CLASSIFIER_GRADIENT] = Part.of(candidates)
            own[silo] = payload
        return Downloads(own=own, weights=SiloWeights(tuple(silos), given))

    def _weights(self, uploads: Mapping[str, Payload]) -> Tensor:
        if not self.method.diem:
            return torch.full((len(uploads), len(uploads)), 1 / len(uploads), dtype=torch.float64)
        known = dict(self.memory.get(_IDENTIFIER, {}))
        for silo, upload in uploads.items():
            if Exposure.DATA_IDENTIFIER in upload:
                known[silo] = upload[Exposure.DATA_IDENTIFIER].tensors()["profile"]
        self.memory[_IDENTIFIER] = known
        identifiers = torch.stack([known[silo].to(torch.float64).flatten() for silo in uploads])
        if self.method.centre == "global_mean":
            identifiers = identifiers - identifiers.mean(dim=0)
        return metric_proxies(identifiers, normalisation=self.method.normalisation)

    def _candidates(self, index: int, weights: Tensor, uploads: Mapping[str, Payload]) -> dict[str, Tensor]:
        """Scaled gradients in the order in which they are to be tried, numbered: their silos are not named."""
        if not self.method.agam:
            return {}
        others = [other for other in range(len(weights)) if other != index and weights[other] > 0]
        others.sort(key=lambda other: (-float(weights[other]), other))
        chosen = others[: self.method.candidates or None]
        if self.method.order == "ascending":
            chosen.reverse()
        if self.method.include_self:
            chosen.append(index)
        payloads = list(uploads.values())
        return {
            f"{rank:06d}/{name}": (float(weights[other]) * tensor.to(torch.float64)).to(torch.float32)
            for rank, other in enumerate(chosen)
            for name, tensor in payloads[other][Exposure.CLASSIFIER_GRADIENT].tensors().items()
        }


@dataclass(frozen=True)
class FedDFQ(Method):
    """FedDFQ's hyper-parameters. Where the paper is silent, the choice is ours.

    Attributes:
        diem: similarities from data identifiers; without, all silos count alike and no identifier leaves.
        felpa: "personal" gives each silo its own mixture of extractors; "global" gives all the mean of those mixtures
            (DIEM inside FedAvg).
        agam: others' classifier gradients are tried.
        centre: what identifiers are taken of: "model_input", the images as the network sees them (in [−1, 1]);
            "none", pixels in [0, 1], where all identifiers point the same way and all cosines are about 1;
            "global_mean", the network's images, and the coordinator subtracts the mean identifier.
        per_class: one profile a class ("N × C × C" in the paper's remark), which also tells which classes a silo has.
        normalisation: "clamp" is max(0, cos) over the row's sum; "softmax" of cosines; "minmax" scales a row to 0 … 1
            before it is divided by its sum.
        selection: how AGAM tries gradients: "greedy", one after another, each on top of those that were kept, as
            Algorithm 2 has it; "argmin", which takes the best of all beginnings of the list, nothing included. That
            needs one look at the images a round instead of one for each gradient, whose answers each have a price
            under differential privacy.
        candidates: how many of the most similar others' gradients a silo is given; 0 for all.
        order: in which they are tried: "ascending" similarity, as Algorithm 2 has it, or "descending".
        include_self: the silo's own gradient is a candidate too, the last.
        gradient: "mean" over the round's mini-batches; "last_batch"; "delta", (before − after)/(learning rate · steps),
            which with plain SGD is the mean.
        buffers: batch normalisation's running statistics stay at the silo, or follow the extractor ("aggregate").
    """

    name: ClassVar[str] = "feddfq"
    silo: ClassVar[type[SiloSide]] = FedDFQSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedDFQCoordinator
    sends: ClassVar[str] = "extractor; classifier's gradient; once: data identifier"
    gets: ClassVar[str] = "its own mixture of extractors, and **other silos' classifier gradients**"
    # The classifier's gradient is that of the noised steps, or what they made of the classifier.
    under_privacy: ClassVar[Protected | str] = Protected(
        derived=frozenset({Exposure.CLASSIFIER_GRADIENT}),
        averages=(
            Average("identifier", Exposure.DATA_IDENTIFIER, lasting=True, only_if="diem"),
            Average("choice", None, lasting=False, only_if="agam"),
        ),
        conditions=(
            Condition(
                "selection",
                ("argmin",),
                "to try gradients one after another is to ask the images a question for each, and each has its price; "
                "argmin asks one a round",
                only_if="agam",
            ),
            Condition(
                "centre",
                ("model_input", "global_mean"),
                "where no pixel is below 0, an image's length is mostly its brightness, and clipping leaves little "
                "else",
                only_if="diem",
            ),
            Condition("per_class", (False,), "numbers of images of each class have no mechanism", only_if="diem"),
        ),
    )
    under_masks: ClassVar[Sums | str] = f"{MIXTURES}, and hands single silos' gradients to others"
    under_blind: ClassVar[Blind | str] = Blind(
        lambda method, *_: method.mixing(),
        conditions=(
            Condition(
                "agam",
                (False,),
                "AGAM tries the others' gradients one after another, and of sums of the first one, two, three … each "
                "next one tells a single hospital's",
            ),
            Condition(
                "centre",
                ("model_input", "none"),
                "to take off the mean of all identifiers, the coordinator has to see them",
                only_if="diem",
            ),
        ),
    )
    diem: bool = True
    felpa: Literal["personal", "global"] = "personal"
    agam: bool = True
    centre: Literal["model_input", "none", "global_mean"] = "model_input"
    per_class: bool = False
    normalisation: Normalisation = "clamp"
    selection: Literal["greedy", "argmin"] = "greedy"
    candidates: Count = 0
    order: Literal["ascending", "descending"] = "ascending"
    include_self: bool = False
    gradient: Literal["mean", "last_batch", "delta"] = "mean"
    buffers: Buffers = "local"

    def mixing(self) -> Mixing:
        """What is done in a round of training where mixtures are blind."""
        statistics = {Exposure.RUNNING_STATISTICS} if self.buffers == "aggregate" else set()
        compared = Compared(Exposure.DATA_IDENTIFIER, _direction, sketched=False) if self.diem else None
        return Mixing(self._mixture, frozenset({Exposure.MODEL_PARAMETERS_EXTRACTOR, *statistics}), compared)

    def _mixture(self, squared: Tensor) -> Tensor:
        """Weights of squared distances ``Tensor[1, N, N]`` between identifiers of length 1; even ones without DIEM."""
        silos = squared.shape[1]
        weights = _proxies(1 - squared[0] / 2, self.normalisation) if self.diem else even(silos)
        return weights.mean(dim=0, keepdim=True).expand(silos, -1) if self.felpa == "global" else weights

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The extractor, with DIEM the identifier (once), with AGAM the classifier's gradient."""
        found = {Exposure.MODEL_PARAMETERS_EXTRACTOR}
        if self.diem:
            found.add(Exposure.DATA_IDENTIFIER)
        if self.agam:
            found.add(Exposure.CLASSIFIER_GRADIENT)
        if self.buffers == "aggregate":
            found.add(Exposure.RUNNING_STATISTICS)
        return frozenset(found)

    @property
    def downlink(self) -> frozenset[Exposure]:
        """Mixed extractors, and with AGAM other silos' classifier gradients."""
        return frozenset({Exposure.PEER_DERIVED} | ({Exposure.CLASSIFIER_GRADIENT} if self.agam else set()))


def data_identifier(images: Tensor) -> Tensor:
    """A data set's identifier: the images' mean over channels and rows, then over images (Eq. 1–2).

    Args:
        images: ``Tensor[n, C, H, W]``, n ≥ 1, as the network sees them.

    Returns:
        ``Tensor[W]`` of the same dtype, computed in float64.
    """
    return column_profiles(images).mean(dim=0).to(images.dtype)


def column_profiles(images: Tensor) -> Tensor:
    """Each image's mean over channels and rows: ``Tensor[n, C, H, W]`` to float64 ``Tensor[n, W]``."""
    return images.to(torch.float64).mean(dim=(1, 2))


def metric_proxies(identifiers: Tensor, *, normalisation: Normalisation = "clamp") -> Tensor:
    """Mixing weights from identifiers' cosines (Eq. 4).

    Args:
        identifiers: ``Tensor[N, W]``. A vector of zeros has cosine 0 with the others and 1 with itself.
        normalisation: see ``FedDFQ``.

    Returns:
        ``Tensor[N, N]`` of the same dtype: rows of non-negative weights that sum to 1, computed in float64.
    """
    vectors = identifiers.to(torch.float64)
    # Scaled by its largest entry first, so that squares neither overflow nor vanish.
    largest = vectors.abs().amax(dim=1, keepdim=True)
    vectors = vectors / torch.where(largest > 0, largest, torch.ones_like(largest))
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    directions = vectors / torch.where(norms > 0, norms, torch.ones_like(norms))
    return _proxies(directions @ directions.T, normalisation).to(identifiers.dtype)


def _proxies(cosines: Tensor, normalisation: Normalisation) -> Tensor:
    """Weights of cosines ``Tensor[N, N]``."""
    cosines = cosines.clamp(-1, 1)
    cosines.fill_diagonal_(1.0)
    if normalisation == "softmax":
        return torch.softmax(cosines, dim=1)
    if normalisation == "minmax":
        low = cosines.amin(dim=1, keepdim=True)
        span = 1 - low
        weights = torch.where(span > 0, (cosines - low) / torch.where(span > 0, span, torch.ones_like(span)), 1.0)
    else:
        weights = cosines.clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)


def _direction(identifier: Tensor) -> Tensor:
    """What of an identifier is compared where mixtures are blind: ``Tensor[1, W]`` of length 1."""
    return unit_rows(identifier.reshape(1, -1))


def mix_extractors(extractors: Tensor, weights: Tensor) -> Tensor:
    """FELPA: ``weights @ extractors`` (Algorithm 1).

    Args:
        extractors: ``Tensor[N, D]``, one flattened extractor a row.
        weights: ``Tensor[N, N]`` as ``metric_proxies`` gives them.

    Returns:
        ``Tensor[N, D]`` of the extractors' dtype, computed in float64.
    """
    return (weights.to(torch.float64) @ extractors.to(torch.float64)).to(extractors.dtype)


def accumulate_gradients(
    features: Tensor,
    labels: Tensor,
    classifier: Tensor,
    gradients: Tensor,
    similarities: Tensor,
    *,
    learning_rate: float,
) -> tuple[Tensor, float]:
    """AGAM: takes gradients one after another into a step, keeping one only if the training loss falls (Algorithm 2).

    Args:
        features: ``Tensor[n, F]``, what goes into the classifier.
        labels: ``Tensor[n]``.
        classifier: ``Tensor[C, F]``, without bias.
        gradients: ``Tensor[K, C, F]`` in the order in which they are tried.
        similarities: ``Tensor[K]``; a gradient with similarity 0 is not tried.
        learning_rate: η > 0.

    Returns:
        The classifier after the step, ``Tensor[C, F]``, and its mean cross entropy, which is never above the old one.
    """
    logits = features @ classifier.T
    least = float(F.cross_entropy(logits, labels))
    step = torch.zeros_like(classifier)
    for gradient, similarity in zip(gradients, similarities, strict=True):
        if similarity == 0:
            continue
        trial = step + similarity * gradient
        loss = float(F.cross_entropy(features @ (classifier - learning_rate * trial).T, labels))
        if loss < least:
            step, least = trial, loss
    return classifier - learning_rate * step, least


def loss_changes(features: Tensor, labels: Tensor, classifier: Tensor, steps: Tensor) -> Tensor:
    """By how much each image's cross entropy changes with each of several steps of the classifier.

    Args:
        features: ``Tensor[n, F]``, what goes into the classifier.
        labels: ``Tensor[n]``.
        classifier: ``Tensor[C, F]``, without bias.
        steps: ``Tensor[K, C, F]``; the k-th leads to ``classifier - steps[k]``.

    Returns:
        ``Tensor[n, K]``, below 0 where the loss falls.
    """
    before = F.cross_entropy(features @ classifier.T, labels, reduction="none")
    after = [F.cross_entropy(features @ (classifier - step).T, labels, reduction="none") for step in steps]
    return torch.stack(after, dim=1) - before.unsqueeze(1)


class _GradientMeter:
    """Adds up the classifier's gradients during training."""

    def __init__(self, model: nn.Module) -> None:
        path, classifier = classifier_of(model)
        self._parameters = {f"{path}.{name}": p for name, p in classifier.named_parameters()}
        self._before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._sums = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._last = dict(self._sums)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Takes a step's gradients."""
        for name in self._parameters:
            self._sums[name] += gradients[name]
            self._last[name] = gradients[name].detach().clone()

    def gradient(self, kind: str, steps: int, learning_rate: float) -> dict[str, Tensor]:
        """The gradient as ``FedDFQ.gradient`` wants it, on the CPU."""
        if kind == "last_batch":
            found = self._last
        elif kind == "mean":
            found = {name: total / steps for name, total in self._sums.items()}
        else:
            found = {
                name: (self._before[name] - p.detach()) / (learning_rate * steps)
                for name, p in self._parameters.items()
            }
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}


def _features(model: nn.Module, images: Tensor, bias: bool) -> Tensor:
    """What goes into the classifier; a bias is the weight of a feature that is always 1."""
    model.eval()
    found = []
    with torch.no_grad(), Features(model) as features:
        for start in range(0, len(images), _BATCH):
            model(images[start : start + _BATCH])
            found.append(features.last)
    joined = torch.cat(found)
    return torch.cat([joined, joined.new_ones(len(joined), 1)], dim=1) if bias else joined


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Weight and bias as one matrix ``[C, F]`` or ``[C, F + 1]``."""
    return torch.cat([tensors[name].reshape(len(tensors[name]), -1) for name in names], dim=1)


def _split(head: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    return {"weight": head[:, :-1], "bias": head[:, -1]} if "bias" in names else {"weight": head}
