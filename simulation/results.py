"""From an experiment's runs to a table and learning curves."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from privacy.errors import DataError
from simulation.experiment import label_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAST = 10


@dataclass(frozen=True)
class Row:
    """One method: mean and standard deviation over seeds, in percent, of the silos' uniform mean accuracy.

    ``best`` is the best round (as the papers report it, optimistic: a maximum over noisy measurements), ``last``
    the mean of the last ten rounds, ``wins`` on how many seeds ``last`` is above separate training's.
    """

    label: str
    seeds: int
    best: tuple[float, float]
    last: tuple[float, float]
    curve: np.ndarray
    wins: int | None


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of an experiment; raises ``DataError`` if there are none."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise DataError(f"{folder}: holds no finished runs; start them with `simulation run`")
    return found


def tabulate(found: list[dict[str, Any]]) -> list[Row]:
    """One row a method, in the experiment's order."""
    curves: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for run in found:
        rounds = [100 * float(np.mean(list(silos.values()))) for silos in run["accuracy_per_round"]]
        if run["method"] == "fedavg":
            # Its personal model is the average as received: what a round made is measured at the next one.
            rounds = [*rounds[1:], 100 * float(np.mean(list(run["final_accuracy"].values())))]
        curves[run["label"]][run["seed"]] = np.asarray(rounds)
    order = [label_of(entry) for entry in found[0]["experiment"]["methods"]]
    curves = dict(sorted(curves.items(), key=lambda item: order.index(item[0])))
    alone = curves.get("local", {})
    rows = []
    for label, by_seed in curves.items():
        last = {seed: float(curve[-LAST:].mean()) for seed, curve in by_seed.items()}
        best = [float(curve.max()) for curve in by_seed.values()]
        shared = [seed for seed in last if seed in alone]
        wins = sum(last[seed] > alone[seed][-LAST:].mean() for seed in shared) if label != "local" and shared else None
        rows.append(
            Row(
                label,
                len(by_seed),
                (float(np.mean(best)), float(np.std(best))),
                (float(np.mean(list(last.values()))), float(np.std(list(last.values())))),
                np.mean(list(by_seed.values()), axis=0),
                None if wins is None else int(wins),
            )
        )
    return rows


def markdown(found: list[dict[str, Any]], rows: list[Row], command: str) -> str:
    """The results page: configuration, table, how to repeat it."""
    first = found[0]
    experiment = first["experiment"]
    synthetic = " **Synthetic data: no result here says anything about patients.**" if first["synthetic"] else ""
    lines = [
        f"# {experiment['name']}",
        "",
        f"Data: {first['data']} (SHA-256 of the data set version `{first['data_sha256'][:16]}…`).{synthetic}",
        f"Setting: `{json.dumps(experiment['setting'])}`. Model: {experiment['model']}. "
        f"Training: `{json.dumps(experiment['training'])}`. {experiment['rounds']} rounds, "
        f"seeds {', '.join(map(str, experiment['seeds']))}. PyTorch {first['versions']['torch']}.",
        "",
        "Accuracy in percent: the uniform mean over silos of each one's personalised model on its own test images; "
        f"mean ± standard deviation over seeds. Best round is optimistic; the mean of the last {LAST} rounds is not "
        "chosen on test data.",
        "",
        f"| method | seeds | best round | last {LAST} rounds | seeds on which it beats separate training |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        wins = "–" if row.wins is None else f"{row.wins} of {row.seeds}"
        lines.append(
            f"| {row.label} | {row.seeds} | {row.best[0]:.2f} ± {row.best[1]:.2f} | "
            f"{row.last[0]:.2f} ± {row.last[1]:.2f} | {wins} |"
        )
    lines += ["", f"![learning curves]({experiment['name']}.png)", "", "Repeat it:", "", "```", command, "```", ""]
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], rows: list[Row], path: Path) -> None:
    """Learning curves, mean over seeds."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        axes.plot(np.arange(1, len(row.curve) + 1), row.curve, label=row.label, linewidth=1.6)
    first = found[0]
    synthetic = " (synthetic)" if first["synthetic"] else ""
    axes.set_title(f"{first['experiment']['name']}: {first['data']}{synthetic}, mean over seeds")
    axes.set_xlabel("round")
    axes.set_ylabel("mean accuracy of the silos, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
