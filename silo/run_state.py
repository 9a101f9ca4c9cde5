"""What a silo keeps of a run: the method's memory, the personalised model, what was measured.

A round's results appear together: files are written under new names and made durable, then ``progress.json``
names them, in one atomic step. A silo that is killed at any moment finds the round before or the round after.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms.datasets import ImageDataset
from algorithms.method import PERSONAL, Memory
from privacy.durable import write_atomically
from privacy.errors import DataError
from privacy.plan import RunPlan
from silo.training import Measurement

MODEL = "model.safetensors"
DESCRIPTION = "model.json"
RESULTS = "results.json"
_PROGRESS = "progress.json"


class Measured(BaseModel):
    """The personalised model on the silo's own test images after ``rounds`` rounds; 0: before any training. ``shared``:
    see ``Measurement``."""

    rounds: int
    accuracy: float
    loss: float
    shared: float | None = None


class _Progress(BaseModel):
    model_config = ConfigDict(extra="forbid")
    plan_sha256: str
    trained_rounds: int
    finished: bool
    files: dict[str, Annotated[str, Field(pattern=r"^[^/\x00]+\.safetensors$")]]
    measured: list[Measured]
    received: dict[str, str] = {}


class RunState:
    """The folder of one run. ``trained_rounds`` counts the rounds up to and including the last one trained."""

    def __init__(self, folder: Path, plan: RunPlan, silo: str, dataset: ImageDataset) -> None:
        self.folder = folder
        self._plan = plan
        self._silo = silo
        self._dataset = dataset
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._progress = self._read()
        write_atomically(folder / "plan.json", plan.model_dump_json(indent=2).encode())
        if self._progress.files:
            self._show()

    @property
    def trained_rounds(self) -> int:
        """One more than the last round trained here; 0 before the first."""
        return self._progress.trained_rounds

    @property
    def finished(self) -> bool:
        """Whether the run's end has been taken in."""
        return self._progress.finished

    @property
    def measured(self) -> list[Measured]:
        """What was measured so far, in order."""
        return self._progress.measured

    @property
    def received(self) -> dict[str, str]:
        """SHA-256 (hex) of what the coordinator gave: the starting model, and what the last round was trained from."""
        return self._progress.received

    def memory(self) -> Memory:
        """The method's memory as it was saved last; empty before the first round."""
        memory: Memory = {}
        for group, name in self._progress.files.items():
            try:
                memory[group] = load_file(self.folder / name)
            except (OSError, SafetensorError) as error:
                raise self._damaged(self.folder / name, str(error)) from None
        return memory

    def save(
        self,
        memory: Memory,
        *,
        trained_rounds: int,
        measurements: Mapping[int, Measurement | None],
        received: Mapping[str, str] | None = None,
        finished: bool = False,
    ) -> None:
        """Keeps a round's outcome; ``measurements`` by number of rounds behind them, ``received`` as the property."""
        files = {}
        for group, state in memory.items():
            name = f"{group}-{trained_rounds:06d}{'-end' if finished else ''}.safetensors"
            self._write(name, state)
            files[group] = name
        old = set(self._progress.files.values()) - set(files.values())
        measured = list(self._progress.measured)
        for rounds, measurement in measurements.items():
            if measurement is not None:
                measured.append(Measured(rounds=rounds, **vars(measurement)))
        self._progress = _Progress(
            plan_sha256=self._plan.sha256.hex(),
            trained_rounds=trained_rounds,
            finished=finished,
            files=files,
            measured=measured,
            received=dict(received or {}),
        )
        write_atomically(self.folder / _PROGRESS, self._progress.model_dump_json(indent=2).encode())
        self._show()
        for name in old:
            (self.folder / name).unlink(missing_ok=True)

    def _read(self) -> _Progress:
        path = self.folder / _PROGRESS
        fresh = _Progress(plan_sha256=self._plan.sha256.hex(), trained_rounds=0, finished=False, files={}, measured=[])
        if not path.exists():
            return fresh
        try:
            progress = _Progress.model_validate_json(path.read_bytes())
            if progress.files and PERSONAL not in progress.files:
                raise ValueError("it names no personalised model")
        except ValueError as error:
            raise self._damaged(path, str(error)) from None
        if progress.plan_sha256 != self._plan.sha256.hex():
            raise DataError(
                f"{self.folder} holds a run of the same name with another plan; move it away, or ask the coordinator "
                "to give the new run another name"
            )
        return progress

    def _damaged(self, path: Path, why: str) -> DataError:
        return DataError(
            f"{path}: cannot be read ({why}); restore the state folder from a backup, or move {self.folder} away to "
            "start this run anew at this silo"
        )

    def _write(self, name: str, state: Mapping[str, Tensor]) -> None:
        path = self.folder / name
        try:
            save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
        except SafetensorError as error:
            if number := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
            raise
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def _show(self) -> None:
        """Gives the personalised model its lasting name, without writing its bytes again."""
        link = self.folder / f".{MODEL}.new"
        link.unlink(missing_ok=True)
        source = self.folder / self._progress.files[PERSONAL]
        try:
            os.link(source, link)
        except FileNotFoundError:
            raise self._damaged(source, "it is gone") from None
        link.replace(self.folder / MODEL)
        description = describe(self._plan, self._silo, self._dataset)
        description["rounds_trained"] = self.trained_rounds
        description["test_accuracy"] = self.measured[-1].accuracy if self.measured else None
        write_atomically(self.folder / DESCRIPTION, json.dumps(description, indent=2).encode())
        results = {
            "run": self._plan.run,
            "method": self._plan.method.name,
            "silo": self._silo,
            "data": self._dataset.name,
            "synthetic": self._dataset.synthetic,
            "test_images": len(self._dataset.test),
            "measured": [m.model_dump(exclude_none=True) for m in self.measured],
        }
        write_atomically(self.folder / RESULTS, json.dumps(results, indent=2).encode())


def has_ended(folder: Path, plan_sha256: str) -> bool:
    """Whether a folder holds the outcome of a whole run with this plan."""
    try:
        progress = _Progress.model_validate_json((folder / _PROGRESS).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return progress.finished and progress.plan_sha256 == plan_sha256


def describe(plan: RunPlan, silo: str, dataset: ImageDataset) -> dict[str, Any]:
    """How to load a personalised model, and what it is."""
    return {
        "load": f"algorithms.models.build(ModelPlan(**architecture)), then load_state_dict of {MODEL} (safetensors)",
        "architecture": plan.model.model_dump(mode="json"),
        "pixels": "uint8 RGB or grey, channels first, scaled as (x / 255 - 0.5) / 0.5",
        "class_names": list(dataset.class_names),
        "silo": silo,
        "federation": plan.federation,
        "run": plan.run,
        "method": plan.method.model_dump(mode="json"),
        "plan_sha256": plan.sha256.hex(),
        "data": dataset.name,
        "data_sha256": dataset.fingerprint,
        "synthetic": dataset.synthetic,
    }
