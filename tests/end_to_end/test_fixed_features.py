"""A linear layer on fixed features in real daemons: what leaves is that layer, and the model is simulation's."""

from __future__ import annotations

import stat
from collections.abc import Callable

import pytest

from medsilo.algorithms.fedavg import FedAvg
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_journals_sound,
    assert_models_are,
)
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


@pytest.mark.parametrize("name", ["stain-texture", "scattering"])
def test_a_run_on_fixed_features_sends_the_linear_layer_and_keeps_the_features(federation: Make, name: str) -> None:
    one = federation(
        insecure=True,
        run={
            "method": {"name": "fedavg"},
            "model": {"name": name, "input_shape": [3, 28, 28], "classes": 9},
            "rounds": 2,
            "ask_for": [],
        },
        exposures=[exposure.value for exposure in FedAvg().required],
    )
    one.run_to_the_end()
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_models_are(one, one.simulate())
    for silo in one.silos:
        sent = [record for record in one.messages(silo, "sent") if "MODEL_PARAMETERS_CLASSIFIER" in record["classes"]]
        assert sent
        (file,) = (one.run_folder(silo).parents[1] / "features").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
