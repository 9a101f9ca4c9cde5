"""What training and testing say of how they went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where local training stands; ``loss`` is the mean cross entropy of the epoch so far."""

    round: int
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Measurement:
    """A model's accuracy (share in [0, 1]) and mean cross entropy on a silo's test or validation images.

    ``shared``: the accuracy with noise, as it may leave under differential privacy; None where it was not noised.
    ``of_classes``: the mean accuracy of the classes that the images have (balanced accuracy, share in [0, 1]), to which
    a model that names the most frequent class alone gives one over their number; None where it was not asked for.
    """

    accuracy: float
    loss: float
    shared: float | None = None
    of_classes: float | None = None
