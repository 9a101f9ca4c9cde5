"""All orders of what can happen to a run with three hospitals: ``python -m tests.support.rounds.every_order``.

The coordinator's state machine is driven by a model of what stands around it: a disk, calls under way, and hospitals
that join, train, send, send again, withdraw and crash. The coordinator may crash at any moment, so also before and
after each of its writes. Each order is a sequence of such events. Orders that lead to the same state go on alike, so
each state is followed once, and counted as often as there are orders that lead to it.

Whatever happens: no update is lost, none is counted twice, there is no receipt without a file, no update is masked for
two sets of hospitals, and what the coordinator has in memory is what it would read from its disk.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

from medsilo.coordinator.rounds.machine import (
    AdmitToEnd,
    Aggregate,
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
from medsilo.privacy.consent.early_end import EarlyEnd
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire

NAMES = ("a", "b", "c")
CALLS = 2
"""Updates of one hospital that may be under way at once: one, and another whose connection was cut."""


class Key(NamedTuple):
    """A mask key."""

    silo: str
    round: int
    digest: int


class Roster:
    """Stands for a roster; the same keys are the same object."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = {key.silo: key for key in keys}
        self.silos = tuple(self.keys)
        self.sha256 = self

    def __repr__(self) -> str:
        return "+".join(f"{key.silo}{key.digest}" for key in self.keys.values())


@cache
def _roster(keys: tuple[Key, ...]) -> Roster:
    return Roster(keys)


class File(NamedTuple):
    """An update on disk."""

    silo: str
    round: int
    copy: int


class Delivered(NamedTuple):
    """What a participant's row says: the file, None where there is none (any more); and which roster it is for."""

    file: File | None
    roster: Roster | None


Rows = tuple[tuple[str, Delivered | None], ...]


class RoundRow(NamedTuple):
    """A round in the database."""

    number: int
    rows: Rows
    closed: bool = False

    @property
    def delivered(self) -> dict[str, Delivered]:
        return {silo: mine for silo, mine in self.rows if mine is not None}

    def with_row(self, silo: str, row: Delivered | None) -> RoundRow:
        return self._replace(rows=tuple(sorted({**dict(self.rows), silo: row}.items(), key=lambda item: item[0])))


class Disk(NamedTuple):
    """What the coordinator has written."""

    accepted: frozenset[str] = frozenset()
    withdrawn: frozenset[str] = frozenset()
    finished: bool = False
    early: EarlyEnd | None = None
    rounds: tuple[RoundRow, ...] = ()
    rosters: tuple[tuple[int, tuple[str, ...]], ...] = ()
    files: frozenset[File] = frozenset()

    def read(self) -> Stored:
        """As the database would say it."""
        last = self.rounds[-1] if self.rounds else None
        found = None
        if last is not None:
            found = Round(last.number, frozenset(s for s, _ in last.rows), frozenset(last.delivered), last.closed)
        return Stored(
            accepted=self.accepted,
            withdrawn=self.withdrawn,
            finished=self.finished,
            early_end=self.early,
            round=found,
            first_roster=self.rosters[0][1] if self.rosters else None,
            roster=dict(self.rosters).get(last.number) if last else None,
        )


class Call(NamedTuple):
    """An update whose file is on disk, and which is about to be counted."""

    silo: str
    round: int
    roster: Roster | None
    file: File | None


class Sending(NamedTuple):
    """What a hospital sends until it is answered."""

    round: int
    roster: Roster | None


class Silo(NamedTuple):
    """A hospital. On its disk: ``trained`` rounds, ``receipts`` by round, and for whom it has masked its update of a
    round. In memory: its mask key and what it sends. ``keys``: how many it has made."""

    trained: int = 0
    receipts: frozenset[int] = frozenset()
    masked: tuple[tuple[int, tuple[str, ...]], ...] = ()
    key: Key | None = None
    sending: Sending | None = None
    keys: int = 0


