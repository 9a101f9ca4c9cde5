"""The ``simulation`` command."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from medsilo.privacy.party.console import application, out
from medsilo.privacy.party.console import run as run_app
from medsilo.simulation.experiment import ExperimentConfig
from medsilo.simulation.scheduling import run_experiment

app = application("Experiments: the daemons' methods with no network.", program="simulation")

Config = Annotated[Path, typer.Option("--config", "-c", help="The experiment (YAML).")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder in which the experiments' runs are kept.")]


@app.command()
def run(
    config: Config,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="pathmnist, synthetic, or a path to an .npz; may be given several times."),
    ] = None,
    runs: Runs = Path("runs"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Runs at the same time; they share the cores.")] = 2,
    ray: Annotated[
        str | None, typer.Option("--ray", help="A Ray cluster's address (or 'local') to run on instead.")
    ] = None,
) -> None:
    """Do what is not yet done of an experiment. Ctrl-C (or SIGTERM) ends cleanly; the same command goes on."""
    # A batch system ends a job with SIGTERM, and gives it time.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    experiment = ExperimentConfig.read(config)
    run_experiment(experiment, tuple(data or ()), runs / experiment.name, workers=workers, console=out, ray=ray)


@app.command()
def results(
    config: Config,
    runs: Runs = Path("runs"),
    to: Annotated[Path, typer.Option("--out", help="Folder for the page, tables and pictures.")] = Path("docs/results"),
    everything: Annotated[
        bool, typer.Option("--all", help="Also learning curves, silo-to-silo weights, and all figures as JSON.")
    ] = False,
) -> None:
    """Turn finished runs into a page, tables, and a picture of accuracy against exposed bytes, or against ε."""
    from medsilo.simulation.results.writing import write_results

    experiment = ExperimentConfig.read(config)
    page = write_results(experiment, config, runs, to, everything=everything)
    out.print(page.read_text(encoding="utf-8"), markup=False)


def main() -> None:
    """Entry point."""
    run_app(app)
