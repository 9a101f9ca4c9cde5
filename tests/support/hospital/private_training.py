"""A small site that trains under differential privacy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.models import build
from medsilo.privacy.budget.accounting import Unit
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import ModelPlan, RunPlan
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.local_training import dataset, plan

CPU = torch.device("cpu")


class Silent(NoiseSource):
    """Takes every unit, and makes no noise: what is left is the clipped sum."""

    def gaussian(self, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float64]:
        self.deviation = deviation
        return np.zeros(shape)

    def sample(self, count: int, rate: float) -> npt.NDArray[np.int64]:
        return np.arange(count, dtype=np.int64)


def private_plan(*, model: str = "diversifed-cnn", unit: Unit = "image", rate: float = 0.5, **changes: Any) -> RunPlan:
    found = plan(**{"optimizer": "sgd", "learning_rate": 1.0, "epochs": 1, **changes.pop("training", {})})
    mechanism = {
        "epsilon": 8,
        "delta": 1e-5,
        "unit": unit,
        "clipping_norm": 0.3,
        "noise_multiplier": 2.0,
        "sampling_rate": rate,
        "steps": 100,
        **changes,
    }
    return found.model_copy(
        update={
            "privacy": PrivacyPlan.model_validate(mechanism),
            "model": ModelPlan(name=model, input_shape=found.model.input_shape, classes=3),
        }
    )


def with_patients(data: ImageDataset, patients: list[str]) -> ImageDataset:
    train = ImageSplit(data.train.images, data.train.labels, np.array(patients))
    return ImageDataset(data.name, data.source, True, data.class_names, train, None, data.test)


def private_site(run: RunPlan, data: ImageDataset | None = None, **options: Any) -> LocalSite:
    options.setdefault("charge", lambda *_: unsealed())
    return LocalSite("h", data or dataset(), build(run.model, seed=1), run, device=CPU, **options)


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([t.flatten().double() for t in tensors.values()]).norm())
