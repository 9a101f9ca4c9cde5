"""What the rounds make of a hospital that withdraws: every method goes on without it, and nothing waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo.algorithms.method import Federation, Round
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.registry import METHODS
from medsilo.algorithms.tensors import MemoryWorkspace, payload_tensors
from medsilo.algorithms.tensors.files import read_payload
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure
from tests.support.rounds.withdrawing import NAMES, ROUNDS, Run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(name: str, **parameters: Any) -> Run:
        made.append(Run(tmp_path, {"name": name, **parameters}))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_on_without_a_hospital_that_withdrew_and_takes_it_back(
    begin: Callable[..., Run], name: str
) -> None:
    """It withdraws with its update delivered and the round open; later it gives its consent anew."""
    run = begin(name)
    run.join(*NAMES)
    run.work(*NAMES)
    run.opened(1)
    run.work("a")
    signed = run.withdraw("a")
    assert (signed.dropped_round, signed.rounds_acknowledged) == (1, (0, 1))
    assert run.withdraw("a") == signed, "again, it changes nothing"
    assert run.files_of("a") == []
    assert len(run.files_of("a-b")) <= 1, "another hospital's updates stay"
    assert not run.rounds.is_member("a")
    with pytest.raises(RefusedError, match="a has withdrawn"):
        run.deliver("a", 1, run.uploads[1, "a"])
    assert run.files_of("a") == []
    run.work("a-b", "c")
    run.opened(2)
    run = run.restarted()
    try:
        assert run.rounds.has_withdrawn("a")
        run.work("a-b", "c")
        run.opened(3)
        assert set(run.store.latest_files("r")) <= {"a-b", "c"}
        run.join("a")
        run.work("a-b", "c")
        run.opened(4)
        assert run.store.withdrawals("r") == {}
        run.work(*NAMES)
        run.opened(5)
        run.work(*NAMES)
        run.rounds.wait_until_done()
        for side in run.sides.values():
            assert all(tensor.isfinite().all() for tensor in side.personal().values())
    finally:
        run.close()


@pytest.mark.parametrize("name", ["fedavg", "diversifed", "pfedsim", "feddfq", "fedpdc"])
def test_a_dropped_update_is_used_for_nothing(begin: Callable[..., Run], name: str) -> None:
    """The others get what they would get had the hospital never sent anything but its first round's update."""
    run = begin(name)
    run.join(*NAMES)
    run.work(*NAMES)
    run.opened(1)
    run.work(*NAMES[:2])
    run.withdraw("a")
    run.work("c")
    run.opened(2)
    model = build(run.plan.model, seed=1)
    federation = Federation(
        Layout.of(model), ROUNDS, run.plan.seed, NAMES, run.plan.model.input_shape, run.config.open_public(model)
    )
    reference = run.method.coordinator_side(federation)
    first = {silo: run.uploads[0, silo] for silo in NAMES}
    reference.aggregate(Round(0, first, first, MemoryWorkspace()))
    reference.forget("a")
    second = {silo: run.uploads[1, silo] for silo in NAMES[1:]}
    expected = reference.aggregate(Round(1, second, second, MemoryWorkspace()))
    for silo in NAMES[1:]:
        with run.rounds.task(silo, 60, lambda: True, holds_model=True) as (_, payload):
            shared = [Exposure.PEER_DERIVED]
            found, wanted = payload_tensors(payload, shared), payload_tensors(expected.for_silo(silo), shared)
            assert found
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_the_last_hospital_that_is_left_trains_on_and_when_it_goes_the_run_ends(begin: Callable[..., Run]) -> None:
    run = begin("diversifed")
    run.join(*NAMES)
    run.work(*NAMES)
    run.opened(1)
    run.withdraw("a")
    run.withdraw("a-b")
    run.work("c")
    run.opened(2)
    run.withdraw("c")
    run.rounds.wait_until_done()
    assert run.store.is_finished("r")
    assert run.rounds.failure is None
    run = run.restarted()
    try:
        run.rounds.wait_until_done()
        run.join("c")
        run.work("c")  # the end is told to whoever comes back
    finally:
        run.close()


def test_before_the_start_nobody_is_waited_for_who_has_withdrawn(begin: Callable[..., Run]) -> None:
    run = begin("fedavg")
    run.join("a", "c")
    run.withdraw("a")
    time.sleep(0.1)
    assert run.store.last_round("r") is None, "the third hospital may still come"
    run.join("a-b")
    run.work("a-b", "c")
    run.opened(1)


def test_a_run_that_nobody_began_ends_when_all_have_withdrawn(begin: Callable[..., Run]) -> None:
    run = begin("fedavg")
    run.join("a", "c")
    for name in NAMES:
        run.withdraw(name)
    run.rounds.wait_until_done()
    assert run.store.is_finished("r")


def test_a_withdrawal_while_a_round_is_being_closed_waits_for_it(begin: Callable[..., Run]) -> None:
    """Its update is being used just then; the tombstone counts from the next round on."""
    run = begin("fedavg")
    side, closing, go_on = run.rounds._aggregator.side, threading.Event(), threading.Event()
    aggregate = side.aggregate

    def slow(*arguments: Any) -> Any:
        closing.set()
        go_on.wait(30)
        return aggregate(*arguments)

    side.aggregate = slow  # type: ignore[method-assign]
    run.join(*NAMES)
    run.work(*NAMES)
    assert closing.wait(30)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run.withdraw("a")))
    thread.start()
    time.sleep(0.05)
    assert found == []
    go_on.set()
    thread.join(30)
    assert found[0].dropped_round is None
    run.opened(1)
    run.work("a-b", "c")
    run.opened(2)


def test_single_models_of_a_hospital_that_withdrew_are_not_handed_on(begin: Callable[..., Run]) -> None:
    run = begin("apple")
    run.join(*NAMES)
    run.work(*NAMES)
    run.opened(1)
    with run.rounds.task("c", 60, lambda: True, holds_model=True) as (_, payload):
        assert any(spec.name.startswith("a/") for spec in payload[Exposure.PEER_MODELS].specs)
    run.withdraw("a")
    for number in (1, 2):
        run.opened(number)
        with run.rounds.task("c", 60, lambda: True, holds_model=True) as (_, payload):
            given = payload.get(Exposure.PEER_MODELS)
            assert not [spec.name for spec in (given.specs if given else ()) if spec.name.startswith("a/")]
        run.work("a-b", "c")


def test_a_crash_between_the_tombstone_and_the_deletion_leaves_no_update_behind(begin: Callable[..., Run]) -> None:
    run = begin("fedavg")
    run.join(*NAMES)
    run.work("a", "a-b")
    (name,) = run.files_of("a")
    path = next(run.config.state.rglob(name))
    content = path.read_bytes()
    run.withdraw("a")
    path.write_bytes(content)
    run = run.restarted()
    try:
        assert run.files_of("a") == []
        assert read_payload(next(run.config.state.rglob(run.files_of("a-b")[0])))
        run.work("c")
        run.opened(1)
    finally:
        run.close()
