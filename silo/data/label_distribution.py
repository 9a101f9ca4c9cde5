"""Pictures of a federation's data, drawn to files without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from medsilo.algorithms.datasets import ImageDataset, written_whole
from medsilo.privacy.errors import ConfigurationError

_INK = "#1d2733"
_MUTED = "#66717f"
_GRID = "#e4e8ed"
_BUBBLE = "#2f6f9f"
_WARNING = "#a8380f"
_CELL, _RIGHT, _TOP = 0.62, 0.35, 0.95  # inches


def draw_label_distribution(shards: Sequence[ImageDataset], path: Path, *, title: str | None = None) -> None:
    """Draws how many training images of each class each silo has, as a PNG.

    Silos are columns, classes are rows; a circle's area is proportional to the number of images, which is
    written in it or, where it is small, beside it. A synthetic set is marked as such in the title.

    Args:
        shards: the silos' shards, with the same class names; at least one.
        path: the PNG file to write; it appears whole or not at all.
        title: what to call the data set; the first shard's source when None.

    Raises:
        ConfigurationError: there are no shards, or their class names differ.
        DataError: the file cannot be written.
    """
    if not shards:
        raise ConfigurationError("there are no shards to draw; give at least one")
    class_names = shards[0].class_names
    if any(shard.class_names != class_names for shard in shards):
        raise ConfigurationError(f"{path}: the shards have different classes; draw shards of one data set")
    counts = np.stack([shard.train.counts(len(class_names)) for shard in shards], axis=1)
    names = [shard.name for shard in shards]
    room = _room_for(names, class_names)
    figure = Figure(figsize=(room.width, room.height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(room.fractions)
    _draw_grid(axes, names, class_names, crowded=room.crowded)
    _draw_circles(axes, counts)
    _write_heading(figure, room, shards, title)
    with written_whole(path) as file:
        # Without the software's version in it, the same shards give the same bytes.
        figure.savefig(file, format="png", metadata={"Software": None})


@dataclass(frozen=True)
class _Room:
    """Sizes in inches. ``crowded``: the silos' names do not fit side by side, and are written aslant."""

    left: float
    bottom: float
    grid_width: float
    grid_height: float
    crowded: bool

    @property
    def width(self) -> float:
        return self.left + self.grid_width + _RIGHT

    @property
    def height(self) -> float:
        return self.bottom + self.grid_height + _TOP

    @property
    def fractions(self) -> tuple[float, float, float, float]:
        """The grid's left, bottom, width and height, of the whole picture."""
        w, h = self.width, self.height
        return self.left / w, self.bottom / h, self.grid_width / w, self.grid_height / h


def _room_for(names: Sequence[str], class_names: Sequence[str]) -> _Room:
    longest = max(len(name) for name in names)
    grid_width = max(len(names) * _CELL, 5.2)
    crowded = longest * 0.078 > grid_width / len(names)
    return _Room(
        left=0.35 + 0.083 * max(len(name) for name in class_names),
        bottom=0.3 + 0.06 * longest if crowded else 0.45,
        grid_width=grid_width,
        grid_height=len(class_names) * _CELL,
        crowded=crowded,
    )


def _draw_grid(axes: Axes, names: Sequence[str], class_names: Sequence[str], *, crowded: bool) -> None:
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(len(class_names) - 0.5, -0.5)
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=45 if crowded else 0,
        ha="right" if crowded else "center",
        rotation_mode="anchor",
        fontsize=9,
        color=_INK,
    )
    axes.set_yticks(range(len(class_names)), class_names, fontsize=9, color=_INK)
    axes.tick_params(length=0, pad=6)
    axes.set_xticks(np.arange(-0.5, len(names)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(class_names)), minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color=_GRID, linewidth=0.8, zorder=0)
    axes.spines[:].set_visible(False)


def _draw_circles(axes: Axes, counts: npt.NDArray[np.int64]) -> None:
    """``counts``: [classes, silos]."""
    rows, columns = np.indices(counts.shape)
    fraction = counts / max(1, int(counts.max()))
    diameter = 0.92 * _CELL * 72 * np.sqrt(fraction)  # points
    colours = [to_rgba(_BUBBLE, 0.35 + 0.65 * value) for value in fraction.ravel()]
    axes.scatter(columns.ravel(), rows.ravel(), s=diameter.ravel() ** 2, c=colours, linewidths=0, zorder=2)
    for (row, column), count in np.ndenumerate(counts):
        if not count:
            continue
        text = f"{count}"
        inside = diameter[row, column] > 4.6 * len(text) + 3
        axes.annotate(
            text,
            (column, row),
            xytext=(0, 0 if inside else -diameter[row, column] / 2 - 4.5),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if inside and fraction[row, column] > 0.5 else _INK,
            zorder=3,
        )


def _write_heading(figure: Figure, room: _Room, shards: Sequence[ImageDataset], title: str | None) -> None:
    synthetic = any(shard.synthetic for shard in shards)
    heading = title if title is not None else shards[0].source
    if synthetic:
        heading = f"SYNTHETIC DATA: {heading}"
    letters = int((room.width - 0.5) / 0.12)
    if len(heading) > letters:
        heading = f"{heading[: letters - 1]}…"
    totals = [len(shard.train) for shard in shards]
    each = f"{totals[0]:,}" if len(set(totals)) == 1 else f"{min(totals):,} to {max(totals):,}"
    plural = "hospitals" if len(shards) > 1 else "hospital"
    figure.text(
        0.2 / room.width,
        1 - 0.34 / room.height,
        heading,
        fontsize=13,
        fontweight="bold",
        color=_WARNING if synthetic else _INK,
        va="center",
    )
    figure.text(
        0.2 / room.width,
        1 - 0.64 / room.height,
        f"Training images of each class at {len(shards)} {plural}, {each} each; area is the number of images",
        fontsize=9.5,
        color=_MUTED,
        va="center",
    )
