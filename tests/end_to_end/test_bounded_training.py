"""What a hospital's consent says of how it is trained, and of runs that it was not shown: with real daemons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.runs.checks import assert_journals_sound
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


def planned(one: Federation, **changes: Any) -> None:
    """From now on the coordinator leads another run."""
    one.coordinator_config = {**one.coordinator_config, "run": {**one.coordinator_config["run"], **changes}}
    one.write("coordinator.yaml", one.coordinator_config)


def rpcs(one: Federation, name: str, since: int) -> set[str]:
    return {record["rpc"] for record in one.messages(name, "sent") if record["index"] >= since}


def test_a_run_with_another_plan_than_the_one_of_the_consent_waits_for_a_person(federation: Make) -> None:
    one = federation(run={"rounds": 1})
    one.write_consent("hospital1", approval="changes")
    one.run_to_the_end()  # the first plan is the one that the consent is for
    assert "waits for approval" not in one.said("hospital1")
    begun = len(one.records("hospital1"))

    planned(one, name="longer", training={"epochs": 2, "batch_size": 32})
    coordinator = one.start_coordinator()
    others = [one.start_silo(name) for name in one.silos[1:]]
    waiting = one.start_silo("hospital1")
    one.wait_to_say("hospital1", "waits for approval: its plan is not the one that the consent was given for")
    assert rpcs(one, "hospital1", begun) == {"GetPlan"}, "not even yes or no has left"
    one.command("silo", "approve", "--yes", "--config", "hospital1.yaml")
    one.finish(waiting, *others, coordinator)
    assert [r["run"] for r in one.records("hospital1") if r["kind"] == "approval"] == ["longer"]
    assert_journals_sound(one)


def test_what_is_absurd_to_train_is_refused_and_all_rounds_together_have_a_bound(federation: Make) -> None:
    one = federation(run={"rounds": 2})
    one.write_consent("hospital1", total_rounds=3, training={"epochs": 5, "steps": 50, "learning_rate": 0.1})
    one.run_to_the_end()
    begun = len(one.records("hospital1"))

    planned(one, name="absurd", training={"epochs": 400, "batch_size": 2, "learning_rate": 1e6})
    coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "run absurd")
    one.ends_with(one.start_silo("hospital1"), 4)
    said = " ".join(one.said("hospital1").split())
    for words in (
        "400 epochs a round (`training: epochs: 400`)",
        "18000 steps a round (`training: steps: 18000`)",
        "a learning rate of 1e+06 (`training: learning_rate: 1e+06`)",
        "4 rounds of all runs together (`total_rounds: 4`)",
    ):
        assert words in said
    assert "SubmitUpdate" not in rpcs(one, "hospital1", begun)
    assert "hospital1 declines run absurd" in one.said("coordinator")
    coordinator.terminate()
    one.finish(coordinator)
    assert_journals_sound(one)


def test_a_round_that_trains_more_steps_than_planned_ends_the_part_before_they_are_taken(federation: Make) -> None:
    # Ditto trains twice in a round, of which the plan's own epochs tell nothing.
    one = federation(
        run={"rounds": 1, "method": {"name": "ditto"}, "training": {"epochs": 2, "batch_size": 45}},
        exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED", "LOCAL_METRICS"],
    )
    one.write_consent("hospital1", training={"steps": 4})
    one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in one.silos[1:]]
    one.ends_with(one.start_silo("hospital1"), 4)
    assert "allows 4 steps of training in a round (`training: steps:`), and round 1 goes on to 6" in " ".join(
        one.said("hospital1").split()
    )
    assert "SubmitUpdate" not in {record["rpc"] for record in one.messages("hospital1", "sent")}
    del others
