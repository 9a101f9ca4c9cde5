"""One run of an experiment: trains it to the end, goes on after a kill, and writes its folder.

``run.json``            what was run, on what, with which versions; ``finished`` says whether it is complete
``rounds.parquet``      a row a round and silo: accuracy, mean accuracy of classes, loss, bytes by exposure class up
                        and down
``weights.parquet``     silo-to-silo weights, for methods that have such: a row a round, silo and other silo
``checkpoint.safetensors``  until the run is finished: where it goes on

Beside the runs, in the experiment's folder, ``features/`` holds what fixed extractors made of the shards' images.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import TypeAdapter
from torch import nn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.datasets.public_set import PublicImages
from medsilo.algorithms.method import Federation
from medsilo.algorithms.models import Layout, build
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, DataError, MedsiloError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.data.settings import Setting
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.sources import open_dataset
from medsilo.silo.training.device import choose_device
from medsilo.simulation.batched import Engine, InLanes, InThreads, Stacked
from medsilo.simulation.experiment import Described, Run
from medsilo.simulation.federation import SiloRound, Simulation
from medsilo.simulation.public_images import cut_public

RUN, ROUNDS, WEIGHTS = "run.json", "rounds.parquet", "weights.parquet"
CHECKPOINT, PROGRESS = "checkpoint.safetensors", "progress.json"
_LOCK = ".lock"

DIRECTIONS = ("up", "down")


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``stopped`` and ``busy`` runs are gone on with by the same command."""

    status: Literal["done", "stopped", "busy", "failed"]
    message: str = ""
    exit_code: int = 0


def execute(run: Run, stop: Path, threads: int = 1, dataset: ImageDataset | None = None) -> Outcome:
    """Does a run, or the rest of it. It ends at the next round once the file ``stop`` exists.

    ``threads``: how many silos an engine that trains them side by side trains at a time. ``dataset``: the run's, where
    it is at hand and opening it again would cost more.
    """
    torch.set_num_threads(1)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with _alone(run.folder) as alone:
            if not alone:
                return Outcome("busy", "another process works on it")
            return _Execution(run, stop, threads).go(dataset or open_dataset(run.data))
    except MedsiloError as error:
        return Outcome("failed", str(error), error.exit_code)
    finally:
        # Sites and what they charge hold each other, with all images: a process that does many runs would fill up.
        gc.collect()


@dataclass(frozen=True)
class Recorded:
    """Of a run's images what its record says."""

    name: str
    source: str
    synthetic: bool
    fingerprint: str
    image_shape: tuple[int, int, int]
    num_classes: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Recorded:
        """``info``: the content of ``run.json``."""
        model = info["plan"]["model"]
        channels, height, width = model["input_shape"]
        return cls(
            info["data"],
            info["data_source"],
            info["synthetic"],
            info["data_sha256"],
            (channels, height, width),
            model["classes"],
        )


def is_finished(run: Run, dataset: ImageDataset) -> bool:
    """Whether a run's folder holds its finished run.

    Raises ``ConfigurationError`` where the folder holds another run: other data, plan or setting.
    """
    recorded = read_run(run.folder)
    if recorded is None:
        return False
    check_same(recorded, run, dataset)
    return bool(recorded["finished"])


def check_same(recorded: Mapping[str, Any], run: Run, dataset: Described) -> None:
    """Raises ``ConfigurationError`` where ``run.json`` is the record of another run: other data, plan or setting."""
    expected = _description(run, dataset, run.config.engine)
    must_agree = ("data_sha256", "setting", "public", *(("engine",) if run.config.engine != "auto" else ()))
    differing = [key for key in must_agree if recorded.get(key) != expected[key]]
    differing += [
        key
        for key in ("model", "training", "rounds", "seed", "participation", "privacy")
        if recorded["plan"].get(key) != expected["plan"].get(key)
    ]
    # A hyper-parameter that a later release added, with its default, does not make it another run.
    now, then = expected["plan"]["method"], recorded["plan"]["method"]
    if then["name"] != now["name"] or any(now["parameters"].get(k) != v for k, v in then["parameters"].items()):
        differing.append("method")
    if differing:
        raise ConfigurationError(
            f"{run.folder} holds a run with another {', '.join(differing)}; give the experiment another name, or move "
            "the folder away"
        )


