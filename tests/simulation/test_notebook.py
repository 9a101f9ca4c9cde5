"""What a notebook is given is what the commands write."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from medsilo import read_results
from medsilo.algorithms.datasets import save_npz
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.execution import execute
from medsilo.simulation.experiment import ExperimentConfig
from medsilo.simulation.experiment import runs as runs_of
from medsilo.simulation.results.writing import write_results

FIELDS: dict[str, Any] = {
    "name": "notebook",
    "setting": {"kind": "dirichlet", "silos": 2, "alpha": 1.0, "train_per_silo": 20, "test_per_silo": 10},
    "model": "mlp-64",
    "training": {"epochs": 1, "batch_size": 20},
    "rounds": 2,
    "seeds": [1],
    "methods": [{"name": "local"}, {"name": "fedavg"}],
}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A folder with the experiment's finished runs."""
    save_npz(tmp_path / "few.npz", generate_tissue(seed=1, train=900, test=270))
    config = ExperimentConfig.of(FIELDS)
    for run in runs_of(config, (str(tmp_path / "few.npz"),), tmp_path / "runs" / config.name):
        outcome = execute(run, tmp_path / "stop")
        assert outcome.status == "done", outcome.message
    return tmp_path / "runs"


def test_tables_hold_what_the_commands_files_hold(finished: Path) -> None:
    results = read_results(FIELDS, runs=finished)
    config = ExperimentConfig.of(FIELDS)
    write_results(config, Path("experiment.yaml"), finished, finished / "page")
    for table, name in ((results.accuracy, "notebook.csv"), (results.exposure, "notebook-exposure.csv")):
        with (finished / "page" / name).open() as file:
            rows = list(csv.DictReader(file))
        assert list(table.columns) == list(rows[0])
        assert [[("" if value is None else str(value)) for value in row] for row in table.itertuples(index=False)] == [
            list(row.values()) for row in rows
        ]
    assert results.synthetic, "generated images are called so"
    rounds = results.rounds
    assert len(rounds) == 2 * (3 * 2), "two methods; two rounds and the end, for two silos"
    for method, accuracy in results.accuracy.set_index("method").last10_mean.items():
        trained = rounds[(rounds.method == method) & (rounds["round"] < 2)]
        by_round = trained.groupby("round").accuracy.mean()
        assert math.isclose(100 * by_round.mean(), accuracy)
    sent = rounds.groupby("method")[[name for name in rounds.columns if name.startswith("up_")]].sum().sum(axis=1)
    megabytes = results.exposure[results.exposure.direction == "up"].groupby("method").mb_per_silo.sum()
    assert sent["local"] == 0
    assert math.isclose(sent["fedavg"] / 2 / 1e6, megabytes["fedavg"])


def test_a_wrong_experiment_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"experiment notebook: unknown key `round`; did you mean `rounds`\?"):
        read_results({**FIELDS, "round": 3}, runs=tmp_path)
    with pytest.raises(ConfigurationError, match=r"experiment notebook: methods: .*no-such"):
        read_results({**FIELDS, "methods": [{"name": "no-such"}]}, runs=tmp_path)
    with pytest.raises(DataError, match="holds no finished runs"):
        read_results(FIELDS, runs=tmp_path)
