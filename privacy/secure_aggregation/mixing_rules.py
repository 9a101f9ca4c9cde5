"""What a silo looks at before it helps to open mixtures of its model: who would get how much of it.

The coordinator chooses the weights, and could choose them so that a mixture is one silo's model. So each silo holds
them to rules that are its own, and refuses, by the name of the rule, what breaks them. Everybody is shown all weights:
a silo looks at the whole matrix, since what two recipients get can give away more than what each gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.secure_aggregation.blind_mixing import LARGEST_ROW, WEIGHT_BITS, Mix, withstands

_TRIES = 1000
"""For limits below 1, where taking one weight down lets the next one stand out."""

_SLACK = 1e-6
"""Rounding, in a limit."""
_ROUNDED = 1e-14
"""Of all that several rounds' mixtures hold: how much is taken to be unknown in any sum of them, as rounding."""
_AT_ONCE = 1 << 14
"""How many choices of recipients are looked at together: what is in memory does not grow with their number."""
ROUNDS = 4
"""Of how many rounds mixtures are looked at together."""


@dataclass(frozen=True)
class Seen:
    """Of a run's last rounds what recipients have, or would have: ``weights`` ``[N, N]`` of each, the present one last,
    and ``moves``, the scalar products ``[R, R]`` of the silo's own models in them, less the one that all started
    from."""

    weights: tuple[NDArray[np.int64], ...]
    moves: NDArray[np.float64]


@dataclass(frozen=True)
class Assessment:
    """What a silo has found of weights that it may help with.

    Attributes:
        models: in a mixture that holds its model, or its own, how many count beside the recipient's own, at least; None
            where there is none.
        isolation: how far its model stands out of what recipients get, at most.
        over_rounds: the same of what they got in the last rounds together.
    """

    models: int | None
    isolation: float
    over_rounds: float


