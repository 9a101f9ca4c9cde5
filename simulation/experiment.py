"""Experiments: one data setting, several methods, several seeds; resumable, each run in a file of its own."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, TypeAdapter
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from algorithms.datasets import ImageDataset
from algorithms.method import Method
from algorithms.registry import make
from privacy.configuration import Name, StrictModel, load
from privacy.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from silo.sharding import ByPatient, Dirichlet, Pathological, PracticalGroups, Setting, cut
from silo.sources import open_dataset
from simulation.federation import Simulation

_SETTINGS: dict[str, type[Setting]] = {
    "practical": PracticalGroups,
    "pathological": Pathological,
    "dirichlet": Dirichlet,
    "by-patient": ByPatient,
}


class ExperimentConfig(StrictModel):
    """An experiment file.

    ``setting``: ``kind`` and the fields of that setting in ``silo.sharding``. ``methods``: each a ``name`` with any
    of the method's hyper-parameters.
    """

    name: Name
    setting: dict[str, Any]
    model: str = "diversifed-cnn"
    training: TrainingPlan = TrainingPlan()
    rounds: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    methods: tuple[dict[str, str | bool | int | float | None], ...] = Field(min_length=1)
    device: Literal["cpu", "cuda"] = "cpu"

    @classmethod
    def read(cls, path: Path) -> ExperimentConfig:
        """Raises ``ConfigurationError`` naming the file and every key that is wrong."""
        return load(path, cls)

    def make_setting(self) -> Setting:
        """The data setting."""
        fields = dict(self.setting)
        kind = _SETTINGS[str(fields.pop("kind"))]
        return TypeAdapter(kind).validate_python(fields)


@dataclass(frozen=True)
class Run:
    """One method with one seed."""

    config: ExperimentConfig
    data: str
    label: str
    method: Method
    seed: int
    file: Path


def runs(config: ExperimentConfig, data: str, folder: Path) -> Iterator[Run]:
    """The experiment's runs."""
    for entry in config.methods:
        parameters = dict(entry)
        name = str(parameters.pop("name"))
        method = make(name, parameters)
        label = label_of(entry)
        for seed in config.seeds:
            yield Run(config, data, label, method, seed, folder / f"{label}-seed{seed}.json")


def label_of(entry: Mapping[str, Any]) -> str:
    """A method's name with the hyper-parameters that the experiment gives it."""
    return "-".join([str(entry["name"]), *(f"{key}={value}" for key, value in entry.items() if key != "name")])


def run_experiment(config: ExperimentConfig, data: str, folder: Path, *, workers: int, console: Console) -> None:
    """Runs what is not yet done; a run that was cut short starts again."""
    folder.mkdir(parents=True, exist_ok=True)
    open_runs = [run for run in runs(config, data, folder) if not run.file.exists()]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(workers) as pool:
        task = progress.add_task(config.name, total=len(open_runs))
        for label in pool.map(execute, open_runs):
            progress.console.print(f"done: {label}")
            progress.advance(task)


def execute(run: Run) -> str:
    """Does one run and writes its file."""
    torch.set_num_threads(1)
    config = run.config
    dataset = open_dataset(run.data)
    shards = cut(dataset, config.make_setting(), seed=run.seed)
    plan = make_plan(run, dataset)
    simulation = Simulation(plan, run.method, shards, device=torch.device(config.device))
    history = []
    for _ in range(plan.rounds):
        measured = simulation.step()
        history.append({name: m.accuracy for name, m in measured.items() if m is not None})
    final = {name: m.accuracy for name, m in simulation.finish().items() if m is not None}
    content = {
        "experiment": config.model_dump(mode="json"),
        "label": run.label,
        "method": run.method.name,
        "parameters": run.method.parameters(),
        "seed": run.seed,
        "data": dataset.name,
        "data_sha256": dataset.fingerprint,
        "synthetic": dataset.synthetic,
        "plan": plan.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "accuracy_per_round": history,
        "final_accuracy": final,
    }
    partial = run.file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(run.file)
    return f"{run.label}, seed {run.seed}"


def make_plan(run: Run, dataset: ImageDataset) -> RunPlan:
    """The plan that daemons would be given."""
    return RunPlan(
        federation="simulation",
        coordinator="coordinator",
        run=run.config.name,
        method=MethodPlan(name=run.method.name, parameters=run.method.parameters()),
        model=ModelPlan(name=run.config.model, input_shape=dataset.image_shape, classes=dataset.num_classes),
        training=run.config.training,
        rounds=run.config.rounds,
        seed=run.seed,
        required=run.method.required,
    )
