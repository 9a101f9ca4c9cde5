"""What a method states of itself, as data: the ranges of its hyper-parameters, and how it stands under differential
privacy, under masks and where mixtures are blind, which ``protection/`` reads. Where that depends on hyper-parameters,
it names them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from medsilo.privacy.errors import TrainingError
from medsilo.privacy.exposure import MODEL, Exposure

_BOUNDS = (
    ("least", operator.ge, "{:g} or more", "≥"),
    ("above", operator.gt, "above {:g}", ">"),
    ("most", operator.le, "at most {:g}", "≤"),
    ("below", operator.lt, "below {:g}", "<"),
)


@dataclass(frozen=True)
class Range:
    """Of a number, written beside its type: ``Annotated[float, Range(above=0, most=1)]``.

    >>> Range(above=0, most=1).words, Range(above=0, most=1).signs
    ('above 0 and at most 1', '> 0 ≤ 1')
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number lies in it."""
        return all(compare(value, bound) for bound, compare, *_ in self._bounds())

    @property
    def words(self) -> str:
        """What a number must be."""
        return " and ".join(text.format(bound) for bound, _, text, _ in self._bounds())

    @property
    def signs(self) -> str:
        """The same for a table."""
        return " ".join(f"{sign} {bound:g}" for bound, *_, sign in self._bounds())

    def _bounds(self) -> list[tuple[float, Callable[[float, float], bool], str, str]]:
        return [(getattr(self, name), *rest) for name, *rest in _BOUNDS if getattr(self, name) is not None]


NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(least=0, most=1)]
Count = Annotated[int, Range(least=0)]
OneOrMore = Annotated[int, Range(least=1)]


@dataclass(frozen=True)
class Average:
    """An average over the images that a method asks for (``site.average``).

    Attributes:
        content: as the method calls it.
        exposure: the class that it is sent as; None where it only enters the training.
        lasting: it is drawn once for a version of the data set; else in every round but the first.
        only_if: a hyper-parameter, without which it is not asked for.
        bound: R, the most that one unit's vector counts, where the method itself says it; its noise is then the
            training's. Otherwise both are the coordinator's to say.
        once: it is drawn once in a run.
    """

    content: str
    exposure: Exposure | None
    lasting: bool
    only_if: str | None = None
    bound: float | None = None
    once: bool = False

    def times(self, rounds: int) -> int:
        """How often at most, in a run of so many rounds."""
        return 1 if self.lasting or self.once else rounds - 1


@dataclass(frozen=True)
class Condition:
    """A hyper-parameter that must have one of certain values.

    Attributes:
        name: of the hyper-parameter.
        values: that will do.
        reason: why others will not.
        only_if: another hyper-parameter, without which any value will do.
    """

    name: str
    values: tuple[object, ...]
    reason: str
    only_if: str | None = None


@dataclass(frozen=True)
class Protected:
    """States that differential privacy protects all that a method sends: its silos train with ``site.fit`` on the cross
    entropy, with or without a correction, and send nothing but the models that leaves them, what is made of these,
    averages over their images that ``site.average`` noises, and numbers of images.

    Attributes:
        each_round: epochs of each training in a round: a number, or the hyper-parameter that says it; None, or a
            hyper-parameter of 0, stands for the plan's.
        at_end: epochs of each training after the last round, likewise; 0 stands for none.
        derived: classes beyond the usual that are computed from trained models only.
        averages: averages over the images besides training.
        conditions: what its hyper-parameters must be.
        reporting: what they must be for accuracies of personalised models to leave. A model that is made, at the silo,
            of images that no noise protects must stay there, and so must whatever is measured on it.
    """

    each_round: tuple[int | str | None, ...] = (None,)
    at_end: tuple[int | str, ...] = ()
    derived: frozenset[Exposure] = frozenset()
    averages: tuple[Average, ...] = ()
    conditions: tuple[Condition, ...] = ()
    reporting: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Sums:
    """States that all that a method's coordinator makes of a round's updates is made of their weighted mean and their
    number.

    Attributes:
        rounds: of a method and a run's rounds, how many from the first that holds for.
        otherwise: why it holds for none, where ``rounds`` can be 0.
        from_mean: whether a silo trains from nothing but the mean that all are handed, and keeps nothing of its own
            from round to round that enters what it sends. Only then can noise be shared out.
    """

    rounds: Callable[[Any, int], int] = lambda _, rounds: rounds
    otherwise: str = ""
    from_mean: bool = False


@dataclass(frozen=True)
class Compared:
    """Of what the coordinator learns how far silos lie apart, where mixtures are blind.

    Attributes:
        exposure: the class whose first tensor it is; None for all that is mixed, as one row.
        rows: makes of that tensor ``Tensor[K, F]``, whose K rows are compared each for itself.
        sketched: rows are compared by their sketches; otherwise whole, and a silo that works with the coordinator
            learns what is compared: then silos have to consent to ``exposure``.
    """

    exposure: Exposure | None = None
    rows: Callable[[Tensor], Tensor] = lambda tensor: tensor.reshape(1, -1)
    sketched: bool = True


@dataclass(frozen=True)
class Mixing:
    """What a coordinator does blind in one round of training; all of a round's silos deliver.

    Attributes:
        weights: of squared distances ``Tensor[K, N, N]`` (float64, each symmetric) the weights ``Tensor[N, N]``, whose
            row i makes the mixture of silo i and adds up to 1.
        mixed: the classes of an update that are mixed, each tensor by the same weights. What is neither mixed nor
            compared stays at the silo.
        compared: of what distances are taken; None where ``weights`` go by none, and is given K = 0 of them.
    """

    weights: Callable[[Tensor], Tensor]
    mixed: frozenset[Exposure] = frozenset(MODEL)
    compared: Compared | None = Compared()


@dataclass(frozen=True)
class Blind:
    """States that all that a method's coordinator makes of a round's models are mixtures, one for each silo, by weights
    that it makes of how far silos lie apart.

    Attributes:
        mixing: of a method, a round of training and the number of those: what is done in it.
        conditions: what its hyper-parameters must be.
    """

    mixing: Callable[[Any, int, int], Mixing]
    conditions: tuple[Condition, ...] = ()


def even(silos: int) -> Tensor:
    """Weights ``Tensor[N, N]`` by which everybody is given the mean."""
    return torch.full((silos, silos), 1 / silos, dtype=torch.float64)


def unit_rows(tensor: Tensor) -> Tensor:
    """``Tensor[K, F]`` of numbers to rows of length 1 (float64), so that half a squared distance is 1 - cosine.

    Raises ``TrainingError`` for a row of zeros, which has no direction.
    """
    rows = tensor.to(torch.float64)
    # By the largest first, so that squares stay finite.
    rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    if not (norms > 0).all():
        raise TrainingError("a row that is to be compared blindly by its direction is all zeros, and has none")
    found: Tensor = rows / norms
    return found


UNSTATED_PRIVACY = "no one has stated how its content is protected"
UNSTATED_SUMS = "no one has stated that the coordinator needs no more than a sum"
UNSTATED_BLIND = "no one has stated that the coordinator needs no more than distances between models"
ONE_MEAN = "its coordinator makes one mean for all, which it can of masked updates"

# Reasons that several methods give.
OWN_LOSS = "its loss is its own, and single images' gradients of it have no bound here"
OWN_STEPS = "it takes steps of its own on the images, which nothing clips or noises"
PROTOTYPES = "prototypes are averages of the silo's images' features, and have no mechanism"
MIXTURES = "each silo gets a mixture of its own, for which the coordinator needs every single model"
HANDED_ON = "it hands single silos' models to others"
