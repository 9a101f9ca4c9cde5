"""In whatever order hospitals deliver, repeat, withdraw, drop out and come late, and whoever crashes when: no update is
lost, none is counted twice, there is no receipt without a file, and no update is masked for two sets of hospitals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medsilo.coordinator.rounds.kept_state import stored
from medsilo.coordinator.rounds.machine import (
    AdmitToEnd,
    CloseRound,
    Decision,
    FinishRun,
    FixRoster,
    GiveEarlierReceipt,
    Machine,
    OpenRound,
    Refuse,
    RestartRound,
    Round,
    Rules,
    State,
    Step,
    Stored,
    WriteDelivery,
    WriteWithdrawal,
)
from medsilo.coordinator.rounds.masked_round import MaskedRound
from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import RefusedError
from tests.support.rounds.every_order import (
    KINDS,
    Event,
    Kind,
    Model,
    Roster,
    World,
    completes,
    down,
    masked,
    one_by_one,
    opened,
    overdue,
    rules,
    search,
    second,
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_order_breaks_a_promise(kind: Kind) -> None:
    model = Model(Machine(kind.rules))
    found = search(model, depth=kind.depth, start=kind.start(model))
    assert not found.broken, "\n".join(found.trace)
    assert found.orders >= 1_000_000
    assert found.depth == kind.depth


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_orders_that_are_followed_together_are_all_counted(kind: Kind) -> None:
    model = Model(Machine(kind.rules))
    start = kind.start(model)
    assert search(model, depth=4, start=start).orders == one_by_one(model, start, 4)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_from_wherever_a_run_is_it_comes_to_its_end_when_all_take_part(kind: Kind) -> None:
    model, patient = Model(Machine(kind.rules)), Model(Machine(kind.rules), keys=20)
    known: set[World] = set()
    reached = {kind.start(model)}
    layer = set(reached)
    for _ in range(4):
        layer = {after for world in layer for _, after in model.events(world)} - reached
        reached |= layer
    stuck = [world for world in reached if not completes(patient, world, known)]
    assert not stuck


class CountsRepeats(Machine):
    """Takes an update that it has already."""

    def offered(self, *arguments: Any, **options: Any) -> GiveEarlierReceipt | Refuse | None:
        answer = super().offered(*arguments, **options)
        return None if isinstance(answer, GiveEarlierReceipt) else answer


class TakesLateOnes(Machine):
    """Takes updates while the round is being aggregated, or has ended."""

    def offered(self, state: State, *arguments: Any, **options: Any) -> GiveEarlierReceipt | Refuse | None:
        return super().offered(replace(state, closing=False), *arguments, **options)


class ForgetsWhoDelivered(Machine):
    """Begins the open round anew after a crash."""

    def restored(self, stored: Stored) -> Step:
        opened = stored.round
        return super().restored(replace(stored, round=replace(opened, delivered=frozenset()) if opened else None))


class TurnsAwaySecondOnes(Machine):
    """Refuses whoever comes when another has delivered."""

    def offered(
        self, state: State, silo: str, number: int, *arguments: Any, **options: Any
    ) -> GiveEarlierReceipt | Refuse | None:
        answer = super().offered(state, silo, number, *arguments, **options)
        if answer is None and state.round is not None and state.round.delivered:
            return Refuse(RefusedError("one is enough"))
        return answer


class UsesHalf(Machine):
    """Leaves one of the updates out."""

    def due(self, state: State) -> Step | None:
        step = super().due(state)
        if step is None or not step.state.closing:
            return step
        (aggregate,) = step.decisions
        return replace(step, decisions=(replace(aggregate, silos=aggregate.silos[1:]),))  # type: ignore[call-arg,union-attr]


class KeepsTheRoster(Machine):
    """Does not let go of what was masked for a roster whose key is lost."""

    def _mask_again(self, state: State) -> Step:
        assert state.masks is not None
        return Step((), replace(state, masks=replace(state.masks, roster=None)))


class TakesAnyRoster(Machine):
    """Does not look what an update was masked for."""

    def offered(
        self, state: State, silo: str, number: int, roster_sha256: Any = b"", **options: Any
    ) -> GiveEarlierReceipt | Refuse | None:
        present = state.masks.roster.sha256 if state.masks and state.masks.roster else roster_sha256
        return super().offered(state, silo, number, present, **options)


class SumsWhoIsLeft(Machine):
    """Masks again with whoever is left when one of the roster withdraws."""

    def withdrawn(self, state: State, silo: str) -> Step:
        step = super().withdrawn(state, silo)
        if (masks := step.state.masks) is None or masks.silos is None:
            return step
        left = tuple(name for name in masks.silos if name != silo)
        return replace(step, state=replace(step.state, masks=replace(masks, silos=left, roster=None), bound=None))


class SumsOthers(Machine):
    """Makes sums of other hospitals in one run, where one has withdrawn and joined again."""

    def _is_lost(self, state: State, masks: MaskedRound, current: Round) -> bool:
        return False


class IgnoresWithdrawals(Machine):
    """Takes in whoever has joined, though it has withdrawn meanwhile."""

    def joined(self, state: State, silo: str, *, has_withdrawn: bool) -> Step:
        return super().joined(state, silo, has_withdrawn=False)


class Hasty(Model):
    """Counts updates whose files are still being written."""

    def _with_file(self, world: World, name: str, number: int, roster: Roster | None) -> World:
        after = super()._with_file(world, name, number, roster)
        return after._replace(disk=world.disk)


class Generous(Model):
    """Gives the receipt before the row is written."""

    def _count(self, world: World, state: State, place: int, call: Any) -> Iterator[Event]:
        yield f"{call.silo} gets a receipt", self._receipt(world, place, call.round, call.roster)


class Forgetful(Model):
    """Leaves the updates of hospitals that have withdrawn on disk."""

    def _let_go(self, world: World) -> World:
        return world


PLAIN, BOUND, FREE = rules(), rules(minimum=2, binds=True), rules(minimum=2)


@pytest.mark.parametrize(
    ("model", "start", "said"),
    [
        (Model(CountsRepeats(PLAIN)), opened, "counted twice"),
        (Model(TakesLateOnes(PLAIN)), overdue, "are used"),
        (Model(ForgetsWhoDelivered(PLAIN)), opened, "stored otherwise"),
        (Model(TurnsAwaySecondOnes(PLAIN)), opened, "an update is lost"),
        (Model(UsesHalf(PLAIN)), opened, "are used"),
        (Model(KeepsTheRoster(FREE)), masked, "updates for"),
        (Model(TakesAnyRoster(BOUND)), masked, "updates for"),
        (Model(SumsWhoIsLeft(FREE)), masked, "is to be of"),
        (Model(SumsOthers(BOUND)), second, "masked round 0"),
        (Model(IgnoresWithdrawals(PLAIN)), Model.start, "in memory or stored, not both"),
        (Hasty(Machine(PLAIN)), opened, "a receipt without a file"),
        (Generous(Machine(PLAIN)), opened, "that is nowhere"),
        (Forgetful(Machine(PLAIN)), opened, "is left on disk"),
    ],
    ids=lambda found: type(found.machine).__name__ + type(found).__name__ if isinstance(found, Model) else "",
)
def test_what_breaks_a_promise_is_found(model: Model, start: Callable[[Model], World], said: str) -> None:
    found = search(model, depth=8, start=start(Model(Machine(model.rules))))
    assert said in found.broken, found.trace


class Told(Model):
    """Remembers the decisions that an event carried out, and after which write a crash came."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.writes: dict[World, tuple[Decision, ...]] = {}

    def _carry_out(self, label: str, world: World, step: Step, **options: Any) -> Iterator[Event]:
        # Without crashes between two writes of one decision, which the database keeps together with its files.
        *_, (_, after) = super()._carry_out(label, world, step, **{**options, "crashes": False})
        self.writes[after] = step.decisions
        yield label, after
        if step.decisions and options.get("crashes", True):
            self.writes[down(after)] = step.decisions
            yield f"{label}; the coordinator crashes", down(after)