def check_can_run(runs: Sequence[Run], datasets: Mapping[str, ImageDataset]) -> dict[str, str]:
    """The engine for each model, by name. Raises what would fail a run before its first round.

    A model or setting that does not fit the images, say: a sweep should not come upon it hours after it was begun. Of
    several seeds the first is looked at.

    ``runs``: of one experiment, at least one.
    ``datasets``: by ``Run.data``.
    """
    config = runs[0].config
    if config.engine != "auto":
        make_engine(config.engine, threads=1)
    device = choose_device(config.device)
    engines: dict[str, str] = {}
    looked_at: set[object] = set()
    shards: dict[object, list[ImageDataset]] = {}
    for run in runs:
        place = (run.data, run.setting_name)
        if (key := (*place, run.participation, run.variant.label)) in looked_at:
            continue
        looked_at.add(key)
        dataset, method = datasets[run.data], run.variant.method
        try:
            if place not in shards:
                shards[place] = cut(dataset, run.setting, seed=run.seed)
            plan = run.plan(dataset)
            model = build(plan.model, trusted=config.trusted_models, weights=run.weights)
            private = plan.privacy is not None
            engine = choose_engine(model, device, private=private) if config.engine == "auto" else config.engine
            engines[plan.model.name + (" with privacy" if private else "")] = engine
            if not method.needs_public:
                names = tuple(shard.name for shard in shards[place])
                layout = Layout.of(model)
                method.coordinator_side(
                    Federation(layout, plan.training_rounds, plan.seed, silos=names, input_shape=plan.model.input_shape)
                )
        except MedsiloError as error:
            raise type(error)(f"{run.title}: {error}") from None
    return engines


def read_run(folder: Path) -> dict[str, Any] | None:
    """A run's ``run.json``, or None where there is none; raises ``DataError`` if it is damaged."""
    path = folder / RUN
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete the folder to begin this run anew") from None
    return content


