"""Simulation: partial participation, repeatability, and the table made of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.datasets import ImageDataset
from algorithms.diversifed import DiversiFed, attract_repel
from algorithms.method import PERSONAL, Method
from algorithms.registry import make
from privacy.errors import DataError
from privacy.exposure import Exposure
from privacy.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from silo.sharding import Dirichlet, cut
from silo.synthetic import generate_tissue
from simulation.federation import Simulation
from simulation.results import read_runs, tabulate


@pytest.fixture(scope="module")
def shards() -> list[ImageDataset]:
    setting = Dirichlet(silos=5, alpha=1.0, train_per_silo=40, test_per_silo=10)
    return cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)


def simulate(shards: list[ImageDataset], method: Method, **changes: Any) -> Simulation:
    plan = RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=9),
        training=TrainingPlan(epochs=1, batch_size=20),
        seed=1,
        required=method.required,
        **{"rounds": 4, **changes},
    )
    return Simulation(plan, method, shards, device=torch.device("cpu"))


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def test_the_same_run_twice_gives_the_same_bits(shards: list[ImageDataset]) -> None:
    runs = [simulate(shards, make(name, {})) for name in ("diversifed", "diversifed")]
    for one in runs:
        for _ in range(3):
            one.step()
    for name, half in runs[0].silos.items():
        assert torch.equal(flat(half.personal()), flat(runs[1].silos[name].personal()))


def test_z_is_made_of_the_uploads_of_the_round(shards: list[ImageDataset]) -> None:
    """Through payloads, stack and mixing, z is what the published function gives for the silos' models."""
    one = simulate(shards, DiversiFed(temperature=0.7))
    one.step()
    models = torch.stack([flat(half.memory[PERSONAL]) for half in one.silos.values()])
    expected = attract_repel(models, temperature=0.7)
    for row, name in enumerate(one.silos):
        z = flat(one._own[name][Exposure.PEER_DERIVED].tensors())
        torch.testing.assert_close(z, expected[row], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("stale", ["reuse", "none"])
def test_a_silo_that_sat_out_gets_its_old_answer_or_none(shards: list[ImageDataset], stale: str) -> None:
    one = simulate(shards, make("diversifed", {"stale": stale}), participation=0.6, rounds=8)
    took_part: list[set[str]] = []
    for _ in range(6):
        took_part.append(set(one.step()))
        assert len(took_part[-1]) == 3
        for name in one.silos:
            holds = bool(one._own.get(name))
            expected = name in took_part[-1] if stale == "none" else name in set().union(*took_part)
            assert holds == expected


@pytest.mark.parametrize("method", ["local", "fedavg", "diversifed"])
def test_every_method_bears_partial_participation_and_ends(shards: list[ImageDataset], method: str) -> None:
    one = simulate(shards, make(method, {}), participation=0.4)
    for _ in range(4):
        one.step()
    assert set(one.finish()) == {shard.name for shard in shards}
    for half in one.silos.values():
        assert torch.isfinite(flat(half.personal())).all()


def test_after_fedavg_all_silos_hold_the_same_model(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("fedavg", {}), rounds=2)
    one.step()
    one.step()
    one.finish()
    first, *others = (flat(half.personal()) for half in one.silos.values())
    assert all(torch.equal(first, other) for other in others)


def test_the_table_counts_seeds_and_says_where_separate_training_was_beaten(tmp_path: Path) -> None:
    methods = [{"name": "local"}, {"name": "diversifed", "temperature": 0.5}]
    for label, accuracies in (("local", (0.4, 0.6)), ("diversifed-temperature=0.5", (0.5, 0.5))):
        for seed, accuracy in enumerate(accuracies):
            content = {
                "label": label,
                "method": label.partition("-")[0],
                "seed": seed,
                "experiment": {"methods": methods},
                "accuracy_per_round": [{"a": accuracy, "b": accuracy}] * 12,
                "final_accuracy": {"a": accuracy, "b": accuracy},
            }
            (tmp_path / f"{label}-seed{seed}.json").write_text(json.dumps(content))
    alone, together = tabulate(read_runs(tmp_path))
    assert (alone.label, alone.last, alone.wins) == ("local", (50.0, 10.0), None)
    assert (together.last, together.wins, together.seeds) == ((50.0, 0.0), 1, 2)
    with pytest.raises(DataError, match="no finished runs"):
        read_runs(tmp_path / "nowhere")