class World(NamedTuple):
    """Everything. ``state`` is None while the coordinator is down; ``closing``: whose updates are being aggregated;
    ``joining``: whose answers are stored and not yet heard of; ``ended``: rounds that came to their end."""

    state: State | None
    disk: Disk
    silos: tuple[Silo, ...]
    calls: tuple[Call, ...] = ()
    closing: tuple[str, ...] | None = None
    joining: frozenset[str] = frozenset()
    ended: int = 0


class BrokenPromiseError(Exception):
    """Something that must never happen."""


def _promise(kept: bool, words: str) -> None:
    if not kept:
        raise BrokenPromiseError(words)


Event = tuple[str, World]
Op = Callable[[World], World]


class Model:
    """What stands around a machine. ``keys``: how many mask keys a hospital may make."""

    def __init__(self, machine: Machine, *, keys: int = 3) -> None:
        self.machine = machine
        self.rules = machine.rules
        self._keys = keys

    def start(self) -> World:
        """A coordinator that has just begun."""
        disk = Disk()
        return World(self.machine.restored(disk.read()).state, disk, tuple(Silo() for _ in NAMES))

    def events(self, world: World) -> Iterator[Event]:
        """What can happen next."""
        if world.state is None:
            yield from self._carry_out(
                "the coordinator starts", world, self.machine.restored(world.disk.read()), then=self._let_go
            )
        else:
            yield "the coordinator crashes", down(world)
            yield from self._of_the_run(world, world.state)
        for place, name in enumerate(NAMES):
            silo = world.silos[place]
            if silo.key is not None or silo.sending is not None:
                yield f"{name} crashes", _with(world, place, silo._replace(key=None, sending=None))
            if world.state is not None:
                yield from self._of_silo(world, world.state, place, name, silo)

    def _of_the_run(self, world: World, state: State) -> Iterator[Event]:
        if world.closing is not None:
            used = world.closing
            yield from self._carry_out("the round ends", world, self.machine.closed(state, used=bool(used)))
            if state.masks is not None and used:
                unusable = world._replace(closing=())
                yield from self._carry_out("masks do not cancel", unusable, self.machine.closed(state, used=False))
        if (step := self.machine.due(state)) is not None:
            yield from self._carry_out("the run goes on", world, step)
        if self.rules.quorum is not None and self.machine.deadline(state) is not None:
            yield "the deadline passes", world._replace(state=self.machine.deadline_passed(state).state)

    def _of_silo(self, world: World, state: State, place: int, name: str, silo: Silo) -> Iterator[Event]:
        disk = world.disk
        if name not in state.members and name not in world.joining:
            accepted = disk._replace(accepted=disk.accepted | {name}, withdrawn=disk.withdrawn - {name})
            yield f"{name} answers the plan", world._replace(disk=accepted, joining=world.joining | {name})
        if name in world.joining:
            heard = world._replace(joining=world.joining - {name})
            yield from self._carry_out(f"{name} has joined", heard, self._joined(world, state, name))
        if name in disk.accepted and name not in disk.withdrawn and not state.closing:
            gone = _with(world, place, silo._replace(sending=None, key=None, receipts=frozenset()))
            step = self.machine.withdrawn(state, name)
            yield from self._carry_out(f"{name} withdraws", gone, step, then=self._let_go)
        if name in state.members and name not in state.withdrawn:
            if silo.sending is None:
                yield from self._ask(world, state, place, name, silo)
            elif sum(call.silo == name for call in world.calls) < CALLS:
                yield from self._send(world, state, place, name, silo.sending)
        for call in world.calls:
            if call.silo == name:
                yield from self._count(world, state, place, call)

    def _joined(self, world: World, state: State, name: str) -> Step:
        """As ``Rounds.joined``."""
        return self.machine.joined(state, name, has_withdrawn=name in world.disk.withdrawn)

    def _ask(self, world: World, state: State, place: int, name: str, silo: Silo) -> Iterator[Event]:
        """The hospital asks for its task, with its mask key if it has trained a masked round."""
        last = silo.trained - 1
        step = Step((), state)
        key = None
        if last >= 0 and self.rules.minimum is not None and self.rules.is_masked(last) and last == state.number:
            if silo.key is None or silo.key.round != last:
                if silo.keys == self._keys:
                    return
                silo = silo._replace(key=Key(name, last, silo.keys), keys=silo.keys + 1)
            key = cast(Any, silo.key)
            step = self.machine.key_stated(state, name, key)
            world = _with(world, place, silo)

        def answer(world: World) -> World:
            silo = world.silos[place]
            assert world.state is not None
            if (order := self.machine.order(world.state, name, key)) is None:
                return world
            if order.kind == wire.TASK_KIND_FINISH:
                return _with(world, place, silo._replace(sending=Sending(self.rules.rounds, None)))
            if order.kind == wire.TASK_KIND_MASK:
                roster = _roster(tuple(cast(Any, order.roster)))
                self._check_mask(silo, order.round, roster)
                masked = tuple(sorted({*silo.masked, (order.round, roster.silos)}))
                return _with(world, place, silo._replace(masked=masked, sending=Sending(order.round, roster)))
            if self.rules.minimum is not None and self.rules.is_masked(order.round):
                _promise(order.round >= silo.trained, f"{name} is asked twice to train round {order.round}")
                return _with(world, place, silo._replace(trained=order.round + 1, key=None))
            trained = max(silo.trained, order.round + 1)
            return _with(world, place, silo._replace(trained=trained, sending=Sending(order.round, None)))

        yield from self._carry_out(f"{name} asks for its task", world, step, then=answer)

    def _check_mask(self, silo: Silo, number: int, roster: Roster) -> None:
        for before, silos in silo.masked:
            if before == number or self.rules.binds:
                _promise(silos == roster.silos, f"{silos} masked round {before}, {roster.silos} round {number}")

    def _send(self, world: World, state: State, place: int, name: str, sending: Sending) -> Iterator[Event]:
        """The update's header is looked at, and its file written."""
        number, roster = sending
        answer = self.machine.offered(
            state, name, number, cast(Any, roster), before=_before(world.disk, state, name, number)
        )
        if isinstance(answer, Refuse):
            self._check_refusal(world, state, name, number, roster, answer)
            yield f"{name} sends and is refused", _refused(world, place, sending)
        elif isinstance(answer, GiveEarlierReceipt):
            yield f"{name} repeats", self._receipt(world, place, number, roster)
        else:
            yield f"{name} sends", self._with_file(world, name, number, roster)

    def _with_file(self, world: World, name: str, number: int, roster: Roster | None) -> World:
        """The update's file is durable."""
        file = None
        if number < self.rules.rounds:
            used = world.disk.files | {call.file for call in world.calls}
            file = next(f for copy in range(9) if (f := File(name, number, copy)) not in used)
            world = world._replace(disk=world.disk._replace(files=world.disk.files | {file}))
        return world._replace(calls=tuple(sorted((*world.calls, Call(name, number, roster, file)), key=_place)))

    def _count(self, world: World, state: State, place: int, call: Call) -> Iterator[Event]:
        """The update is complete and durable: it is counted, or not, and answered."""
        name, number, roster = call.silo, call.round, call.roster
        step = self.machine.delivered(
            state, name, number, cast(Any, roster), before=_before(world.disk, state, name, number)
        )
        calls = list(world.calls)
        calls.remove(call)
        world = world._replace(calls=tuple(calls))
        decision = step.decisions[0]
        if isinstance(decision, WriteDelivery):

            def write(world: World) -> World:
                return _write_delivery(world, decision, call)

            said = f"{name}'s update of round {number} is counted"
            yield from self._carry_out(
                said, world, step, ops=[write], then=lambda world: self._receipt(world, place, number, roster)
            )
            for label, after in self._carry_out(said, world, step, ops=[write], crashes=False):
                yield f"{label}, and the receipt is lost", after
            return
        without = world._replace(disk=world.disk._replace(files=world.disk.files - {call.file}))  # type: ignore[arg-type]
        if isinstance(decision, Refuse):
            self._check_refusal(world, state, name, number, roster, decision)
            yield f"{name}'s update is refused", _refused(without, place, Sending(number, roster))
        else:
            yield f"{name}'s update was a repetition", self._receipt(without, place, number, roster)

    def _receipt(self, world: World, place: int, number: int, roster: Roster | None) -> World:
        """The receipt arrives; a key that masked the update goes."""
        name, silo = NAMES[place], world.silos[place]
        row = _row(world.disk, number)
        _promise(row is not None and name in row.delivered, f"{name} gets a receipt of round {number} that is nowhere")
        if name in world.disk.withdrawn:
            return world  # it has gone meanwhile
        silo = silo._replace(receipts=silo.receipts | {number})
        if silo.sending == Sending(number, roster):
            silo = silo._replace(sending=None, key=None)
        return _with(world, place, silo)

    def _check_refusal(
        self, world: World, state: State, name: str, number: int, roster: Roster | None, refusal: Refuse
    ) -> None:
        row = _row(world.disk, number)
        is_due = row is not None and not row.closed and dict(row.rows).get(name, ...) is None and not state.closing
        if is_due and state.masks is not None:
            is_due = state.masks.roster is not None and cast(Any, state.masks.roster) is roster
        _promise(not is_due or name in state.withdrawn, f"an update is lost, for {name} is told: {refusal.error}")

    def _let_go(self, world: World) -> World:
        """Updates of hospitals that have withdrawn are deleted."""
        gone = {file for file in world.disk.files if file.silo in world.disk.withdrawn}
        under_way = {call.file for call in world.calls}
        return world._replace(disk=world.disk._replace(files=world.disk.files - (gone - under_way)))

    def _carry_out(
        self,
        label: str,
        world: World,
        step: Step,
        *,
        ops: Sequence[Op] | None = None,
        then: Op | None = None,
        crashes: bool = True,
    ) -> Iterator[Event]:
        """A step's decisions, with a crash after each write. ``then`` is done after the last."""
        done = world
        for op in self._ops(step.decisions) if ops is None else ops:
            try:
                done = op(done)
            except BrokenPromiseError as broken:
                raise BrokenPromiseError(f"{label}: {broken}") from None
            if crashes:
                yield f"{label}; the coordinator crashes after a write", down(done)
        done = done._replace(state=step.state)
        aggregates = [decision for decision in step.decisions if isinstance(decision, Aggregate)]
        if aggregates:
            done = done._replace(closing=aggregates[0].silos)
        yield label, then(done) if then is not None else done

    def _ops(self, decisions: Iterable[Decision]) -> Iterator[Op]:
        for decision in decisions:
            match decision:
                case OpenRound() | FinishRun() | AdmitToEnd() | FixRoster() | CloseRound():
                    yield lambda world, decision=decision: self._write(world, decision)  # type: ignore[misc]
                case RestartRound(number):
                    yield lambda world, number=number: _restart(world, number)  # type: ignore[misc]
                    yield lambda world, number=number: _delete_unnamed(world, number)  # type: ignore[misc]
                case WriteWithdrawal():
                    yield lambda world, decision=decision: _write_withdrawal(world, decision)  # type: ignore[misc]
                    yield self._let_go

    def _write(self, world: World, decision: Decision) -> World:
        disk = world.disk
        last = disk.rounds[-1] if disk.rounds else None
        match decision:
            case OpenRound(number, silos):
                _promise(number == (last.number + 1 if last else 0), f"round {number} is opened after {last}")
                _promise(last is None or last.closed, f"round {number} is opened while another is open")
                _promise(not disk.withdrawn.intersection(silos), f"round {number} is opened for one that has withdrawn")
                opened = RoundRow(number, tuple((silo, None) for silo in sorted(silos)))
                return world._replace(disk=disk._replace(rounds=(*disk.rounds, opened)))
            case FinishRun(silos, early, closes):
                _promise(not disk.finished, "the run ends twice")
                if closes is not None and last is not None:
                    # Under masks what came for a sum that may not be is given up with it.
                    is_masked = self.rules.minimum is not None and self.rules.is_masked(closes)
                    _promise(last.number == closes, f"round {closes} is closed, not {last}")
                    _promise(is_masked or not last.delivered, f"the run ends, and {set(last.delivered)} are not used")
                    last = last._replace(closed=True)
                    disk = disk._replace(rounds=(*disk.rounds[:-1], last))
                done = early.rounds if early else self.rules.rounds
                _promise(done == world.ended, f"the end is said to be after {done} rounds; {world.ended} were done")
                _promise(last is None or last.closed, "the run ends while a round is open")
                end = RoundRow(self.rules.rounds, tuple((silo, None) for silo in sorted(silos)))
                return world._replace(disk=disk._replace(finished=True, early=early, rounds=(*disk.rounds, end)))
            case AdmitToEnd(silo):
                assert last is not None
                return world._replace(disk=disk._replace(rounds=(*disk.rounds[:-1], last.with_row(silo, None))))
            case FixRoster(number, silos):
                known = dict(disk.rosters).get(number, silos)
                _promise(known == silos, f"round {number} is of {known}, and is to be of {silos}")
                rosters = tuple(sorted({*disk.rosters, (number, silos)}))
                return world._replace(disk=disk._replace(rosters=rosters))
            case CloseRound(number):
                assert last is not None
                self._check_close(world, last, number)
                after = disk._replace(rounds=(*disk.rounds[:-1], last._replace(closed=True)))
                return world._replace(disk=after, ended=world.ended + 1, closing=None)
        raise AssertionError(decision)

    def _check_close(self, world: World, last: RoundRow, number: int) -> None:
        _promise(last.number == number and not last.closed, f"round {number} is counted twice")
        used, is_masked = world.closing, self.rules.minimum is not None and self.rules.is_masked(number)
        delivered = last.delivered
        if used is not None:
            _promise(len(set(used)) == len(used), f"an update is counted twice in round {number}")
            _promise(not world.disk.withdrawn.intersection(used), "the update of one that has withdrawn is used")
        if not is_masked:
            _promise(set(used or ()) == set(delivered), f"of {set(delivered)} in round {number} {used} are used")
        elif used:
            rosters = {mine.roster for mine in delivered.values()}
            (roster,) = rosters if len(rosters) == 1 else (None,)
            _promise(roster is not None and roster.silos == used == tuple(delivered), f"a sum of {last} over {used}")


