"""An experiment's pictures: learning curves, accuracy against exposed bytes, silo-to-silo weights over rounds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets import written_whole
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.results.table import Spread, written_size

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Floats = npt.NDArray[np.float64]

_ARROWS = {"up": "↑", "down": "↓"}
_PANELS = 6


def draw_curves(title: str, curves: Mapping[str, Floats], path: Path) -> None:
    """Learning curves: percent by round, the mean over seeds."""
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for index, (label, curve) in enumerate(curves.items()):
        axes.plot(np.arange(1, len(curve) + 1), curve, label=label, linewidth=1.5, **_style(index))
    axes.set_title(f"{title}: mean over seeds", fontsize=11)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean accuracy of the silos, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def draw_privacy(title: str, series: Mapping[str, Sequence[tuple[float, Spread]]], measured: str, path: Path) -> None:
    """Accuracy against ε, a line a method; training without differential privacy stands at the right, as ∞.

    ``series``: by method (ε, (mean, standard deviation)), ε ascending, the last possibly infinite. ``measured``: which
    rounds' mean it is.
    """
    places = sorted({epsilon for points in series.values() for epsilon, _ in points})
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for index, (label, points) in enumerate(series.items()):
        where = [places.index(epsilon) for epsilon, _ in points]
        means, deviations = zip(*(spread for _, spread in points), strict=True)
        axes.errorbar(
            where, means, yerr=_whiskers(deviations), label=label, marker="o", capsize=2, linewidth=1.5, **_style(index)
        )
    names = ["∞\n(no noise)" if np.isinf(epsilon) else f"{epsilon:g}" for epsilon in places]
    axes.set_xticks(range(len(places)), names)
    axes.set_title(f"{title}: mean over seeds", fontsize=11)
    axes.set_xlabel("ε of the run (more is less private)")
    axes.set_ylabel(f"accuracy, {measured}, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def draw_exposure(
    title: str,
    points: Mapping[str, tuple[Spread, Mapping[str, Mapping[Exposure, float]]]],
    measured: str,
    path: Path,
) -> None:
    """Methods by accuracy, best first; beside each the MB per silo for the whole run in every class and direction.

    ``points``: by method, accuracy (mean, standard deviation) and MB by direction and class. ``measured``: which
    rounds' mean the accuracy is.
    """
    columns = [
        (direction, exposure)
        for direction in _ARROWS
        for exposure in Exposure
        if any(megabytes[direction].get(exposure) for _, megabytes in points.values())
    ]
    ranked = sorted(points.items(), key=lambda item: -item[1][0][0])
    sizes = np.array([[m[direction].get(e, 0.0) for direction, e in columns] for _, (_, m) in ranked])
    height, width = len(ranked), max(1, len(columns))
    figure, (bars, grid) = plt.subplots(
        1,
        2,
        figsize=(5.5 + 0.62 * width, 2.9 + 0.27 * height),
        width_ratios=(3.2, 0.62 * width),
        layout="constrained",
    )
    rows = np.arange(height)
    means, deviations = zip(*(accuracy for _, (accuracy, _) in ranked), strict=True)
    bars.barh(rows, means, xerr=_whiskers(deviations), color="0.6", height=0.7, error_kw={"linewidth": 1, "capsize": 2})
    bars.set_yticks(rows, [label for label, _ in ranked], fontsize=8)
    bars.set_ylim(height - 0.5, -0.5)
    bars.set_xlabel(f"accuracy, {measured}, %", fontsize=8)
    bars.tick_params(axis="x", labelsize=7)
    grid.set_xlim(-0.5, width - 0.5)
    grid.set_ylim(height - 0.5, -0.5)
    if columns:
        # The logarithm: a count of images has a millionth of a model's bytes and exposes something all the same.
        shown = np.where(sizes > 0, np.log10(np.maximum(sizes, 1e-9)), np.nan)
        grid.imshow(shown, cmap="YlOrRd", aspect="auto")
        middle = (np.nanmin(shown) + np.nanmax(shown)) / 2
        for (row, column), size in np.ndenumerate(sizes):
            if size > 0:
                dark = shown[row, column] > middle
                grid.text(
                    column,
                    row,
                    written_size(size, 2),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white" if dark else "black",
                )
    names = [f"{_ARROWS[direction]} {exposure}" for direction, exposure in columns]
    grid.set_xticks(range(len(columns)), names, rotation=90, fontsize=7)
    grid.set_yticks([])
    figure.suptitle(
        f"{title}\naccuracy, and MB per silo for the whole run (↑ sent by a silo, ↓ sent to it)", fontsize=10
    )
    _save(figure, path)


def draw_weights(title: str, weights: Sequence[tuple[int, Sequence[str], Floats]], path: Path) -> None:
    """Silo-to-silo weights over rounds: row i, column j is how much of j's model silo i was given.

    The diagonal (a silo's own model) is left grey: it would drown the rest. Red pulls i towards j, blue pushes it off.
    """
    chosen = np.unique(np.linspace(0, len(weights) - 1, _PANELS).round().astype(int))
    shown = [weights[index] for index in chosen]
    others = [np.abs(matrix[~np.eye(len(matrix), dtype=bool)]) for _, _, matrix in shown]
    limit = max((float(values.max()) for values in others if values.size), default=0.0) or 1.0
    pushes = any((matrix < 0).any() for _, _, matrix in shown)
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(1.2 + 3.2 * columns, 0.9 + 3.2 * rows), layout="constrained", squeeze=False
    )
    image = None
    for axes, (number, silos, matrix) in zip(grid.flat, shown, strict=False):
        hidden = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        axes.set_facecolor("0.85")
        image = axes.imshow(hidden, cmap="RdBu_r" if pushes else "Reds", vmin=-limit if pushes else 0.0, vmax=limit)
        _name_silos(axes, silos)
        axes.set_title(f"round {number + 1}", fontsize=9)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 14 + 33 * columns, break_long_words=True)), fontsize=11)
    figure.supylabel("silo that is given a model", fontsize=9)
    figure.supxlabel("whose model", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.8).set_label(
            "weight (above 0 pulled towards, below 0 pushed off)", fontsize=8
        )
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


def _whiskers(deviations: Sequence[float | None]) -> list[float] | None:
    """What matplotlib draws of standard deviations, of which one seed has none."""
    return [deviation or 0 for deviation in deviations] if any(deviations) else None


def _save(figure: Figure, path: Path) -> None:
    with written_whole(path) as file:
        # Without the software's version in it, the same runs give the same bytes.
        figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
    plt.close(figure)
