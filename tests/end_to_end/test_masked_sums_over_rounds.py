"""What a coordinator cannot get out of the sums of several rounds, and how runs go on when hospitals drop out."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medsilo.algorithms.datasets import ImageDataset
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.runs.checks import assert_every_round_counted_once, assert_journals_sound
from tests.support.runs.federation import PATIENCE, Federation
from tests.support.runs.masked import MASKED

Make = Callable[..., Federation]
FULL_BATCHES = {"epochs": 1, "batch_size": 100, "optimizer": "sgd", "learning_rate": 0.05}


@pytest.fixture(scope="module")
def four() -> list[ImageDataset]:
    setting = PracticalGroups(groups=(1, 1, 2), train_per_silo=60, test_per_silo=20)
    return cut(generate_tissue(seed=2, train=600, test=180), setting, seed=2)


def masked(make: Make, shards: list[ImageDataset], *, minimum: int = 3, **run: Any) -> Federation:
    settings = {"method": {"name": "fedavg"}, "ask_for": [], "secure_aggregation": {"minimum": minimum}, "rounds": 2}
    one = make(run={**settings, "training": FULL_BATCHES, **run}, exposures=MASKED, shards=shards)
    for name in one.silos:
        one.write_consent(name, secure_aggregation={"minimum": minimum})
    return one


def subtraction(one: Federation) -> tuple[float, int] | None:
    """What the difference of two sums tells of the last hospital: how far it is from its update, relatively, and how
    many images it has; None where there are no two sums."""
    state = one.folder / "state" / "coordinator"
    first, second = (state / f"sum-{number}.safetensors" for number in (0, 1))
    if not second.exists():
        return None
    larger, smaller = load_file(first), load_file(second)
    images = int(larger.pop("weight") - smaller.pop("weight"))
    folder = one.run_folder(one.silos[-1])
    progress = json.loads((folder / "progress.json").read_text())
    trained = load_file(folder / progress["files"]["trained"])
    start = load_file(state / "runs" / "test" / "initial.safetensors")
    names = {name: next(key for key in start if key.endswith(name)) for name in larger}
    change = torch.cat([(trained[n] - start[key]).double().reshape(-1) for n, key in names.items()])
    found = torch.cat([((larger[n] - smaller[n]) / images - start[key]).reshape(-1) for n, key in names.items()])
    return float((found - change).norm() / change.norm()), images


def test_two_sums_that_differ_by_one_hospital_are_never_given(federation: Make, four: list[ImageDataset]) -> None:
    one = masked(federation, four)
    one.start("subtracting", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    *others, last = [one.start_silo(name) for name in one.silos]
    for silo in others:
        silo.wait(PATIENCE)
    assert subtraction(one) is None, "relative error of the last hospital's update, and its number of images"
    for silo, name in zip(others, one.silos, strict=False):
        one.ends_with(silo, 6)
        said = " ".join(one.said(name).split())
        assert "hospital1, hospital2, hospital3, hospital4 before: the difference of the two sums would give" in said
        assert [r["round"] for r in one.records(name) if r["kind"] == "roster"] == [0]
    last.kill()
    one.ends_with(last, -signal.SIGKILL)
    # Started anew, a hospital still knows.
    again = one.start_silo("hospital1")
    one.ends_with(again, 6)
    assert "is not masked for the coordinator's roster" in one.said("hospital1")
    assert subtraction(one) is None


def test_a_hospital_that_dies_between_masked_rounds_is_waited_for(federation: Make, four: list[ImageDataset]) -> None:
    one = masked(federation, four, quorum=3, deadline_minutes=0.05)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in one.silos[:3]]
    fourth = one.start("dying_silo", "1", "train", "--config", "hospital4.yaml")
    one.wait_for("the fourth hospital's end", lambda: fourth.poll() is not None)
    one.wait_for(
        "the others' updates of round 2",
        lambda: all(any(r["round"] == 1 for r in one.messages(name, "sent")) for name in one.silos[:3]),
    )
    one.finish(*others, one.start_silo("hospital4"), coordinator)
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    for name in one.silos:
        assert {tuple(r["silos"]) for r in one.records(name) if r["kind"] == "roster"} == {tuple(one.silos)}


def test_a_masked_run_that_a_hospital_leaves_ends_with_a_clear_word_and_what_it_has(
    federation: Make, four: list[ImageDataset]
) -> None:
    one = masked(federation, four, rounds=100)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in one.silos[:3]]
    fourth = one.start_silo("hospital4")
    one.wait_to_say("coordinator", "round 1 of 100 has ended")
    one.command("silo", "consent", "withdraw", "--config", "hospital4.yaml", "--yes")
    one.ends_with(fourth, 4)
    one.finish(*others, coordinator)
    assert "hospital4 has withdrawn, and a masked sum over the others" in one.said("coordinator")
    for name in one.silos:
        assert {tuple(r["silos"]) for r in one.records(name) if r["kind"] == "roster"} == {tuple(one.silos)}
    assert_journals_sound(one)