@dataclass(frozen=True)
class MixingRules:
    """What a silo asks of mixtures that its model goes into.

    Attributes:
        minimum: in each mixture, how many models beside the recipient's own, at least 2: a recipient takes its own part
            out. Those with less than a tenth of the largest weight do not count.
        largest_isolation: how far a silo's model may stand out of what recipients get; see ``isolation``. 1 is a
            mixture of two models besides the recipient's, in equal parts.
        colluders: for so many recipients together isolation has to stay within its limits, whatever they do with their
            mixtures, and what is sealed has to stay so. ``minimum`` is of each mixture alone: differences of ordinary
            rows hold few models.
        over_rounds: how far it may stand out of what they get in the last ``ROUNDS`` rounds together.
    """

    minimum: int = 2
    largest_isolation: float = 1.0
    colluders: int = 1
    over_rounds: float = math.inf

    def check(self, mix: Mix, own: str, seen: Seen | None = None) -> Assessment:
        """What there is to say of weights, with those of earlier rounds where they are ``seen``; raises
        ``RefusedError`` that names the rule, the recipient and the figure."""
        whole = 1 << WEIGHT_BITS
        count = len(mix.silos)
        if mix.weights.shape != (count, count) or len(set(mix.silos)) != count or own not in mix.silos:
            raise RefusedError(
                f"weights of shape {mix.weights.shape} are not those of {count} silos with {own} in them"
            )
        if mix.weights.dtype != np.int64 or (np.abs(mix.weights.astype(np.float64)) > LARGEST_ROW).any():
            raise RefusedError(f"weights have to be whole numbers of at most {LARGEST_ROW}")
        if (mix.weights.sum(axis=1) != whole).any() or (np.abs(mix.weights).sum(axis=1) > LARGEST_ROW).any():
            raise RefusedError(f"a row of weights has to add up to {whole}, and its sizes to {LARGEST_ROW} at most")
        if (most := withstands(mix.weights)) < min(self.colluders, count - 2):
            raise RefusedError(
                f"colluders: by these weights what is sealed withstands {most} recipients that work with the "
                f"coordinator; {self.colluders} are the least"
            )
        place = mix.silos.index(own)
        others = [row for row in range(count) if row != place]
        least: list[int] = []
        for row in range(count):
            models = _counted(np.delete(mix.weights[row], row))
            # Its own mixture, too: what a coordinator makes of that comes back in its next model.
            concerned = models > 0 if row == place else mix.weights[row, place] != 0
            least += [models] if concerned else []
            if concerned and models < self.minimum:
                raise RefusedError(
                    f"minimum: the mixture of {mix.silos[row]} would hold {models} models beside its own (of at least "
                    f"a tenth of the largest weight); {self.minimum} are the least"
                )
        now = Seen((mix.weights,), np.ones((1, 1)))
        alone = self._most(mix, place, now, "largest_isolation", self.largest_isolation, "in what {} get")
        for other in others:
            if (found := isolation([mix.weights], other, (place,))) > self.largest_isolation * (1 + _SLACK):
                raise RefusedError(
                    f"largest_isolation: {mix.silos[other]}'s model would stand out {found:.3g} times in what {own} "
                    f"itself gets; {self.largest_isolation:g} is the most"
                )
        together = alone
        if seen is not None and len(seen.weights) > 1:
            what = f"in what {{}} get in {len(seen.weights)} rounds of training together"
            rule = "largest_isolation_over_rounds"
            together = self._most(mix, place, seen, rule, self.over_rounds, what)
        return Assessment(min(least, default=None), alone, together)

    def _most(self, mix: Mix, place: int, seen: Seen, rule: str, largest: float, what: str) -> float:
        """The largest isolation of one silo's model among all recipients, so many together as may collude."""
        most = 0.0
        others = [row for row in range(len(mix.silos)) if row != place]
        for colluding in range(1, self.colluders + 1):
            for rows, found in _each(seen, place, itertools.combinations(others, colluding)):
                if found > largest * (1 + _SLACK):
                    names = ", ".join(mix.silos[row] for row in rows)
                    raise RefusedError(
                        f"{rule}: {mix.silos[place]}'s model would stand out {found:.3g} times {what.format(names)}; "
                        f"{largest:g} is the most"
                    )
                most = max(most, found)
        return most

    def nearest(self, weights: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of whole weights those that no silo refuses by these rules, for one recipient at a time: where a model would
        stand out, its weight is taken down to what is allowed; where there is no room, all are; where too few models
        are left, the recipient gets its own alone. What is taken away goes to the recipient's own model."""
        whole = 1 << WEIGHT_BITS
        found = np.empty_like(weights)
        for row, given in enumerate(weights):
            others = self._allowed(np.delete(given, row))
            found[row] = np.insert(others, row, whole - others.sum())
        return found

    def _allowed(self, others: NDArray[np.int64]) -> NDArray[np.int64]:
        room = (LARGEST_ROW - (1 << WEIGHT_BITS)) // 2
        size = int(np.abs(others).sum())
        others = others if size <= room else np.trunc(others * (room / size)).astype(np.int64)
        for _ in range(_TRIES):
            place = int(np.abs(others).argmax())
            most = int(self.largest_isolation * np.linalg.norm(np.delete(others, place).astype(np.float64)))
            if abs(int(others[place])) <= most:
                break
            others = others.copy()
            others[place] = np.sign(others[place]) * most
        else:
            return np.zeros_like(others)
        if _counted(others) < self.minimum:
            return np.zeros_like(others)
        return others


def _counted(others: NDArray[np.int64]) -> int:
    """How many models stand in a mixture with at least a tenth of the weight of the one that stands there most."""
    sizes = np.abs(others)
    return int(np.count_nonzero(sizes * 10 >= sizes.max(initial=0)) if sizes.any() else 0)


def _each(seen: Seen, own: int, choices: Iterable[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """The isolation of a silo's model for each choice of recipients."""
    if len(seen.weights) > 1:
        yield from ((rows, isolation(seen.weights, own, rows, moves=seen.moves)) for rows in choices)
        return
    while chosen := list(itertools.islice(choices := iter(choices), _AT_ONCE)):
        yield from zip(chosen, isolations(seen.weights[0], own, np.array(chosen)).tolist(), strict=True)


def isolations(weights: NDArray[np.int64], own: int, recipients: NDArray[np.int64]) -> NDArray[np.float64]:
    """``isolation`` in one round, in whole numbers, for choices of recipients ``[B, C]``: ``[B]``.

    With G the scalar products of the recipients' rows, without their own columns and the silo's, and v the silo's
    weights in them, that is √(vᵀ G⁻¹ v). Of G, bordered by v, elimination without fractions (Bareiss, 1968) gives that
    as a fraction. A pivot of 0 is of a row that is a sum of those before: if v is not the same sum, its difference from
    them is the silo's model alone.
    """
    count = recipients.shape[1]
    mine = weights[:, own]
    products = (weights @ weights.T - np.outer(mine, mine))[recipients[:, :, None], recipients[:, None]]
    known = weights[recipients[:, :, None], recipients[:, None]]
    matrix = np.zeros((count + 1, count + 1, len(recipients)), dtype=object)
    matrix[:-1, :-1] = (products - known @ known.transpose(0, 2, 1)).transpose(1, 2, 0)
    matrix[:-1, -1] = matrix[-1, :-1] = mine[recipients].T
    alone = np.zeros(len(recipients), dtype=bool)
    divisor = np.ones(len(recipients), dtype=object)
    for row in range(count):
        pivot, ahead = matrix[row, row], matrix[row, row + 1 :]
        depends = pivot == 0
        alone |= depends & (ahead[-1] != 0)
        pivot = np.where(depends, divisor, pivot)
        for place in range(row + 1, count + 1):
            # What is below the diagonal is as above it.
            rest = matrix[place, place:]
            matrix[place, place:] = (pivot * rest - matrix[row, place] * matrix[row, place:]) // divisor
        divisor = pivot
    found = np.sqrt((-matrix[-1, -1] / divisor).astype(np.float64).clip(0.0))
    return np.asarray(np.where(alone, np.inf, found))


def isolation(
    rounds: Sequence[NDArray[np.int64]],
    own: int,
    recipients: tuple[int, ...],
    *,
    moves: NDArray[np.float64] | None = None,
    others: NDArray[np.float64] | None = None,
) -> float:
    """How far one silo's models stand out of what some recipients can make of their mixtures together.

    Of all sums of their rows, without the parts of their own models, the largest ratio of what is the silo's to what is
    all others', as if models were drawn at random: 0 where they get nothing of it; where it can be taken out alone,
    infinite in one round, and in several as large as rounding lets it be. Of one round that is the silo's weight over
    the Euclidean norm of all others': with one recipient and n equal weights beside its own, 1/√(n - 1). Over several
    rounds models that hardly change count as the same, so that rows can be solved for them, and models that change much
    as new ones.

    Args:
        rounds: weights ``[N, N]`` of each of R rounds.
        own: the silo's place.
        recipients: places of others.
        moves: ``[R, R]``, the scalar products of the silo's models in these rounds, each less what all know of it (the
            model that all started from); the same models by default.
        others: the same of the others' models, or of each silo's ``[N, R, R]``; as ``moves`` by default.
    """
    count = len(rounds)
    if count == 1 and others is None:
        return float(isolations(rounds[0], own, np.array([recipients]))[0])
    moves = np.ones((count, count)) if moves is None else moves
    others = moves if others is None else others
    # Rows by recipient and round, and what each two of them have in common of the silo's models, and of the others'.
    rows = np.concatenate([[one[recipient] for one in rounds] for recipient in recipients]) / (1 << WEIGHT_BITS)
    mine = np.tile(moves, (len(recipients),) * 2) * np.outer(rows[:, own], rows[:, own])
    unknown = [place for place in range(rows.shape[1]) if place not in (own, *recipients)]
    if others.ndim == 2:
        rest = np.tile(others, (len(recipients),) * 2) * (rows[:, unknown] @ rows[:, unknown].T)
    else:
        each = np.tile(others, (1, len(recipients), len(recipients)))
        rest = np.einsum("nst,sn,tn->st", each[unknown], rows[:, unknown], rows[:, unknown])
    if not mine.any():
        return 0.0
    unsure = _ROUNDED * max(float(np.trace(rest)), float(np.trace(mine)))
    sizes, directions = np.linalg.eigh(rest)
    whitened = directions / np.sqrt(np.maximum(sizes, 0.0) + unsure)
    return float(np.sqrt(max(0.0, np.linalg.eigvalsh(whitened.T @ mine @ whitened)[-1])))


def as_far(moves: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Scalar products ``[R, R]`` of a silo's models as they would be had it moved only that share of how far each lies
    from the last."""
    blend = share * np.eye(len(moves))
    blend[:, -1] += 1 - share
    return np.asarray(blend @ moves @ blend.T)