def check(machine: Machine, world: World) -> None:
    """What holds at every moment; raises ``BrokenPromiseError``."""
    disk, state = world.disk, world.state
    for row in disk.rounds:
        for name, mine in row.delivered.items():
            _promise(mine.file is None or mine.file in disk.files, f"a receipt of {name} without a file")
    for name, silo in zip(NAMES, world.silos, strict=True):
        for number in silo.receipts:
            found = _row(disk, number)
            _promise(found is not None and name in found.delivered, f"{name}'s update of round {number} is lost")
    if state is None:
        return
    under_way = {call.file for call in world.calls}
    for file in disk.files - under_way:
        _promise(file.silo not in disk.withdrawn, f"an update of {file.silo}, who has withdrawn, is left on disk")
    unheard = world.joining
    stored = machine.restored(disk.read()).state
    if state.masks is not None and state.masks.silos is not None:
        stored = State(**{**_fields(stored), "round": state.round})  # of a masked round all would deliver again
        last = disk.read().round
        _promise(last == state.round, f"memory says {state.round}, the disk {last}")
        rosters = {mine.roster for mine in disk.rounds[-1].delivered.values()}
        _promise(rosters <= {cast(Any, state.masks.roster)}, f"updates for {rosters}, with {state.masks.roster} to sum")
    for what in ("finished", "early_end", "bound", "round"):
        _promise(getattr(state, what) == getattr(stored, what), f"{what}: {getattr(state, what)}, stored otherwise")
    for what in ("members", "withdrawn"):
        differ = getattr(state, what) ^ getattr(stored, what)
        _promise(differ <= unheard, f"{what}: {sorted(differ)} are in memory or stored, not both")


