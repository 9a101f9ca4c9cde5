"""What a silo refuses of a plan before it asks the consent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medsilo.algorithms.datasets import ImageDataset
from medsilo.privacy.consent.consent import Consent, ConsentFile
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import ModelPlan, RunPlan, WeightsPlan
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.journal import Journal
from medsilo.silo.run.agreement import agree
from tests.support.evidence.exchanging import SILO, key_of, origin_of
from tests.support.evidence.planning import make_plan
from tests.support.hospital.local_training import dataset

FROM_HOSPITALS = WeightsPlan(sha256="ab" * 32, tensors_sha256="cd" * 32, source="the outcome of run tissue-1")


class Uplink:
    """Of what is not called here, but for ``use``."""

    def use(self, *_: Any) -> None:
        """Takes the gate of the joined run."""


def agreed(plan: RunPlan, folder: Path, images: ImageDataset) -> None:
    classes = [exposure.value for exposure in plan.required]
    content = {
        "coordinator": plan.coordinator_identity.uri,
        "methods": [plan.method.name],
        "exposures": [*classes, "PROTOCOL", "IDENTITY", "LOCAL_METRICS", "PEER_DERIVED"],
        "rounds": plan.rounds,
        "approval": "none",
    }
    file = ConsentFile(None, Consent.model_validate(content), "f")
    gate = ConsentGate(file, plan.coordinator_identity)
    nothing: Any = None
    uplink: Any = Uplink()
    with Journal(folder, key=key_of(1), origin=origin_of(SILO)) as journal:
        door = Door(journal, identity=SILO, federation="test", gate=gate)
        agree(nothing, plan, uplink, gate, images, door, History.of([]), nothing)


def test_a_start_from_hospitals_models_is_refused_where_the_plan_does_not_ask_for_it(tmp_path: Path) -> None:
    """The hospitals would train from what other hospitals' images have made, and none had agreed that it may travel."""
    plan = make_plan()
    model = ModelPlan(**{**dict(plan.model), "weights": FROM_HOSPITALS})
    named = make_plan(model=model, required=(*plan.required, Exposure.PEER_INITIAL_MODEL))
    agreed(named, tmp_path / "named", dataset(20, 1))
    with pytest.raises(RefusedError, match="PEER_INITIAL_MODEL: a plan must name all of that"):
        agreed(make_plan(model=model), tmp_path / "silent", dataset(20, 1))