class _Execution:
    """The state of one run while it is executed."""

    def __init__(self, run: Run, stop: Path, threads: int) -> None:
        self._run = run
        self._stop = stop
        self._threads = threads
        self._rows: list[dict[str, Any]] = []
        self._weights: list[dict[str, Any]] = []
        self._saved = time.monotonic()

    def go(self, dataset: ImageDataset) -> Outcome:
        """To the end, or to where it is stopped."""
        run = self._run
        if self._stop.exists():
            return Outcome("stopped")
        if is_finished(run, dataset):
            return Outcome("done")
        engine, checkpoint = run.config.engine, run.folder / CHECKPOINT
        if engine == "auto":
            model = build(run.plan(dataset).model, trusted=run.config.trusted_models, weights=run.weights)
            engine = choose_engine(model, choose_device(run.config.device), private=run.variant.privacy is not None)
            recorded = read_run(run.folder)
            # What was begun is gone on with: other engines have other bits.
            if checkpoint.exists() and recorded is not None and recorded["engine"] != _bits(engine):
                engine = recorded["engine"]
        simulation = make_simulation(run, dataset, make_engine(engine, self._threads))
        description = _description(run, dataset, engine)
        if checkpoint.exists():
            notes = simulation.load(checkpoint)
            self._rows, self._weights = notes["rows"], notes["weights"]
        self._write_run({**description, "finished": False})
        started, first = time.monotonic(), simulation.round
        self._saved = started
        while simulation.round < simulation.plan.training_rounds:
            self._report(simulation, started, first)
            if self._stop.exists():
                self._save(simulation)
                return Outcome("stopped")
            simulation.step()
            self._record(simulation)
            if time.monotonic() - self._saved >= run.config.checkpoint_seconds:
                self._save(simulation)
        simulation.finish()
        self._rows += [_row(one) for one in simulation.last]
        final = {one.silo: one.measured and one.measured.accuracy for one in simulation.last}
        write_table(run.folder / ROUNDS, _rounds_table(self._rows))
        if self._weights:
            write_table(run.folder / WEIGHTS, _weights_table(self._weights))
        spent = {silo: asdict(guarantee) for silo, guarantee in simulation.spent.items()}
        self._write_run({**description, "finished": True, "final_accuracy": final, "spent": spent})
        for name in (CHECKPOINT, PROGRESS):
            (run.folder / name).unlink(missing_ok=True)
        return Outcome("done")

    def _record(self, simulation: Simulation) -> None:
        self._rows += [_row(one) for one in simulation.last]
        every = self._run.config.weights_every
        given, number = simulation.weights, simulation.round - 1
        # The first round's, every so many rounds', and the last one's (of a method that aggregates after it).
        if given is not None and (number % every == 0 or simulation.round == simulation.plan.training_rounds):
            self._weights.append({"round": number, "silos": list(given.silos), "weights": given.weights.tolist()})

    def _save(self, simulation: Simulation) -> None:
        simulation.save(self._run.folder / CHECKPOINT, notes={"rows": self._rows, "weights": self._weights})
        self._saved = time.monotonic()

    def _report(self, simulation: Simulation, started: float, first: int) -> None:
        done = simulation.round - first
        content = {
            "round": simulation.round,
            "rounds": simulation.plan.training_rounds,
            "seconds_per_round": (time.monotonic() - started) / done if done else None,
        }
        path = self._run.folder / PROGRESS
        partial = path.with_name(f".{PROGRESS}.partial")
        partial.write_text(json.dumps(content))
        partial.replace(path)

    def _write_run(self, content: dict[str, Any]) -> None:
        write_atomically(self._run.folder / RUN, json.dumps(content, indent=1).encode())


EngineName = Literal["alone", "threads", "lanes", "stacked"]


def choose_engine(model: nn.Module, device: torch.device, *, private: bool) -> EngineName:
    """The engine for ``engine: auto``: the fastest that was measured for such a model.

    The figures: docs/results/simulation-speed.md.

    Lanes for networks that they can do, where Numba is installed; stacked where no convolution is trained; else
    threads. Silo by silo with differential privacy, and on GPUs, for which nothing was measured.
    """
    if private or device.type != "cpu":
        return "alone"
    if find_spec("numba") is not None:
        from medsilo.simulation.lanes import in_lanes

        if in_lanes(model) is not None:
            return "lanes"
    convolutions = (module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd))
    trained = any(parameter.requires_grad for module in convolutions for parameter in module.parameters(recurse=False))
    return "threads" if trained else "stacked"


def make_engine(name: EngineName, threads: int) -> Engine | None:
    """The engine of that name; None for silo by silo.

    Raises ``ConfigurationError`` if it needs what is not installed.
    """
    match name:
        case "alone":
            return None
        case "threads":
            return InThreads(threads)
        case "lanes":
            return InLanes(threads)
        case "stacked":
            return Stacked()


def _bits(engine: str) -> str:
    """The engine by what changes bits; threads do not."""
    return "alone" if engine == "threads" else engine


def make_simulation(run: Run, dataset: ImageDataset, engine: Engine | None) -> Simulation:
    """The simulation of a run, before its first round."""
    shards = cut(dataset, run.setting, seed=run.seed)
    plan = run.plan(dataset)
    return Simulation(
        plan,
        run.variant.method,
        shards,
        device=choose_device(run.config.device),
        engine=engine,
        trusted=run.config.trusted_models,
        weights=run.weights,
        public=_public(run, plan, dataset, shards),
        features=run.features,
    )