def _fields(state: State) -> dict[str, Any]:
    return {name: getattr(state, name) for name in State.__slots__}


def _place(call: Call) -> tuple[Any, ...]:
    return call.silo, call.round, call.file or (), repr(call.roster)


def _with(world: World, place: int, silo: Silo) -> World:
    return world._replace(silos=(*world.silos[:place], silo, *world.silos[place + 1 :]))


def down(world: World) -> World:
    """The coordinator has crashed: what was in memory, and all calls, are gone."""
    return world._replace(state=None, calls=(), closing=None, joining=frozenset())


def _refused(world: World, place: int, sending: Sending) -> World:
    silo = world.silos[place]
    return _with(world, place, silo._replace(sending=None)) if silo.sending == sending else world


def _row(disk: Disk, number: int) -> RoundRow | None:
    # An early end has the number of the rounds that were planned, whichever came last.
    return next((row for row in disk.rounds if row.number == number), None)


def _before(disk: Disk, state: State, name: str, number: int) -> bool | None:
    """As ``Rounds._delivered_before``."""
    if state.round is not None and number == state.round.number:
        return None
    row = _row(disk, number)
    rows = dict(row.rows) if row else {}
    return rows[name] is not None if name in rows else None


def _write_delivery(world: World, decision: WriteDelivery, call: Call) -> World:
    disk, name = world.disk, decision.silo
    last = disk.rounds[-1]
    _promise(last.number == decision.number and not last.closed, f"{name} is counted in a round that has ended")
    rows = dict(last.rows)
    _promise(name in rows, f"{name} is counted in a round that it was not asked for")
    _promise(rows[name] is None, f"{name}'s update of round {decision.number} is counted twice")
    _promise(call.file is None or call.file in disk.files, f"{name} gets a receipt without a file")
    row = last.with_row(name, Delivered(call.file, call.roster))
    return world._replace(disk=disk._replace(rounds=(*disk.rounds[:-1], row)))


