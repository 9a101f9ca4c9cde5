"""The models that runs have left, and which of them `silo predict`, `evaluate` and `export` take.

Of every run there are the last model and, where the hospital has validation images, the one that did best on them: by
test images none is ever chosen. By default the last model of the newest run that trained is in use; another one stays
in use from when it was chosen, its bytes kept under a name of their own, however the run goes on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DataError
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.run.run_state import MODEL, Progress, give_name, read_progress

_IN_USE = "in-use.json"

Which = Literal["last", "best", "last and best", "chosen"]


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: str
    rounds: int
    file: str
    validation: float | None


@dataclass(frozen=True)
class KeptModel:
    """A run's model on disk.

    Attributes:
        run: which left it; ``folder``: that run's.
        path: the model's file.
        which: the run's last, its best by validation images, both, or one that was chosen and is neither any more.
        rounds: of the run's rounds, those behind it.
        planned: the run's rounds.
        validation: its accuracy (share in [0, 1]) on the hospital's validation images; None without.
        end: why the run ended before its plan's last round; None where it did not.
        trained: whether anything of the run is in it.
    """

    run: str
    folder: Path
    path: Path
    which: Which
    rounds: int
    planned: int
    validation: float | None
    end: str | None
    trained: bool

    @property
    def written(self) -> datetime:
        """When, UTC."""
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)

    @property
    def words(self) -> str:
        """``run spring, after 12 of 30 rounds (its best on validation images)``."""
        kind = {
            "last": "its last",
            "best": "its best on validation images",
            "last and best": "its last, and its best on validation images",
            "chosen": "as it was when it was put in use",
        }[self.which]
        return f"run {self.run}, after {self.rounds} of {self.planned} rounds ({kind})"


def listed(runs: Path) -> tuple[list[KeptModel], KeptModel | None]:
    """Every model that is there, one that was put in use and is none of a run's any more included; and the one in use,
    None where no run has trained."""
    found, chosen = kept_models(runs), chosen_model(runs)
    if chosen is None:
        return found, next((one for one in reversed(found) if one.trained and one.which != "best"), None)
    return [*found, *([chosen] if chosen.which == "chosen" else [])], chosen


def why_untrained(model: KeptModel) -> str:
    """In words."""
    return f"the run {model.end}" if model.end else "no round of the run is in it"


def kept_models(runs: Path) -> list[KeptModel]:
    """Every model that is there, by run, the newest run last; a run whose files cannot be read is left out."""
    found = []
    for path in sorted(runs.glob(f"*/{MODEL}"), key=lambda path: path.stat().st_mtime):
        try:
            found += models_of(path.parent)
        except DataError:
            continue
    return found


def models_of(folder: Path) -> list[KeptModel]:
    """A run's last model and its best one, if that is another; raises ``DataError`` for files that do not fit."""
    plan = read_plan(folder)
    progress = read_progress(folder)
    if progress is None:
        raise DataError(
            f"{folder}: progress.json is missing or cannot be read, so it is not known what its models are. Look "
            "whether the disk is well and this account may read the file. Other runs' models can be used all the "
            "same (--run). If the run goes on, move its folder away, and `silo train` starts it anew; else only "
            "a backup has the file"
        )
    early = progress.early_end.read() if progress.early_end else None
    rounds = _rounds_behind(progress, plan)
    last = KeptModel(
        run=folder.name,
        folder=folder,
        path=folder / MODEL,
        which="last",
        rounds=rounds,
        planned=plan.training_rounds,
        validation=progress.last.accuracy if progress.last else None,
        end=early.words(plan.rounds) if early else None,
        trained=rounds > 0 and (early is None or early.rounds > 0),
    )
    best = progress.best
    if best is None:
        return [last]
    if best.rounds == rounds:
        return [replace(last, which="last and best")]
    path = folder / best.file
    return [replace(last, path=path, which="best", rounds=best.rounds, validation=best.accuracy, trained=True), last]


def _rounds_behind(progress: Progress, plan: RunPlan) -> int:
    if progress.rounds is not None:
        return progress.rounds
    # Of an earlier release. Where the model is what the coordinator hands out, the last round's outcome comes with the
    # next task, and the end's is measured.
    from medsilo.algorithms.registry import make  # PyTorch takes seconds to load

    if not make(plan.method.name, plan.method.parameters).measures_received:
        return progress.trained_rounds
    received_last = progress.finished and (not progress.measured or progress.measured[-1].rounds == plan.rounds)
    return progress.trained_rounds if received_last else max(0, progress.trained_rounds - 1)


