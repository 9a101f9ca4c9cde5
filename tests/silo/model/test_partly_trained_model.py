"""A model of which a part was trained, at the hospital: predicted, exported, inspected and rehearsed as any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from medsilo.algorithms.datasets import ImageDataset, to_tensor
from medsilo.algorithms.models import PartlyTrained
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.exposure import Exposure
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.model.evaluation import evaluate
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.model.exporting import export
from medsilo.silo.model.prediction import load_model
from medsilo.silo.model.saliency import grad_cam
from medsilo.silo.preview.inspection import inspect
from medsilo.silo.preview.rehearsal import rehearse
from medsilo.silo.state.config import SiloConfig
from tests.support.hospital.trained_hospital import configured, planned, train

TRAINS: dict[str, Any] = {"head": "head", "last": {"last": 2}, "lora": {"lora": {"rank": 2}}}
CLASSIFIER = 4 * (84 * 9 + 9)
EXTRACTORS = {"head": 0, "last": 4 * (120 * 84 + 84), "lora": 4 * 2 * (6 + 75 + 16 + 150 + 64 + 120 + 120 + 84)}


def model_of(part: str) -> ModelPlan:
    return ModelPlan(name="lenet5", input_shape=(3, 20, 20), classes=9, train=TRAINS[part])


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    return generate_tissue(seed=1, train=60, test=30, size=20)


@pytest.fixture(scope="module", params=TRAINS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    config = configured(tmp_path_factory.mktemp("hospital1"), shard)
    train(config, planned("autumn", "fedavg", model=model_of(request.param)))
    return config


def test_the_model_is_whole_and_plain_and_says_what_was_measured(config: SiloConfig, shard: ImageDataset) -> None:
    loaded = load_model(config.runs / "autumn")
    assert not isinstance(loaded.module, PartlyTrained)
    found = loaded.classify(config.shard)
    right = np.mean([one.label == label for one, label in zip(found, shard.test.labels, strict=True)])
    assert right == pytest.approx(loaded.description["test_accuracy"])
    assert grad_cam(loaded.module, to_tensor(shard.test.images[:2]), torch.tensor([0, 1])) is not None


def test_it_is_exported_as_any_other(config: SiloConfig, tmp_path: Path) -> None:
    assert export(config, tmp_path / "model", ExportFormat.PT2).difference < 1e-5


def test_it_is_evaluated_beside_its_start(config: SiloConfig) -> None:
    assert evaluate(config).compared is not None


@pytest.mark.parametrize("part", TRAINS)
def test_an_inspection_counts_what_is_trained_alone(tmp_path: Path, shard: ImageDataset, part: str) -> None:
    config = configured(tmp_path, shard)
    plan = planned("autumn", "fedavg", model=model_of(part))
    consent = {
        "coordinator": plan.coordinator_identity.uri,
        "methods": ["fedavg"],
        "exposures": [exposure.value for exposure in plan.required],
        "rounds": 3,
    }
    (tmp_path / "consent.yaml").write_text(yaml.safe_dump(consent))
    written = yaml.safe_load((tmp_path / "hospital1.yaml").read_text()) | {"consent": "consent.yaml"}
    (tmp_path / "hospital1.yaml").write_text(yaml.safe_dump(written))
    config = SiloConfig.read(tmp_path / "hospital1.yaml")
    sizes = {item.exposure: item.bytes for item in inspect(config, plan).content if item.leaves}
    assert CLASSIFIER <= sizes[Exposure.MODEL_PARAMETERS_CLASSIFIER] < CLASSIFIER + 200
    assert EXTRACTORS[part] <= sizes.get(Exposure.MODEL_PARAMETERS_EXTRACTOR, 0) < EXTRACTORS[part] + 200


@pytest.mark.parametrize("part", TRAINS)
def test_a_rehearsal_attacks_what_is_trained(tmp_path: Path, shard: ImageDataset, part: str) -> None:
    plan = planned("autumn", "fedavg", model=model_of(part))
    found = rehearse(configured(tmp_path, shard), plan, coins=np.random.default_rng(1))
    assert Exposure.MODEL_PARAMETERS_CLASSIFIER in found.leaves
    for scores in found.scores.values():
        assert len(np.unique(scores)) > len(scores) / 2  # every canary has been looked at