def _write_withdrawal(world: World, decision: WriteWithdrawal) -> World:
    """As ``Store.withdraw``."""
    disk, name, rounds = world.disk, decision.silo, []
    for row in world.disk.rounds:
        mine = dict(row.rows).get(name)
        if row.number == decision.open_round:
            row = row._replace(rows=tuple(item for item in row.rows if item[0] != name))
        elif mine is not None:
            row = row.with_row(name, mine._replace(file=None))
        rounds.append(row)
    return world._replace(disk=disk._replace(withdrawn=disk.withdrawn | {name}, rounds=tuple(rounds)))


def _restart(world: World, number: int) -> World:
    """As ``Store.restart_round``; the receipts of that round are void, for all are asked again or it is given up."""
    disk = world.disk
    last = disk.rounds[-1]
    _promise(last.number == number and not last.closed, f"round {number} is begun again after its end")
    silos = tuple(silo._replace(receipts=silo.receipts - {number}) for silo in world.silos)
    row = last._replace(rows=tuple((name, None) for name, _ in last.rows))
    return world._replace(silos=silos, disk=disk._replace(rounds=(*disk.rounds[:-1], row)))


def _delete_unnamed(world: World, number: int) -> World:
    kept = {call.file for call in world.calls}
    gone = {file for file in world.disk.files if file.round == number and file not in kept}
    return world._replace(disk=world.disk._replace(files=world.disk.files - gone))