def _write(store: Store, decision: Decision, rounds: int) -> None:
    match decision:
        case OpenRound(number, silos):
            store.open_round("r", number, silos)
        case FinishRun(silos, early, closes):
            store.finish_run("r", rounds, silos, early=early, closes=closes)
        case AdmitToEnd(silo):
            store.admit_participant("r", rounds, silo)
        case FixRoster(number, silos):
            store.fix_roster("r", number, silos)
        case RestartRound(number):
            store.restart_round("r", number)
        case CloseRound(number):
            store.close_round("r", number, downloads={}, memory_file=None)
        case WriteDelivery(number, silo):
            store.deliver("r", number, silo, file="f", receipt={"of": silo}, accuracy=None, loss=None)
        case WriteWithdrawal(silo, open_round):
            store.withdraw("r", silo, reason="", rounds_acknowledged=[], statement={}, open_round=open_round)


@pytest.mark.parametrize("its_rules", [PLAIN, BOUND, FREE], ids=["plain", "one set", "sets may change"])
def test_the_models_disk_says_what_the_database_says(its_rules: Rules, tmp_path: Path) -> None:
    """Random orders, whose writes go to both."""
    model, rng = Told(Machine(its_rules)), random.Random(1)
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    store.open_run("r", b"{}", "00")
    world, kept = model.start(), 0
    for _ in range(150):
        model.writes.clear()
        following = list(model.events(world))
        if not following:
            break
        label, after = rng.choice([event for event in following if "crashes" not in event[0]] * 9 + following)
        if "answers the plan" in label:
            store.answer("r", label[0], accepted=True, missing=[], audit_key="", certificate_sha256="")
        for decision in model.writes.get(after, ()):
            _write(store, decision, its_rules.rounds)
            kept += 1
        world = after
        assert stored(store, "r") == world.disk.read(), label
    store.close()
    assert kept > 10
