"""A linear layer on fixed features at the hospital: predicted, exported, inspected and rehearsed as any model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from medsilo.algorithms.datasets import ImageDataset, to_tensor
from medsilo.algorithms.models import build
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.exposure import Exposure
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.model.exporting import export
from medsilo.silo.model.prediction import load_model
from medsilo.silo.model.saliency import grad_cam
from medsilo.silo.preview.inspection import inspect
from medsilo.silo.preview.rehearsal import rehearse
from medsilo.silo.state.config import SiloConfig
from tests.support.hospital.trained_hospital import configured, planned, train

NAMES = ("stain-texture", "stain-directions", "scattering")


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    return generate_tissue(seed=1, train=60, test=30, size=20)


def model_of(name: str) -> ModelPlan:
    return ModelPlan(name=name, input_shape=(3, 20, 20), classes=9)


@pytest.fixture(scope="module", params=NAMES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    config = configured(tmp_path_factory.mktemp("hospital1"), shard)
    train(config, planned("autumn", "fedavg", model=model_of(request.param)))
    return config


def test_predicting_reads_pictures_and_no_kept_features(config: SiloConfig, shard: ImageDataset) -> None:
    found = load_model(config.runs / "autumn").classify(config.shard)
    right = np.mean([one.label == label for one, label in zip(found, shard.test.labels, strict=True)])
    assert right > 0.3  # of nine classes: it has learnt
    assert not config.features.exists()


@pytest.mark.parametrize("kind", ExportFormat)
def test_the_exported_file_computes_the_features_too(config: SiloConfig, tmp_path: Path, kind: ExportFormat) -> None:
    if kind == ExportFormat.ONNX:
        pytest.importorskip("onnxruntime", reason="this needs medsilo[onnx]")
    assert export(config, tmp_path / "model", kind).difference < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_map_of_what_spoke_for_a_class(name: str, shard: ImageDataset) -> None:
    model = build(model_of(name), seed=1)
    assert grad_cam(model, to_tensor(shard.test.images[:2]), torch.tensor([0, 1])) is None


@pytest.mark.parametrize(
    ("name", "numbers"), [("stain-texture", 9 * 123), ("stain-directions", 9 * 24), ("scattering", 9 * 973)]
)
def test_an_inspection_counts_the_linear_layer_alone(
    tmp_path: Path, shard: ImageDataset, name: str, numbers: int
) -> None:
    config = configured(tmp_path, shard)
    plan = planned("autumn", "fedavg", model=model_of(name))
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
    classes = {item.exposure: item.bytes for item in inspect(config, plan).content if item.leaves}
    assert numbers * 4 <= classes[Exposure.MODEL_PARAMETERS_CLASSIFIER] < numbers * 4 + 200
    assert sum(classes.values()) < numbers * 4 + 2000


def test_a_rehearsal_attacks_the_linear_layer(tmp_path: Path, shard: ImageDataset) -> None:
    plan = planned("autumn", "fedavg", model=model_of("stain-texture"))
    found = rehearse(configured(tmp_path, shard), plan, coins=np.random.default_rng(1))
    assert Exposure.MODEL_PARAMETERS_CLASSIFIER in found.leaves
    assert set(found.scores) >= {"loss", "gradient"}
    for scores in found.scores.values():
        assert len(np.unique(scores)) > len(scores) / 2  # every canary has been looked at
