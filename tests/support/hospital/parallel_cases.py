"""Trainings that one process does alone, or two do together; the second of the two is
``python -m tests.support.hospital.parallel_cases MEETING OUT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.method import State
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.consent.plan import AugmentationPlan, MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.data_parallel import Alone, DataParallel
from medsilo.silo.training.site import LocalSite
from medsilo.simulation import federation
from medsilo.simulation.federation import Simulation
from tests.support.methods.fitting import fitting

CPU = torch.device("cpu")
DEVICES = [CPU, CPU]
SGD: dict[str, Any] = {"epochs": 1, "batch_size": 4, "optimizer": "sgd", "learning_rate": 0.1}
CHANGES = (AugmentationPlan(kind="rotation", amount=20.0), AugmentationPlan(kind="horizontal_flip", amount=0.5))
OTHERS: dict[str, dict[str, Any]] = {
    "batch normalisation": {"model": "lenet5"},
    "changed images": {"training": {"augmentation": CHANGES}},
    "weighted classes": {"training": {"class_weights": "balanced"}},
    "a kept Adam": {"training": {"optimizer": "adam", "learning_rate": 0.001, "keep_optimizer_state": True}},
    "fewer images than processes": {"model": "lenet5", "train": 1},
}
"""What federated averaging is tried with."""
DIVISIBLE = [name for name, method in METHODS.items() if not method.own_steps]
CASES = [*DIVISIBLE, *OTHERS]
DROPOUT, BFLOAT16 = "dropout", "bfloat16"


def shard(name: str, number: int, *, train: int = 11) -> ImageDataset:
    numbers = np.random.default_rng(number)

    def split(count: int) -> ImageSplit:
        labels = numbers.integers(0, 3, count, dtype=np.int64)
        images = numbers.integers(0, 156, (count, 16, 16, 3), dtype=np.uint8) + 30 * labels[:, None, None, None]
        return ImageSplit(images.astype(np.uint8), labels)

    return ImageDataset(name, "a test", True, ("a", "b", "c"), split(train), None, split(4))


def planned(method: str = "fedavg", *, model: str = "diversifed-cnn", **training: Any) -> RunPlan:
    chosen = make(method, {})
    return RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method, parameters=chosen.parameters()),
        model=ModelPlan(name=model, input_shape=(3, 16, 16), classes=3),
        training=TrainingPlan(**{**SGD, **training}),
        rounds=2,
        seed=1,
        required=chosen.required,
    )


def plan_of(case: str) -> RunPlan:
    method = case if case in METHODS else "fedavg"
    options = OTHERS.get(case, {})
    model = options.get("model", fitting(make(method, {}), "diversifed-cnn", "lenet5"))
    return planned(method, model=model, **options.get("training", {}))


def result(case: str, place: Alone) -> State:
    """All silos' personalised models after a federation's two rounds, whose trainings are done at this place."""
    if case in (DROPOUT, BFLOAT16):
        return _fitted(case, place)
    plan = plan_of(case)
    shards = [shard(f"h{number}", number, train=OTHERS.get(case, {}).get("train", 11)) for number in range(3)]
    public = PublicImages(shard("p", 9, train=6), build(plan.model, seed=plan.seed), plan.model.input_shape)

    def here(*arguments: Any, **named: Any) -> LocalSite:
        return LocalSite(*arguments, **named, place=place)

    with mock.patch.object(federation, "LocalSite", here):
        simulation = Simulation(plan, make(plan.method.name, {}), shards, device=CPU, public=public)
    for _ in range(plan.rounds):
        simulation.step()
    simulation.finish()
    return {f"{name}/{key}": t for name, side in simulation.silos.items() for key, t in side.personal().items()}


def _fitted(case: str, place: Alone) -> State:
    torch.manual_seed(7)
    layers = [nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.BatchNorm1d(8), nn.ReLU()]
    model = nn.Sequential(*layers, *([nn.Dropout(0.5)] if case == DROPOUT else []), nn.Linear(8, 3))
    precision = BFLOAT16 if case == BFLOAT16 else "float32"
    site = LocalSite("h", shard("h", 1), model, planned(), device=CPU, precision=precision, place=place)
    site.fit(0)
    return state_of(site.model)


def results(place: Alone) -> dict[str, State]:
    """Of all cases."""
    return {case: result(case, place) for case in (*CASES, DROPOUT, BFLOAT16)}


def main() -> None:
    meeting, out = sys.argv[1:]
    torch.set_num_threads(1)
    place = DataParallel(1, DEVICES, Path(meeting))
    found = results(place)
    again = {case: result(case, place) for case in ("fedavg", DROPOUT)}
    place.close()
    named = {**found, **{f"{case} again": state for case, state in again.items()}}
    save_file({f"{case}/{key}": t.contiguous().clone() for case, s in named.items() for key, t in s.items()}, out)


if __name__ == "__main__":
    main()
