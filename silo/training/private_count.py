"""The accuracy that a silo reports under differential privacy: a noisy count over its held-out test images.

A unit counts 1 where the model is right on it and 0 where it is not; blanking it (zero-out adjacency) changes the count
by at most 1, and the plan's noise is added to it: discrete Gaussian, or discrete Laplace. With the image as unit every
image counts; with the patient as unit one image of each patient does, drawn anew each time. The number of units is
public.

No held-out unit may be a training one, so these releases have an account of their own: what training costs and what
measuring costs concern different patients.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import ImageDataset, image_hashes
from medsilo.privacy.budget.accounting import Unit
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import MetricsPlan
from medsilo.privacy.errors import DataError
from medsilo.silo.training.private_training import Charge


def held_out_owners(dataset: ImageDataset, unit: Unit) -> npt.NDArray[np.int64]:
    """Whose each test image is: ``int64 [m]``, units numbered from 0 without gaps.

    Raises ``DataError`` where a test unit may be a training one as well: a patient (an image, where the shard does not
    say whose the images are) that is in both splits.
    """
    train, test = dataset.train, dataset.test
    if (train.patients is None or test.patients is None) and unit == "patient":
        raise DataError(
            f"{dataset.source}: the run's unit of privacy is the patient, but the shard does not say which test image "
            "is whose (train_patients, test_patients)"
        )
    if train.patients is not None and test.patients is not None:
        shared = len(set(train.patients.tolist()) & set(test.patients.tolist()))
        what = "patients"
    else:
        shared = len(set(image_hashes(train.images)) & set(image_hashes(test.images)))
        what = "images"
    if shared:
        raise DataError(
            f"{dataset.source}: {shared} {what} are in the training and in the test split; accuracies on those cannot "
            "be accounted for apart from training. Cut the shard again, with the patients kept apart"
        )
    if unit == "image" or test.patients is None:
        return np.arange(len(test), dtype=np.int64)
    return np.unique(test.patients, return_inverse=True)[1].astype(np.int64)


class PrivateCounts:
    """Measures with noise.

    Args:
        plan: the noise of a release.
        owners: whose each test image is, ``int64 [m]`` (see ``held_out_owners``).
        charge: is called before the noise is drawn.
        noise: where it comes from; by default a source under the key that the charge gives.
    """

    def __init__(
        self,
        plan: MetricsPlan,
        owners: npt.NDArray[np.int64],
        charge: Charge,
        *,
        noise: NoiseSource | None = None,
    ) -> None:
        self._plan = plan
        self._charge = charge
        self._noise = noise
        order = np.argsort(owners, kind="stable")
        self._images_of = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)

    def accuracy(self, right: npt.NDArray[np.bool_], *, round_number: int) -> float:
        """The noised share of units that the model gets right, held to [0, 1].

        ``right``: on which test images it is right, ``bool [m]``. Raises ``BudgetError`` if the account does not allow
        it.
        """
        reads = hashlib.sha256(f"{self._plan!r} {len(right)}\n".encode() + right.tobytes()).hexdigest()
        paid = self._charge(round_number, "accuracy", self._plan.event(1), reads)
        source = self._noise or NoiseSource(paid.key)
        noised = self.count(right, source) + self._drawn(source)
        return min(max(noised / len(self._images_of), 0.0), 1.0)

    def _drawn(self, source: NoiseSource) -> int:
        if self._plan.deviation is None:
            return source.discrete_laplace(self._plan.epsilon)
        return source.discrete_gaussian(self._plan.deviation)

    def count(self, right: npt.NDArray[np.bool_], source: NoiseSource) -> int:
        """Of how many units the one image that is looked at is right; no unit changes it by more than 1."""
        return sum(int(right[own[source.shuffled(len(own))[0]]]) for own in self._images_of)
