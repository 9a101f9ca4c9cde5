"""Whole runs of a method over a few silos with a few random images each."""

from __future__ import annotations

import numpy as np
import torch

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.method import Method, PublicSet
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.simulation.federation import Simulation


def shard(name: str, seed: int, *, train: int = 24, test: int = 10, classes: int = 3) -> ImageDataset:
    """Random images 1×16×16, each brighter the higher its class."""
    rng = np.random.default_rng(seed)

    def split(count: int) -> ImageSplit:
        labels = rng.integers(0, classes, count)
        images = np.clip(rng.normal(60 + 60 * labels[:, None, None, None], 30, (count, 16, 16, 1)), 0, 255)
        return ImageSplit(images.astype(np.uint8), labels.astype(np.int64), None)

    names = tuple(f"class {label}" for label in range(classes))
    return ImageDataset(name, "random images", True, names, split(train), None, split(test))


def run_plan(method: Method, *, rounds: int, model: str = "mlp-64", participation: float = 1.0) -> RunPlan:
    return RunPlan(
        federation="tiny",
        coordinator="coordinator",
        run="run",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name=model, input_shape=(1, 16, 16), classes=3),
        training=TrainingPlan(epochs=1, batch_size=8, optimizer="sgd", learning_rate=0.05),
        rounds=rounds,
        seed=3,
        required=method.required,
        participation=participation,
    )


def simulate(
    method: Method,
    *,
    rounds: int,
    silos: int = 3,
    model: str = "mlp-64",
    participation: float = 1.0,
    public: PublicSet | None = None,
) -> Simulation:
    """A finished run."""
    plan = run_plan(method, rounds=rounds, model=model, participation=participation)
    shards = [shard(f"hospital{n}", seed=n) for n in range(1, silos + 1)]
    simulation = Simulation(plan, method, shards, device=torch.device("cpu"), public=public)
    for _ in range(rounds):
        simulation.step()
    simulation.finish()
    return simulation
