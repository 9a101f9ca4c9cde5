"""Ridge regression on fixed features, from sums that each silo sends once.

Of each image, with features x clipped to the norm c and divided by it, and the code u of its class (below), a silo adds
up xxᵀ and uxᵀ over its images (its units, where a run has differential privacy). The coordinator adds up the silos'
sums, and each silo solves for its own linear layer

    W = B (A + λI)⁻¹,   A = Σ xxᵀ,   B = Σ uxᵀ.

One round does it; more rounds send the same numbers again. Where noise is added to what leaves, a silo adds its own
sums once more for its own model, as they are: at home there is nothing to hide them from. They are not put in the place
of those that it sent, since it cannot know whether these came in time.

Codes: of K classes, class k has (e_k - 1/K) / √(1 - 1/K) / √2, which has norm 1/√2. All silos' images together, without
noise, so give the ridge regression of e_k - 1/K, whose largest number is that of e_k's.

Sensitivity: what leaves is one vector, the upper triangle of A, all but its diagonal times √2, and B. An image that is
blanked (zero-out adjacency) moves the first part by ‖xxᵀ‖_F = ‖x‖² ≤ 1, the second by ‖u‖‖x‖ ≤ 1/√2, both together by
at most R = √(3/2), and by exactly that if ‖x‖ = 1. A patient's vector is the mean of its images', so it is no longer.
The run's differential privacy clips to R and adds Gaussian noise of deviation s = zR to each number: one Gaussian
mechanism. A then has noise of deviation s on its diagonal and s/√2 beside it, whose eigenvalues are spread over ±s√(2d)
(Wigner's semicircle).

λ, from the noise alone, with m noised sums in A and ρ = 0.05:

* ``adassp``: λ = s√m · √(d · ln(2d²/ρ)), Wang, "Revisiting Differentially Private Linear Regression" (UAI 2018),
  Algorithm 2, whose noised least eigenvalue is taken as 0 here: no budget is spent on it, and of correlated features it
  is nearly that.
* ``projected``, ours: A's negative eigenvalues, which noise alone can have made, become 0, and λ = s√(md/2), the root
  mean square of the noise's eigenvalues: about a fifth of the other, and as good or better wherever it was tried
  (docs/results/coloncells-ridge.md). Both only see what was released.

What it exposes: without noise, exact second moments of the hospital's features, the number of its images and of each
class among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.declarations import Average, Condition, NonNegative, Positive, Protected, Sums
from medsilo.algorithms.families.class_statistics import linear_shape
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
from medsilo.algorithms.models import Features, Layout
from medsilo.algorithms.tensors import Part, Payload, TensorSpec
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure

SENSITIVITY = math.sqrt(1.5)
"""R, the longest that one image's vector is."""

_CODE = math.sqrt(0.5)
_RHO = 0.05
_SHARPNESS = 5.0
"""Logits for an answer of 1: which class is largest does not depend on it, the cross entropy does."""

_SENT = "moments"
_OWN = "own"
_PRODUCTS, _CLASSES = "products", "classes"
_SILOS = TensorSpec("silos", (), "I64")
_NUMBERS_AT_ONCE = 1 << 24


