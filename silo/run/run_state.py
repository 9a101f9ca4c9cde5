"""What a silo keeps of a run: the method's memory, the personalised model (the last one, and the one that did best on
validation images), what was measured.

A round's results appear together: files are written under new names and made durable, then ``progress.json``
names them, in one atomic step. A silo that is killed at any moment finds the round before or the round after.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import PERSONAL, Memory
from medsilo.algorithms.models.given_weights import BACKBONE
from medsilo.algorithms.tensors.files import write_tensors
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DataError
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.data.image_files import is_grey
from medsilo.silo.training.measuring import Measurement

MODEL = "model.safetensors"
DESCRIPTION = "model.json"
RESULTS = "results.json"
_PROGRESS = "progress.json"
# A model that diverges may have no finite loss, and null would not be read again.
_ANY_NUMBER = ConfigDict(ser_json_inf_nan="constants")


class Measured(BaseModel):
    """The personalised model on the silo's own test images after ``rounds`` rounds; 0: before any training. ``shared``:
    see ``Measurement``."""

    model_config = _ANY_NUMBER
    rounds: int
    accuracy: float
    loss: float
    shared: float | None = None


_File = Annotated[str, Field(pattern=r"^[^/\x00]+\.safetensors$")]


class Validated(BaseModel):
    """A personalised model with ``rounds`` of the run's rounds behind it, on the silo's own validation images.
    ``data_sha256``: of the shard that they are from."""

    model_config = _ANY_NUMBER
    rounds: int
    accuracy: float
    loss: float
    data_sha256: str
    file: _File


class Early(BaseModel):
    """An ``EarlyEnd``; ``reason`` is its name."""

    rounds: int
    reason: str

    def read(self) -> EarlyEnd:
        """As it is everywhere else."""
        return EarlyEnd(self.rounds, EndReason.__members__.get(self.reason, EndReason.UNKNOWN))


class Progress(BaseModel):
    """``progress.json``. ``rounds``: of the run's rounds, those behind the personalised model; None in folders of
    earlier releases. ``last``, ``best``: the model as it is, and as it was best; without validation images neither.
    ``frozen``: the file of what of the model is frozen, and ``plain``: of the model with it; None where nothing is, and
    the method's memory holds the whole model."""

    model_config = ConfigDict(extra="forbid")
    plan_sha256: str
    trained_rounds: int
    finished: bool
    files: dict[str, _File]
    measured: list[Measured]
    received: dict[str, str] = {}
    rounds: int | None = None
    last: Validated | None = None
    best: Validated | None = None
    early_end: Early | None = None
    frozen: _File | None = None
    plain: _File | None = None

    @property
    def model(self) -> str:
        """The file of the personalised model as programs load it."""
        return self.plain or self.files[PERSONAL]


