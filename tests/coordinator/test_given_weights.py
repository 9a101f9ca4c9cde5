"""What a coordinator's file says of given weights, and what becomes of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from pydantic import ValidationError
from safetensors.torch import save_file

from medsilo.algorithms.models import build, state_of
from medsilo.coordinator.given_weights import OUTCOME, WeightsConfig
from medsilo.privacy.consent.plan import ModelPlan, WeightsPlan
from medsilo.privacy.errors import ConfigurationError

MODEL = ModelPlan(name="mlp-64", input_shape=(3, 8, 8), classes=4)


def file_of(folder: Path, classes: int = 4) -> Path:
    path = folder / f"weights-{classes}.pt"
    torch.save(state_of(build(MODEL.model_copy(update={"classes": classes}), seed=5)), path)
    return path


def planned(config: WeightsConfig, runs: Path | None = None) -> WeightsPlan:
    return config.plan(MODEL, trusted=(), runs=runs)


@pytest.mark.parametrize(
    "fields",
    [{}, {"file": "a.pt", "run": "one"}, {"torchvision": "A.B", "file": "a.pt"}, {"run": "one", "public": True}],
)
def test_weights_are_of_one_origin_and_a_runs_outcome_is_never_public(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"names one of|is for a `file`"):
        WeightsConfig.model_validate(fields)


def test_a_file_counts_as_hospitals_unless_it_is_said_to_be_public(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    assert not planned(WeightsConfig(file=path)).public
    assert planned(WeightsConfig(file=path, public=True)).public
    (tmp_path / "model.json").write_text("{}")  # beside a hospital's model
    with pytest.raises(ConfigurationError, match="is a run's outcome"):
        planned(WeightsConfig(file=path, public=True))
    assert not planned(WeightsConfig(file=path)).public


def test_the_last_layer_is_left_where_its_classes_are_others_or_where_that_is_wanted(tmp_path: Path) -> None:
    assert planned(WeightsConfig(file=file_of(tmp_path))).without is None
    assert planned(WeightsConfig(file=file_of(tmp_path), new_head=True)).without == "classifier"
    other = planned(WeightsConfig(file=file_of(tmp_path, classes=9)))
    assert other.without == "classifier"
    assert "Its layer classifier is drawn anew." in other.words


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    before = planned(WeightsConfig(file=path))
    torch.save(state_of(build(MODEL, seed=6)), path)
    after = planned(WeightsConfig(file=path))
    assert (before.sha256, before.tensors_sha256) != (after.sha256, after.tensors_sha256)


def test_an_earlier_run_is_named_by_its_name_and_one_that_is_not_there_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="run one has not ended here, or its method gives every silo a model"):
        planned(WeightsConfig(run="one"), tmp_path)
    (tmp_path / "one").mkdir()
    file_of(tmp_path / "one").rename(tmp_path / "one" / "a.pt")
    save_file(torch.load(tmp_path / "one" / "a.pt", weights_only=True), tmp_path / "one" / OUTCOME)
    found = planned(WeightsConfig(run="one"), tmp_path)
    assert (found.source, found.public) == ("the outcome of run one", False)
    with pytest.raises(ConfigurationError, match="is for a coordinator's configuration"):
        planned(WeightsConfig(run="one"))


def test_torchvisions_weights_come_from_its_cache_and_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    model = ModelPlan(name="torchvision:mnasnet0_5", input_shape=(3, 32, 32), classes=4)
    config = WeightsConfig(torchvision="MNASNet0_5_Weights.IMAGENET1K_V1")
    name = torchvision.models.get_weight("MNASNet0_5_Weights.IMAGENET1K_V1").url.rpartition("/")[2]
    with pytest.raises(ConfigurationError, match=f"not in torchvision's cache .*{name}.*nothing is downloaded"):
        config.plan(model, trusted=(), runs=None)
    (tmp_path / "checkpoints").mkdir()
    torch.save(torchvision.models.mnasnet0_5().state_dict(), tmp_path / "checkpoints" / name)
    found = config.plan(model, trusted=(), runs=None)
    assert (found.public, found.without) == (True, "classifier.1")
    with pytest.raises(ConfigurationError, match=r"has no weights 'Foo_Weights\.X'"):
        WeightsConfig(torchvision="Foo_Weights.X").plan(model, trusted=(), runs=None)
