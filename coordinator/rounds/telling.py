"""What the operator's log says of a run's rounds, with the names of hospitals."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from medsilo.coordinator.rounds.closing import Aggregated
from medsilo.coordinator.rounds.machine import State
from medsilo.coordinator.store.records import RoundState
from medsilo.privacy.consent.early_end import EndReason
from medsilo.privacy.consent.plan import RunPlan

log = logging.getLogger("medsilo.coordinator.rounds")

_ONE_SET_OF_SILOS = (
    "the sums of one run are of the same hospitals in every round, for two that differ by a few would give away what "
    "those sent. It gets the run's end, and can take part in the next run"
)


class Telling:
    """Tells of one run of these silos. What happens is in the state."""

    def __init__(self, plan: RunPlan, silos: frozenset[str]) -> None:
        self._plan = plan
        self._silos = silos

    def opened(self, number: int, silos: Iterable[str]) -> None:
        """A round has been opened."""
        log.info("round %d of %d is open for %s", number + 1, self._plan.rounds, ", ".join(silos))

    def waits(self, state: State) -> None:
        """Says whom the run waits for, so that nobody has to guess why nothing happens."""
        opened, plan = state.round, self._plan
        if opened is None or opened.closed:
            missing = sorted(self._silos - state.members - state.withdrawn)
            what = "to join"
        else:
            missing = sorted(opened.asked - opened.delivered)
            what = "to fetch the end" if state.finished else f"to deliver round {opened.number + 1} of {plan.rounds}"
        if missing:
            log.warning("run %s waits for %s %s", plan.run, ", ".join(missing), what)

    def comes_too_late(self, silo: str) -> None:
        """A silo has joined when the masked sums were of others already."""
        log.warning("run %s: %s has come too late for the masked rounds: %s", self._plan.run, silo, _ONE_SET_OF_SILOS)

    def has_withdrawn(self, state: State) -> None:
        """A silo has withdrawn."""
        if len(state.members) == 1 and state.round is not None:
            log.warning("run %s goes on with %s alone: no other hospital is left in it", self._plan.run, *state.members)

    def has_begun_anew(self, number: int, silo: str) -> None:
        """A silo has lost the mask key that others count on."""
        log.warning("round %d: %s has begun anew; all mask again with fresh keys", number + 1, silo)

    def mask(self, number: int, silos: Iterable[str], *, before: State, after: State) -> None:
        """A roster has been fixed."""
        binds = before.bound is None and after.bound is not None
        if binds and (out := sorted((before.members | self._silos) - set(after.bound or ()) - before.withdrawn)):
            log.warning(
                "run %s: %s take%s no part in the masked rounds: %s",
                self._plan.run,
                ", ".join(out),
                "s" if len(out) == 1 else "",
                _ONE_SET_OF_SILOS,
            )
        log.info("round %d of %d: %s mask their updates", number + 1, self._plan.rounds, ", ".join(silos))

    def is_given_up(self, state: State) -> None:
        """A masked round comes to no sum."""
        silos = (state.masks.silos if state.masks else None) or sorted(state.round.asked if state.round else ())
        log.warning(
            "round %d is given up: not all of %s have delivered, and a sum over others would give single updates away",
            state.number + 1,
            ", ".join(silos),
        )

    def ended(self, state: RoundState, aggregated: Aggregated, seconds: float) -> None:
        """A round has ended."""
        number, delivered = state.number + 1, aggregated.silos
        late = sorted(set(state.participants) - set(delivered))
        for silo, change in aggregated.changes.items():
            if change.unusual:
                log.warning("round %d: %s's change is unusual: %s", number, silo, ", ".join(change.unusual))
        log.info(
            "round %d of %d has ended with %d update%s%s (%.2f s at the coordinator)",
            number,
            self._plan.rounds,
            len(delivered),
            "" if len(delivered) == 1 else "s",
            f"; late: {', '.join(late)}" if late else "",
            seconds,
        )

    def finished(self, state: State) -> None:
        """The run has ended; if early, in the operator's own words, which name hospitals."""
        run, early = self._plan.run, state.early_end
        if early is None:
            log.info("run %s: all %d rounds have ended", run, self._plan.rounds)
            return
        words = {
            EndReason.WITHDRAWN: "every hospital has withdrawn",
            EndReason.TOO_FEW_FOR_MASKS: "too many hospitals have withdrawn for a masked sum",
        }.get(early.reason)
        if words is None:
            gone = sorted(state.withdrawn.intersection(state.bound or ()))
            words = (
                f"{', '.join(gone)} {'has' if len(gone) == 1 else 'have'} withdrawn, and a masked sum over the others, "
                "held against those before, would give away what the withdrawn sent"
            )
        log.warning(
            "run %s: %s, so it ends %s; what was made of them stays%s",
            run,
            words,
            early.when(self._plan.rounds),
            ". A new run (new `name`, new `seed`) can begin without" if state.bound else "",
        )
