"""The memory of one simulation of many silos with a model of about a million parameters.

All silos take turns with one module; what each keeps is its side's memory. The peak is the process's largest resident
set (VmHWM), images and PyTorch included. Images are generated, training is one epoch over few of them: neither changes
what the models take.

    python benchmarks/simulation_memory.py [--silos 100] [--rounds 3] [--method diversifed] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import torch

from medsilo.algorithms.models import build
from medsilo.algorithms.registry import make
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.data.settings import Dirichlet
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation

MODEL = "torchvision:shufflenet_v2_x0_5"
CLASSES = 650
"""Chosen so that the model has a million parameters; the images' nine classes are among them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", default="diversifed")
    parser.add_argument("--train", type=int, default=40, help="training images of each silo")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.silos, options.rounds, options.method, options.train)
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(silos: int, rounds: int, name: str, train: int) -> dict[str, object]:
    setting = Dirichlet(silos=silos, alpha=1.0, train_per_silo=train, test_per_silo=10)
    shards = cut(generate_tissue(seed=1, train=silos * train, test=silos * 10), setting, seed=1)
    method = make(name, {})
    plan = RunPlan(
        federation="bench",
        coordinator="c",
        run="memory",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name=MODEL, input_shape=(3, 28, 28), classes=CLASSES),
        training=TrainingPlan(epochs=1, batch_size=train),
        rounds=rounds,
        seed=1,
        required=method.required,
    )
    parameters = sum(p.numel() for p in build(plan.model).parameters())
    before = peak()
    simulation = Simulation(plan, method, shards, device=torch.device("cpu"))
    started = time.perf_counter()
    for _ in range(rounds):
        simulation.step()
    simulation.finish()
    after_rounds = peak()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        saving = time.perf_counter()
        simulation.save(path)
        saved = time.perf_counter()
        size = path.stat().st_size
    return {
        "silos": silos,
        "parameters": parameters,
        "method": name,
        "rounds": rounds,
        "peak_bytes": after_rounds,
        "peak_bytes_before_the_first_round": before,
        "peak_bytes_with_checkpoint": peak(),
        "checkpoint_bytes": size,
        "checkpoint_seconds": round(saved - saving, 2),
        "seconds_per_round": round((saving - started) / rounds, 2),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
