"""``simulation run``: what it writes, that a kill costs nothing, that it goes on and never mixes runs up."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.features import StainTexture
from medsilo.algorithms.models import build
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError, MedsiloError
from medsilo.silo.data import sources
from medsilo.simulation import scheduling
from medsilo.simulation.execution import CHECKPOINT, PROGRESS, ROUNDS, RUN, WEIGHTS, choose_engine, execute, is_finished
from medsilo.simulation.experiment import ExperimentConfig, Run, runs
from medsilo.simulation.federation import Simulation
from medsilo.simulation.scheduling import run_experiment
from tests.support.methods.mixing import Mixing

SIMULATION = Path(sys.executable).parent / "simulation"
PATIENCE = 240


@pytest.fixture(autouse=True)
def small_synthetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests need no more than a few images; generating them all takes seconds."""
    from medsilo.silo.data.synthetic import generate_tissue

    small = generate_tissue(seed=1, train=540, test=270)
    monkeypatch.setattr("medsilo.simulation.execution.open_dataset", lambda spec: small)
    monkeypatch.setattr("medsilo.silo.data.sources.open_dataset", lambda spec: small)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def write(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "name": "tiny",
        "data": "synthetic",
        "setting": {"kind": "dirichlet", "silos": 4, "alpha": 1.0, "train_per_silo": 30, "test_per_silo": 10},
        "model": "mlp-64",
        "training": {"epochs": 1, "batch_size": 30},
        "rounds": 5,
        "seeds": [1],
        "participation": 0.5,
        "checkpoint_seconds": 0,
        "methods": [{"name": "diversifed"}],
        **changes,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def only(folder: Path, **changes: Any) -> Run:
    (run,) = runs(ExperimentConfig.read(write(folder, **changes)), (), folder / "runs")
    return run


def test_a_run_writes_what_it_was_and_a_row_a_round_and_silo(tmp_path: Path) -> None:
    run = only(tmp_path)
    assert execute(run, tmp_path / "stop").status == "done"
    info = json.loads((run.folder / RUN).read_text())
    assert info["finished"] is True
    assert info["synthetic"] is True
    assert info["seed"] == info["plan"]["seed"] == 1
    assert info["setting"]["kind"] == "dirichlet"
    assert info["plan"]["participation"] == 0.5
    assert len(info["data_sha256"]) == 64
    assert set(info["versions"]) >= {"medsilo", "python", "torch"}
    rows = pq.read_table(run.folder / ROUNDS).to_pylist()
    assert [(row["round"], row["silo"]) for row in rows] == [
        (number, f"hospital{silo}") for number in range(6) for silo in range(1, 5)
    ]
    assert [sum(row["took_part"] for row in rows if row["round"] == number) for number in range(6)] == [2] * 5 + [0]
    model = 4 * ((3 * 28 * 28 + 1) * 64 + (64 + 1) * 9)
    for row in rows:
        sent = row["up_MODEL_PARAMETERS_EXTRACTOR"] + row["up_MODEL_PARAMETERS_CLASSIFIER"]
        assert sent == (model if row["took_part"] else 0)
    for silo in range(1, 5):
        assert sum(row["down_INITIAL_MODEL"] for row in rows if row["silo"] == f"hospital{silo}") == model
        assert 0 <= row["of_classes"] <= 1
    assert not (run.folder / CHECKPOINT).exists()
    assert not (run.folder / PROGRESS).exists()


def test_a_private_run_says_what_each_silo_has_spent(tmp_path: Path) -> None:
    privacy = {"epsilon": 6, "delta": 1e-5, "sampling_rate": 0.5}
    run = only(tmp_path, rounds=2, participation=1.0, privacy=privacy, methods=[{"name": "fedavg"}])
    assert execute(run, tmp_path / "stop").status == "done"
    info = json.loads((run.folder / RUN).read_text())
    assert info["plan"]["privacy"]["epsilon"] == 6
    assert len(info["spent"]) == 4
    for spent in info["spent"].values():
        assert 5.9 < spent["epsilon"] <= 6
        assert (spent["delta"], spent["unit"], spent["adjacency"]) == (1e-5, "image", "zero-out")
    plain = {**privacy, "epsilon": float("inf")}
    with pytest.raises(ConfigurationError, match="another privacy"):
        is_finished(
            only(tmp_path, rounds=2, participation=1.0, privacy=plain, methods=[{"name": "fedavg"}]),
            sources.open_dataset(run.data),
        )


def test_features_of_a_shard_are_made_for_the_experiments_first_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    of = StainTexture.of

    def counted(self: StainTexture, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return of(self, images)

    monkeypatch.setattr(StainTexture, "of", counted)
    training = {"epochs": 2, "batch_size": 30, "optimizer": "sgd", "learning_rate": 1.0}
    path = write(
        tmp_path, rounds=2, participation=1.0, model="stain-texture", training=training, methods=["fedavg", "local"]
    )
    first, second = runs(ExperimentConfig.read(path), (), tmp_path / "runs")
    assert execute(first, tmp_path / "stop").status == "done"
    assert sum(seen) == 4 * (30 + 10)
    kept = sorted(first.folder.parents[3].glob("features/*/*.safetensors"))
    assert (len(kept), {file.stat().st_mode & 0o777 for file in kept}) == (4, {0o600})
    assert execute(second, tmp_path / "stop").status == "done"
    assert sum(seen) == 4 * (30 + 10)
    # And they are those of the images: a run that has none kept ends with the same figures.
    remade = dataclasses.replace(second, folder=tmp_path / "anew", features=None)
    assert execute(remade, tmp_path / "stop").status == "done"
    assert sum(seen) == 8 * (30 + 10)
    rows = [pq.read_table(folder / ROUNDS).to_pylist() for folder in (second.folder, remade.folder)]
    assert rows[0] == rows[1]


def test_threads_give_the_same_figures_as_silos_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    alone, threads = only(tmp_path, engine="alone"), only(tmp_path / "other", engine="threads")
    for run in (alone, threads):
        assert execute(run, tmp_path / "stop", threads=2).status == "done"
    assert pq.read_table(alone.folder / ROUNDS).equals(pq.read_table(threads.folder / ROUNDS))


@pytest.mark.parametrize(
    ("model", "private", "engine"),
    [
        ("mlp-64", False, "stacked"),
        ("diversifed-cnn", False, "lanes"),
        ("resnet8", False, "threads"),
        ("diversifed-cnn", True, "alone"),
    ],
)
def test_the_engine_is_chosen_by_the_model(model: str, private: bool, engine: str) -> None:
    made = build(ModelPlan(name=model, input_shape=(3, 28, 28), classes=9))
    assert choose_engine(made, torch.device("cpu"), private=private) == engine


def test_the_chosen_engine_is_said_and_recorded_and_what_was_begun_by_another_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    config = ExperimentConfig.read(write(tmp_path))
    said = Console(record=True, width=200)
    run_experiment(config, (), tmp_path / "runs", workers=1, console=said)
    assert "engine: stacked (mlp-64)" in said.export_text()
    run = only(tmp_path)
    assert json.loads((run.folder / RUN).read_text())["engine"] == "stacked"
    (tmp_path / "other").mkdir()
    begun, stop = only(tmp_path / "other", engine="alone"), tmp_path / "stop"
    original = Simulation.step

    def step(self: Simulation) -> Any:
        stop.touch()
        return original(self)

    with monkeypatch.context() as stopping:
        stopping.setattr(Simulation, "step", step)
        assert execute(begun, stop).status == "stopped"
    stop.unlink()
    assert execute(only(tmp_path / "other"), stop).status == "done"
    assert json.loads((begun.folder / RUN).read_text())["engine"] == "alone"
    (tmp_path / "whole").mkdir()
    whole = only(tmp_path / "whole", engine="alone")
    assert execute(whole, stop).status == "done"
    assert (begun.folder / ROUNDS).read_bytes() == (whole.folder / ROUNDS).read_bytes()


def test_generated_images_are_made_once_and_handed_to_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_again(spec: str) -> ImageDataset:
        raise AssertionError(f"{spec} is made a second time")

    begun = in_this_process(monkeypatch)
    monkeypatch.setattr("medsilo.simulation.execution.open_dataset", made_again)
    go(tmp_path)
    assert len(begun) == 1


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from medsilo.algorithms.local import Local

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

@dataclass(frozen=True)
class Mine(Local):
    name: ClassVar[str] = "mine"
    strength: float = 1.0

nothing = 3
"""


def test_models_and_methods_of_ones_own_run_where_the_file_trusts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_code.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    in_this_process(monkeypatch)
    own = {"model": "own_code:small", "methods": [{"name": "own_code:Mine", "strength": 2.0}, "fedavg"]}
    trusted = {"trusted_models": "own_code:small", "trusted_methods": "own_code:Mine"}
    go(tmp_path, **own, **trusted)
    recorded = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob(f"*/*/*/*/{RUN}")]
    assert {info["method"] for info in recorded} == {"mine", "fedavg"}
    assert {info["plan"]["model"]["name"] for info in recorded} == {"own_code:small"}
    assert {"strength": 2.0} in [info["parameters"] for info in recorded]
    for left_out, words in (("trusted_models", "trusted_models:"), ("trusted_methods", "trusted_methods:")):
        (tmp_path / left_out).mkdir()
        with pytest.raises(ConfigurationError, match=words):
            go(tmp_path / left_out, **own, **{key: one for key, one in trusted.items() if key != left_out})
    for name, words in (("own_code:nothing", "no dataclass"), ("own_code:missing", "PYTHONPATH")):
        with pytest.raises(ConfigurationError, match=words):
            go(tmp_path, methods=[name], trusted_methods=[name])


def test_a_stopped_run_goes_on_to_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = only(tmp_path)
    (tmp_path / "other").mkdir()
    parts = only(tmp_path / "other")
    stop = tmp_path / "stop"
    assert execute(whole, stop).status == "done"
    original = Simulation.step

    def step(self: Simulation) -> Any:
        if self.round == 2:
            stop.touch()
        return original(self)

    monkeypatch.setattr(Simulation, "step", step)
    assert execute(parts, stop).status == "stopped"
    assert json.loads((parts.folder / RUN).read_text())["finished"] is False
    assert json.loads((parts.folder / PROGRESS).read_text())["round"] == 3
    stop.unlink()
    monkeypatch.setattr(Simulation, "step", original)
    assert execute(parts, stop).status == "done"
    assert (parts.folder / ROUNDS).read_bytes() == (whole.folder / ROUNDS).read_bytes()


def test_a_killed_command_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """SIGKILL to the command in the middle of a run; its worker dies with it; the same command does the rest."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    found = {}
    for kind in ("whole", "killed"):
        config = write(tmp_path / kind, rounds=60, data=str(_file(tmp_path)))
        found[kind] = runs(ExperimentConfig.read(config), (), tmp_path / kind / "runs" / "tiny")[0].folder
        command = [str(SIMULATION), "run", "-c", str(config), "--runs", str(tmp_path / kind / "runs"), "--workers", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if kind == "killed":
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            until(lambda: (found["killed"] / CHECKPOINT).exists(), process)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not json.loads((found["killed"] / RUN).read_text())["finished"]
            before = (found["killed"] / PROGRESS).stat().st_mtime
            time.sleep(1)
            settled = (found["killed"] / PROGRESS).stat().st_mtime
            time.sleep(1)
            assert (found["killed"] / PROGRESS).stat().st_mtime == settled >= before
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    assert (found["killed"] / ROUNDS).read_bytes() == (found["whole"] / ROUNDS).read_bytes()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_rounds_under_way_and_says_how_to_go_on(sent: signal.Signals, tmp_path: Path) -> None:
    """And so does what a batch system sends to all processes of a job."""
    config = write(tmp_path, rounds=100_000, data=str(_file(tmp_path)), methods=[{"name": "local"}], seeds=[1, 2])
    found = runs(ExperimentConfig.read(config), (), tmp_path / "runs" / "tiny")
    command = [str(SIMULATION), "run", "-c", str(config), "--runs", str(tmp_path / "runs"), "--workers", "1"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where these tests run in the background, children would ignore Ctrl-C from birth.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until(lambda: (found[0].folder / CHECKPOINT).exists(), process)
    os.killpg(process.pid, sent)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert (found[0].folder / CHECKPOINT).exists()
    assert not list((tmp_path / "runs" / "tiny").glob(".stop*"))


def _file(folder: Path) -> Path:
    from medsilo.algorithms.datasets import save_npz
    from medsilo.silo.data.synthetic import generate_tissue

    path = folder / "small.npz"
    if not path.exists():
        save_npz(path, generate_tissue(seed=1, train=270, test=90))
    return path


def until(condition: Any, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the command ended too early"
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs in this process, one after the other; the returned list says which were begun."""
    from concurrent.futures import Future
    from contextlib import contextmanager

    begun: list[str] = []

    @contextmanager
    def processes(workers: int) -> Iterator[Any]:
        def submit(run: Run, stop: Path, dataset: ImageDataset | None) -> Future[Any]:
            future: Future[Any] = Future()
            begun.append(run.title)
            future.set_result(execute(run, stop, dataset=dataset))
            return future

        yield submit

    monkeypatch.setattr(scheduling, "_processes", processes)
    return begun


def go(folder: Path, **changes: Any) -> None:
    config = ExperimentConfig.read(write(folder, **changes))
    run_experiment(config, (), folder / "runs", workers=1, console=Console(quiet=True))


def test_finished_runs_are_not_repeated_and_new_seeds_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = in_this_process(monkeypatch)
    go(tmp_path)
    go(tmp_path)
    assert len(begun) == 1
    go(tmp_path, seeds=[1, 2])
    assert len(begun) == 2
    assert begun[1].endswith("seed 2")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rounds": 6}, "rounds"),
        ({"training": {"epochs": 2}}, "training"),
        ({"model": "diversifed-cnn"}, "model"),
        (
            {"setting": {"kind": "dirichlet", "silos": 4, "alpha": 2.0, "train_per_silo": 30, "test_per_silo": 10}},
            "setting",
        ),
        ({"methods": [{"name": "diversifed", "label": "diversifed", "temperature": 0.7}]}, "method"),
    ],
)
def test_a_changed_experiment_never_takes_old_runs_for_its_own(
    changes: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    go(tmp_path, rounds=1)
    with pytest.raises(ConfigurationError, match=f"another .*{what}.*give the experiment another name"):
        go(tmp_path, **{"rounds": 1, **changes})


def test_one_failing_run_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    diverging = {"optimizer": "sgd", "learning_rate": 1e30}
    methods = [{"name": "local", "label": "bad", "training": diverging}, {"name": "local", "label": "good"}]
    with pytest.raises(MedsiloError, match=r"1 of 2 runs failed(.|\n)*bad, seed 1: local training diverged") as error:
        go(tmp_path, methods=methods)
    assert error.value.exit_code == 8
    assert json.loads((tmp_path / "runs/synthetic/dirichlet-participation=0.5/good/seed-1" / RUN).read_text())[
        "finished"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ["local", "fedap"]}, "fedap/seed-1|fedap, seed 1.*batch normalisation"),
        ({"methods": ["local", {"name": "fedavg", "model": "resnett"}]}, "fedavg-model=resnett, seed 1: .*resnett"),
        (
            {"setting": {"kind": "dirichlet", "silos": 4, "alpha": 1.0, "train_per_silo": 9000, "test_per_silo": 10}},
            "diversifed, seed 1: ",
        ),
        ({"device": "cuda"}, "sees no CUDA device"),
    ],
    ids=["model without what the method needs", "unknown model", "too few images", "no GPU"],
)
def test_what_cannot_run_is_said_before_anything_runs(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    begun = in_this_process(monkeypatch)
    with pytest.raises(MedsiloError, match=words):
        go(tmp_path, **changes)
    assert begun == []
    assert not (tmp_path / "runs").exists()


def test_images_of_one_class_are_refused_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from medsilo.algorithms.datasets import ImageDataset, ImageSplit

    split = ImageSplit(torch.zeros(200, 28, 28, 3, dtype=torch.uint8).numpy(), torch.zeros(200).long().numpy())
    one = ImageDataset("one", "one.npz", False, ("only",), split, None, split)
    monkeypatch.setattr("medsilo.silo.data.sources.open_dataset", lambda spec: one)
    with pytest.raises(ConfigurationError, match=r"one\.npz: no model is for 1 classes"):
        go(tmp_path)


def test_a_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    config = ExperimentConfig.read(write(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(MedsiloError, match=r"file/tiny"):
        run_experiment(config, (), tmp_path / "file" / "tiny", workers=1, console=Console(quiet=True))


def test_two_commands_never_work_on_one_run(tmp_path: Path) -> None:
    import fcntl

    run = only(tmp_path)
    run.folder.mkdir(parents=True)
    with (run.folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert execute(run, tmp_path / "stop").status == "busy"
    assert execute(run, tmp_path / "stop").status == "done"


def test_ray_that_is_not_installed_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = ExperimentConfig.read(write(tmp_path))
    with pytest.raises(ConfigurationError, match=r"pip install 'medsilo\[ray\]'"):
        run_experiment(config, (), tmp_path / "runs", workers=1, console=Console(quiet=True), ray="auto")


def test_numba_that_is_not_installed_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("medsilo.simulation.lanes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    config = ExperimentConfig.read(write(tmp_path, engine="lanes"))
    with pytest.raises(ConfigurationError, match=r"pip install 'medsilo\[lanes\]'"):
        run_experiment(config, (), tmp_path / "runs", workers=1, console=Console(quiet=True))


def test_weights_are_kept_every_so_many_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = only(tmp_path, participation=1.0, weights_every=2, rounds=6)

    monkeypatch.setattr(type(run.variant.method), "coordinator", Mixing)
    assert execute(run, tmp_path / "stop").status == "done"
    rows = pq.read_table(run.folder / WEIGHTS).to_pylist()
    # DiversiFed does not aggregate after the last round (5), so that there is none of it.
    assert sorted({row["round"] for row in rows}) == [0, 2, 4]
    for row in rows:
        i, j = int(row["silo"][-1]) - 1, int(row["other"][-1]) - 1
        assert row["weight"] == i - 10 * j
