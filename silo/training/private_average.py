"""Means over all units of a vector each, with differential privacy: what a method tells of its images besides training.

A unit's vector is the mean of its images' (one image's, where that is the unit), clipped to the norm R that the plan
names. Gaussian noise of standard deviation z·R is added to their sum, which is divided by the number n of units (public
under zero-out adjacency): the Gaussian mechanism on a sum that blanking any one unit moves by at most R.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medsilo.privacy.budget.kept_releases import KeptReleases
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import PrivacyPlan, ReleasePlan
from medsilo.privacy.errors import RefusedError
from medsilo.silo.training.private_training import Charge

_MARGIN = 1 - 1e-9


class PrivateAverages:
    """Answers a method's questions for averages.

    Args:
        plan: names the contents that may be released, each with its bound and noise.
        owners: whose each training image is, ``int64 [n]`` (see ``private_training.owners_of``).
        charge: is called before the noise is drawn.
        noise: where that comes from; by default a source under the key that the charge gives.
        kept: where answers that last are kept; nowhere by default.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        owners: npt.NDArray[np.int64],
        charge: Charge,
        *,
        noise: NoiseSource | None = None,
        kept: KeptReleases | None = None,
    ) -> None:
        self._plan = plan
        self._owners = torch.from_numpy(owners)
        self.units = int(self._owners.max() + 1)
        self._charge = charge
        self._noise = noise
        self._kept = kept

    def average(self, content: str, parts: Iterable[Tensor], *, round_number: int, lasting: bool) -> Tensor:
        """The noised mean: float64 ``[D]``. One that lasts is drawn once for a version of the data set, and then given
        again as it was, at no cost.

        Args:
            content: as the plan names it.
            parts: the images' vectors in order, float64 ``[b, D]``.
            round_number: for the account.
            lasting: see ``medsilo.algorithms.method.Site.average``.

        Raises ``RefusedError`` for a content that the plan does not name, and ``BudgetError`` before any noise is drawn
        if the account does not allow it.
        """
        release = self._release(content)
        if lasting and self._kept is not None and (numbers := self._kept.find(release)) is not None:
            return torch.tensor(numbers, dtype=torch.float64)
        total = clipped_unit_sum(parts, self._owners, release.bound)
        reads = hashlib.sha256(f"{release!r} {len(total)}\n".encode() + total.numpy().tobytes()).hexdigest()
        paid = self._charge(round_number, content, release.event(1), reads)
        source = self._noise or NoiseSource(paid.key)
        noise = source.gaussian(tuple(total.shape), release.noise_multiplier * release.bound)
        answer = (total + torch.from_numpy(noise)) / self.units
        if lasting and self._kept is not None:
            self._kept.keep(release, answer.tolist(), charge=paid.charge)
        return answer

    def exact(self, content: str, parts: Iterable[Tensor]) -> Tensor:
        """The same mean without noise, for what stays at the silo; nothing is charged for it."""
        return clipped_unit_sum(parts, self._owners, self._release(content).bound) / self.units

    def noise(self, content: str) -> float:
        """The standard deviation of the noise in each number of an answer."""
        release = self._release(content)
        return release.noise_multiplier * release.bound / self.units

    def _release(self, content: str) -> ReleasePlan:
        release = self._plan.release(content)
        if release is None:
            raise RefusedError(f"the plan does not say how the silo's {content} is protected; nothing of it is sent")
        return release


def clipped_unit_sum(parts: Iterable[Tensor], owners: Tensor, bound: float) -> Tensor:
    """The sum over units of the mean of each one's vectors, clipped to the norm ``bound``.

    Blanking any one unit moves it by at most ``bound``. A unit whose vector is not finite counts as nothing.

    Args:
        parts: the vectors, float64 ``[b, D]``, all of them ``[n, D]``.
        owners: whose each is, ``int64 [n]``, from 0, without gaps.
        bound: R > 0.

    Returns:
        float64 ``[D]``.
    """
    counts = torch.bincount(owners)
    if len(counts) == len(owners):
        # Each is a unit of its own, and never are all of them in memory.
        return torch.stack([_clipped_sum(part, bound) for part in parts]).sum(dim=0)
    sums, begun = torch.zeros(len(counts), 0, dtype=torch.float64), 0
    for part in parts:
        if not begun:
            sums = part.new_zeros(len(counts), part.shape[1])
        sums.index_add_(0, owners[begun : begun + len(part)], part)
        begun += len(part)
    return _clipped_sum(sums / counts.unsqueeze(1), bound)


def _clipped_sum(means: Tensor, bound: float) -> Tensor:
    # Scaled by its largest number first, so that no square overflows.
    largest = means.abs().amax(dim=1, keepdim=True)
    finite = torch.isfinite(largest) & (largest > 0)
    directions = torch.where(finite, means / torch.where(finite, largest, 1.0), 0.0)
    norms = torch.linalg.vector_norm(directions, dim=1, keepdim=True) * torch.where(finite, largest, 1.0)
    # The margin keeps what rounding adds within the bound.
    factors = (bound * _MARGIN / norms.clamp(min=1e-300)).clamp(max=1.0)
    total: Tensor = (directions * torch.where(finite, largest, 1.0) * factors).sum(dim=0)
    return total
