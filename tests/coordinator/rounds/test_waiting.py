"""A run that waits says for whom; one that goes on without a hospital names it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from medsilo.coordinator import daemon
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds import rounds
from medsilo.coordinator.rounds.rounds import Rounds
from tests.support.rounds.waiting import NAMES, Run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(**settings: Any) -> Run:
        made.append(Run(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.rounds.stop()
        one.store.close()


def test_a_run_that_waits_says_for_whom(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "REMINDER_SECONDS", 0.05)
    one = begin()
    one.join("a")
    one.until(lambda: "run r waits for b, c to join" in caplog.text)
    assert one.status()["waiting_for"] == ["b", "c"]
    one.store.answer("r", "c", accepted=False, missing=["rounds"], audit_key="00" * 32, certificate_sha256="")
    assert one.status()["waiting_for"] == ["b", "c"], "who has declined is waited for all the same"
    one.join("b", "c")
    one.until(lambda: one.status()["round"] == 1)
    one.deliver("a", "c", number=0)
    one.until(lambda: "run r waits for b to deliver round 1 of 2" in caplog.text)
    assert one.status()["waiting_for"] == ["b"]
    assert "Waiting for b since" in one.told()
    one.deliver("b", number=0)
    one.until(lambda: one.status()["round"] == 2)
    one.deliver("a", "b", "c", number=1)
    one.until(lambda: "run r waits for a, b, c to fetch the end" in caplog.text)


def test_a_corrected_plan_begins_with_its_own_model(tmp_path: Path) -> None:
    """As long as no hospital has answered the plan, it may be changed; the starting model changes with it."""
    one = Run(tmp_path)
    path = tmp_path / "state/runs/r/initial.safetensors"
    try:
        first = path.read_bytes()
        one.rounds.stop()
        content = yaml.safe_load(one.path.read_text())
        content["run"]["seed"] = 7
        one.path.write_text(yaml.safe_dump(content))
        config = CoordinatorConfig.read(one.path)
        Rounds(config, config.plan(), config.make_method(), one.store)
        assert path.read_bytes() != first
    finally:
        one.store.close()


def test_at_the_end_it_waits_for_every_signature_and_says_for_whose(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "REMINDER_SECONDS", 0.05)
    one = begin(rounds=1)
    one.join(*NAMES)
    one.until(lambda: one.status()["round"] == 1)
    one.deliver(*NAMES, number=0)
    one.until(lambda: one.status()["finished"])
    signed = {"spiffe://test/silo/a", "spiffe://test/silo/c"}
    door: Any = SimpleNamespace(has_parted=signed.__contains__)
    wait = daemon._await_signatures
    waiting = threading.Thread(target=wait, args=(one.rounds.config, one.rounds, door, threading.Event()), daemon=True)
    waiting.start()
    for name in NAMES:
        one.rounds.accept(name, 1, file=None, receipt={"of": name}, metrics={})
    one.until(lambda: "run r waits for b to sign for its end" in caplog.text)
    assert waiting.is_alive()
    signed.add("spiffe://test/silo/b")
    waiting.join(timeout=60)
    assert not waiting.is_alive()


def test_a_hospital_that_never_comes_back_is_named_round_by_round(
    begin: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one = begin(quorum=2, deadline_minutes=0)
    one.join(*NAMES)
    for number in range(2):
        one.until(lambda number=number: one.rounds.round_number == number)
        one.deliver("a", "b", number=number)
    one.until(lambda: one.status()["finished"])
    assert caplog.text.count("with 2 updates; late: c") == 2
    silos = {silo["silo"]: silo for silo in one.status()["silos"]}
    assert silos["c"]["late"] == [1, 2]
    assert silos["a"]["late"] == silos["b"]["late"] == []
    assert "2 (1–2)" in one.told()


class Jumping(datetime):
    """The clock, moved."""

    by = timedelta()

    @classmethod
    def now(cls, zone: tzinfo | None = None) -> Jumping:
        return cls.fromtimestamp((datetime.now(UTC) + cls.by).timestamp(), zone)


@pytest.mark.parametrize("days", [-1, 1])
def test_a_jump_of_the_clock_neither_ends_a_round_nor_keeps_it_open(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    monkeypatch.setattr(rounds, "datetime", Jumping)
    one = begin(quorum=2, deadline_minutes=60)
    one.join(*NAMES)
    one.until(lambda: one.status()["round"] == 1)
    one.deliver("a", "b", number=0)
    monkeypatch.setattr(Jumping, "by", timedelta(days=days))
    with one.rounds._changed:
        left = one.rounds._seconds_to_deadline()
    assert left is not None
    assert 0 < left <= 3600


def test_a_clock_that_was_put_back_while_the_coordinator_was_away_costs_one_deadline_at_most(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begin(quorum=2, deadline_minutes=60)
    one.join(*NAMES)
    one.until(lambda: one.status()["round"] == 1)
    one.deliver("a", "b", number=0)
    one.rounds.stop()
    monkeypatch.setattr(rounds, "datetime", Jumping)
    monkeypatch.setattr(Jumping, "by", timedelta(days=-1))
    again = Rounds(one.rounds.config, one.rounds.plan, one.rounds.config.make_method(), one.store)
    left = again._seconds_to_deadline()
    assert left is not None
    assert 3500 < left <= 3600
