"""What ``coordinator status`` and the coordinator's page say of a run: its round, its silos, what was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.store.records import Member, RoundState, Withdrawal
from medsilo.coordinator.store.store import Store
from medsilo.privacy.witness.status import read_status

LAST_CHANGES = 5
"""Of how many rounds' changes it tells."""
LAST_REFUSALS = 20


def status_of(config: CoordinatorConfig, store: Store, rounds: Sequence[RoundState]) -> dict[str, Any]:
    """The run's round, its silos, who is late, what was refused. ``rounds``: all of the run's, from the store."""
    run = config.run.name
    members = store.members(run)
    current = rounds[-1] if rounds else None
    finished = bool(rounds) and store.is_finished(run)
    early = store.early_end(run) if finished else None
    withdrawals = store.withdrawals(run)
    silos: list[dict[str, Any]] = []
    for name in config.silos:
        member = members.get(name)
        own = [state.participants[name] for state in rounds if name in state.participants]
        withdrawn = withdrawals.get(name)
        state = "withdrawn" if withdrawn else _state(name, member.accepted if member else None, current, finished)
        silos.append(
            {
                "silo": name,
                "state": state,
                "withdrawal": {
                    "at": withdrawn.at,
                    "reason": withdrawn.reason,
                    "rounds_acknowledged": withdrawn.rounds_acknowledged,
                    "dropped_round": withdrawn.dropped_round,
                }
                if withdrawn
                else None,
                "missing": list(member.missing) if member else [],
                "rounds_delivered": sum(p.delivered_at is not None and p.round < config.run.exchanges for p in own),
                "rounds_late": sum(p.late for p in own),
                "late": [p.round + 1 for p in own if p.late],
                "changes": [
                    {"round": p.round + 1, **vars(p.change), "unusual": p.change.unusual}
                    for p in own
                    if p.change is not None
                ][-LAST_CHANGES:],
            }
        )
    return {
        "run": run,
        "method": config.run.method["name"],
        "round": None if current is None else min(current.number + 1, config.run.exchanges),
        "rounds": config.run.exchanges,
        "opened_at": current.opened_at if current else None,
        "finished": finished,
        "end": (early.words(config.run.exchanges) if early else "ended") if finished else None,
        "waiting_for": _waiting_for(config, members, current, withdrawals),
        "silos": silos,
        "witnesses": read_status(config.state),
        "refusals": [vars(refusal) for refusal in store.refusals(LAST_REFUSALS)],
    }


def _waiting_for(
    config: CoordinatorConfig,
    members: Mapping[str, Member],
    current: RoundState | None,
    withdrawals: Mapping[str, Withdrawal],
) -> list[str]:
    """Whom the run waits for now: to join, to deliver the open round's update, or to fetch the end."""
    if current is None:
        joined = {name for name, member in members.items() if member.accepted}
        return [name for name in config.silos if name not in joined and name not in withdrawals]
    if current.closed_at is not None:
        return []
    return [name for name, one in current.participants.items() if one.delivered_at is None]


def _state(name: str, accepted: bool | None, current: RoundState | None, finished: bool) -> str:
    if accepted is None:
        return "not joined yet"
    if not accepted and (current is None or name not in current.participants):
        return "declined"  # who declines what it took part in wants no more of it
    if current is None or name not in current.participants:
        return "joined"
    if current.participants[name].delivered_at is not None:
        return "done" if finished else "delivered"
    return "fetching the end" if finished else "training"
