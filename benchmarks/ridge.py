"""Ridge regression from one noised release a hospital, on six hospitals by patient: by ε, features and rule for λ.

``python benchmarks/ridge.py --data coloncells.npz [--seeds 1 2 3] [--noises 5] [--unit image]`` prints the table of
docs/results/coloncells-ridge.md. It calls what the method calls (``moments``, ``solve``) on features that are made
once, and draws the noise from the source that hospitals draw it from; the rounds around it are left out, so that many
noise seeds take a minute.

``random 25``: stain-texture along 24 random orthonormal directions and its constant, which no model of Medsilo's does:
what a projection is worth that knows nothing. ``alone``: a hospital's own exact sums, which leave nobody.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.features import FixedExtractor, StainDirections, StainTexture
from medsilo.algorithms.ridge import SENSITIVITY, moments, solve
from medsilo.privacy.budget.accounting import GaussianRelease, noise_multiplier_for
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.silo.data.dealing import by_patient
from medsilo.silo.data.settings import ByPatient

DELTA, SHRINKAGE, SILOS = 1e-5, 1e-5, 6
EPSILONS = (0.5, 1.0, 2.0, 8.0, math.inf)
RULES = {"projected": ("projected", "exact"), "own part noised": ("projected", "noised"), "adassp": ("adassp", "exact")}

Silo = tuple[Tensor, Tensor, Tensor]
"""The exact sums; features and labels to test on."""


def features_of(extractor: FixedExtractor, images: np.ndarray) -> Tensor:
    parts = [extractor(to_tensor(images[start : start + 256])) for start in range(0, len(images), 256)]
    return torch.cat(parts).double()


def random_rows(count: int, of: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = torch.linalg.qr(torch.randn(of - 1, count, generator=generator, dtype=torch.float64))[0].T
    whole = torch.zeros(count + 1, of, dtype=torch.float64)
    whole[:count, : of - 1], whole[count, of - 1] = rows, 1
    return whole


def accuracies(
    silos: list[Silo], classes: int, *, noise: float, rule: str, own: str, source: NoiseSource
) -> tuple[float, float]:
    """The mean over silos of accuracy, and of the mean accuracy of classes."""
    exact = [sums for sums, _, _ in silos]
    deviation = noise * SENSITIVITY
    sent = [one + torch.from_numpy(source.gaussian(tuple(one.shape), deviation)) for one in exact] if noise else exact
    found = []
    for silo, mine in zip(silos, exact, strict=True):
        total = sum(sent, torch.zeros(())) + (mine if noise and own == "exact" else 0)
        found.append(measured(total, silo, classes, deviation * math.sqrt(len(sent)), rule))
    return tuple(np.mean(found, axis=0).tolist())


def sums_of(features: Tensor, labels: Tensor, owners: np.ndarray, classes: int) -> Tensor:
    """The sum over units of the means of their images' vectors."""
    of, counts = np.unique(owners, return_inverse=True, return_counts=True)[1:]
    shares = torch.from_numpy(1 / counts[of])
    parts = zip(features.split(256), labels.split(256), shares.split(256), strict=True)
    return torch.stack([share @ moments(x, y, classes=classes, clip=1.0) for x, y, share in parts]).sum(dim=0)


def measured(total: Tensor, silo: Silo, classes: int, deviation: float, rule: str) -> tuple[float, float]:
    _, x, y = silo
    size = x.shape[1]
    products, crossed = total.split([size * (size + 1) // 2, classes * size])
    head = solve(
        products, crossed.reshape(classes, size), deviation=deviation, shrinkage=SHRINKAGE, regularisation=rule
    )
    right = (x @ head.T).argmax(dim=1) == y
    of_classes = [right[y == label].double().mean() for label in y.unique()]
    return 100 * float(right.double().mean()), 100 * float(torch.stack(of_classes).mean())


def row(label: str, one: Callable[[int, int], tuple[float, float]], seeds: list[int], noises: int) -> str:
    """Means over seeds and noises; the deviation is over seeds, of each one's mean over noises."""
    figures = np.array([[one(seed, noise) for noise in range(noises)] for seed in seeds]).mean(axis=1)
    cells = [
        f"{mean:.1f} ± {spread:.1f}" for mean, spread in zip(figures.mean(axis=0), figures.std(axis=0), strict=True)
    ]
    return f"| {label} | {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--noises", type=int, default=5)
    parser.add_argument("--unit", choices=["image", "patient"], default="image")
    parser.add_argument("--test-from", choices=["test", "train"], default="test")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with np.load(chosen.data, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    classes = int(data["train_labels"].max()) + 1
    labels = {
        split: torch.from_numpy(data[f"{split}_labels"].reshape(-1).astype(np.int64)) for split in ("train", "test")
    }
    texture = {split: features_of(StainTexture(), data[f"{split}_images"]) for split in labels}
    directions = {split: features_of(StainDirections(), data[f"{split}_images"]) for split in labels}
    patients = chosen.unit == "patient"
    owners = data["train_patients"] if patients else np.arange(len(labels["train"]))
    rows = random_rows(24, StainTexture.features)
    kinds = {
        "stain-texture, 123": texture,
        "stain-directions, 24": directions,
        "random 25": {split: found @ rows.T for split, found in texture.items()},
    }
    setting = ByPatient(SILOS, chosen.test_from)
    cut = {seed: by_patient(data["train_patients"], data["test_patients"], setting, seed=seed) for seed in chosen.seeds}
    print("| features | λ, own part | ε | accuracy | mean accuracy of classes |\n| --- | --- | --- | --- | --- |")
    for kind, found in kinds.items():
        made: dict[int, list[Silo]] = {}

        def silos(seed: int, found: dict[str, Tensor] = found, made: dict[int, list[Silo]] = made) -> list[Silo]:
            if seed not in made:
                of = chosen.test_from
                made[seed] = [
                    (
                        sums_of(found["train"][s.train], labels["train"][s.train], owners[s.train], classes),
                        found[of][s.test],
                        labels[of][s.test],
                    )
                    for s in cut[seed]
                ]
            return made[seed]

        def alone(seed: int, _noise: int) -> tuple[float, float]:
            each = [measured(s[0], s, classes, 0.0, "projected") for s in silos(seed)]
            return tuple(np.mean(each, axis=0).tolist())

        print(row(f"{kind} | alone | ∞", alone, chosen.seeds, 1), flush=True)
        for label, (rule, own) in RULES.items():
            for target in EPSILONS:
                if math.isinf(target) and label != "projected":
                    continue
                noise = 0.0 if math.isinf(target) else multiplier(target)

                def one(
                    seed: int, number: int, noise: float = noise, rule: str = rule, own: str = own
                ) -> tuple[float, float]:
                    source = NoiseSource(seed.to_bytes(16, "big") + number.to_bytes(16, "big"))
                    return accuracies(silos(seed), classes, noise=noise, rule=rule, own=own, source=source)

                shown = "∞" if math.isinf(target) else f"{target:g}"
                print(row(f"{kind} | {label} | {shown}", one, chosen.seeds, chosen.noises if noise else 1), flush=True)


def multiplier(target: float) -> float:
    return noise_multiplier_for(target, delta=DELTA, events=lambda noise: [GaussianRelease(noise, 1)])


if __name__ == "__main__":
    main(sys.argv[1:])
