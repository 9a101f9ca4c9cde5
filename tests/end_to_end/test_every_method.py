"""Every method in real daemons: it runs, it sends what it declared and nothing else, and it gives the models that
simulation gives. The connections are plain text through recording proxies, so that what was on the wire can be held
against both journals, byte for byte, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from medsilo.algorithms.registry import METHODS, make
from tests.support.methods.fitting import fitting
from tests.support.network.proxy import Proxy
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_every_round_counted_once,
    assert_journals_have_what_was_on_the_wire,
    assert_journals_sound,
    assert_models_are,
)
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_runs_as_in_simulation_and_exposes_what_it_declares(
    federation: Make, public_data: Path, name: str
) -> None:
    method = make(name, {})
    # pFedSim's two rounds are one of each phase.
    model = {"name": fitting(method, "diversifed-cnn", "lenet5"), "input_shape": [3, 28, 28], "classes": 9}
    one = federation(
        insecure=True,
        run={"method": {"name": name}, "model": model, "rounds": 2, "ask_for": []},
        exposures=[exposure.value for exposure in method.required],
        coordinator={"public_data": str(public_data)},
    )
    proxies = {silo: Proxy(one.port) for silo in one.silos}
    for silo, proxy in proxies.items():
        one.write_silo(silo, port=proxy.port)
    one.run_to_the_end()
    for silo, proxy in proxies.items():
        assert_journals_have_what_was_on_the_wire(one, silo, proxy)
        proxy.close()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_both_sides_agree(one)
    assert_models_are(one, one.simulate())
    for silo in one.silos:
        left = {exposure for record in one.messages(silo, "sent") for exposure in record["classes"]}
        assert left == {"PROTOCOL", "IDENTITY"} | method.uploads
        came = {exposure for record in one.messages(silo, "received") for exposure in record["classes"]}
        assert came <= {"PROTOCOL", "IDENTITY", "INITIAL_MODEL"} | method.downlink
        assert {"INITIAL_MODEL"} | method.downlink <= came