@dataclass
class Found:
    """What a search has seen. ``orders`` of the full depth, or that ended before."""

    depth: int = 0
    orders: int = 1
    states: int = 1
    events: int = 0
    broken: str = ""
    trace: list[str] = field(default_factory=list)


def search(
    model: Model,
    *,
    depth: int,
    start: World | None = None,
    told: Callable[[Found], None] = lambda _: None,
    enough: Callable[[Found], bool] = lambda _: False,
) -> Found:
    """Follows all orders of up to ``depth`` events, or until ``enough``; ends at the first promise that is broken,
    with the events that led there."""
    gc.disable()  # nothing here is circular, and to look through millions of worlds takes as long as to make them
    try:
        return _search(model, depth, model.start() if start is None else start, told, enough)
    finally:
        gc.enable()


def _search(
    model: Model, depth: int, begin: World, told: Callable[[Found], None], enough: Callable[[Found], bool]
) -> Found:
    found = Found()
    came: dict[World, tuple[World | None, str]] = {begin: (None, "")}
    follows: dict[World, list[World]] = {}
    layer = {begin: 1}
    ended = 0
    while layer and found.depth < depth and not enough(found):
        after: dict[World, int] = {}
        for world, orders in layer.items():
            if (next_ones := follows.get(world)) is None:
                next_ones = follows[world] = []
                label = ""
                try:
                    for label, reached in model.events(world):
                        next_ones.append(reached)
                        if reached not in came:
                            came[reached] = (world, label)
                            check(model.machine, reached)
                        label = ""
                except BrokenPromiseError as broken:
                    found.broken = str(broken)
                    found.trace = [*_way(came, world), *filter(None, [label]), found.broken]
                    return found
                found.events += len(next_ones)
            if not next_ones:
                ended += orders
            for reached in next_ones:
                after[reached] = after.get(reached, 0) + orders
        layer = after
        found.depth += 1
        found.orders = ended + sum(layer.values())
        found.states = len(came)
        told(found)
    return found


