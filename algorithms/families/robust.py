"""Averages that a minority of poisoned updates cannot move far: the trimmed mean and the median of each coordinate
(Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018, Definitions 1 and 2).

Of N values of a coordinate the k smallest and the k largest are left out, and the others averaged. If at most k of the
silos lie, each coordinate of the result lies between the least and the greatest value that honest silos sent, whatever
the liars send: among the k + 1 smallest values at least one is an honest silo's, and among the k + 1 largest. Silos
count alike: a weight that a silo states itself is one more number that it can lie about.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.method import require
from medsilo.algorithms.tensors import Part, Stack, Workspace, combine, transform

Aggregation = Literal["mean", "trimmed_mean", "median"]
"""How one model is made of the silos'."""

FEW = 10
"""Up to so many rows, comparing whole rows is quicker than sorting every column."""
_COLUMNS = 1 << 14
"""Sorted at once, so that what is needed besides the values themselves stays small."""


def check_aggregation(method: str, aggregation: str, trim: float | None) -> None:
    """Raises ``ConfigurationError`` for a share to leave out that a way to average cannot have."""
    if aggregation == "trimmed_mean":
        require(
            trim is not None and 0 < trim < 0.5,
            f"{method}: trim is {trim}; a trimmed mean needs the share of silos to leave out at either end, above 0 "
            "and below 0.5 (for example 0.2)",
        )
    else:
        require(trim is None, f"{method}: trim is for `aggregation: trimmed_mean`; a {aggregation} has no such share")


def left_out(silos: int, trim: float | None) -> int:
    """k, how many of so many silos' values are left out at either end: trim · N, rounded up, so that no fewer liars are
    withstood than the share says; one value (of an even number, two) is always left, as with the median (no ``trim``).
    """
    most = (silos - 1) // 2
    # A share such as 0.1, of 10, may come out a little above 1.
    return most if trim is None else min(most, math.ceil(trim * silos - 1e-9))


def trimmed_mean(values: Tensor, k: int) -> Tensor:
    """The mean of each column without its k smallest and k largest values (Definition 2, with k = βm).

    Args:
        values: ``Tensor[N, D]``, without NaN.
        k: at least 0, below N/2; ⌊(N-1)/2⌋ gives the median (Definition 1), for even N the mean of the middle two.

    Returns:
        ``Tensor[D]`` of the values' dtype.
    """
    count = len(values)
    if count > FEW:
        pieces = []
        for columns in torch.split(values, _COLUMNS, dim=1):
            ordered = np.ascontiguousarray(columns.numpy().T)
            ordered.sort(axis=1)
            pieces.append(torch.from_numpy(ordered[:, k : count - k].mean(axis=1)))
        return torch.cat(pieces) if pieces else values.new_empty(0)
    rows = list(values)
    for step in range(k):
        # The greatest of what is left goes to the end, then the least to the beginning.
        for low in [*range(step, count - 1 - step), *range(count - 3 - step, step - 1, -1)]:
            rows[low], rows[low + 1] = torch.minimum(*rows[low : low + 2]), torch.maximum(*rows[low : low + 2])
    return torch.stack(rows[k : count - k]).mean(dim=0)


def average(
    stack: Stack, weights: Tensor, workspace: Workspace, *, aggregation: Aggregation, trim: float | None
) -> Part:
    """One row of a stack's N, in float64: the mean with ``weights`` (``Tensor[N]``), or a robust one, without."""
    if aggregation == "mean":
        (found,) = combine(stack, weights.reshape(1, -1), workspace)
        return found
    k = left_out(stack.shape[0], trim)
    (found,) = transform(stack, lambda block: trimmed_mean(block, k).unsqueeze(0), 1, workspace)
    return found


def robust_warnings(method: str, aggregation: str, trim: float | None, silos: int) -> list[str]:
    """What an operator should know before a robust run with so many silos."""
    if aggregation == "mean":
        return []
    k = left_out(silos, trim)
    if k == 0:
        return [f"{method}: with {silos} silos nothing can be left out, and {aggregation} is the mean"]
    name = aggregation.replace("_", " ")
    return [f"{method}: the {name} of {silos} silos withstands {k} that send anything at all; all count alike"]
