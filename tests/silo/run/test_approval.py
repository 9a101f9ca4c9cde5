"""Which runs wait for a person before they begin."""

from __future__ import annotations

from typing import Any

import pytest

from medsilo.privacy.consent.consent import Consent, ConsentFile
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import Cause, History
from medsilo.privacy.journal.records import read
from medsilo.silo.run.approval import waits

PLAN = RunPlan.model_validate(
    {
        "federation": "test",
        "coordinator": "coordinator",
        "run": "run1",
        "method": {"name": "fedavg", "parameters": {}},
        "model": {"name": "mlp-64", "input_shape": (1, 4, 4), "classes": 3},
        "training": {},
        "rounds": 10,
        "seed": 1,
        "required": ["PROTOCOL"],
    }
)
WITHDRAWN = {"kind": "withdrawal", "run": "run1", "plan_sha256": "its own", "cause": Cause.WITHDRAWN.value}


@pytest.mark.parametrize(
    ("later", "waiting"),
    [
        ([], False),
        ([WITHDRAWN], True),
        ([{**WITHDRAWN, "plan_sha256": "elsewhere"}], True),
        ([{**WITHDRAWN, "cause": Cause.EXPIRED.value}], True),
        ([{**WITHDRAWN, "cause": Cause.EXPIRED.value, "plan_sha256": "elsewhere"}], False),
    ],
    ids=["going on", "withdrawn", "withdrawn in a later run", "expired", "another run's part expired"],
)
def test_a_run_that_was_joined_before_waits_for_a_person_once_the_consent_to_it_has_ended(
    later: list[dict[str, Any]], waiting: bool
) -> None:
    """The coordinator could else go back to a plan that the hospital has taken its consent to back."""
    plan = PLAN
    before = plan.sha256.hex()
    joined = {"kind": "run", "run": plan.run, "plan_sha256": before, "plan": plan.model_dump(mode="json")}
    records = [
        {**record, "plan_sha256": before} if record.get("plan_sha256") == "its own" else record for record in later
    ]
    history = History.of(map(read, [joined, *records, {"kind": "consent", "consent": {}, "given": True}]))
    consent = Consent(coordinator=plan.coordinator_identity.uri, approval="changes", plan_sha256="ab" * 32)
    assert waits(ConsentFile(None, consent, "f"), plan, history) == waiting
