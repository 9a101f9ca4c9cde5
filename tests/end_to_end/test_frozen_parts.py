"""Runs that train a part of the model, in real daemons over connections that are read along: what is frozen comes with
the first task and is in no other message, and the model at the end is whole, and simulation's."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.models import Layout, build, frozen_names, plain_state, whole_state
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.silo.model.prediction import load_model
from tests.support.network.proxy import Proxy
from tests.support.network.wire_reader import DATA, frames
from tests.support.runs.checks import (
    assert_both_sides_agree,
    assert_journals_have_what_was_on_the_wire,
    assert_journals_sound,
    assert_models_are,
    assert_models_are_nearly,
)
from tests.support.runs.federation import Federation
from tests.support.runs.masked import masked

Make = Callable[..., Federation]
PIECE = 32
"""Bytes of a tensor that are looked for: none is cut so often that no piece is whole."""


def content(connections: Iterable[bytes], *, from_client: bool) -> bytes:
    """All that was sent in messages, HTTP/2's own words left out; a killed party's last frame may be cut short."""
    sent = bytearray()
    for connection in connections:
        with suppress(AssertionError):
            for kind, _, _, payload in frames(connection, from_client=from_client):
                sent += payload if kind == DATA else b""
    return bytes(sent)


def found(tensor: torch.Tensor, sent: bytes) -> int:
    """How often pieces of a tensor's bytes are in it: the most often that one of a few is."""
    raw = tensor.contiguous().numpy().tobytes()
    places = [0] if len(raw) <= PIECE else [0, (len(raw) - PIECE) // 2, len(raw) - PIECE]
    return max(sent.count(raw[place : place + PIECE]) for place in places)


@pytest.mark.parametrize("train", ["head", {"lora": {"rank": 2}}], ids=["head", "lora"])
def test_what_is_frozen_is_in_no_message_but_the_start(federation: Make, train: Any) -> None:
    model = {"name": "lenet5", "input_shape": [3, 28, 28], "classes": 9, "train": train}
    one = federation(
        insecure=True,
        run={"method": {"name": "fedavg"}, "model": model, "rounds": 3, "ask_for": []},
        exposures=[exposure.value for exposure in FedAvg().required],
    )
    proxies = {silo: Proxy(one.port) for silo in one.silos}
    for silo, proxy in proxies.items():
        one.write_silo(silo, port=proxy.port)
    coordinator = one.start_coordinator()
    first, *others = (one.start_silo(name) for name in one.silos)
    one.wait_to_say("coordinator", "round 2 of 3 is open")
    first.kill()  # wherever it is: what is frozen is read from its own disk again
    first.wait()
    one.finish(one.start_silo(one.silos[0]), *others, coordinator)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())

    plan = CoordinatorConfig.read(one.folder / "coordinator.yaml").plan()
    start = build(plan.model, seed=plan.seed)
    # Tensors of zeros or ones are as they are in many messages.
    frozen = {n: t for n, t in whole_state(start).items() if n in frozen_names(start) and len(t.unique()) > 8}
    assert len(frozen) == 7  # four layers' weights, and their biases but for the first, of six numbers
    for silo, proxy in proxies.items():
        up = content((bytes(c.up) for c in proxy.connections), from_client=True)
        down = content((bytes(c.down) for c in proxy.connections), from_client=False)
        trained = load_file(one.run_folder(silo) / "model.safetensors")
        assert {name: found(tensor, up) for name, tensor in frozen.items()} == dict.fromkeys(frozen, 0)
        assert {name: found(tensor, down) for name, tensor in frozen.items()} == dict.fromkeys(frozen, 1)
        assert found(trained["classifier.weight"], down) >= 1  # the last average: this search finds what is there
        same = {name for name, tensor in frozen.items() if torch.equal(tensor, trained[name])}
        assert same == (set(frozen) if train == "head" else {name for name in frozen if name.endswith("bias")})
        proxy.close()

    loaded = load_model(one.run_folder(one.silos[0])).module.state_dict()
    assert set(loaded) == set(plain_state(start, start.state_dict()))
    kept = one.run_folder(one.silos[0]).parents[1] / "features"
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept.glob("*")] == ([0o600] if train == "head" else [])


def test_both_sides_journals_have_what_was_on_the_wire_of_a_head(federation: Make) -> None:
    model = {"name": "lenet5", "input_shape": [3, 28, 28], "classes": 9, "train": {"last": 2}}
    one = federation(
        insecure=True,
        run={"method": {"name": "fedavg"}, "model": model, "rounds": 2, "ask_for": []},
        exposures=[exposure.value for exposure in FedAvg().required],
    )
    proxies = {silo: Proxy(one.port) for silo in one.silos}
    for silo, proxy in proxies.items():
        one.write_silo(silo, port=proxy.port)
    one.run_to_the_end()
    assert_models_are(one, one.simulate())
    assert_both_sides_agree(one)
    for silo, proxy in proxies.items():
        assert_journals_have_what_was_on_the_wire(one, silo, proxy)
        proxy.close()
        updates = [r for r in one.messages(silo, "sent") if "MODEL_PARAMETERS_CLASSIFIER" in r["classes"]]
        sizes = [r["classes"].get("MODEL_PARAMETERS_EXTRACTOR", 0) for r in one.messages(silo, "sent")]
        assert len(updates) == 2
        assert sum(sizes) < 2 * (4 * (120 * 84 + 84) + 100)


@pytest.mark.parametrize("train", ["head", {"lora": {"rank": 2}}], ids=["head", "lora"])
def test_masks_hide_the_trained_part_alone(federation: Make, train: Any) -> None:
    model = {"name": "lenet5", "input_shape": [3, 28, 28], "classes": 9, "train": train}
    one = masked(federation, run={"model": model})
    one.run_to_the_end()
    assert_journals_sound(one)
    assert_models_are_nearly(one, one.simulate())
    layout = Layout.of(build(CoordinatorConfig.read(one.folder / "coordinator.yaml").plan().model, seed=1))
    numbers = sum(spec.nbytes // 4 for spec in layout.parameters) + 1
    for silo in one.silos:
        sent = sum(r["classes"].get("MASKED_UPDATE", 0) for r in one.messages(silo, "sent"))
        assert 2 * 8 * numbers <= sent < 2 * 8 * numbers + 1000
