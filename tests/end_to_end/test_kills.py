"""Killed at any step that it takes on disk, again and again, a process loses nothing and counts nothing twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence

import pytest
from federation import Federation, Process
from test_runs import assert_every_round_counted_once, assert_journals_sound, assert_models_are, assert_signed

Make = Callable[..., Federation]


def run_with_kills(one: Federation, coordinator: Sequence[tuple[int, str]], silo: Sequence[tuple[int, str]]) -> None:
    """A run in which the coordinator and hospital2 are killed at the given steps, each time started again.

    Every one of these kills has to happen.
    """
    planned = {"coordinator": list(coordinator), "hospital2": list(silo)}
    waiting = {party: list(kills) for party, kills in planned.items()}
    killed = dict.fromkeys(planned, 0)

    def begin(party: str) -> Process:
        start = one.start_coordinator if party == "coordinator" else lambda prefix: one.start_silo(party, prefix=prefix)
        return start(prefix=("deadly", *map(str, waiting[party].pop(0))) if waiting[party] else ())

    running = {party: begin(party) for party in ("coordinator", *one.silos) if party in waiting}
    others = [one.start_silo(name) for name in one.silos if name not in running]

    def all_ended() -> bool:
        for party, process in list(running.items()):
            if process.poll() == -signal.SIGKILL:
                killed[party] += 1
                running[party] = begin(party)
        return all(process.poll() == 0 for process in running.values())

    one.wait_for("the run's end", all_ended)
    one.finish(*others)
    assert killed == {party: len(kills) for party, kills in planned.items()}


def test_killed_again_and_again_at_its_steps_on_disk_nothing_is_lost(federation: Make) -> None:
    # Four rounds are more than twice the steps on disk that these kills need.
    one = federation(run={"rounds": 4})
    run_with_kills(
        one,
        coordinator=[(14, "before"), (30, "after"), (45, "before"), (60, "after")],
        silo=[(10, "after"), (20, "before"), (27, "after"), (33, "before")],
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
