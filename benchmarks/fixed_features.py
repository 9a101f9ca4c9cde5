"""What a round costs a hospital of whose model a linear layer on kept features is trained: CPU seconds.

In simulation: hospitals one after the other, FedAvg: training, upload, average and measurement of each round, divided
by hospitals and rounds; features are made in a round before the first that counts. The same of `preset: head` (ε = 1),
and how many times a plain round of as many full-batch steps that is. In one silo: making the features, starting with
the kept file, and a round of training, measuring and building the upload. Bytes of tensors that a hospital uploads in a
round, by exposure class, beside those of a network that is trained as a whole. One PyTorch thread.

    python benchmarks/fixed_features.py [--silos 20] [--images 500] [--rounds 10] [--size 28] [--models …] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.models import build, state_of
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.site import LocalSite
from medsilo.simulation.federation import Simulation

MODELS = ("stain-texture", "scattering")
NETWORK = "diversifed-cnn"
CLASSES = 9
PROMISE = {"epsilon": 1.0, "delta": 1e-5, "unit": "image"}
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "silos": options.silos,
        "training_images_a_silo": options.images,
        "size": options.size,
        "rounds": options.rounds,
        "load_average": round(os.getloadavg()[0], 1),
        "models": [measure(model, options) for model in options.models],
        "upload_bytes_a_round": {model: uploaded(model, options.size) for model in (*options.models, NETWORK)},
    }
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(model: str, options: argparse.Namespace) -> dict[str, object]:
    """CPU seconds of simulation and of one silo."""
    plan = planned(model, options.size, options.rounds)
    shards = [shard(f"hospital{number}", options.images, options.size, number) for number in range(options.silos)]
    in_simulation = simulated(plan, shards)
    privacy = PrivacyConfig.model_validate({"preset": "head", "units": options.images, **PROMISE})
    training = privacy.training(FedAvg(), plan.training, options.rounds, options.silos)
    plain = plan.model_copy(update={"training": training.model_copy(update={"batch_size": options.images})})
    private = plan.model_copy(
        update={"training": training, "privacy": privacy.plan(FedAvg(), training, options.rounds)}
    )
    in_private, in_plain = simulated(private, shards), simulated(plain, shards)
    with tempfile.TemporaryDirectory() as folder:
        features = Path(folder) / "features"
        making = seconds(lambda: site(plan, shards[0], features).inputs())
        kept = site(plan, shards[0], features)
        reading = seconds(lambda: kept.inputs())
        side = FedAvg().silo_side(kept)
        side.begin(state_of(kept.model))

        def one_round(number: int) -> None:
            side.train(number, {})
            side.upload()
            kept.measure(side.personal())

        one_round(0)
        in_one = seconds(lambda: [one_round(number) for number in range(1, options.rounds)])
        size = sum(file.stat().st_size for file in features.iterdir())
    rounds = options.rounds - 1
    return {
        "model": model,
        "simulation_cpu_seconds_a_hospital_and_round": round(in_simulation, 5),
        "preset_head": {
            "steps_a_round": training.epochs,
            "simulation_cpu_seconds_a_hospital_and_round": round(in_private, 5),
            "times_a_plain_round": round(in_private / in_plain, 2),
        },
        "silo_cpu_seconds_a_round": round(in_one / rounds, 5),
        "silo_cpu_seconds_to_make_the_features": round(making, 3),
        "silo_cpu_seconds_to_read_them": round(reading, 4),
        "kept_bytes": size,
    }


def simulated(plan: RunPlan, shards: Sequence[ImageDataset]) -> float:
    """CPU seconds a hospital and round, the first left out."""
    simulation = Simulation(plan, FedAvg(), shards, device=CPU)
    simulation.step()
    return seconds(lambda: [simulation.step() for _ in range(plan.rounds - 1)]) / (plan.rounds - 1) / len(shards)


def uploaded(model: str, size: int) -> dict[str, int]:
    """Bytes of tensors by exposure class."""
    plan = planned(model, size, 1)
    one = LocalSite("h", shard("h", 10, size, 1), build(plan.model, seed=1), plan, device=CPU)
    side = FedAvg().silo_side(one)
    side.begin(state_of(one.model))
    side.train(0, {})
    return {exposure.value: part.nbytes for exposure, part in side.upload().items()}


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def site(plan: RunPlan, data: ImageDataset, features: Path) -> LocalSite:
    return LocalSite(data.name, data, build(plan.model, seed=1), plan, device=CPU, features=features)


def planned(model: str, size: int, rounds: int) -> RunPlan:
    return RunPlan(
        federation="benchmark",
        coordinator="coordinator",
        run="benchmark",
        method=MethodPlan(name="fedavg", parameters={}),
        model=ModelPlan(name=model, input_shape=(3, size, size), classes=CLASSES, train="head"),
        training=TrainingPlan(epochs=1, batch_size=50, optimizer="sgd", learning_rate=0.5),
        rounds=rounds,
        seed=1,
        required=FedAvg().required,
    )


def shard(name: str, images: int, size: int, seed: int) -> ImageDataset:
    numbers = np.random.default_rng(seed)

    def split(count: int) -> ImageSplit:
        pixels = numbers.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        return ImageSplit(pixels, np.arange(count, dtype=np.int64) % CLASSES)

    names = tuple(str(number) for number in range(CLASSES))
    return ImageDataset(name, "random pixels", True, names, split(images), None, split(images // 5))


if __name__ == "__main__":
    main()
