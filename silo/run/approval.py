"""A run that waits for a person: nothing of it leaves before ``silo approve``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from medsilo.privacy.consent.consent import Consent, ConsentFile
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import History, timestamp
from medsilo.privacy.door.door import Door
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.journal.records import ApprovalRecord
from medsilo.silo.state.config import SiloConfig

_LOOK_SECONDS = 0.5


def approve(config: SiloConfig, plan: RunPlan) -> None:
    """Leaves the approval of exactly this plan for the daemon, durably."""
    content = {"run": plan.run, "plan_sha256": plan.sha256.hex(), "at": timestamp()}
    write_atomically(config.approval, json.dumps(content).encode())


def waits(consent: ConsentFile, plan: RunPlan, history: History) -> bool:
    """Whether nothing of a run may leave, not even yes or no, before a person has said yes to its plan.

    With ``approval: changes`` that is so for another plan than the one that the consent was given for: which one that
    is the file says (``plan_sha256``), or the journal, where it is the first one that was joined with the file as it
    stands. A run that was joined before has been let in already, unless the consent to it has ended since.
    """
    digest = plan.sha256.hex()
    approval = consent.consent.approval
    if approval == "none" or digest in history.approved:
        return False
    if approval == "required":
        return True
    given_for = consent.consent.plan_sha256 or history.first_plans.get(consent.sha256)
    return given_for not in (None, digest) and digest not in history.let_in


def await_approval(
    config: SiloConfig,
    plan: RunPlan,
    gate: ConsentGate,
    door: Door,
    history: History,
    notice: Callable[[str], None],
) -> None:
    """Returns when the plan is approved, or needs no approval; raises ``EndedError`` if the consent ends meanwhile.

    An approval holds for a plan, not for a process: it is asked for once, however often the daemon starts.
    """
    digest = plan.sha256.hex()
    if not waits(gate.file, plan, history):
        return
    approved_at = _approved_at(config, digest)
    if approved_at is None:
        notice(
            f"run {plan.run} waits for approval{_why(gate.file.consent)}; nothing of it has left. What would leave:\n"
            f"  silo inspect --config FILE\nTo let it begin:\n  silo approve --config FILE --plan-sha256 {digest}"
        )
    while approved_at is None:
        time.sleep(_LOOK_SECONDS)
        gate.check(())
        approved_at = _approved_at(config, digest)
    door.note(ApprovalRecord(run=plan.run, plan_sha256=digest, approved_at=approved_at))
    config.approval.unlink(missing_ok=True)
    notice(f"run {plan.run} is approved")


def _why(consent: Consent) -> str:
    if consent.approval == "required":
        return ""
    return ": its plan is not the one that the consent was given for (`approval: changes`)"


def _approved_at(config: SiloConfig, digest: str) -> str | None:
    try:
        content = json.loads(config.approval.read_bytes())
    except (OSError, ValueError):
        return None
    return str(content.get("at")) if isinstance(content, dict) and content.get("plan_sha256") == digest else None
