"""Simulation: partial participation, repeatability, what it measures and counts, going on from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.diversifed import DiversiFed, attract_repel
from medsilo.algorithms.method import PERSONAL, Method
from medsilo.algorithms.models import build
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.errors import DataError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.data.settings import Dirichlet
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation
from medsilo.simulation.public_images import cut_public
from tests.support.methods.fitting import fitting

SETTING = Dirichlet(silos=5, alpha=1.0, train_per_silo=40, test_per_silo=10)


@pytest.fixture(scope="module")
def dataset() -> ImageDataset:
    return generate_tissue(seed=1, train=900, test=270)


@pytest.fixture(scope="module")
def shards(dataset: ImageDataset) -> list[ImageDataset]:
    return cut(dataset, SETTING, seed=1)


def simulate(
    shards: list[ImageDataset],
    method: Method,
    *,
    public: ImageDataset | None = None,
    model: str | None = None,
    **changes: Any,
) -> Simulation:
    model = model or fitting(method, "mlp-64", "lenet5")
    plan = RunPlan(
        federation="test",
        coordinator="c",
        run="r",
        method=MethodPlan(name=method.name, parameters=method.parameters()),
        model=ModelPlan(name=model, input_shape=(3, 28, 28), classes=9),
        seed=1,
        required=method.required,
        **{"rounds": 4, "training": TrainingPlan(epochs=1, batch_size=20), **changes},
    )
    given = public and PublicImages(public, build(plan.model, seed=1), plan.model.input_shape)
    return Simulation(plan, method, shards, device=torch.device("cpu"), public=given or None)


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def test_the_same_run_twice_gives_the_same_bits(shards: list[ImageDataset]) -> None:
    runs = [simulate(shards, make(name, {})) for name in ("diversifed", "diversifed")]
    for one in runs:
        for _ in range(3):
            one.step()
    for name, side in runs[0].silos.items():
        assert torch.equal(flat(side.personal()), flat(runs[1].silos[name].personal()))


def test_z_is_made_of_the_uploads_of_the_round(shards: list[ImageDataset]) -> None:
    """Through payloads, stack and mixing, z is what the published function gives for the silos' models."""
    one = simulate(shards, DiversiFed(temperature=0.7))
    one.step()
    models = torch.stack([flat(side.memory[PERSONAL]) for side in one.silos.values()])
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
    for side in one.silos.values():
        assert torch.isfinite(flat(side.personal())).all()


def test_after_fedavg_all_silos_hold_the_same_model(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("fedavg", {}), rounds=2)
    one.step()
    one.step()
    one.finish()
    first, *others = (flat(side.personal()) for side in one.silos.values())
    assert all(torch.equal(first, other) for other in others)


def test_separate_training_sends_nothing_and_gets_the_starting_model_once(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("local", {}), participation=0.6, rounds=6)
    started: set[str] = set()
    size = 4 * ((3 * 28 * 28 + 1) * 64 + (64 + 1) * 9)  # float32; weights and biases of both layers
    for _ in range(6):
        one.step()
        for row in one.last:
            assert row.up == {}
            first = row.took_part and row.silo not in started
            assert row.down == ({Exposure.INITIAL_MODEL: size} if first else {})
            if row.took_part:
                started.add(row.silo)
    one.finish()
    for row in one.last:
        assert row.down == ({} if row.silo in started else {Exposure.INITIAL_MODEL: size})


def test_every_byte_of_fedavg_is_counted_in_its_class(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("fedavg", {}), rounds=2)
    hidden, classifier = 4 * (3 * 28 * 28 + 1) * 64, 4 * (64 + 1) * 9
    up = {
        Exposure.MODEL_PARAMETERS_EXTRACTOR: hidden,
        Exposure.MODEL_PARAMETERS_CLASSIFIER: classifier,
        Exposure.SAMPLE_COUNT: 8,
    }
    down = [
        {Exposure.INITIAL_MODEL: hidden + classifier},
        {Exposure.PEER_DERIVED: hidden + classifier},
    ]
    for number in range(2):
        one.step()
        assert [(row.round, row.up, row.down) for row in one.last] == [(number, up, down[number])] * 5
    one.finish()
    assert [(row.round, row.up, row.down) for row in one.last] == [(2, {}, down[1])] * 5


