"""A linear layer on a torchvision network at the hospital, which brings that network's weights itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file

from medsilo.algorithms.datasets import ImageDataset
from medsilo.coordinator.given_weights import WeightsConfig
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.model.exporting import export
from medsilo.silo.model.kept_models import find_model
from medsilo.silo.model.prediction import load_kept, load_model
from medsilo.silo.preview.inspection import inspect
from medsilo.silo.state.config import SiloConfig
from tests.support.hospital.trained_hospital import configured, planned, train

NAME = "mnasnet0_5"


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    return generate_tissue(seed=1, train=45, test=18, size=20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(4)
    save_file(torchvision.models.get_model(NAME, weights=None).state_dict(), folder / "any-name.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(weights: Path) -> ModelPlan:
    bare = ModelPlan(name=f"torchvision-features:{NAME}", input_shape=(3, 20, 20), classes=9)
    given = WeightsConfig(file=weights / "any-name.safetensors", public=True, brought=True)
    return bare.model_copy(update={"weights": given.plan(bare, trusted=(), runs=None)})


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset, weights: Path, model: ModelPlan
) -> SiloConfig:
    config = configured(tmp_path_factory.mktemp("hospital1"), shard, weights=[str(weights)])
    train(config, planned("autumn", "fedavg", model=model))
    return config


def test_what_is_kept_and_would_leave_is_the_linear_layer(config: SiloConfig, model: ModelPlan) -> None:
    kept = load_file(config.runs / "autumn" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in kept.items()} == {"classifier.weight": (9, 1281)}
    found = inspect(config, planned("autumn", "fedavg", model=model))
    tensors = [shape for item in found.content for _, shape, _ in item.tensors if shape]
    assert tensors == [(9, 1281)]


def test_predicting_wants_the_file_and_says_which(config: SiloConfig, shard: ImageDataset, model: ModelPlan) -> None:
    kept = find_model(config.runs)
    found = load_kept(kept, weights=config.weights).classify(config.shard)
    assert len(found) == len(shard.test)
    assert model.weights is not None
    with pytest.raises(ConfigurationError, match=model.weights.sha256):
        load_model(config.runs / "autumn")


def test_the_exported_file_holds_the_network_too(config: SiloConfig, tmp_path: Path) -> None:
    assert export(config, tmp_path / "model", ExportFormat.PT2).difference < 1e-5


def test_a_coordinator_is_told_that_hospitals_bring_such_weights(weights: Path) -> None:
    bare = ModelPlan(name=f"torchvision-features:{NAME}", input_shape=(3, 20, 20), classes=9)
    sent = WeightsConfig(file=weights / "any-name.safetensors", public=True)
    with pytest.raises(ConfigurationError, match="set `brought: true`"):
        sent.plan(bare, trusted=(), runs=None)
