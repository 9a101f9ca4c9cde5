"""Blind mixtures of real daemons: each hospital gets a mixture of its own, of models that the coordinator never sees."""

from __future__ import annotations

import pytest

from tests.support.runs.blind import blind
from tests.support.runs.masked import Make


@pytest.mark.parametrize("method", ["diversifed", "fedamp"])
def test_models_are_those_of_the_plain_run(federation: Make, method: str) -> None:
    one = blind(federation, run={"method": {"name": method}})
    one.run_to_the_end()
    expected = one.simulate()
    from safetensors.torch import load_file

    for name in one.silos:
        for key, tensor in load_file(one.run_folder(name) / "model.safetensors").items():
            print(name, key, (tensor - expected[name][key]).abs().max())
