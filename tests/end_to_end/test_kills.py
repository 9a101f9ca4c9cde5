"""Killed at any step that it takes on disk, again and again, a process loses nothing and counts nothing twice."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable

import pytest

from medsilo.algorithms.datasets import ImageDataset
from tests.support.runs.checks import (
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_signed,
)
from tests.support.runs.fault_campaign import (
    MIXES,
    PLAIN,
    RUN,
    assert_evidence_agrees,
    assert_measured_once,
)
from tests.support.runs.faults import Fault, Kept, needs_faults, run_through
from tests.support.runs.federation import PATIENCE, Federation
from tests.support.runs.once import assert_charged_once

Make = Callable[..., Federation]


def kills(*steps: tuple[int, bool]) -> list[Fault]:
    return [Fault("kill", "disk", step, after) for step, after in steps]


@needs_faults
def test_killed_again_and_again_at_its_steps_on_disk_nothing_is_lost(federation: Make) -> None:
    # Four rounds are more than twice the steps on disk that these kills need.
    one = federation(run={"rounds": 4})
    run_through(
        one,
        {
            "coordinator": kills((14, False), (30, True), (45, False), (60, True)),
            "hospital2": kills((10, True), (20, False), (27, True), (33, False)),
        },
    )
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
    assert_measured_once(one)


@needs_faults
def test_after_power_cuts_failing_disks_and_a_jump_of_the_clock_a_private_run_goes_on(
    federation: Make, shards: list[ImageDataset]
) -> None:
    """A sample of ``fault_campaign.py``, on disk and between calls."""
    mix = MIXES["fedavg, private"]
    one = federation(shards=shards[:2], exposures=PLAIN, run={**RUN, **mix["run"], "rounds": 4})
    for name in one.silos:
        one.write_consent(name, **mix["consent"])
    kept = Kept(one)
    run_through(
        one,
        {
            "coordinator": [
                Fault("power", "disk", 12, after=True),
                Fault("full", "disk", 20, seconds=0.3),
                Fault("kill", "rpc", 5),
            ],
            "hospital2": [
                Fault("read-only", "disk", 9, seconds=0.3),
                Fault("power", "rpc", 6, after=True),
                Fault("io-error", "disk", 12),
                Fault("clock", "rpc", 3, seconds=-86400),
                Fault("kill", "rpc", 7, after=True),
            ],
        },
        at_an_end=kept.look,
    )
    kept.check()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_signed(one)
    assert_evidence_agrees(one)
    assert_measured_once(one)
    assert_charged_once(one)
    state = one.folder / "state"
    for party, said in (("coordinator", "the disk is full"), ("hospital2", "the disk is read-only")):
        assert f"error: {state / party}" in one.said(party)
        assert said in one.said(party)
    # One message, and no stack of calls.
    assert "Traceback" not in one.everything_said()


@pytest.mark.parametrize("party", ["coordinator", "hospital1"])
def test_one_daemon_at_a_time_in_a_state_folder(federation: Make, party: str) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    if party == "coordinator":
        said = one.command("coordinator", "serve", "--config", "coordinator.yaml", expect=7)
    else:
        one.start_silo(party)
        one.wait_to_say(party, "joined run")
        said = one.command("silo", "train", "--config", f"{party}.yaml", expect=7)
    assert "another process has this journal open" in said
    assert all(process.poll() is None for process in one.processes), "the first one goes on"


@needs_faults
def test_killed_after_the_runs_end_a_hospital_ends_by_itself_though_the_coordinator_has_ended(
    federation: Make, shards: list[ImageDataset]
) -> None:
    """Before and after each boundary of its last calls: every start goes a little further. It ends as well when it is
    started once more."""
    mix = MIXES["fedavg"]
    one = federation(shards=shards[:2], exposures=PLAIN, run={**RUN, **mix["run"], "rounds": 1})
    coordinator = one.start_coordinator()
    other = one.start_silo("hospital2")

    def start(number: int) -> int:
        kill = Fault("kill", "rpc", 1 + number // 2, after=number % 2 == 1)
        return one.start("ending_silo", str(kill), "silo", "train", "--config", "hospital1.yaml").wait(PATIENCE)

    codes = map(start, itertools.count())
    killed = len(list(itertools.takewhile(lambda code: code == -signal.SIGKILL, codes)))
    assert one.processes[-1].poll() == 0, one.everything_said()
    one.finish(other, coordinator)
    assert start(99) == 0, one.everything_said()
    assert "The coordinator is not waited for: run test has ended" in one.said("hospital1")
    assert killed >= 9, "four boundaries, and the answer to its signature"
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_measured_once(one)