def test_a_method_that_hands_out_one_model_is_measured_with_it(shards: list[ImageDataset]) -> None:
    """What a round is said to have made is what its average does, also at a silo that sat the round out."""
    one = simulate(shards, make("fedavg", {}), participation=0.6, rounds=3)
    for _ in range(3):
        returned = one.step()
        assert one._everyone is not None
        average = one._everyone[Exposure.PEER_DERIVED].tensors()
        for row in one.last:
            assert row.measured == one._sites[row.silo].measure(average)
        assert returned == {row.silo: row.measured for row in one.last if row.took_part}
    last = {row.silo: row.measured for row in one.last}
    assert one.finish() == last


def test_feddbes_last_round_is_measured_with_what_its_aggregation_gave(shards: list[ImageDataset]) -> None:
    """And so with what the silos keep: nothing is trained after it."""
    one = simulate(shards, make("feddbe", {}), rounds=3)
    for _ in range(3):
        one.step()
    last = {row.silo: row.measured for row in one.last}
    assert one.finish() == last


def test_a_silo_that_sat_out_keeps_its_measurement(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("diversifed", {}), participation=0.4, rounds=4)
    before: dict[str, Any] = {}
    for _ in range(4):
        one.step()
        assert sum(row.took_part for row in one.last) == 2
        for row in one.last:
            assert row.measured == one._sites[row.silo].measure(one.silos[row.silo].personal())
            if not row.took_part and before:
                assert row.measured == before[row.silo]
        before = {row.silo: row.measured for row in one.last}


def test_all_silos_share_one_module(shards: list[ImageDataset]) -> None:
    one = simulate(shards, make("local", {}))
    assert len({id(site.model) for site in one._sites.values()}) == 1


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_gone_on_with_from_a_file_has_the_bits_of_one_that_was_not_stopped(
    dataset: ImageDataset, shards: list[ImageDataset], method: str, tmp_path: Path
) -> None:
    """With a model that has running statistics, and silos that sit rounds out: the most that there is to keep."""
    made = make(method, {})
    model = fitting(made, "lenet5", "mlp-64")
    public = cut_public(dataset, SETTING, shards, seed=1, per_class=2) if made.needs_public else None

    def fresh() -> Simulation:
        training = TrainingPlan(epochs=1, batch_size=20, keep_optimizer_state=True)
        return simulate(shards, made, public=public, model=model, participation=0.6, rounds=5, training=training)

    whole, stopped = fresh(), fresh()
    rows: dict[str, list[Any]] = {"whole": [], "parts": []}
    for _ in range(2):
        stopped.step()
        rows["parts"] += stopped.last
    stopped.save(tmp_path / "checkpoint", notes={"any": [1, 2.5]})
    again = fresh()
    assert again.load(tmp_path / "checkpoint") == {"any": [1, 2.5]}
    assert again.round == 2
    for one, kind in ((whole, "whole"), (again, "parts")):
        while one.round < 5:
            one.step()
            rows[kind] += one.last
        one.finish()
        rows[kind] += one.last
    assert rows["whole"] == rows["parts"]
    for name, side in whole.silos.items():
        expected, found = side.personal(), again.silos[name].personal()
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


def test_a_checkpoint_that_is_cut_short_is_refused(shards: list[ImageDataset], tmp_path: Path) -> None:
    one = simulate(shards, make("fedavg", {}))
    one.step()
    one.save(tmp_path / "checkpoint")
    content = (tmp_path / "checkpoint").read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "checkpoint").write_bytes(content[:length])
        with pytest.raises(DataError, match="cannot be read as a checkpoint"):
            one.load(tmp_path / "checkpoint")


def test_a_checkpoint_of_another_plan_or_other_images_is_refused(shards: list[ImageDataset], tmp_path: Path) -> None:
    one = simulate(shards, make("local", {}))
    one.step()
    one.save(tmp_path / "checkpoint")
    with pytest.raises(DataError, match="another plan, or on other data"):
        simulate(shards, make("local", {}), rounds=9).load(tmp_path / "checkpoint")
    with pytest.raises(DataError, match="another plan, or on other data"):
        simulate(shards[:4], make("local", {})).load(tmp_path / "checkpoint")


def test_a_checkpoint_is_a_safetensors_file(shards: list[ImageDataset], tmp_path: Path) -> None:
    """Readable without any of our code, and never able to run any."""
    one = simulate(shards, make("diversifed", {}))
    one.step()
    one.save(tmp_path / "checkpoint")
    with safe_open(tmp_path / "checkpoint", framework="pt") as file:
        state = json.loads(bytes(file.get_tensor("state").numpy()))
        for name, side in one.silos.items():
            for key, number in state["silos"][name][PERSONAL].items():
                assert torch.equal(file.get_tensor(str(number)), side.personal()[key])
