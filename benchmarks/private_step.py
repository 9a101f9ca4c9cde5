"""What a step of DP-SGD costs beside a step of plain training: the same model, images and number of images a step.

Both are ``LocalSite.fit``, with one PyTorch thread, in turn; a private step takes as many images on average as a plain
one has. Linear heads take all images in every step, at both. The ratio of the medians is what to look at: seconds
depend on the machine and on what else it does.

    python benchmarks/private_step.py [--images 600] [--batch 60] [--legs 5] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, ImageSplit
from medsilo.algorithms.local import Local
from medsilo.algorithms.models import build
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.silo.training.site import LocalSite

MODELS = ("diversifed-cnn", "lenet5-gn", "resnet8-gn")
HEADS = ((122, 4), (122, 9), (1280, 9))
"""Features and classes of linear layers."""
HEAD_STEPS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--batch", type=int, default=60)
    parser.add_argument("--legs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "images": options.images,
        "images_a_step": options.batch,
        "legs": options.legs,
        "models": [measure(model, options.images, options.batch, options.legs) for model in MODELS],
        "heads": [
            measure("linear", options.images, options.images, options.legs, (1, 1, features), classes)
            for features, classes in HEADS
        ],
    }
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(
    model: str, images: int, batch: int, legs: int, shape: tuple[int, int, int] = (3, 28, 28), classes: int = 9
) -> dict[str, object]:
    """Seconds a step of either kind, in turn, and their ratio."""
    made = ModelPlan(name=model, input_shape=shape, classes=classes)
    plain, private = site(made, images, batch, None), site(made, images, batch, batch / images)
    seconds: dict[str, list[float]] = {"plain": [], "private": []}
    for leg in range(-1, legs):
        for name, one in (("plain", plain), ("private", private)):
            began = time.perf_counter()
            steps = one.fit(max(leg, 0))
            if leg >= 0:  # the first of each warms up
                seconds[name].append((time.perf_counter() - began) / steps)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "model": model,
        "input": list(shape),
        "parameters": sum(p.numel() for p in plain.model.parameters()),
        **{f"{name}_seconds_a_step": round(value, 5) for name, value in medians.items()},
        "ratio": round(medians["private"] / medians["plain"], 2),
    }


def site(model: ModelPlan, images: int, batch: int, rate: float | None) -> LocalSite:
    """A silo with random images: synthetic, for timing alone."""
    numbers = np.random.default_rng(1)

    def split(count: int) -> ImageSplit:
        pixels = numbers.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
        return ImageSplit(pixels, np.arange(count, dtype=np.int64) % model.classes)

    channels, height, width = model.input_shape
    names = tuple(f"class {label}" for label in range(model.classes))
    data = ImageDataset("silo", "random", True, names, split(images), None, split(9))
    is_head = model.name == "linear"
    privacy = None
    if rate is not None:
        mechanism = {"epsilon": 8, "delta": 1e-5, "clipping_norm": 1, "noise_multiplier": 1, "steps": 1000}
        privacy = PrivacyPlan.model_validate({**mechanism, "sampling_rate": rate})
    plan = RunPlan(
        federation="benchmark",
        coordinator="coordinator",
        run="step",
        method=MethodPlan(name="local", parameters={}),
        model=model,
        training=TrainingPlan(epochs=HEAD_STEPS if is_head else 1, batch_size=batch),
        rounds=1,
        seed=1,
        required=Local().required,
        privacy=privacy,
    )
    linear = nn.Sequential(nn.Flatten(), nn.Linear(width, model.classes))
    made = linear if is_head else build(plan.model, seed=1)
    return LocalSite("silo", data, made, plan, device=torch.device("cpu"), charge=lambda *_: unsealed())


if __name__ == "__main__":
    main()
