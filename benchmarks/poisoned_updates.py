"""What a few poisoning hospitals do to FedAvg and to its robust averages, and whom `coordinator status` would name.

Ten silos in the simulation; the liars among them train, and send their change turned round and made longer: what they
were sent − FACTOR · (their model − what they were sent). Accuracy is the honest silos' mean on their own test images,
after the last round. Beside it, over all rounds: how often a liar's and how often an honest silo's change is "unusual".

    python benchmarks/poisoned_updates.py [--data FILE.npz] [--alpha 1.0] [--liars 0 1 2] [--seeds 1] [--out FILE.json]

Without --data on generated images, of which accuracies say nothing about real tissue.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.tensors import Part, Payload
from medsilo.coordinator.rounds.changes import compare
from medsilo.coordinator.rounds.comparing import Beginning, products_of_changes
from medsilo.coordinator.store.records import Change
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.silo.data.settings import Dirichlet
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation

SILOS, ROUNDS, FACTOR = 10, 10, 5.0
METHODS = {
    "mean": FedAvg(),
    "trimmed_mean, trim 0.2": FedAvg(aggregation="trimmed_mean", trim=0.2),
    "median": FedAvg(aggregation="median"),
}


class Side:
    """A silo side that remembers what it was sent; a liar's turns its change round."""

    def __init__(self, side: Any, *, lies: bool) -> None:
        self._side = side
        self._lies = lies
        self.given: Payload = {Exposure.INITIAL_MODEL: Part.of(side.memory["personal"])}
        self.sent: Payload = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def train(self, round_number: int, download: Payload) -> None:
        if download:
            self.given = download
        self._side.train(round_number, download)

    def upload(self) -> Payload:
        update = dict(self._side.upload())
        if self._lies:
            (start,) = (part.tensors() for part in self.given.values())
            for exposure in MODEL:
                tensors = update[exposure].tensors()
                update[exposure] = Part.of({n: start[n] - FACTOR * (t - start[n]) for n, t in tensors.items()})
        self.sent = update
        return update


def measure(method: FedAvg, shards: list[ImageDataset], liars: int, seed: int) -> dict[str, float]:
    first = shards[0]
    plan = RunPlan(
        federation="bench",
        coordinator="coordinator",
        run="poisoned",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name="diversifed-cnn", input_shape=first.image_shape, classes=first.num_classes),
        training=TrainingPlan(epochs=2, batch_size=20),
        rounds=ROUNDS,
        seed=seed,
        required=method.required,
    )
    simulation = Simulation(plan, method, shards, device=torch.device("cpu"))
    sides: Any = simulation.silos
    names = sorted(sides)
    lying = set(names[:liars])
    for name in names:
        sides[name] = Side(sides[name], lies=name in lying)
    changes: dict[str, list[Change]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        simulation.step()
        updates: Mapping[str, Payload] = {name: sides[name].sent for name in names}
        beginnings = {name: Beginning((sides[name].given,)) for name in names}
        for name, change in zip(names, compare(products_of_changes(updates, beginnings)), strict=True):
            changes[name].append(change)
    measured = simulation.finish()
    honest = [name for name in names if name not in lying]
    accuracies = [m.accuracy for name in honest if (m := measured[name]) is not None]
    return {
        "accuracy": float(np.mean(accuracies)),
        **{f"liars_{key}": value for key, value in figures(changes, lying).items()},
        **{f"honest_{key}": value for key, value in figures(changes, honest).items()},
    }


def figures(changes: Mapping[str, list[Change]], names: Collection[str]) -> dict[str, float]:
    """Over some silos and all rounds: how often unusual, and the middle and the ends of 90 % of scores and cosines."""
    said = [change for name in names for change in changes[name]]
    if not said:
        return {}
    found = {"unusual": sum(bool(change.unusual) for change in said) / len(said)}
    for key in ("score", "cosine"):
        values = [value for change in said if (value := getattr(change, key)) is not None]
        found |= {f"{key}_{q}": round(float(np.percentile(values, q)), 3) for q in (5, 50, 95)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--liars", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_npz(options.data) if options.data else generate_tissue(seed=0, train=4000, test=1000)
    rows = []
    for liars in options.liars:
        for label, method in METHODS.items():
            found = []
            for seed in options.seeds:
                setting = Dirichlet(silos=SILOS, alpha=options.alpha, train_per_silo=160, test_per_silo=40)
                found.append(measure(method, cut(data, setting, seed=seed), liars, seed))
            row = {"liars": liars, "aggregation": label, **{k: [f[k] for f in found] for k in found[0]}}
            rows.append(row)
            print(json.dumps(row), flush=True)
    content = {"data": options.data.stem if options.data else "synthetic", "alpha": options.alpha, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps({**content, "seeds": options.seeds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