def one_by_one(model: Model, world: World, depth: int) -> int:
    """The number of orders, each gone through for itself."""
    following = [after for _, after in model.events(world)] if depth else []
    return sum(one_by_one(model, after, depth - 1) for after in following) or 1


def completes(model: Model, world: World, known: set[World]) -> bool:
    """Whether the run comes to its end when from now on nothing crashes and all take part. ``known``: worlds that
    do."""
    way = [world]
    while way[-1] not in known and not (way[-1].state is not None and way[-1].state.is_done):
        before = set(way)
        after = {label: to for label, to in model.events(way[-1]) if to not in before and not _disturbs(label)}
        if not after:
            return False
        way.append(min(after.items(), key=lambda item: _patience(item[0]))[1])
    known.update(way)
    return True


def _disturbs(label: str) -> bool:
    return any(word in label for word in ("crashes", "withdraws", "lost", "do not cancel"))


def _patience(label: str) -> int:
    return 2 if "deadline" in label else 1 if "repeats" in label else 0


def _way(came: Mapping[World, tuple[World | None, str]], world: World) -> list[str]:
    labels: list[str] = []
    at: World | None = world
    while at is not None:
        at, label = came[at]
        labels.append(label)
    return labels[-2::-1]


def lead(model: Model, world: World, *labels: str) -> World:
    """The world after these events."""
    for label in labels:
        world = dict(model.events(world))[label]
    return world


def opened(model: Model) -> World:
    """A world in which all three have joined and the first round is open."""
    joins = [label for name in NAMES for label in (f"{name} answers the plan", f"{name} has joined")]
    return lead(model, model.start(), *joins, "the run goes on")


