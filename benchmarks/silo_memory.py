"""A hospital's memory by the size of its model: real daemons over mutual TLS, one hospital, two rounds.

The silo's peak is sampled from /proc: resident in all, and of that what belongs to no file (`RssAnon`: it cannot be
given back when memory is short; pages of mapped files can). The same run with a model of 1.4 MB from the same library
is the baseline. `floor`: what the same training takes without Medsilo, two epochs in plain PyTorch, less the same for
the small model.

    python benchmarks/silo_memory.py [--model resnet50] [--method fedavg] [--optimizer adam] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from medsilo.algorithms.models import build
from medsilo.privacy.consent.plan import ModelPlan, TrainingPlan
from medsilo.silo.training.optimizers import make_optimizer

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
CLASSES = 9
SMALL = "shufflenet_v2_x0_5"
IMAGES, BATCH = 60, 32
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
}
EXPOSURES = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "RUNNING_STATISTICS", "SAMPLE_COUNT", "PEER_DERIVED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet50"], help="of torchvision")
    parser.add_argument("--method", nargs="+", default=["fedavg"])
    parser.add_argument("--optimizer", nargs="+", default=["adam"], choices=[*OPTIMIZERS])
    parser.add_argument("--train-alone", nargs=2, metavar=("MODEL", "OPTIMIZER"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.train_alone is not None:
        train_alone(*options.train_alone)
        return
    found: dict[str, Any] = {}
    for method, optimizer in itertools.product(options.method, options.optimizer):
        base, least = measure(method, SMALL, optimizer), measure_alone(SMALL, optimizer)
        for name in options.model:
            size = sum(tensor.nbytes for tensor in build(plan_of(name), seed=1).state_dict().values())
            peak = measure(method, name, optimizer)
            floor = measure_alone(name, optimizer)
            found[key := f"{method}, {optimizer}, {name}"] = {
                "model_mb": round(size / 1e6, 1),
                **{what: round(value / 1e6) for what, value in peak.items()},
                **{f"baseline_{what}": round(value / 1e6) for what, value in base.items()},
                **{f"models_{what}": round((peak[what] - base[what]) / size, 2) for what in peak},
                "floor_models_anonymous": round((floor["anonymous"] - least["anonymous"]) / size, 2),
            }
            print(json.dumps({key: found[key]}, indent=2), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def plan_of(name: str) -> ModelPlan:
    """A torchvision model in the run's plan."""
    return ModelPlan(name=f"torchvision:{name}", input_shape=(3, 28, 28), classes=CLASSES)


def measure_alone(name: str, optimizer: str) -> dict[str, int]:
    """The peaks of a process that does nothing but train, in bytes."""
    command = [sys.executable, __file__, "--train-alone", name, optimizer]
    process = subprocess.Popen(command)
    peaks: dict[str, int] = {}
    watch(process.pid, peaks)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    return peaks


def train_alone(name: str, optimizer: str) -> None:
    """The training of two rounds, and nothing else."""
    torch.set_num_threads(1)
    model = build(plan_of(name), seed=1)
    training = make_optimizer(list(model.parameters()), TrainingPlan(**OPTIMIZERS[optimizer]))
    for count in 2 * [BATCH, IMAGES - BATCH]:
        training.zero_grad(set_to_none=True)
        labels = torch.arange(count) % CLASSES
        F.cross_entropy(model(torch.randn(count, 3, 28, 28)), labels).backward()
        training.step()


def measure(method: str, model: str, optimizer: str) -> dict[str, int]:
    """The silo's peaks in bytes."""
    from medsilo.silo.data.settings import PracticalGroups
    from medsilo.silo.data.sharding import cut
    from medsilo.silo.data.synthetic import generate_tissue
    from tests.support.runs.federation import Federation

    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=IMAGES, test_per_silo=20)
    shards = cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)[:1]
    run = {
        "method": {"name": method},
        "model": plan_of(model).model_dump(mode="json"),
        "rounds": 2,
        "ask_for": [],
        "training": {"epochs": 1, "batch_size": BATCH, **OPTIMIZERS[optimizer]},
    }
    with tempfile.TemporaryDirectory(prefix="silo-memory-") as folder:
        one = Federation(Path(folder), shards, run=run, forked=False, exposures=EXPOSURES)
        try:
            coordinator = one.start_coordinator()
            one.wait_to_say("coordinator", "listening")
            silo = one.start_silo(one.silos[0])
            peaks: dict[str, int] = {}
            watching = threading.Thread(target=watch, args=(silo.pid, peaks))
            watching.start()
            one.finish(silo, coordinator)
            watching.join()
        finally:
            one.kill_everything()
    return peaks


def watch(pid: int, peaks: dict[str, int]) -> None:
    """Follows a process until it ends."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        fields = (line.partition(":") for line in lines)
        now = {key: int(rest.split()[0]) * 1024 for key, _, rest in fields if "kB" in rest}
        if "VmHWM" not in now:
            return  # it has ended, and waits to be asked for
        peaks["resident"] = max(peaks.get("resident", 0), now["VmHWM"])
        peaks["anonymous"] = max(peaks.get("anonymous", 0), now["RssAnon"])
        time.sleep(0.005)


if __name__ == "__main__":
    main()
