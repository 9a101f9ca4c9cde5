"""The ``simulation`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privacy.console import application, output
from privacy.console import run as run_app
from simulation.experiment import ExperimentConfig, run_experiment
from simulation.results import draw, markdown, read_runs, tabulate

app = application("Experiments: the daemons' methods with no network.")
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The experiment (YAML).")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the runs' files.")]


@app.command()
def run(
    config: Config,
    data: Annotated[str, typer.Option("--data", help="pathmnist, synthetic, or a path to an .npz.")],
    runs: Runs = Path("runs"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Runs at the same time.")] = 2,
) -> None:
    """Do what is not yet done of an experiment."""
    experiment = ExperimentConfig.read(config)
    run_experiment(experiment, data, runs / experiment.name, workers=workers, console=out)


@app.command()
def results(
    config: Config,
    runs: Runs = Path("runs"),
    to: Annotated[Path, typer.Option("--out", help="Folder for the page and the picture.")] = Path("docs/results"),
) -> None:
    """Turn finished runs into a table and learning curves."""
    experiment = ExperimentConfig.read(config)
    found = read_runs(runs / experiment.name)
    rows = tabulate(found)
    to.mkdir(parents=True, exist_ok=True)
    name = found[0]["data"]
    source = name if name == "pathmnist" else "synthetic" if found[0]["synthetic"] else f"{name}.npz"
    command = f"simulation run --config {config} --data {source}\nsimulation results --config {config}"
    page = markdown(found, rows, command)
    (to / f"{experiment.name}.md").write_text(page, encoding="utf-8")
    draw(found, rows, to / f"{experiment.name}.png")
    out.print(page, markup=False)


def main() -> None:
    """Entry point."""
    run_app(app)
