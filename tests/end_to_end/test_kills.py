"""Killed at any step that it takes on disk, again and again, a process loses nothing and counts nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from faults import Fault, needs_faults, run_through
from federation import Federation
from test_runs import assert_every_round_counted_once, assert_journals_sound, assert_models_are, assert_signed

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
    # A round is trained once, or again from the same start: never measured twice.
    measured = json.loads((one.run_folder("hospital2") / "results.json").read_text())["measured"]
    assert [m["rounds"] for m in measured] == sorted({m["rounds"] for m in measured})


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