def chosen_model(runs: Path) -> KeptModel | None:
    """The model that was put in use; None where none was. Raises ``DataError`` if it is gone."""
    try:
        choice = _Choice.model_validate_json((runs / _IN_USE).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{runs / _IN_USE}: cannot be read ({error}); `silo models --newest` begins anew") from None
    path = runs / choice.file
    if not path.exists() or not (runs / choice.run / MODEL).exists():
        raise DataError(
            f"run {choice.run}, after {choice.rounds} rounds, was put in use, and is not there any more; put another "
            "model in use (`silo models --newest` takes the newest run's)"
        )
    models = models_of(runs / choice.run)
    for model in models:
        if model.rounds == choice.rounds and model.path.samefile(path):
            return replace(model, path=path)
    return replace(
        models[-1], path=path, which="chosen", rounds=choice.rounds, validation=choice.validation, trained=True
    )


def find_model(runs: Path, run: str | None = None, round_: str | None = None) -> KeptModel:
    """The model to use: the named one, else the one that was put in use, else the last of the newest run that trained.

    ``round_``: how many rounds are to be behind it, ``last`` or ``best``; the last by default. Raises ``DataError`` if
    there is none such.
    """
    if run is None and round_ is None and (chosen := chosen_model(runs)) is not None:
        return chosen
    if run is not None:
        models = _models_of_named(runs, run)
    else:
        chosen = chosen_model(runs) if round_ is not None else None
        models = _models_of_named(runs, chosen.run) if chosen else _newest_trained(runs)
    if round_ is None or round_ == "last":
        return models[-1]
    for model in models:
        if round_ in (*model.which.split(" and "), str(model.rounds)):
            return model
    kept = ", ".join(f"{model.rounds} ({model.which})" for model in models)
    if round_ == "best":
        raise DataError(
            f"run {models[-1].run}: has no best round: there were no validation images (a `val` split in the shard) "
            f"to tell it by, and by test images none is chosen. Kept: {kept}"
        )
    raise DataError(f"--round {round_:.40}: of run {models[-1].run} are kept: {kept}. Give one of these, last or best")


def choose_model(runs: Path, run: str | None, round_: str | None) -> KeptModel:
    """Puts a model in use until another is; raises ``DataError`` if there is none such."""
    model = find_model(runs, run, round_)
    name = f"in-use-{model.run}-{model.rounds:06d}.safetensors"
    if model.path != runs / name:
        give_name(model.path, runs / name)
    choice = _Choice(run=model.run, rounds=model.rounds, file=name, validation=model.validation)
    write_atomically(runs / _IN_USE, choice.model_dump_json(indent=2).encode())
    _forget(runs, keep=name)
    return replace(model, path=runs / name)


def use_newest(runs: Path) -> KeptModel:
    """Back to the last model of the newest run that trained, whichever that will be."""
    (runs / _IN_USE).unlink(missing_ok=True)
    _forget(runs, keep=None)
    return find_model(runs)


def _forget(runs: Path, *, keep: str | None) -> None:
    for path in runs.glob("in-use-*.safetensors"):
        if path.name != keep:
            path.unlink()


def _models_of_named(runs: Path, run: str) -> list[KeptModel]:
    if run != Path(run).name or "\0" in run:
        raise DataError(f"{run!r:.80} is not the name of a run")
    if not (runs / run / MODEL).exists():
        others = ", ".join(sorted(path.parent.name for path in runs.glob(f"*/{MODEL}")))
        there = f"; models are there of: {others}" if others else "; `silo train` writes one after every round"
        raise DataError(f"{runs / run}: holds no model{there}")
    return models_of(runs / run)


def _newest_trained(runs: Path) -> list[KeptModel]:
    folders = sorted(runs.glob(f"*/{MODEL}"), key=lambda path: path.stat().st_mtime, reverse=True)
    untrained = []
    for path in folders:
        models = models_of(path.parent)
        if models[-1].trained:
            return models
        untrained.append(models[-1])
    if not untrained:
        raise DataError(f"{runs}: no run has left a model there yet; `silo train` writes one after every round")
    why = "; ".join(f"{model.run}: {why_untrained(model)}" for model in untrained)
    raise DataError(
        f"{runs}: no run has left a trained model there: {why}. To take an untrained one all the same, name its run "
        "(--run)"
    )


def read_plan(folder: Path) -> RunPlan:
    """The plan of the run in a folder; raises ``DataError`` where there is none."""
    path = folder / "plan.json"
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{path}: does not hold the run's plan ({error}). Look whether the disk is well and this account may read "
            "the file. If the run goes on, `silo train` writes it again; else ask the coordinator's operator, who "
            "prints it with `coordinator plan` and that run's configuration, and put it there. A backup has it too"
        ) from None


def as_json(models: list[KeptModel], in_use: KeptModel | None) -> str:
    """For other programs."""
    rows = [
        {
            "run": model.run,
            "which": model.which,
            "rounds": model.rounds,
            "planned": model.planned,
            "trained": model.trained,
            "validation_accuracy": model.validation,
            "end": model.end,
            "written": model.written.isoformat(timespec="seconds"),
            "in_use": is_same(model, in_use),
        }
        for model in models
    ]
    return json.dumps({"models": rows}, indent=2)


def is_same(model: KeptModel, other: KeptModel | None) -> bool:
    """Whether two are one model, under whichever name."""
    return other is not None and (model.run, model.rounds) == (other.run, other.rounds)
