"""A small site that trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.local import Local
from medsilo.algorithms.models import build, state_of
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.site import LocalSite

CPU = torch.device("cpu")


def dataset(train: int = 10, test: int = 5, size: int = 16) -> ImageDataset:
    numbers = np.random.default_rng(train)

    def split(count: int) -> ImageSplit:
        images = numbers.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        return ImageSplit(images, np.arange(count, dtype=np.int64) % 3)

    return ImageDataset("h", "a test", True, ("a", "b", "c"), split(train), None, split(test))


def plan(*, seed: int = 1, classes: int = 3, size: int = 16, **training: Any) -> RunPlan:
    return RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name="local", parameters={}),
        model=ModelPlan(name="diversifed-cnn", input_shape=(3, size, size), classes=classes),
        training=TrainingPlan(**{"epochs": 2, "batch_size": 4, **training}),
        rounds=3,
        seed=seed,
        required=Local().required,
    )


class Recording(nn.Module):
    """Keeps the batches it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 16 * 16, 3)
        self.batches: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(images.clone())
        found: torch.Tensor = self.linear(images.flatten(1))
        return found


def site(run: RunPlan, data: ImageDataset | None = None, name: str = "h", **options: Any) -> LocalSite:
    model = options.pop("model", None) or build(run.model, seed=run.seed)
    return LocalSite(name, data or dataset(), model, run, device=CPU, **options)


def trained(run: RunPlan, *, name: str = "h", round_number: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.seed())  # whatever went before must not matter
    one = site(run, name=name)
    one.fit(round_number)
    return state_of(one.model)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
