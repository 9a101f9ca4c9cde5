"""Of a run with blind mixtures the rounds in which they are opened are of the silos that sealed, and of no others."""

from __future__ import annotations

from dataclasses import replace

from medsilo.coordinator.rounds.machine import FinishRun, Machine, OpenRound, Round, Rules, State
from medsilo.privacy.consent.early_end import EndReason

RULES = Rules(
    run="r",
    silos=frozenset("abcd"),
    rounds=4,
    start_with=3,
    quorum=None,
    minimum=3,
    is_masked=lambda number: number < 4 and number % 2 == 0,
    binds=True,
    draw=lambda silos, number: tuple(silos),
    all_bound=True,
)
SEALED = State(
    members=frozenset("abcd"),
    bound=("a", "b", "c"),
    round=Round(0, frozenset("abc"), frozenset("abc"), closed=True),
)


def test_a_silo_that_came_late_is_not_asked_to_open_what_it_has_not_sealed() -> None:
    machine = Machine(RULES)
    step = machine.due(SEALED)
    assert step is not None
    assert step.decisions == (OpenRound(1, ("a", "b", "c")),)
    assert step.state.masks is None, "what opens mixtures is for no roster"
    assert machine.comes_too_late(step.state, "d")
    assert machine.due(step.state) is None, "it waits for all three"
    some = replace(step.state, round=Round(1, frozenset("abc"), frozenset("ab")), overdue=True)
    assert machine.due(some) is None, "whatever the deadline says"


def test_a_silo_that_withdraws_before_mixtures_are_opened_ends_the_run() -> None:
    machine = Machine(RULES)
    opened = machine.due(SEALED)
    assert opened is not None
    left = machine.withdrawn(opened.state, "c").state
    step = machine.due(left)
    assert step is not None
    (finish,) = step.decisions
    assert isinstance(finish, FinishRun)
    assert finish.early is not None
    assert (finish.closes, finish.early.reason) == (1, EndReason.WITHDRAWN_FROM_MASKS)
    # After the last round there is nothing to lack anybody for.
    done = replace(SEALED, round=Round(3, frozenset("abc"), frozenset("abc"), closed=True))
    assert machine.due(machine.withdrawn(done, "c").state).decisions == (FinishRun(("a", "b", "d")),)  # type: ignore[union-attr]
