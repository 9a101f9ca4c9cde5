"""The consent as it stands, and taking it back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from medsilo.privacy.consent.consent import ConsentFile, today
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.withdrawal import EndedError, History, timestamp
from medsilo.privacy.errors import ConsentError, JournalInUseError
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.withdrawal_request import WithdrawalRequest

DAEMON_SECONDS = 120.0
"""How long ``withdraw`` waits for a running daemon to end."""


def take_back(settings: SiloConfig, reason: str) -> None:
    """When this returns, nothing leaves any more; a daemon that runs ends by itself."""
    if not settings.withdrawal.exists():
        WithdrawalRequest(timestamp(), reason).write(settings.withdrawal)
    settings.approval.unlink(missing_ok=True)


def tell_coordinator(settings: SiloConfig, notice: Callable[[str], None]) -> str:
    """Tells the coordinator of the withdrawal, once no daemon has the journal open; how that went, in words.

    ``notice``: is told what is waited for.
    """
    if not (settings.keys / "audit.key").exists():
        return ""  # no keys, so there was never a journal, nor a run
    from medsilo.silo.run.ending import conclude_alone  # takes seconds to load; until then nothing leaves already

    error = EndedError(Cause.WITHDRAWN, "the consent is withdrawn")
    outcome = _when_free(lambda: conclude_alone(settings, error, notice), notice)
    return str(outcome).partition("\n")[2] or "It was in no run; there is nobody to tell."


def consent_content(settings: SiloConfig) -> dict[str, Any]:
    """What ``silo consent show`` says, for machines."""
    file = ConsentFile.read(settings.consent)
    consent = file.consent
    history = History.read(settings.journal)
    missing = file.missing_to_ask(settings.coordinator_identity)
    days = None if consent.expires is None else max((consent.expires - today()).days + 1, 0)
    withdrawn = settings.withdrawal.exists() or history.withdrawal is not None
    if withdrawn:
        state = "withdrawn"
    elif missing.expired:
        state = "expired"
    else:
        state = "lets nothing leave" if missing else "in force"
    return {
        "silo": settings.identity.uri,
        "file": str(file.path) if file.path else None,
        "sha256": file.sha256,
        "state": state,
        "coordinator": consent.coordinator,
        "methods": list(consent.methods),
        "classes": [{"class": e.value, "meaning": MEANING[e]} for e in Exposure if e in consent.classes],
        "rounds": consent.rounds,
        "total_rounds": consent.total_rounds,
        "training": consent.training.model_dump(),
        "rounds_of_runs": {part.run: sorted(part.sent) for part in history.parts.values()},
        "expires": consent.expires.isoformat() if consent.expires else None,
        "days_left": days,
        "approval": consent.approval,
        "plan_sha256": consent.plan_sha256,
        "withdrawal": _withdrawal(settings, history) if withdrawn else None,
    }


def _withdrawal(settings: SiloConfig, history: History) -> dict[str, Any]:
    record, asked = history.withdrawal, WithdrawalRequest.read(settings.withdrawal)
    part = history.parts.get(record.plan_sha256 or "") if record else None
    return {
        "at": asked.at if asked else record.time if record else None,
        "reason": record.reason if record else asked.reason if asked else "",
        "run": part.run if part else None,
        "rounds_acknowledged": list(record.rounds_acknowledged) if record else [],
        "coordinator_told": part.told if part else None,
    }


def _when_free(action: Callable[[], ConsentError], notice: Callable[[str], None]) -> ConsentError:
    """Does what needs the journal, after a running daemon has ended."""
    deadline = time.monotonic() + DAEMON_SECONDS
    waiting = False
    while True:
        try:
            found: ConsentError = action()
            return found
        except JournalInUseError:
            if time.monotonic() > deadline:
                raise
        if not waiting:
            notice("Waiting for the running daemon to end …")
            waiting = True
        time.sleep(0.2)
