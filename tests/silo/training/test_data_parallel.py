"""Two processes train as one: each has a part of every batch, and what comes out is what one gives, up to rounding."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from medsilo.algorithms.datasets import ImageDataset, load_npz, save_npz
from medsilo.algorithms.method import State
from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.registry import METHODS, make
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import ConfigurationError, TrainingError
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training import processes
from medsilo.silo.training.data_parallel import Alone, DataParallel, check_divisible, check_layers
from medsilo.silo.training.device import set_threads
from medsilo.silo.training.measuring import Progress
from medsilo.silo.training.processes import Processes
from medsilo.silo.training.site import LocalSite
from tests.support.hospital import parallel_cases
from tests.support.hospital.parallel_cases import BFLOAT16, CASES, CPU, DEVICES, DROPOUT, planned, shard
from tests.support.hospital.private_training import private_plan

ROOT = Path(__file__).parents[3]


@dataclass
class Both:
    """What the two processes found, the first one again when it was asked again, and what it finds alone."""

    first: dict[str, State]
    second: dict[str, State]
    again: dict[str, State]
    alone: dict[str, State]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("together")
    meeting, out = folder / "meeting", folder / "out.safetensors"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    other = subprocess.Popen([sys.executable, "-m", parallel_cases.__name__, str(meeting), str(out)], cwd=ROOT)
    try:
        place = DataParallel(0, DEVICES, meeting)
        first = parallel_cases.results(place)
        again = {case: parallel_cases.result(case, place) for case in ("fedavg", DROPOUT)}
        place.close()
        alone = parallel_cases.results(Alone())
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()
        torch.set_num_threads(threads)
    second: dict[str, State] = {}
    for key, tensor in load_file(out).items():
        case, _, name = key.partition("/")
        second.setdefault(case, {})[name] = tensor
    return Both(first, second, again, alone)


def largest_difference(one: State, other: State) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_what_one_does(both: Both, case: str) -> None:
    assert largest_difference(both.first[case], both.alone[case]) < 2e-5
    start = build(parallel_cases.plan_of(case).model, seed=1).state_dict()
    moved = largest_difference(start, {name: both.alone[case][f"h0/{name}"] for name in start})
    assert moved > 2e-3, "or else there was nothing to compare"


def test_two_processes_train_in_mixed_precision_nearly_what_one_does(both: Both) -> None:
    assert largest_difference(both.first[BFLOAT16], both.alone[BFLOAT16]) < 0.02


@pytest.mark.parametrize("case", [*CASES, DROPOUT, BFLOAT16])
def test_both_processes_have_the_same_bits(both: Both, case: str) -> None:
    assert largest_difference(both.first[case], both.second[case]) == 0


@pytest.mark.parametrize("case", ["fedavg", DROPOUT])
def test_the_same_number_of_processes_gives_the_same_bits_again(both: Both, case: str) -> None:
    assert largest_difference(both.first[case], both.again[case]) == 0
    assert largest_difference(both.first[case], both.second[f"{case} again"]) == 0


def place_of(size: int, rank: int) -> DataParallel:
    """A place in no process group, for what needs none."""
    place = object.__new__(DataParallel)
    place.rank, place.size, place._split = rank, size, None
    return place


@pytest.mark.parametrize(("size", "count"), [(2, 7), (3, 8), (3, 3), (4, 2), (2, 1)])
def test_parts_are_the_whole_batch_and_their_shares_add_up_to_one(size: int, count: int) -> None:
    index = torch.randperm(count)
    parts = [place_of(size, rank).part(index) for rank in range(size)]
    assert sum(part.share for part in parts) == pytest.approx(1)
    if count < size:
        assert all(torch.equal(part.index, index) for part in parts)
        return
    assert torch.equal(torch.cat([part.index for part in parts]), index)
    assert [part.first for part in parts] == [sum(len(p.index) for p in parts[:n]) for n in range(size)]
    assert max(len(part.index) for part in parts) - min(len(part.index) for part in parts) <= 1


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.own_steps])
def test_a_method_with_steps_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}, which takes steps of its own.*name one device"):
        check_divisible(planned(name), make(name, {}))


def test_one_that_did_not_say_so_is_refused_when_it_asks_for_batches() -> None:
    place = place_of(2, 0)
    site = LocalSite("h", shard("h", 1), nn.Linear(3 * 16 * 16, 3), planned(), device=CPU, place=place)
    with pytest.raises(ConfigurationError, match="name one device"):
        next(site.batches(0))


def test_every_method_that_asks_for_batches_says_so() -> None:
    for method in METHODS.values():
        source = Path(sys.modules[method.__module__].__file__ or "").read_text()
        assert method.own_steps == bool(re.search(r"site\.batches\(", source)), method.name


def test_a_layer_whose_statistics_are_not_added_up_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    with pytest.raises(ConfigurationError, match=r"layer 1 \(InstanceNorm2d\).*name one device"):
        check_layers(model)
    check_layers(nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3)))


def test_a_run_with_differential_privacy_is_refused() -> None:
    run = private_plan()
    with pytest.raises(ConfigurationError, match=r"differential privacy.*name one device"):
        check_divisible(run, make(run.method.name, run.method.parameters))


def configured(folder: Path, **changes: Any) -> SiloConfig:
    save_npz(folder / "h.npz", shard("h", 1))
    content = {
        "federation": "test",
        "name": "h",
        "coordinator": {"address": "127.0.0.1:1"},
        "state": "state",
        "shard": "h.npz",
        "device": ["cpu", "cpu"],
        "threads": 1,
        **changes,
    }
    (folder / "state").mkdir(exist_ok=True)
    (folder / "h.yaml").write_text(yaml.safe_dump(content))
    return SiloConfig.read(folder / "h.yaml")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", ["cpu"], ["cpu", "cpu"], ["cuda:0", "cuda:3"]])
def test_a_device_or_a_list_of_them_may_be_named(tmp_path: Path, device: str | list[str]) -> None:
    assert list(configured(tmp_path, device=device).devices) == ([device] if isinstance(device, str) else device)


@pytest.mark.parametrize(
    "device",
    ["mps", "cpu:1", "cuda:x", [], ["auto", "auto"], ["cuda", "cuda"], ["cuda:1", "cuda:1"], ["cpu", "cuda:0"]],
)
def test_devices_that_cannot_train_together_are_refused(tmp_path: Path, device: str | list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"h\.yaml.*(\n.*)*device.*should"):
        configured(tmp_path, device=device)


def test_a_run_that_cannot_be_divided_is_refused_before_a_process_is_started(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ConfigurationError, match="pfedme"):
        Processes(config, DEVICES, planned("pfedme"), load_npz(config.shard))


def test_a_process_that_cannot_begin_is_named_with_what_it_said(tmp_path: Path) -> None:
    config = configured(tmp_path)
    dataset = load_npz(config.shard)
    save_npz(config.shard, shard("h", 2))
    with pytest.raises(TrainingError, match=r"process 2 of 2 \(cpu\): .*h\.npz: the file was changed"):
        Processes(config, DEVICES, planned(), dataset).__enter__()
    assert list(config.state.iterdir()) == []


def train_a_round(
    several: Processes, dataset: ImageDataset, plan: RunPlan, progress: Callable[[Progress], None]
) -> None:
    """As the daemon does."""
    with several:
        model = build(plan.model, seed=1)
        site = LocalSite("h", dataset, model, plan, device=CPU, progress=progress, place=several.place)
        side = make(plan.method.name, {}).silo_side(site)
        with several.together("begin", {"initial": state_of(model)}):
            side.begin(state_of(model))
        with several.together("train", {}):
            side.train(0, {})


def test_a_process_that_dies_in_mid_training_ends_it_and_is_named(tmp_path: Path) -> None:
    config, plan = configured(tmp_path), planned(epochs=50)
    dataset = load_npz(config.shard)
    several = Processes(config, DEVICES, plan, dataset)
    seen: list[int] = []

    def kill(progress: Progress) -> None:
        seen.append(progress.epoch)
        if progress.epoch == 2:
            several._helpers[0][0].kill()

    with pytest.raises(TrainingError, match=r"process 2 of 2 \(cpu\): was killed by signal 9. Nothing of this round"):
        train_a_round(several, dataset, plan, kill)
    torch.distributed.destroy_process_group()
    assert 2 <= seen[-1] < 50


def test_a_silo_that_waits_in_vain_for_a_process_that_ended_is_ended_and_the_others_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with NCCL, whose calls do not return."""
    config = configured(tmp_path)
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(processes, "_PATIENCE_SECONDS", 0.1)
    with Processes(config, [CPU, CPU, CPU], planned(), load_npz(config.shard)) as together:
        monkeypatch.setattr(processes.os, "_exit", end)
        (killed, _), (other, connection) = together._helpers
        with together.together("resume", {}):
            killed.kill()
            assert ended.wait(60)
        connection.close()  # as when the silo is killed
        assert other.wait(60) == 0
    assert set(codes) == {8}
    assert "process 2 of 3 (cpu): was killed by signal 9. Nothing of this round was sent" in capfd.readouterr().err


def test_processes_share_the_threads_that_one_would_have() -> None:
    before = torch.get_num_threads()
    try:
        for threads, size, expected in ((None, 2, 3), (None, 8, 1), (4, 2, 4), (None, 1, 6)):
            torch.set_num_threads(6)
            set_threads(threads, size)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
