"""An experiment's pictures: learning curves, accuracy against exposed bytes, silo-to-silo weights over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

from algorithms.datasets import written_whole
from privacy.exposure import Exposure

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_ARROWS = {"up": "sent by a silo", "down": "sent to a silo"}
_PANELS = 6


def draw_curves(title: str, curves: Mapping[str, Floats], path: Path) -> None:
    """Learning curves: percent by round, the mean over seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for index, (label, curve) in enumerate(curves.items()):
        axes.plot(np.arange(1, len(curve) + 1), curve, label=label, linewidth=1.5, **_style(index))
    axes.set_title(f"{title}: mean over seeds", fontsize=11)
    axes.set_xlabel("round")
    axes.set_ylabel("mean accuracy of the silos, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def draw_exposure(
    title: str,
    points: Mapping[str, tuple[tuple[float, float], Mapping[str, Mapping[Exposure, float]]]],
    path: Path,
) -> None:
    """A panel an exposure class and direction: MB per silo for the whole run (log, 0 at the left), accuracy upwards.

    ``points``: by method, accuracy (mean, standard deviation) and MB by direction and class.
    """
    panels = [
        (direction, exposure)
        for direction in _ARROWS
        for exposure in Exposure
        if any(megabytes[direction].get(exposure) for _, megabytes in points.values())
    ] or [("up", Exposure.MODEL_PARAMETERS_EXTRACTOR)]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(1.5 + 3.6 * columns, 0.9 + 2.9 * rows), layout="constrained", squeeze=False, sharey=True
    )
    for axes, (direction, exposure) in zip(grid.flat, panels, strict=False):
        sizes = [megabytes[direction].get(exposure, 0.0) for _, megabytes in points.values()]
        for index, ((label, ((mean, std), _)), size) in enumerate(zip(points.items(), sizes, strict=True)):
            style = {"marker": "osD^vP*X"[index // 10 % 8], "color": f"C{index % 10}"}
            axes.errorbar([size], [mean], yerr=[std], label=label, markersize=6, capsize=2, linestyle="", **style)
        least = min((size for size in sizes if size > 0), default=1.0)
        axes.set_xscale("symlog", linthresh=least / 2)
        axes.set_xlim(-least / 10, 1.6 * max(sizes))
        axes.set_title(f"{exposure}\n{_ARROWS[direction]}", fontsize=8)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=7)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title}: accuracy against exposed bytes", fontsize=11)
    figure.supxlabel("MB per silo, whole run", fontsize=9)
    figure.supylabel("accuracy, last 10 rounds, %", fontsize=9)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    _save(figure, path)


def draw_weights(title: str, weights: Sequence[tuple[int, Sequence[str], Floats]], path: Path) -> None:
    """Silo-to-silo weights over rounds: row i, column j is how much of j's model silo i was given.

    The diagonal (a silo's own model) is left grey: it would drown the rest. Red pulls i towards j, blue pushes it off.
    """
    chosen = np.unique(np.linspace(0, len(weights) - 1, _PANELS).round().astype(int))
    shown = [weights[index] for index in chosen]
    others = [np.abs(matrix[~np.eye(len(matrix), dtype=bool)]) for _, _, matrix in shown]
    limit = max((float(values.max()) for values in others if values.size), default=0.0) or 1.0
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(1.2 + 3.2 * columns, 0.9 + 3.2 * rows), layout="constrained", squeeze=False
    )
    image = None
    for axes, (number, silos, matrix) in zip(grid.flat, shown, strict=False):
        hidden = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        axes.set_facecolor("0.85")
        image = axes.imshow(hidden, cmap="RdBu_r", vmin=-limit, vmax=limit)
        _name_silos(axes, silos)
        axes.set_title(f"round {number + 1}", fontsize=9)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supylabel("silo that is given a model", fontsize=9)
    figure.supxlabel("whose model", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.8, label="weight: above 0 pulled towards, below 0 pushed off")
    _save(figure, path)


def _name_silos(axes: Axes, silos: Sequence[str]) -> None:
    """Numbers, where all names end in one; they fit."""
    short = [name[len(name.rstrip("0123456789")) :] or name for name in silos]
    every = max(1, len(silos) // 10)
    ticks = range(0, len(silos), every)
    names = [short[index] for index in ticks]
    axes.set_xticks(list(ticks), names, fontsize=6)
    axes.set_yticks(list(ticks), names, fontsize=6)


def _style(index: int) -> dict[str, Any]:
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":", "-.")[index // 10 % 4]}


def _save(figure: Figure, path: Path) -> None:
    with written_whole(path) as file:
        # Without the software's version in it, the same runs give the same bytes.
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    plt.close(figure)
