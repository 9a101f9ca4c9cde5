"""How far DiversiFed's bounded variant is from a pull to the mean: cosines, and accuracies with equal tuning.

Twenty hospitals in two groups by class, 30 rounds of 5 epochs. For each λ: the bounded variant (τ = 1, ρ = 0.05) and
MR-MTL. Cosines are between z_i - w_i and w̄ - w_i, the least and the mean over hospitals, in some rounds.

    python benchmarks/diversifed_pull.py --data coloncells.npz [--seeds 1 2 3] [--weights 1] [--rounds 30] [--choose]

``--choose`` measures on training images that no hospital trains on, with somewhat smaller hospitals.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from medsilo.algorithms.declarations import MIXTURES, Protected, Sums
from medsilo.algorithms.diversifed import DiversiFed, DiversiFedCoordinator
from medsilo.algorithms.families.tethered import pairwise_distances, squared_distances
from medsilo.algorithms.method import CoordinatorSide, Downloads, Method, Round
from medsilo.algorithms.mrmtl import MRMTL
from medsilo.algorithms.tensors import Stack
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.exposure import MODEL
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.sources import open_dataset
from medsilo.simulation.batched import Stacked
from medsilo.simulation.federation import Simulation

LAST = 10
_cosines: list[torch.Tensor] = []


class WatchedCoordinator(DiversiFedCoordinator):
    """Notes the cosines of a round."""

    def aggregate(self, ended: Round) -> Downloads:
        stack = Stack.of(list(ended.uploads.values()), MODEL)
        models = torch.cat(list(stack.map(lambda block: block.to(torch.float64).clone())), dim=1)
        weights = self.method.weights(pairwise_distances([squared_distances(models)], len(models)))
        pull, to_mean = weights @ models - models, models.mean(dim=0) - models
        _cosines.append(torch.cosine_similarity(pull, to_mean, dim=1))
        return super().aggregate(ended)


@dataclass(frozen=True)
class Watched(DiversiFed):
    """The same method, watched."""

    coordinator: ClassVar[type[CoordinatorSide]] = WatchedCoordinator
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = MIXTURES


def run(method: Method, data: Path, *, seed: int, rounds: int, choose: bool) -> list[float]:
    """Mean accuracy over hospitals after each round, in percent."""
    size = {"train_per_silo": 130, "test_per_silo": 30} if choose else {"train_per_silo": 160, "test_per_silo": 36}
    setting = PracticalGroups(
        groups=(10, 10), dominant=((0, 1), (2, 3)), share=0.8, test_from="train" if choose else "test", **size
    )
    shards = cut(open_dataset(str(data)), setting, seed=seed)
    plan = RunPlan(
        federation="benchmark",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=4),
        training=TrainingPlan(epochs=5, batch_size=100, optimizer="adam", learning_rate=1e-3),
        rounds=rounds,
        seed=seed,
        required=method.required,
    )
    simulation = Simulation(plan, method, shards, device=torch.device("cpu"), engine=Stacked())
    curve = []
    for _ in range(rounds):
        measured = simulation.step().values()
        curve.append(100 * float(np.mean([one.accuracy for one in measured if one is not None])))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--weights", type=float, nargs="+", default=[1.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--choose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for weight in options.weights:
        bounded = Watched(variant="bounded", temperature=1.0, repulsion=0.05, proximal_weight=weight)
        for name, method in {"bounded": bounded, "mrmtl": MRMTL(proximal_weight=weight)}.items():
            _cosines.clear()
            curves = [
                run(method, options.data, seed=seed, rounds=options.rounds, choose=options.choose)
                for seed in options.seeds
            ]
            print(
                f"λ = {weight:g}, {name}: mean of the last {LAST} rounds {_shown([np.mean(c[-LAST:]) for c in curves])}"
            )
            rounds = len(_cosines) // len(curves)
            for number in sorted({0, 4, 9, 19, rounds - 1} & set(range(rounds))):
                found = torch.stack(_cosines[number::rounds])
                print(f"  round {number + 1}: cosine at least {float(found.min()):.4f}, mean {float(found.mean()):.4f}")


def _shown(figures: Sequence[float]) -> str:
    return f"{np.mean(figures):.2f} ± {np.std(figures):.2f}"


if __name__ == "__main__":
    main()