class RunState:
    """The folder of one run. ``trained_rounds`` counts the rounds up to and including the last one trained."""

    def __init__(self, folder: Path, plan: RunPlan, silo: str, dataset: ImageDataset) -> None:
        self.folder = folder
        self._plan = plan
        self._silo = silo
        self._dataset = dataset
        self._colour = "grey" if all(is_grey(image) for image in dataset.train.images) else "colour"
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
    def rounds(self) -> int:
        """Of the run's rounds, those behind the personalised model."""
        return self.trained_rounds if self._progress.rounds is None else self._progress.rounds

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
        return {group: self._tensors(name) for group, name in self._progress.files.items()}

    def frozen(self) -> dict[str, Tensor]:
        """What of the model is frozen; empty before the first round, or where nothing is."""
        return {} if self._progress.frozen is None else self._tensors(self._progress.frozen)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return _in_order(self.folder / name)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise self._damaged(self.folder / name, str(error)) from None

    def save(
        self,
        memory: Memory,
        *,
        trained_rounds: int,
        frozen: Mapping[str, Tensor] | None = None,
        plain: Mapping[str, Tensor] | None = None,
        measurements: Mapping[int, Measurement | None],
        received: Mapping[str, str] | None = None,
        finished: bool = False,
        rounds: int | None = None,
        validation: Measurement | None = None,
        early_end: EarlyEnd | None = None,
    ) -> None:
        """Keeps a round's outcome; ``measurements`` by number of rounds behind them, ``received`` as the property.

        ``frozen``: what of the model is frozen, written once; ``plain``: the personalised model with it, where anything
        is. ``rounds``: of the run's rounds, those behind the personalised model; ``trained_rounds`` by default.
        ``validation``: that model on the validation images; the best one stays beside the last, as a second name of
        the same bytes while they are the same. ``early_end``: why the run has ended before its plan's last round.
        """
        rounds = trained_rounds if rounds is None else rounds
        suffix = f"{trained_rounds:06d}{'-end' if finished else ''}"
        files = {group: self._written(f"{group}-{suffix}", state) for group, state in memory.items()}
        kept_frozen, shown = self._progress.frozen, None
        if frozen:
            kept_frozen = kept_frozen or self._written("frozen", frozen)
            shown = self._written(f"model-{suffix}", plain or {})
        last, best = self._validated(shown or files[PERSONAL], rounds, validation)
        measured = list(self._progress.measured)
        for number, measurement in measurements.items():
            if measurement is not None:
                measured.append(Measured(rounds=number, **vars(measurement)))
        before = _kept(self._progress)
        self._progress = Progress(
            plan_sha256=self._plan.sha256.hex(),
            trained_rounds=trained_rounds,
            finished=finished,
            files=files,
            measured=measured,
            received=dict(received or {}),
            rounds=rounds,
            last=last,
            best=best,
            early_end=Early(rounds=early_end.rounds, reason=early_end.reason.name) if early_end else None,
            frozen=kept_frozen,
            plain=shown,
        )
        write_atomically(self.folder / _PROGRESS, self._progress.model_dump_json(indent=2).encode())
        self._show()
        for name in before - _kept(self._progress):
            (self.folder / name).unlink(missing_ok=True)

    def _written(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Writes a file of tensors, and returns its name."""
        write_tensors(self.folder / f"{name}.safetensors", tensors)
        return f"{name}.safetensors"

    def _validated(
        self, file: str, rounds: int, found: Measurement | None
    ) -> tuple[Validated | None, Validated | None]:
        """The last model's figures, and the best one's, whose file is there."""
        best = self._progress.best
        if found is None:
            return None, best
        last = Validated(
            rounds=rounds,
            accuracy=found.accuracy,
            loss=found.loss,
            data_sha256=self._dataset.fingerprint,
            file=file,
        )
        comparable = best is not None and best.data_sha256 == last.data_sha256
        if best is not None and comparable and (best.accuracy, -best.loss) >= (last.accuracy, -last.loss):
            return last, best
        if not rounds:  # the starting model is not the outcome of any training
            return last, best
        name = f"best-{rounds:06d}.safetensors"
        give_name(self.folder / file, self.folder / name)
        return last, last.model_copy(update={"file": name})

    def _read(self) -> Progress:
        path = self.folder / _PROGRESS
        fresh = Progress(plan_sha256=self._plan.sha256.hex(), trained_rounds=0, finished=False, files={}, measured=[])
        if not path.exists():
            return fresh
        try:
            progress = Progress.model_validate_json(path.read_bytes())
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
            f"{path}: cannot be read ({why}). Look whether the disk is well and this account may read the file. If it "
            f"is lost, move {self.folder} away: the same command starts this run anew at this silo (what is trained "
            "again under differential privacy is charged again). Only a backup of that folder has what was learnt here"
        )

    def _show(self) -> None:
        """Gives the personalised model its lasting name, without writing its bytes again."""
        source = self.folder / self._progress.model
        try:
            give_name(source, self.folder / MODEL)
        except FileNotFoundError:
            raise self._damaged(source, "it is gone") from None
        description = describe(self._plan, self._silo, self._dataset)
        description["rounds_trained"] = self.rounds
        description["colour"] = self._colour
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


def _kept(progress: Progress) -> set[str]:
    others = (progress.best.file if progress.best else None, progress.frozen, progress.plain)
    return {*progress.files.values(), *(name for name in others if name is not None)}


def give_name(source: Path, target: Path) -> None:
    """Gives a file a second name, in one step; raises ``FileNotFoundError`` where there is none."""
    link = target.with_name(f".{target.name}.new")
    link.unlink(missing_ok=True)
    os.link(source, link)
    link.replace(target)


def read_progress(folder: Path) -> Progress | None:
    """What a run's folder says of its progress; None where it says nothing that can be read."""
    try:
        return Progress.model_validate_json((folder / _PROGRESS).read_bytes())
    except (OSError, ValueError):
        return None


def _in_order(path: Path) -> dict[str, Tensor]:
    """A file's tensors in the order in which they were given to be saved, which is that of their bytes: an update that
    is made from them again must have the first one's bytes."""
    found = load_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: found[name] for name in file.offset_keys()}


def has_ended(folder: Path, plan_sha256: str) -> bool:
    """Whether a folder holds the outcome of a whole run with this plan."""
    progress = read_progress(folder)
    return progress is not None and progress.finished and progress.plan_sha256 == plan_sha256


def describe(plan: RunPlan, silo: str, dataset: ImageDataset) -> dict[str, Any]:
    """How to load a personalised model, and what it is."""
    weights = ", weights=[the file's folder]" if plan.model.name.startswith(BACKBONE) else ""
    return {
        "load": f"medsilo.algorithms.models.build(ModelPlan(**architecture){weights}), then load_state_dict of "
        f"{MODEL} (safetensors)",
        "architecture": plan.model.model_dump(mode="json", exclude={"train"}),
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
