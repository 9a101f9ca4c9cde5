"""``silo rehearse --run``: the whole run on a hospital's own folder: what it tells by round, what it gains, what it
costs; and nothing is sent, charged or kept."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.algorithms.models import ARCHITECTURES, build, build_start, state_of, whole_state
from medsilo.algorithms.models.given_weights import file_sha256, tensors_sha256
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.budget.accounting import SampledGaussian, epsilon, noise_multiplier_for
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import (
    MethodPlan,
    ModelPlan,
    RunPlan,
    SecureAggregationPlan,
    TrainingPlan,
    WeightsPlan,
)
from medsilo.privacy.errors import ConfigurationError, DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.silo import cli
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.preview.whole_run import LOOKS, Told, WholeRun, rehearse_run
from medsilo.silo.preview.whole_run_display import as_json, show
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.seeded_noise import Seeded
from tests.support.hospital.trained_hospital import configured

ROUNDS = 5
STEPS = 2
DELTA = 1e-5


def planned(
    method: str = "fedavg", *, promised: float | None = None, rounds: int = ROUNDS, rate: float = 1.0, **changes: Any
) -> RunPlan:
    """Full-batch steps of a linear layer; with privacy all of them, at sampling rate ``rate``, cost ``promised``."""
    chosen = make(method, {})
    privacy = None
    if promised is not None:
        steps = rounds * round(STEPS / rate)
        noise = noise_multiplier_for(promised, delta=DELTA, events=lambda z: [SampledGaussian(rate, z, steps)])
        privacy = PrivacyPlan(
            epsilon=promised,
            delta=DELTA,
            unit=changes.pop("unit", "image"),
            clipping_norm=0.1,
            noise_multiplier=noise,
            sampling_rate=rate,
            steps=steps,
        )
    training = {"epochs": STEPS, "optimizer": "sgd", "learning_rate": 0.02, "momentum": 0.9, "batch_size": 500}
    return RunPlan(
        federation="test",
        coordinator="coordinator",
        run="autumn",
        method=MethodPlan(name=method, parameters=chosen.parameters()),
        model=ModelPlan(name=changes.pop("model", "linear"), input_shape=(3, 28, 28), classes=9),
        training=TrainingPlan.model_validate({**training, "keep_optimizer_state": True, **changes.pop("training", {})}),
        rounds=rounds,
        seed=1,
        required=chosen.required,
        privacy=privacy,
        **changes,
    )


@pytest.fixture(scope="module", autouse=True)
def linear() -> Iterator[None]:
    """A model that is fast, and whose gradients are its images."""

    def make_linear(shape: tuple[int, int, int], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "linear", make_linear)
        yield


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    made = generate_tissue(seed=1, train=200, test=45)
    nobody = (dataclasses.replace(split, patients=None) for split in (made.train, made.test))
    return dataclasses.replace(made, **dict(zip(("train", "test"), nobody, strict=True)), validation=None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    return configured(tmp_path_factory.mktemp("hospital1"), shard)


def rehearsed(config: SiloConfig, plan: RunPlan, **options: Any) -> WholeRun:
    return rehearse_run(config, plan, coins=np.random.default_rng(1), hospitals=2, **options)


@pytest.fixture(scope="module")
def plain(config: SiloConfig) -> WholeRun:
    return rehearsed(config, planned(training={"epochs": 40}))


def test_without_privacy_the_later_rounds_tell_more_than_the_first(plain: WholeRun) -> None:
    assert [one.round for one in plain.leakage] == [1, 2, 3, 4, 5]
    first, last = plain.leakage[0].audit, plain.leakage[-1].audit
    assert first.canaries == last.canaries == 100
    assert last.best.auc > 0.8
    assert last.best.auc > first.best.auc
    assert last.epsilon > 0
    assert all(one.claim is None for one in plain.leakage)


def test_the_looks_at_a_long_run_are_few_and_hold_the_first_and_the_last_round(config: SiloConfig) -> None:
    found = rehearsed(config, planned(rounds=30), canaries=20)
    rounds = [one.round for one in found.leakage]
    assert len(rounds) == LOOKS
    assert (rounds[0], rounds[-1]) == (1, 30)
    assert {one.audit.canaries for one in found.leakage} == {20}


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (0.0, False)])
def test_what_all_rounds_tell_is_held_against_what_they_cost_together(
    config: SiloConfig, factor: float, *, kept: bool
) -> None:
    found = rehearsed(config, planned(promised=1.0), noise=Seeded(1, factor=factor))
    claims = [one.claim.epsilon for one in found.leakage if one.claim is not None]
    assert claims == sorted(claims)
    assert found.plan.privacy is not None
    expected = epsilon([SampledGaussian(1.0, found.plan.privacy.noise_multiplier, STEPS)], delta=DELTA)
    assert claims[0] == pytest.approx(expected)
    assert claims[-1] == pytest.approx(1.0, abs=0.01)
    last = found.leakage[-1]
    assert last.claim is not None
    assert (last.audit.epsilon <= last.claim.epsilon) == kept


def test_accuracy_is_that_of_pretend_hospitals_together_and_alone_and_of_all_images(plain: WholeRun) -> None:
    found = plain.accuracies
    assert found is not None
    assert (len(found.joined), len(found.alone), found.units, found.by_patient) == (2, 2, 100, False)
    assert found.joined[0] == found.joined[1], "FedAvg gives all the same model, and the test images are the same"
    assert found.alone[0] != found.alone[1]
    for one in (*found.joined, *found.alone, found.whole):
        assert one.accuracy > 0.3
        assert one.of_classes is not None


def test_noise_that_drowns_the_run_shows_beside_a_hospital_alone(config: SiloConfig) -> None:
    found = rehearsed(config, planned(promised=0.05, training={"learning_rate": 1.0}))
    assert found.accuracies is not None
    joined, alone = (np.mean([m.accuracy for m in side]) for side in (found.accuracies.joined, found.accuracies.alone))
    assert joined < alone


def test_the_price_is_what_the_ledger_would_say_after_the_run(config: SiloConfig, tmp_path: Path) -> None:
    shard = load_npz(config.shard)
    own = configured(tmp_path, shard)
    plan = planned(promised=1.0)
    assert plan.privacy is not None
    found = rehearsed(own, plan).price
    assert found.run is not None
    assert found.run.epsilon == pytest.approx(1.0, abs=0.01)
    assert found.spent is not None
    assert found.after is not None
    assert (found.spent.epsilon, found.after.epsilon) == (0, found.run.epsilon)
    event = SampledGaussian(1.0, plan.privacy.noise_multiplier, ROUNDS * STEPS)
    ledger = Ledger(own.ledgers, Subject(shard.fingerprint, "image"), shard.contents)
    purpose = Purpose("test", "before", "00" * 32, 0, "training")
    ledger.charge(event, purpose, Budget(9.0, DELTA))
    again = rehearsed(own, plan).price
    assert again.spent is not None
    assert again.after is not None
    assert again.spent.epsilon == pytest.approx(1.0, abs=0.01)
    assert again.after.epsilon == pytest.approx(epsilon([event, event], delta=DELTA), abs=1e-3)
    assert len(ledger.entries()) == 1, "nothing was charged"


def test_bytes_are_those_of_all_rounds_by_class(plain: WholeRun) -> None:
    model = 4 * (3 * 28 * 28 + 1) * 9
    assert plain.price.up == {
        Exposure.MODEL_PARAMETERS_EXTRACTOR: 0,
        Exposure.MODEL_PARAMETERS_CLASSIFIER: ROUNDS * model,
        Exposure.SAMPLE_COUNT: ROUNDS * 8,
    }
    assert plain.price.down == {Exposure.INITIAL_MODEL: model, Exposure.PEER_DERIVED: ROUNDS * model}


@pytest.mark.parametrize("method", ["local", "diversifed", "mrmtl", "pfedsim", "fedper", "fedrep", "scaffold"])
def test_other_methods_go_through_their_run(config: SiloConfig, method: str) -> None:
    found = rehearsed(config, planned(method), canaries=20)
    assert [one.round for one in found.leakage] == [1, 2, 3, 4, 5]
    assert found.accuracies is not None


def test_a_network_whose_batches_are_drawn_is_charged_for_them(config: SiloConfig) -> None:
    plan = planned(promised=1.0, rounds=2, rate=0.5, model="lenet5-gn")
    found = rehearsed(config, plan, canaries=20, noise=Seeded(1))
    assert plan.privacy is not None
    event = SampledGaussian(plan.privacy.sampling_rate, plan.privacy.noise_multiplier, plan.privacy.steps)
    assert found.price.run is not None
    assert found.price.run.epsilon == pytest.approx(epsilon([event], delta=DELTA))
    assert [one.round for one in found.leakage] == [1, 2]


def test_with_few_patients_the_rest_is_told(tmp_path: Path, shard: ImageDataset) -> None:
    """A hospital with fewer patients than it takes to guess about."""
    patients = np.array([f"p{index % 8}" for index in range(len(shard.train))])
    test = np.array([f"t{index}" for index in range(len(shard.test))])
    few = dataclasses.replace(
        shard,
        train=dataclasses.replace(shard.train, patients=patients),
        test=dataclasses.replace(shard.test, patients=test),
    )
    found = rehearsed(configured(tmp_path, few), planned(promised=1.0, unit="patient"))
    assert found.leakage == ()
    assert found.units == 8
    assert found.accuracies is not None
    assert (found.accuracies.units, found.accuracies.by_patient) == (4, True)
    assert found.price.run is not None
    assert found.price.run.unit == "patient"
    with pytest.raises(DataError, match="holds 8 training units"):
        rehearse_run(configured(tmp_path, few), planned(promised=1.0, unit="patient"), hospitals=9)


def test_a_method_that_needs_the_coordinators_images_is_refused(config: SiloConfig) -> None:
    with pytest.raises(RefusedError, match="without --run tries out the first round"):
        rehearsed(config, planned("fedpdc"))


def test_progress_counts_every_training_to_the_end(config: SiloConfig) -> None:
    told: list[tuple[int, int, str]] = []

    def tell(now: Told) -> None:
        told.append((now.done, now.of, now.what))

    rehearsed(config, planned(), canaries=20, tell=tell)
    assert told[0][:2] == (0, ROUNDS * 7)
    assert told[-1][:2] == (ROUNDS * 7, ROUNDS * 7)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert len({what for _, _, what in told}) == 4


def test_it_begins_with_the_given_weights_from_which_the_run_begins(
    tmp_path: Path, shard: ImageDataset, config: SiloConfig
) -> None:
    """Trained with steps too small to matter, the models are those of the file."""
    plan = planned(rounds=2, training={"learning_rate": 1e-12})
    given = whole_state(build(plan.model, seed=99))
    file = tmp_path / "given.safetensors"
    save_file(given, file)
    weights = WeightsPlan(
        sha256=file_sha256(file), tensors_sha256=tensors_sha256(given), source="a test", public=True, brought=True
    )
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"weights": weights})})
    with pytest.raises(ConfigurationError, match="under `weights:`"):
        rehearsed(config, plan)
    found = rehearsed(configured(tmp_path, shard, weights=[str(file)]), plan, canaries=20)
    start = build_start(plan.model, seed=plan.seed, weights=[file])
    site = LocalSite("h", shard, start, plan, device=torch.device("cpu"))
    expected = site.measure(state_of(start))
    assert expected is not None
    assert found.accuracies is not None
    for one in (found.accuracies.whole, *found.accuracies.joined):
        assert one.loss == pytest.approx(expected.loss, rel=1e-5)
    assert Exposure.INITIAL_MODEL not in found.price.down, "every hospital brings the file itself"


def test_of_noise_that_is_shared_out_both_figures_are_shown_and_attackers_are_held_to_the_own_share(
    config: SiloConfig,
) -> None:
    method = make("fedavg", {})
    asked = PrivacyConfig(preset="head", epsilon=2, delta=DELTA, unit="image", units=200, honest=5)
    training = asked.training(method, TrainingPlan(), ROUNDS, 6)
    masks = SecureAggregationPlan(minimum=6, rounds=ROUNDS)
    plan = planned().model_copy(
        update={
            "model": ModelPlan(name="stain-texture", input_shape=(3, 28, 28), classes=9),
            "training": training,
            "privacy": asked.plan(method, training, ROUNDS),
            "secure_aggregation": masks,
        }
    )
    found = rehearsed(config, plan, canaries=40, noise=Seeded(1))
    assert plan.privacy is not None
    trusting, alone = plan.privacy.guarantee.epsilon, plan.privacy.alone.epsilon
    assert alone > 1.5 * trusting
    last = found.leakage[-1].claim
    price = found.price
    figures = (last, price.alone, price.after_alone, price.run, price.after)
    assert [one and one.epsilon for one in figures] == pytest.approx([alone] * 3 + [trusting] * 2, rel=1e-2)
    said = Console(record=True, width=200, file=io.StringIO())
    show(found, said)
    assert f"by its own share of the noise alone, it is {price.alone}" in said.export_text()
    assert as_json(found)["price"]["alone"]["epsilon"] == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("as_text", [True, False])
def test_the_command_shows_figures_and_leaves_the_folder_as_it_was(
    tmp_path: Path,
    shard: ImageDataset,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    as_text: bool,
) -> None:
    config = configured(tmp_path, shard)
    plan = planned(promised=1.0)
    (tmp_path / "plan.json").write_bytes(plan.canonical())
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["silo", "rehearse", "--run", "--config", str(tmp_path / "hospital1.yaml"), "--hospitals", "2"]
    words += ["--plan", str(tmp_path / "plan.json"), "--canaries", "40", *([] if as_text else ["--json"])]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    if as_text:
        assert "Nothing was sent or charged." in said
        assert "no forecast of what joining them brings" in said
        assert "MODEL_PARAMETERS_CLASSIFIER" in said
        assert "2 pretend hospitals of 100 images or more, the run together" in said
        assert "so far, and after the run it would be 1.0" in said
    else:
        content = json.loads(said)
        assert content["plan_sha256"] == plan.sha256.hex()
        assert [one["round"] for one in content["leakage"]] == [1, 2, 3, 4, 5]
        assert content["price"]["run"]["epsilon"] == pytest.approx(1.0, abs=0.01)
        assert len(content["accuracy"]["joined"]) == 2
        assert "verdict" not in content
    after = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert config.state == tmp_path / "state"
