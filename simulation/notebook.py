"""Experiments from Python: their runs done, and their results as pandas tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from medsilo.privacy.errors import ConfigurationError
from medsilo.simulation.experiment import ExperimentConfig
from medsilo.simulation.results.runs import read_runs
from medsilo.simulation.results.table import (
    EXPOSURE_COLUMNS,
    Section,
    accuracy_columns,
    accuracy_rows,
    exposure_rows,
    tabulate,
)
from medsilo.simulation.scheduling import run_experiment

Experiment = ExperimentConfig | Mapping[str, Any] | str | Path
"""An experiment, the fields of one as in its file, or the path of its file (YAML)."""


@dataclass(frozen=True)
class Results:
    """An experiment's finished runs as tables.

    Attributes:
        accuracy: a row a method, setting and data set, as on the page of ``simulation results``: accuracies in percent,
            mean and (population) standard deviation over seeds.
        exposure: MB (10^6 bytes) of tensors per silo for the whole run, by direction and exposure class.
        rounds: a row a run, round (from 0) and silo: ``accuracy`` (0 to 1) and ``loss`` on the silo's own test images,
            and bytes of tensors by exposure class, ``up_CLASS`` and ``down_CLASS``.

    >>> from medsilo import simulate
    >>> results = simulate("configs/experiments/synthetic-small.yaml", progress=False)
    >>> results.synthetic  # generated images: nothing here says anything about patients
    True
    """

    accuracy: pd.DataFrame
    exposure: pd.DataFrame
    rounds: pd.DataFrame

    @property
    def synthetic(self) -> bool:
        """Whether any of it is of generated images, on which no result says anything about patients."""
        return bool(self.accuracy["synthetic"].any())


def simulate(
    experiment: Experiment,
    *,
    data: str | Sequence[str] = (),
    runs: str | Path = "runs",
    workers: int = 2,
    progress: bool = True,
) -> Results:
    """Does what is not yet done of an experiment, as ``simulation run``, and reads its results.

    Runs are kept: the same call again reads them, and after an interruption it goes on.

    Args:
        experiment: what to run.
        data: data sets in place of the experiment's: ``pathmnist``, ``synthetic`` or paths of ``.npz`` files.
        runs: folder in which experiments' runs are kept.
        workers: runs at the same time, each in a process with one thread. In a script, call it below
            ``if __name__ == "__main__":``, as ``multiprocessing`` asks for.
        progress: whether lines say how far it is.

    Raises:
        ConfigurationError: the experiment cannot be run, or the folder holds another's runs.
        MedsiloError: runs failed; the others are done.

    >>> from medsilo import simulate
    >>> results = simulate("configs/experiments/synthetic-small.yaml", progress=False)
    >>> sorted(results.exposure["direction"].unique())
    ['down', 'up']
    """
    config = _read(experiment)
    specs = (data,) if isinstance(data, str) else tuple(data)
    # A notebook's cell is no terminal, and what Rich draws there needs a package more.
    console = Console(quiet=not progress, highlight=False, force_jupyter=False)
    run_experiment(config, specs, Path(runs) / config.name, workers=workers, console=console)
    return read_results(config, runs=runs)


def read_results(experiment: Experiment, *, runs: str | Path = "runs") -> Results:
    """The finished runs of an experiment, however many there are; raises ``DataError`` if there are none.

    >>> from medsilo import read_results
    >>> len(read_results("configs/experiments/synthetic-small.yaml").accuracy) > 0
    True
    """
    config = _read(experiment)
    sections = tabulate(read_runs(Path(runs) / config.name), config)
    return Results(
        accuracy=pd.DataFrame(accuracy_rows(sections), columns=accuracy_columns(sections)),
        exposure=pd.DataFrame(exposure_rows(sections), columns=list(EXPOSURE_COLUMNS)),
        rounds=_rounds(sections),
    )


def _read(experiment: Experiment) -> ExperimentConfig:
    if isinstance(experiment, ExperimentConfig):
        experiment.check()
        return experiment
    if not isinstance(experiment, Mapping | str | Path):
        raise ConfigurationError(
            f"an experiment is the path of its file, a mapping of its fields or an ExperimentConfig, not {experiment!r}"
        )
    return (
        ExperimentConfig.of(experiment) if isinstance(experiment, Mapping) else ExperimentConfig.read(Path(experiment))
    )


def _rounds(sections: Sequence[Section]) -> pd.DataFrame:
    tables = []
    for section in sections:
        for run in section.runs:
            names = {"data": section.data, "synthetic": run.info["synthetic"], "setting": section.setting}
            whole = {**names, "method": run.info["label"], "seed": run.info["seed"]}
            tables.append(pd.DataFrame({**whole, **run.columns}))
    found = pd.concat(tables, ignore_index=True)
    sizes = [name for name in found.columns if name.startswith(("up_", "down_"))]
    # A class that a run does not have is one of which it sent nothing.
    return found.fillna(dict.fromkeys(sizes, 0)).astype(dict.fromkeys(sizes, "int64"))
