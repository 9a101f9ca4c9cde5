"""Hospitals that send poison: what the coordinator refuses, what it says of the rest, and to whom."""

from __future__ import annotations

import math
from collections.abc import Callable

import grpc
import pytest

from medsilo.algorithms.models import build, state_of
from medsilo.algorithms.tensors import Part
from medsilo.privacy.exposure import MODEL, Exposure
from tests.support.network.raw_client import HandMade
from tests.support.runs.federation import Federation
from tests.support.runs.refusals import refusal, stored_uploads

Make = Callable[..., Federation]


def shifted(client: HandMade, by: float) -> dict[Exposure, Part]:
    """The starting model with every number shifted."""
    start = state_of(build(client.plan.model, seed=client.plan.seed))
    return {exposure: Part.of({s.name: start[s.name] + by for s in client.parts[exposure]}) for exposure in MODEL}


def test_a_change_beyond_the_limit_is_refused_in_words_and_the_operator_may_raise_it(federation: Make) -> None:
    one = federation(
        run={"method": {"name": "fedavg", "aggregation": "median"}, "max_update_norm": 1.0},
        exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED"],
    )
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    assert "withstands 1 that send anything at all" in one.said("coordinator")
    clients = [HandMade(one, name) for name in one.silos]
    for client in clients:
        client.join()
    one.wait_to_say("coordinator", "round 1 of")
    first, second, third = clients
    numbers = sum(spec.nbytes // 4 for specs in first.parts.values() for spec in specs)
    step = 1 / math.sqrt(numbers)  # this shift of every number has norm 1

    for far in (1.01 * step, -1.01 * step, 1e38):
        code, words = refusal(lambda far=far: third.submit(shifted(third, far)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "hospital3's update changes the model by" in words
        assert "this run's limit is 1;" in words
        assert "ask the coordinator's operator to raise `run.max_update_norm`" in words
    assert stored_uploads(one) == []
    told = one.status()["refusals"][1]
    assert (told["rpc"], told["peer"]) == ("SubmitUpdate", "spiffe://test/silo/hospital3")
    assert "hospital3's update changes the model by 1.01" in told["reason"]
    assert "hospital3's update changes the model by 1.01" in one.said("coordinator")

    first.submit(shifted(first, 0.1 * step))
    second.submit(shifted(second, 0.11 * step))
    third.submit(shifted(third, -0.99 * step))
    one.wait_to_say("coordinator", "round 2 of")
    said = {silo["silo"]: silo["changes"] for silo in one.status()["silos"]}
    norms = {name: changes[0]["norm"] for name, changes in said.items()}
    assert norms == pytest.approx({"hospital1": 0.1, "hospital2": 0.11, "hospital3": 0.99}, rel=1e-3)
    assert [said[name][0]["unusual"] for name in one.silos] == [
        [],
        [],
        ["much larger than others'", "points against most others'"],
    ]
    # Hand-worked: the median is 0.11; 1.4826 · MAD = 0.0148; (0.99 − 0.11) / 0.0148.
    assert said["hospital3"][0]["score"] == pytest.approx(59.4, rel=1e-2)
    assert said["hospital3"][0]["cosine"] == pytest.approx(-1, abs=1e-3)
    table = one.command("coordinator", "status", "--config", "coordinator.yaml")
    assert "unusual: hospital3, round 1" in table
    assert "Unusual is not malicious" in table

    # What counts is the change since what it was sent: the median is 0.1 on.
    first.submit(shifted(first, 1.09 * step), round_number=1)
    refusal(lambda: second.submit(shifted(second, 1.2 * step), round_number=1))
    coordinator.terminate()
    one.ends_with(coordinator, 0)
    one.coordinator_config["run"]["max_update_norm"] = 2.0
    one.write("coordinator.yaml", one.coordinator_config)
    one.start_coordinator()
    one.wait_for("listening again", lambda: one.said("coordinator").count("listening") == 2)
    again = HandMade(one, "hospital2")
    again.enrol_coordinator()
    assert not again.submit(shifted(again, 1.2 * step), round_number=1).repeated