class RidgeSilo(SiloSide):
    """Adds up once, and solves whenever it is given the sums of all."""

    method: Ridge

    def __init__(self, method: Ridge, site: Site) -> None:
        super().__init__(method, site)
        self._specs = _specs(site.layout)

    def train(self, round_number: int, download: Payload) -> None:
        """Adds up in its first round; solves."""
        if _SENT not in self.memory:
            self._add_up(round_number)
        self.finish(download)

    def finish(self, download: Payload) -> None:
        """Solves from the sums of all, or, where there are none yet, from its own; keeps the starting model before it
        has any."""
        if _SENT in self.memory:
            self.memory[PERSONAL] = self.memory[PERSONAL] | self._solved(download)

    def rehearse(self) -> None:
        """The first upload, of zeros."""
        self.memory[_SENT] = {spec.name: torch.zeros(spec.shape) for spec in self._specs}

    def upload(self) -> Payload:
        """The sums, the same in every round."""
        return {Exposure.FEATURE_MOMENTS: Part.of(self.memory[_SENT])}

    def _add_up(self, round_number: int) -> None:
        site, model = self.site, self.site.model
        classes, features = linear_shape(self.method.name, site.layout)
        size = _size(site.layout)

        def vectors(inputs: Tensor, labels: Tensor) -> Tensor:
            with Features(model) as caught, torch.inference_mode():
                model(inputs)
            found = caught.last.to("cpu", torch.float64)
            found = torch.cat([found, found.new_ones(len(found), size - features)], dim=1)
            return moments(found, labels.cpu(), classes=classes, clip=self.method.clip)

        model.eval()
        at_once = max(1, min(1024, _NUMBERS_AT_ONCE // sum(math.prod(spec.shape) for spec in self._specs)))

        def total(*, at_home: bool) -> State:
            mean = site.average(
                "moments", vectors, round_number=round_number, at_home=at_home, inputs=True, at_once=at_once
            )
            products, crossed = torch.split(mean * site.num_units, [math.prod(spec.shape) for spec in self._specs])
            return {_PRODUCTS: products, _CLASSES: crossed.reshape(classes, size)}

        self.memory[_SENT] = {name: tensor.to(torch.float32) for name, tensor in total(at_home=False).items()}
        if self.method.own == "exact" and site.noise("moments"):
            self.memory[_OWN] = total(at_home=True)
        model.train()

    def _solved(self, download: Payload) -> State:
        """The last layer, from all sums that the silo has."""
        own, silos = self.memory.get(_OWN), 0
        sums = [own] if own else []
        if download:
            found = load_parameters(download, Exposure.PEER_DERIVED, (*self._specs, _SILOS))
            silos = int(found[_SILOS.name])
            if silos < 1:
                raise RefusedError("the coordinator's sums are of no silo")
            sums.append(found)
        elif not own:
            sums, silos = [self.memory[_SENT]], 1
        products, crossed = (sum(one[spec.name].to(torch.float64) for one in sums) for spec in self._specs)
        solved = solve(
            torch.as_tensor(products),
            torch.as_tensor(crossed),
            deviation=self.site.noise("moments") * self.site.num_units * math.sqrt(silos),
            shrinkage=self.method.shrinkage,
            regularisation=self.method.regularisation,
        )
        classes, features = linear_shape(self.method.name, self.site.layout)
        scaled = solved * (_SHARPNESS * math.sqrt(1 - 1 / classes) / _CODE / self.method.clip)
        names = [spec.name for spec in self.site.layout.classifier]
        parts = [scaled[:, :features], *(scaled[:, column] for column in range(features, scaled.shape[1]))]
        return {name: part.to(torch.float32).contiguous() for name, part in zip(names, parts, strict=True)}


class RidgeCoordinator(CoordinatorSide):
    """Adds up the silos' sums."""

    def __init__(self, method: Method, federation: Federation) -> None:
        super().__init__(method, federation)
        self._specs = _specs(federation.layout)

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The two sums."""
        return {Exposure.FEATURE_MOMENTS: self._specs}

    def aggregate(self, ended: Round) -> Downloads:
        """The sums over this round's silos, and how many these are."""
        total = {spec.name: torch.zeros(spec.shape, dtype=torch.float64) for spec in self._specs}
        for upload in ended.uploads.values():
            for name, tensor in upload[Exposure.FEATURE_MOMENTS].tensors().items():
                total[name] += tensor
        tensors = {name: tensor.to(torch.float32) for name, tensor in total.items()}
        part = Part.of({**tensors, _SILOS.name: torch.tensor(len(ended.uploads))})
        return Downloads(everyone={Exposure.PEER_DERIVED: part})


@dataclass(frozen=True)
class Ridge(Method):
    """Ridge regression's hyper-parameters.

    Attributes:
        clip: c > 0, the longest that an image's features count. Those of the fixed extractors are √2 long, and longer
            ones are only scaled down, which changes no answer of the model. The plan's differential privacy rests on
            its own clipping to R, not on this.
        shrinkage: λ is at least this share of A's trace, which is the number of images where all are clipped. 0 is
            least squares; then features that depend on each other have no unique solution, and the shortest is taken.
            1e-5 is ours, from patients of a training split.
        regularisation: of the noise, where there is any: "projected" or "adassp" (see above).
        own: of what a silo's own model is made under differential privacy: of its "exact" sums too, or of "noised" ones
            alone. What is made of exact ones has no differential privacy: such a model must stay at the hospital, and
            so must its accuracies.
    """

    name: ClassVar[str] = "ridge"
    silo: ClassVar[type[SiloSide]] = RidgeSilo
    coordinator: ClassVar[type[CoordinatorSide]] = RidgeCoordinator
    sends: ClassVar[str] = "once: sums of products of features, and of features and classes"
    gets: ClassVar[str] = "their sums over all silos"
    uploads: ClassVar[frozenset[Exposure]] = frozenset({Exposure.FEATURE_MOMENTS})
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    under_privacy: ClassVar[Protected | str] = Protected(
        each_round=(),
        averages=(Average("moments", Exposure.FEATURE_MOMENTS, lasting=False, bound=SENSITIVITY, once=True),),
        reporting=(
            Condition(
                "own",
                ("noised",),
                "else a silo's model is made of its exact sums too, which no noise protects",
            ),
        ),
    )
    under_masks: ClassVar[Sums | str] = Sums()
    downloads_last: ClassVar[bool] = True
    measures_received: ClassVar[bool] = True
    clip: Positive = 1.0
    shrinkage: NonNegative = 1e-5
    regularisation: Literal["projected", "adassp"] = "projected"
    own: Literal["exact", "noised"] = "exact"


def moments(features: Tensor, labels: Tensor, *, classes: int, clip: float) -> Tensor:
    """Each image's vector: its products of features, then of class code and features.

    Args:
        features: ``Tensor[n, d]``, float64.
        labels: ``Tensor[n]``, in 0 … K - 1.
        classes: K ≥ 2.
        clip: c > 0.

    Returns:
        ``Tensor[n, d (d + 1) / 2 + K d]``, no row longer than ``SENSITIVITY`` but for rounding.
    """
    size = features.shape[1]
    lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    scaled = features / lengths.clamp(min=clip)
    row, column, factors = _triangle(size)
    products = scaled[:, row] * scaled[:, column] * factors
    codes = torch.eye(classes, dtype=features.dtype) - 1 / classes
    codes *= _CODE / math.sqrt(1 - 1 / classes)
    crossed = codes[labels.to(torch.int64)][:, :, None] * scaled[:, None, :]
    return torch.cat([products, crossed.flatten(1)], dim=1)


def solve(
    products: Tensor, crossed: Tensor, *, deviation: float, shrinkage: float, regularisation: str = "projected"
) -> Tensor:
    """W = B (A + λI)⁻¹.

    Args:
        products: of A as ``moments`` has it, ``Tensor[d (d + 1) / 2]``, float64.
        crossed: B, ``Tensor[K, d]``, float64.
        deviation: s√m, of the noise in each of these numbers; 0 for none.
        shrinkage: λ's share of A's trace besides.
        regularisation: "projected" or "adassp".

    Returns:
        ``Tensor[K, d]``, float64; along directions in which A + λI is nothing, 0.
    """
    size = crossed.shape[1]
    row, column, factors = _triangle(size)
    second = torch.zeros(size, size, dtype=torch.float64)
    second[row, column] = products / factors
    second[column, row] = second[row, column]
    values, directions = torch.linalg.eigh(second)
    weight = shrinkage * max(0.0, float(values.sum()))
    if regularisation == "adassp":
        weight += deviation * math.sqrt(size * math.log(2 * size**2 / _RHO))
    else:
        weight += deviation * math.sqrt(size / 2)
        values = values.clamp(min=0)
    values = values + weight
    inverse = torch.where(values > 1e-12 * values.abs().max(), 1 / values, 0.0)
    solved: Tensor = (crossed @ directions * inverse) @ directions.T
    return solved


def _triangle(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the upper triangle, and what each number of it is multiplied by as it travels, float64."""
    row, column = torch.triu_indices(size, size)
    return row, column, torch.where(row == column, 1.0, 2.0).to(torch.float64).sqrt()


def _size(layout: Layout) -> int:
    """d: the last layer's features, and a constant for its bias."""
    _, features = linear_shape(Ridge.name, layout)
    if layout.extractor:
        raise ConfigurationError(
            "ridge solves for a linear layer on fixed features, and the model has other parameters that are trained; "
            "choose a model of which the last layer alone is trained (stain-texture, for example)"
        )
    return features + len(layout.classifier) - 1


def _specs(layout: Layout) -> tuple[TensorSpec, TensorSpec]:
    size = _size(layout)
    classes = linear_shape(Ridge.name, layout)[0]
    return TensorSpec(_PRODUCTS, (size * (size + 1) // 2,)), TensorSpec(_CLASSES, (classes, size))
