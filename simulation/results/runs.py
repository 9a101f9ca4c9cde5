"""The finished runs of an experiment, read back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from medsilo.privacy.errors import DataError
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.execution import DIRECTIONS, ROUNDS, RUN, read_run
from medsilo.simulation.experiment import data_name, section_name

LAST = 10


MEGABYTE = 1e6


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, read.

    ``info`` is its ``run.json``; ``columns`` the columns of its ``rounds.parquet``.
    """

    folder: Path
    info: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]

    @property
    def section(self) -> tuple[str, str]:
        """Data set (as the experiment's folder has it), and setting with its participation."""
        return data_name(self.info["data_spec"]), section_name(self.info["setting_name"], self.info["participation"])

    @cached_property
    def curve(self) -> Floats:
        """Percent, by round: the uniform mean over silos of their accuracy after it; NaN where none has test images."""
        rounds = int(self.info["plan"]["rounds"])
        number = np.asarray(self.columns["round"])
        accuracy = np.asarray([np.nan if a is None else a for a in self.columns["accuracy"]], dtype=np.float64)
        curve = np.full(rounds, np.nan)
        for one in range(rounds):
            measured = accuracy[number == one]
            measured = measured[~np.isnan(measured)]
            if len(measured):
                curve[one] = 100 * measured.mean()
        return curve

    @property
    def final(self) -> float:
        """Percent: the same mean of the models that the silos keep, after ``finish``."""
        return self._at_end("accuracy")

    @property
    def final_of_classes(self) -> float:
        """Percent: the uniform mean over silos of these models' mean accuracy of classes; NaN for runs of a release
        that did not measure it."""
        return self._at_end("of_classes")

    def _at_end(self, column: str) -> float:
        rounds = int(self.info["plan"]["rounds"])
        kept = zip(self.columns["round"], self.columns.get(column, ()), strict=False)
        measured = [share for number, share in kept if number == rounds and share is not None]
        return 100 * float(np.mean(measured)) if measured else math.nan

    @property
    def last(self) -> float:
        """Percent: the mean of the curve's last ten rounds; ``final`` of a method whose models are made at the end."""
        return self.final if self.made_at_end else float(self.curve[-LAST:].mean())

    @property
    def best(self) -> float:
        """Percent: the curve's best round; ``final`` of a method whose models are made at the end."""
        return self.final if self.made_at_end else float(self.curve.max())

    @property
    def made_at_end(self) -> bool:
        """See ``Method.made_at_end``."""
        return bool(self.info.get("made_at_end", False))

    @cached_property
    def megabytes(self) -> dict[str, dict[Exposure, float]]:
        """By direction and exposure class: MB (10^6 bytes) for the whole run, the mean over silos."""
        silos = len(set(self.columns["silo"]))
        found: dict[str, dict[Exposure, float]] = {direction: {} for direction in DIRECTIONS}
        for name, sizes in self.columns.items():
            direction, _, exposure = name.partition("_")
            if direction in found and exposure in Exposure.__members__:
                found[direction][Exposure(exposure)] = sum(sizes) / silos / MEGABYTE
        return found


def read_runs(folder: Path) -> list[FinishedRun]:
    """The finished runs of an experiment; raises ``DataError`` if there are none."""
    found = []
    for path in sorted(folder.glob(f"*/*/*/seed-*/{RUN}")):
        info = read_run(path.parent)
        if info is None or not info["finished"]:
            continue
        try:
            columns = pq.read_table(path.parent / ROUNDS).to_pydict()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path.parent / ROUNDS}: cannot be read ({error}); delete {path.parent} and run it again"
            ) from None
        found.append(FinishedRun(path.parent, info, columns))
    if not found:
        raise DataError(f"{folder}: holds no finished runs; start them with `simulation run`")
    return found
