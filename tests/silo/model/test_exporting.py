"""``silo export``: a file that says what the model says, or no file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo import cli
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.silo.model import exporting
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.model.exporting import export
from medsilo.silo.model.prediction import load_model
from medsilo.silo.state.config import SiloConfig
from tests.support.hospital.trained_hospital import configured, planned, train


@pytest.fixture(scope="module")
def shard() -> ImageDataset:
    return generate_tissue(seed=1, train=60, test=30, size=16)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, shard: ImageDataset) -> SiloConfig:
    config = configured(tmp_path_factory.mktemp("hospital1"), shard)
    model = ModelPlan(name="lenet5", input_shape=(3, 16, 16), classes=9)
    train(config, planned("autumn", "fedavg", model=model))
    return config


def raw_pixels(config: SiloConfig) -> np.ndarray[Any, Any]:
    """uint8 [n, C, H, W], as they stand in the file."""
    return np.ascontiguousarray(load_npz(config.shard).test.images.transpose(0, 3, 1, 2))


def check(config: SiloConfig, probabilities: np.ndarray[Any, Any], metadata: str) -> None:
    expected = load_model(config.runs / "autumn").classify(config.shard)
    assert probabilities.argmax(axis=1).tolist() == [one.label for one in expected]
    assert probabilities.max(axis=1) == pytest.approx([one.probability for one in expected], abs=1e-5)
    told = json.loads(metadata)
    assert told["class_names"] == list(load_npz(config.shard).class_names)
    assert (told["run"], told["silo"], told["synthetic"]) == ("autumn", "hospital1", True)
    assert "uint8 [n, 3, 16, 16]" in told["input"]
    assert "not a medical device" in told["use"]


def test_onnx_takes_pixels_as_they_are_and_says_what_the_model_says(
    config: SiloConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Read by onnxruntime alone, as another program would; any number of images at a time."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="this needs medsilo[onnx]")
    path = tmp_path / "model.onnx"
    words = ["silo", "export", "-c", str(config.shard.parent / "hospital1.yaml"), "--out", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert not ending.value.code
    assert "on 30 test images its probabilities differ" in capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    pixels = raw_pixels(config)
    (together,) = session.run(["probabilities"], {"images": pixels})
    one_by_one = [session.run(["probabilities"], {"images": pixels[n : n + 1]})[0] for n in range(len(pixels))]
    assert np.allclose(np.concatenate(one_by_one), together, atol=1e-6)
    check(config, together, session.get_modelmeta().custom_metadata_map["medsilo"])


def test_pytorchs_own_format_says_what_the_model_says(config: SiloConfig, tmp_path: Path) -> None:
    made = export(config, tmp_path / "model.pt2", ExportFormat.PT2)
    assert (made.images, made.path) == (30, tmp_path / "model.pt2")
    assert made.difference <= 1e-6
    extra = {"medsilo": ""}
    program = torch.export.load(made.path, extra_files=extra)
    with torch.inference_mode():
        _, probabilities = program.module()(torch.from_numpy(raw_pixels(config)))
    check(config, probabilities.numpy(), extra["medsilo"])


def test_an_export_that_says_something_else_is_not_written(
    config: SiloConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporting._read_pt2

    def wrong(shift: float) -> Any:
        def read(content: bytes) -> Any:
            answer = real(content)

            def shifted(pixels: Any) -> Any:
                logits, probabilities = answer(pixels)
                return logits, probabilities + shift

            return shifted

        return read

    for shift in (2e-4, np.nan):
        monkeypatch.setattr(exporting, "_read_pt2", wrong(shift))
        with pytest.raises(DataError, match="says something else"):
            export(config, tmp_path / "model.pt2", ExportFormat.PT2)
    assert list(tmp_path.iterdir()) == []


def test_without_the_packages_the_way_out_is_named(
    config: SiloConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigurationError, match=r"medsilo\[onnx\]"):
        export(config, tmp_path / "model.onnx", ExportFormat.ONNX)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named(config: SiloConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        export(config, tmp_path / "no-such-folder" / "model.pt2", ExportFormat.PT2)
