"""What a silo looks at before it helps to open mixtures of its model: who would get how much of it.

The coordinator chooses the weights, and could choose them so that a mixture is one silo's model. So each silo holds
them to rules that are its own, and refuses, by the name of the rule, what breaks them. Everybody is shown all weights:
a silo looks at the whole matrix, since what two recipients get can give away more than what each gets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.secure_aggregation.blind_mixing import LARGEST_ROW, WEIGHT_BITS, Mix, withstands

_TRIES = 1000
"""For limits below 1, where taking one weight down lets the next one stand out."""


@dataclass(frozen=True)
class MixingRules:
    """What a silo asks of mixtures that its model goes into.

    Attributes:
        minimum: in each mixture, how many models beside the recipient's own, at least 2: a recipient takes its own part
            out. Those with less than a tenth of the largest weight do not count.
        largest_isolation: how far a silo's model may stand out of what recipients get; see ``isolation``. 1 is a
            mixture of two models besides the recipient's, in equal parts.
        colluders: for so many recipients together the same has to hold, whatever they do with their mixtures, and what
            is sealed has to stay so.
    """

    minimum: int = 2
    largest_isolation: float = 1.0
    colluders: int = 1

    def check(self, mix: Mix, own: str) -> None:
        """Raises ``RefusedError`` that names the rule, the recipient and the figure."""
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
        for row in range(count):
            models = _counted(np.delete(mix.weights[row], row))
            # Its own mixture, too: what a coordinator makes of that comes back in its next model.
            concerned = models > 0 if row == place else mix.weights[row, place] != 0
            if concerned and models < self.minimum:
                raise RefusedError(
                    f"minimum: the mixture of {mix.silos[row]} would hold {models} models beside its own (of at least "
                    f"a tenth of the largest weight); {self.minimum} are the least"
                )
        for colluding in range(1, self.colluders + 1):
            for rows in itertools.combinations(others, colluding):
                found = isolation(mix.weights, place, rows)
                if found > self.largest_isolation * (1 + 1e-9):
                    names = ", ".join(mix.silos[row] for row in rows)
                    raise RefusedError(
                        f"largest_isolation: {own}'s model would stand out {found:.3g} times in what {names} get; "
                        f"{self.largest_isolation:g} is the most"
                    )
        for other in others:
            if (found := isolation(mix.weights, other, (place,))) > self.largest_isolation * (1 + 1e-9):
                raise RefusedError(
                    f"largest_isolation: {mix.silos[other]}'s model would stand out {found:.3g} times in what {own} "
                    f"itself gets; {self.largest_isolation:g} is the most"
                )

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


def isolation(weights: NDArray[np.int64], own: int, recipients: tuple[int, ...]) -> float:
    """How far one silo's model stands out of what some recipients can make of their mixtures together.

    Of all sums of their rows, without the parts of their own models, the largest ratio of the silo's weight to the
    Euclidean norm of all others' weights: 0 where they get nothing of it, infinite where it can be taken out alone.
    With one recipient and n equal weights beside its own, 1/√(n - 1).

    Args:
        weights: ``[N, N]``.
        own: the silo's place.
        recipients: places of others.
    """
    rows = weights[list(recipients)].astype(np.float64) / (1 << WEIGHT_BITS)
    mine = rows[:, own]
    rest = np.delete(rows, [own, *recipients], axis=1)
    if not mine.any():
        return 0.0
    # The largest (yᵀm)² / ‖yᵀR‖² is mᵀ (R Rᵀ)⁺ m, unless some y sees m and nothing else.
    left, sizes, _ = np.linalg.svd(rest, full_matrices=True)
    kept = sizes > 1e-6 * max(1.0, float(np.abs(rows).max()))
    parts = left.T @ mine
    unseen = parts[len(sizes) :] if len(sizes) < len(mine) else parts[:0]
    hidden = np.concatenate([parts[: len(sizes)][~kept], unseen])
    if np.abs(hidden).max(initial=0.0) > 1e-9:
        return float("inf")
    return float(np.linalg.norm(parts[: len(sizes)][kept] / sizes[kept]))