def overdue(model: Model) -> World:
    """A world in which two have delivered, and the third is sending when the deadline passes."""
    asks = [f"{name} asks for its task" for name in NAMES]
    two = [label for n in "ab" for label in (f"{n} sends", f"{n}'s update of round 0 is counted")]
    return lead(model, opened(model), *asks, *two, "c sends", "the deadline passes")


def trained(model: Model) -> World:
    """A world in which all three have trained the first round, which is masked."""
    return lead(model, opened(model), *(f"{name} asks for its task" for name in NAMES))


def masked(model: Model) -> World:
    """A world in which all three have masked their updates of the first round for each other."""
    asks = [f"{name} asks for its task" for name in NAMES]
    return lead(model, trained(model), *asks, "the run goes on", *asks)


def second(model: Model) -> World:
    """A world in which the first round's masked sum has been made, and all three have trained the second round."""
    counted = [label for n in NAMES for label in (f"{n} sends", f"{n}'s update of round 0 is counted")]
    asks = [f"{name} asks for its task" for name in NAMES]
    return lead(model, masked(model), *counted, "the run goes on", "the round ends", "the run goes on", *asks)


def rules(*, rounds: int = 2, quorum: int | None = 2, minimum: int | None = None, binds: bool = False) -> Rules:
    """Of a run with three hospitals."""
    return Rules(
        run="r",
        silos=frozenset(NAMES),
        rounds=rounds,
        start_with=None if quorum is None else quorum,
        quorum=quorum,
        minimum=minimum,
        is_masked=lambda number: number < rounds,
        binds=binds,
        draw=lambda silos, _number: tuple(silos),
        roster=lambda keys: cast(Any, _roster(tuple(cast(Any, keys)))),
    )


class Kind(NamedTuple):
    """A kind of run: its rules, and where its orders begin; ``depth``: to which a test run follows them."""

    rules: Rules
    start: Callable[[Model], World]
    depth: int


_BOUND, _FREE = rules(minimum=2, binds=True), rules(minimum=2)
_STRICT = rules(minimum=3, quorum=None, binds=True)
KINDS: Mapping[str, Kind] = {
    "from the start": Kind(rules(), Model.start, 11),
    "with a quorum": Kind(rules(), opened, 8),
    "with a quorum, past the deadline": Kind(rules(), overdue, 8),
    "waiting for all": Kind(rules(quorum=None), opened, 8),
    "masked: one set of hospitals, from training on": Kind(_BOUND, trained, 7),
    "masked: one set of hospitals, from masking on": Kind(_BOUND, masked, 7),
    "masked: one set of hospitals, in the second round": Kind(_BOUND, second, 8),
    "masked: sets may change, from training on": Kind(_FREE, trained, 7),
    "masked: sets may change, from masking on": Kind(_FREE, masked, 7),
    "masked: all three or none, from training on": Kind(_STRICT, trained, 7),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries all orders of events, deeper and deeper, and says how many.")
    parser.add_argument("--orders", type=float, default=1e8, help="of each kind of run, at least (default: 1e8)")
    parser.add_argument("--depth", type=int, default=99, help="events in one order, at most")
    parser.add_argument("--only", help="one kind of run")
    chosen = parser.parse_args()

    def enough(found: Found) -> bool:
        return found.orders >= chosen.orders

    for name, kind in KINDS.items():
        if chosen.only in (None, name):
            model = Model(Machine(kind.rules))
            print(name)
            found = search(
                model,
                depth=chosen.depth,
                start=kind.start(model),
                told=_said(),
                enough=lambda f: f.orders >= chosen.orders,
            )
            if found.broken:
                sys.exit("\n".join(found.trace))


def _said() -> Callable[[Found], None]:
    began = time.monotonic()

    def say(found: Found) -> None:
        seconds = time.monotonic() - began
        print(
            f"  {found.depth:3} events: {found.orders:,} orders, {found.states:,} states, "
            f"{found.events:,} events tried, {seconds:.0f} s",
            flush=True,
        )

    return say


if __name__ == "__main__":
    main()
