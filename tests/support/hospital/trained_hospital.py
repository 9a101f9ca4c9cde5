"""A hospital with a trained model, without a coordinator: one round here, kept as the daemon keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from medsilo.algorithms.datasets import ImageDataset, load_npz, save_npz
from medsilo.algorithms.method import PERSONAL
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.registry import make
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.run.run_state import RunState
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.site import LocalSite

CLASSES = 9


def planned(run: str, method: str, **changes: Any) -> RunPlan:
    chosen = make(method, {})
    content: dict[str, Any] = {
        "federation": "test",
        "coordinator": "coordinator",
        "run": run,
        "method": MethodPlan(name=method, parameters=chosen.parameters()),
        "model": ModelPlan(name="lenet5-gn", input_shape=(3, 16, 16), classes=CLASSES),
        "training": TrainingPlan(epochs=4, batch_size=16),
        "rounds": 3,
        "seed": 1,
        "required": chosen.required,
    }
    return RunPlan(**{**content, **changes})


def configured(folder: Path, shard: ImageDataset, **changes: Any) -> SiloConfig:
    save_npz(folder / "shard.npz", shard)
    content = {
        "federation": "test",
        "name": "hospital1",
        "coordinator": {"address": "127.0.0.1:1"},
        "state": "state",
        "shard": "shard.npz",
        "device": "cpu",
        "threads": 1,
    }
    (folder / "hospital1.yaml").write_text(yaml.safe_dump({**content, **changes}))
    return SiloConfig.read(folder / "hospital1.yaml")


def train(config: SiloConfig, plan: RunPlan) -> None:
    dataset = load_npz(config.shard)
    model = build(plan.model, seed=plan.seed, weights=config.weights)
    site = LocalSite("hospital1", dataset, model, plan, device=torch.device("cpu"))
    start = site.measure(state_of(site.model))
    site.fit(0)
    state = state_of(site.model)
    kept = RunState(config.runs / plan.run, plan, "hospital1", dataset)
    measured = {0: start, 1: site.measure(state)}
    kept.save(
        {PERSONAL: state},
        trained_rounds=1,
        frozen=site.frozen(),
        plain=site.plain(state),
        measurements=measured,
        finished=True,
    )
