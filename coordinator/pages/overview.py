"""What the coordinator's page shows: the run as its store and journal have it at this moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from medsilo.algorithms.protection.private import planned_averages, planned_steps
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.pages.drawing import curves, matrix
from medsilo.coordinator.pages.status import status_of
from medsilo.coordinator.rounds import weights_log
from medsilo.coordinator.store.records import RoundState
from medsilo.coordinator.store.store import Store
from medsilo.privacy.budget.accounting import epsilon
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.journal.tail import JournalTail
from medsilo.privacy.pages.wording import last_part, readable_bytes, shown
from medsilo.privacy.party.witness_status import witness_lines
from medsilo.privacy.report.words import NAME, TELLING


class Overview:
    """The page's data, for one configuration; the journal is followed as it grows."""

    def __init__(self, config: CoordinatorConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._plan = config.plan()
        self._tail = JournalTail(config.journal)
        self._reading = Lock()

    def look(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What there is to see now; ``round`` in the query chooses the weights' round (from 1).

        Raises ``StoreError`` or ``JournalError`` where that cannot be read.
        """
        config, run = self._config, self._config.run.name
        states = self._store.rounds(run)
        status = status_of(config, self._store, states)
        with self._reading:
            self._tail.update()
            received = self._tail.by_class(run, "received")
            sent = self._tail.by_class(run, "sent")
        measured = _measured(config.silos, states)
        weights = weights_log.rounds(config.state / "runs" / run)
        shown_round = _chosen(query.get("round"), list(weights))
        chosen = weights.get(shown_round) if shown_round is not None else None
        return {
            **status,
            "witnessed": witness_lines(status["witnesses"]),
            "phase": _phase(config, status, states),
            "opened_at": states[-1].opened_at[:19].replace("T", " ") if states else None,
            "accuracy": {name: [[number, value] for number, value in points] for name, points in measured.items()},
            "curves": (
                curves(measured, planned=config.run.exchanges, identifier="curves") if any(measured.values()) else ""
            ),
            "received": _classes(received, config.silos),
            "sent": _classes(sent, config.silos),
            "weights": chosen,
            "weight_rounds": [number + 1 for number in weights],
            "matrix": matrix(chosen["silos"], chosen["weights"], identifier="matrix") if chosen else "",
            "privacy": _privacy(config, self._plan, status["round"] or 0, finished=status["finished"]),
        }


def _phase(config: CoordinatorConfig, status: Mapping[str, Any], states: Sequence[RoundState]) -> str:
    """What the run is waiting for, in words."""
    if status["finished"]:
        left = [silo["silo"] for silo in status["silos"] if silo["state"] == "fetching the end"]
        return f"{status['end']}; waiting for {', '.join(left)} to fetch the end" if left else str(status["end"])
    joined = sum(silo["state"] not in ("not joined yet", "declined", "withdrawn") for silo in status["silos"])
    if not states:
        return f"waiting for silos: {joined} of {config.start_with or len(config.silos)} have joined"
    state = states[-1]
    waiting = status["waiting_for"]
    if state.closed_at is not None:
        return f"round {state.number + 1} has ended; the next one is about to begin"
    if not waiting:
        return f"round {state.number + 1}: combining {len(state.participants)} updates"
    return f"round {state.number + 1}: waiting for {', '.join(waiting)}"


def _measured(silos: Sequence[str], states: Sequence[RoundState]) -> dict[str, list[tuple[int, float]]]:
    """Accuracies that silos have shared, by silo: (round from 1, accuracy)."""
    return {
        name: [
            (state.number + 1, accuracy)
            for state in states
            if name in state.participants and (accuracy := state.participants[name].accuracy) is not None
        ]
        for name in silos
    }


def _classes(by_peer: Mapping[str, Mapping[str, int]], silos: Sequence[str]) -> dict[str, Any]:
    """A table of silos, in their order, by exposure class: what tells about patients first."""
    place = {name: number for number, name in enumerate(silos)}
    found = {name for counts in by_peer.values() for name in counts}
    order = [e for e in TELLING if e.value in found] + [e for e in Exposure if e.value in found and e not in TELLING]
    return {
        "classes": [{"class": e.value, "name": NAME[e], "telling": e in TELLING} for e in order],
        "rows": [
            {
                "silo": last_part(peer),
                "bytes": [counts.get(e.value, 0) for e in order],
                "readable": [readable_bytes(counts[e.value]) if e.value in counts else "–" for e in order],
            }
            for peer, counts in sorted(
                by_peer.items(), key=lambda item: (place.get(last_part(item[0]), len(place)), item)
            )
            if peer
        ],
    }


def _chosen(asked: str | None, rounds: Sequence[int]) -> int | None:
    if not rounds:
        return None
    if asked is not None and asked.isdigit() and int(asked) - 1 in rounds:
        return int(asked) - 1
    return rounds[-1]


def _privacy(config: CoordinatorConfig, plan: RunPlan, number: int, *, finished: bool) -> dict[str, Any] | None:
    """What the plan lets a silo that takes part in every round spend, so far and in all."""
    if plan.privacy is None:
        return None
    done = plan.training_rounds if finished else number // plan.rounds_each
    spent = _spent(config, plan, done) if done else 0.0
    return {
        "epsilon": plan.privacy.epsilon,
        "delta": plan.privacy.delta,
        "unit": plan.privacy.unit,
        "spent": spent,
        "readable": shown(spent),
        "left": shown(max(0.0, plan.privacy.epsilon - spent)),
    }


_spending: dict[tuple[bytes, int], float] = {}


def _spent(config: CoordinatorConfig, plan: RunPlan, rounds: int) -> float:
    """ε of so many rounds; the accountant takes a while, so each is worked out once."""
    key = (plan.sha256, rounds)
    if key not in _spending and plan.privacy is not None:
        method = config.make_method()
        steps = planned_steps(method, plan.training, rounds, plan.privacy.sampling_rate)
        averages = {one.content: one.times(rounds) for one in planned_averages(method, rounds)}
        events = plan.privacy.cost(min(steps, plan.privacy.steps), averages)
        _spending[key] = epsilon(events, delta=plan.privacy.delta)
    return _spending[key]