def _public(run: Run, plan: RunPlan, dataset: ImageDataset, shards: Sequence[ImageDataset]) -> PublicImages | None:
    if not run.variant.method.needs_public:
        return None
    images = cut_public(
        dataset,
        run.setting,
        shards,
        seed=run.seed,
        per_class=run.config.public_per_class,
        share=run.config.public_share,
    )
    return PublicImages(
        images,
        build(plan.model, seed=plan.seed, trusted=run.config.trusted_models, weights=run.weights),
        plan.model.input_shape,
    )


def _description(run: Run, dataset: Described, engine: str) -> dict[str, Any]:
    """All that says which run this is, as ``run.json`` has it."""
    config = run.config
    needs_public = run.variant.method.needs_public
    return {
        "experiment": config.name,
        "label": run.variant.label,
        "method": run.variant.method.name,
        "parameters": run.variant.method.parameters(),
        "measures_received": run.variant.method.measures_received,
        "made_at_end": run.variant.method.made_at_end,
        "setting_name": run.setting_name,
        "setting": {"kind": _kind(run.setting), **_plain(run.setting)},
        "participation": run.participation,
        "seed": run.seed,
        "data": dataset.name,
        "data_spec": Path(run.data).name if run.data.endswith(".npz") else run.data,
        "data_source": dataset.source,
        "data_sha256": dataset.fingerprint,
        "synthetic": dataset.synthetic,
        "public": {"per_class": config.public_per_class, "share": config.public_share} if needs_public else None,
        "plan": run.plan(dataset).model_dump(mode="json"),
        "device": config.device,
        "engine": _bits(engine),
        "versions": {
            "medsilo": version("medsilo"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "pyarrow": pa.__version__,
            "machine": platform.machine(),
        },
    }


def _kind(setting: Setting) -> str:
    from medsilo.simulation.experiment import SETTINGS

    return next(name for name, kind in SETTINGS.items() if isinstance(setting, kind))


def _plain(setting: Setting) -> dict[str, Any]:
    plain: dict[str, Any] = TypeAdapter(type(setting)).dump_python(setting, mode="json")
    return plain


def _row(one: SiloRound) -> dict[str, Any]:
    measured = one.measured
    return {
        "round": one.round,
        "silo": one.silo,
        "took_part": one.took_part,
        "accuracy": measured and measured.accuracy,
        "of_classes": measured and measured.of_classes,
        "loss": measured and measured.loss,
        "up": {str(exposure): size for exposure, size in one.up.items()},
        "down": {str(exposure): size for exposure, size in one.down.items()},
    }


def _rounds_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    columns: dict[str, Any] = {
        "round": pa.array([row["round"] for row in rows], pa.int32()),
        "silo": pa.array([row["silo"] for row in rows], pa.string()),
        "took_part": pa.array([row["took_part"] for row in rows], pa.bool_()),
        "accuracy": pa.array([row["accuracy"] for row in rows], pa.float64()),
        "of_classes": pa.array([row.get("of_classes") for row in rows], pa.float64()),
        "loss": pa.array([row["loss"] for row in rows], pa.float64()),
    }
    for direction in DIRECTIONS:
        occurring = {name for row in rows for name in row[direction]}
        for exposure in Exposure:
            if exposure in occurring:
                sizes = [row[direction].get(str(exposure), 0) for row in rows]
                columns[f"{direction}_{exposure}"] = pa.array(sizes, pa.int64())
    return pa.table(columns)


def _weights_table(kept: Sequence[dict[str, Any]]) -> pa.Table:
    flat = [
        (one["round"], silo, other, weight)
        for one in kept
        for silo, row in zip(one["silos"], one["weights"], strict=True)
        for other, weight in zip(one["silos"], row, strict=True)
    ]
    rounds, silos, others, values = zip(*flat, strict=True)
    return pa.table(
        {
            "round": pa.array(rounds, pa.int32()),
            "silo": pa.array(silos, pa.string()),
            "other": pa.array(others, pa.string()),
            "weight": pa.array(values, pa.float64()),
        }
    )


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a Parquet file, whole or not at all."""
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    write_atomically(path, content.getvalue())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process works in this folder; as long as the block lasts, none can begin to."""
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
