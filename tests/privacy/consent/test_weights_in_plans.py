"""Given weights in a plan: they are part of its hash, and plans without them are hashed as before there were any."""

from __future__ import annotations

import json

import pytest

from medsilo.privacy.consent.plan import ModelPlan, RunPlan, WeightsPlan
from medsilo.privacy.door.protocol import fitted
from medsilo.privacy.errors import RefusedError
from tests.support.evidence.planning import make_plan

WEIGHTS = WeightsPlan(sha256="ab" * 32, tensors_sha256="cd" * 32, source="somewhere", public=True)
SILO = "spiffe://test/silo/hospital1"


def with_weights(weights: WeightsPlan = WEIGHTS) -> RunPlan:
    model = ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=9, weights=weights)
    return make_plan(model=model)


def test_a_plan_without_given_weights_says_nothing_of_them() -> None:
    written = json.loads(make_plan().canonical())
    assert written["model"] == {"name": "diversifed-cnn", "input_shape": [3, 28, 28], "classes": 9}


@pytest.mark.parametrize(
    "weights",
    [WEIGHTS, WEIGHTS.model_copy(update={"licence": "MIT", "without": "fc", "brought": True, "public": False})],
)
def test_a_plan_with_them_arrives_as_it_was_sent(weights: WeightsPlan) -> None:
    plan = with_weights(weights)
    arrived = RunPlan.from_message(plan.to_message())
    assert arrived == plan
    assert arrived.sha256 == plan.sha256


def test_every_word_of_them_is_in_the_plans_hash() -> None:
    changes = {
        "sha256": "00" * 32,
        "tensors_sha256": "00" * 32,
        "source": "elsewhere",
        "licence": "MIT",
        "public": False,
        "without": "fc",
        "brought": True,
    }
    hashes = {with_weights(WEIGHTS.model_copy(update={key: value})).sha256 for key, value in changes.items()}
    assert changes.keys() == WeightsPlan.model_fields.keys()
    assert len(hashes | {with_weights().sha256, make_plan().sha256}) == len(changes) + 2


def test_a_silo_of_the_first_release_is_told_that_it_cannot_start_from_them() -> None:
    fitted(make_plan().to_message(), 1, SILO)
    with pytest.raises(RefusedError, match="weights came with protocol version 2"):
        fitted(with_weights().to_message(), 1, SILO)
