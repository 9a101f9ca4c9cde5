"""What is kept of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import PERSONAL, Memory
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan

SHAPE = (3, 16, 16)


def dataset() -> ImageDataset:
    numbers = np.random.default_rng(0)

    def split(count: int) -> ImageSplit:
        images = numbers.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        return ImageSplit(images, np.arange(count, dtype=np.int64) % 3)

    return ImageDataset("hospital1", "a test", True, ("fat", "mucus", "tumour"), split(9), None, split(6))


def plan(**changes: Any) -> RunPlan:
    content: dict[str, Any] = {
        "federation": "test",
        "coordinator": "c",
        "run": "r",
        "method": MethodPlan(name="local", parameters=Local().parameters()),
        "model": ModelPlan(name="diversifed-cnn", input_shape=SHAPE, classes=3),
        "training": TrainingPlan(epochs=1, batch_size=4),
        "rounds": 3,
        "seed": 1,
        "required": Local().required,
    }
    return RunPlan(**{**content, **changes})


def memory(seed: int) -> Memory:
    return {PERSONAL: state_of(build(plan().model, seed=seed)), "extra": {"t": torch.full((2,), float(seed))}}
