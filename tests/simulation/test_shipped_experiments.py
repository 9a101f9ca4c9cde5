"""The experiment files that come with Medsilo can be run as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medsilo.privacy.consent.plan import TrainingPlan
from medsilo.simulation.execution import execute, read_run
from medsilo.simulation.experiment import ExperimentConfig, runs

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_experiment_is_valid_and_its_first_lines_say_how_to_run_it(path: Path, tmp_path: Path) -> None:
    config = ExperimentConfig.read(path)
    assert config.name == path.stem
    assert f"simulation run     --config configs/experiments/{path.name}" in path.read_text()
    assert runs(config, ("synthetic",), tmp_path)


def test_the_pathmnist_experiment_runs_on_a_file_in_the_official_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MedMNIST's keys, shapes and types, in its place, but random images, enough of each class for 20 silos of 500.

    It must not pass for PathMNIST: it has another MD5.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 14_400), ("val", 90), ("test", 3_600)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % 9).astype(np.uint8)[:, np.newaxis]
    (tmp_path / ".medmnist").mkdir()
    np.savez(tmp_path / ".medmnist" / "pathmnist.npz", **arrays)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)

    config = ExperimentConfig.read(next(path for path in SHIPPED if path.stem == "pathmnist-table3"))
    short = config.model_copy(update={"rounds": 1, "training": TrainingPlan(epochs=1), "seeds": (1,)})
    labels = [run.variant.label for run in runs(short, ("pathmnist",), tmp_path / "runs")]
    assert "diversifed-temperature=0.5" in labels
    run = runs(short, ("pathmnist",), tmp_path / "runs")[0]
    outcome = execute(run, tmp_path / "stop")
    assert outcome.status == "done", outcome
    written = read_run(run.folder)
    assert written is not None
    assert written["data"] == "unofficial pathmnist"
    assert written["plan"]["model"] == {"name": "diversifed-cnn", "input_shape": [3, 28, 28], "classes": 9}
