"""``silo consent`` and ``silo approve``: looking at a consent, taking it back, giving it anew, letting a run begin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from medsilo.privacy.consent.consent import ConsentFile, today
from medsilo.privacy.consent.withdrawal import Cause, EndedError, History, timestamp
from medsilo.privacy.errors import ConfigurationError, ConsentError, JournalInUseError
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.party.console import application, output
from medsilo.privacy.report.words import updates_arrived
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import known_plan
from medsilo.silo.state.withdrawal_request import WithdrawalRequest

consent_app = application("What this hospital consents to: look at it, take it back, give it anew.")
out = output()

Config = Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_APPROVAL = {
    "none": "none: no run waits",
    "changes": "changes: a run with another plan than the one that the consent was given for waits",
    "required": "required: each run waits",
}
DAEMON_SECONDS = 120.0
"""How long ``withdraw`` waits for a running daemon to end."""


@consent_app.command("show")
def show_consent(
    config: Config, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """Show what may leave, to whom, until when, and whether the consent is in force."""
    settings = SiloConfig.read(config)
    content = consent_content(settings)
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    table = Table(title=f"Consent of {settings.name}: {content['state']}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    left = content["days_left"]
    days = "" if left is None else f" ({left} day{'s' * (left != 1)} left, today included)" if left else " (over)"
    runs = [f"{run}: {len(rounds)} of at most {content['rounds']}" for run, rounds in content["rounds_of_runs"].items()]
    for name, value in (
        ("coordinator", content["coordinator"] or "none"),
        ("methods", ", ".join(content["methods"]) or "none"),
        ("may leave", "\n".join(f"{item['class']}: {item['meaning']}" for item in content["classes"]) or "nothing"),
        ("rounds of a run", f"at most {content['rounds']}"),
        ("rounds of all runs", "no limit" if (most := content["total_rounds"]) is None else f"at most {most}"),
        ("rounds taken part in", "\n".join(runs) or "none"),
        ("training in a round", _training(content["training"])),
        ("last day (UTC)", f"{content['expires'] or 'no end'}{days}"),
        ("approval of runs", _APPROVAL[content["approval"]]),
        ("file", f"{content['file'] or 'none (key `consent:`)'}\nSHA-256 {content['sha256']}"),
    ):
        table.add_row(name, value)
    out.print(table)
    if content["withdrawal"]:
        out.print(_withdrawn(content["withdrawal"]), markup=False, soft_wrap=True)


@consent_app.command()
def withdraw(
    config: Config,
    reason: Annotated[
        str, typer.Option("--reason", help="For the hospital's own journal; it is not sent.", show_default=False)
    ] = "",
    yes: Yes = False,
) -> None:
    """Take the consent back: nothing leaves after the message under way. The same command again tells the coordinator
    once more, if it could not be told."""
    settings = SiloConfig.read(config)
    keep_private(settings.state)
    history = History.read(settings.journal)
    if not (settings.withdrawal.exists() or history.withdrawal):
        out.print(
            "After this, nothing leaves any more: a message that is just being sent is the last one. The coordinator "
            "is told, with a signed statement, and uses no further update of this hospital. Models that were made of "
            "earlier updates stay as they are: nothing is unlearned. To take part again: `silo consent give`.",
            soft_wrap=True,
        )
        if not yes:
            typer.confirm(f"Withdraw the consent of {settings.name}?", abort=True)
    take_back(settings, reason)
    out.print("Withdrawn: nothing leaves any more.")
    if told := tell_coordinator(settings):
        out.print(told, markup=False, soft_wrap=True)


def take_back(settings: SiloConfig, reason: str) -> None:
    """When this returns, nothing leaves any more; a daemon that runs ends by itself."""
    if not settings.withdrawal.exists():
        WithdrawalRequest(timestamp(), reason).write(settings.withdrawal)
    settings.approval.unlink(missing_ok=True)


def tell_coordinator(settings: SiloConfig) -> str:
    """Tells the coordinator of the withdrawal, once no daemon has the journal open; how that went, in words."""
    if not (settings.keys / "audit.key").exists():
        return ""  # no keys, so there was never a journal, nor a run
    from medsilo.silo.run.ending import conclude_alone  # takes seconds to load; until then nothing leaves already

    error = EndedError(Cause.WITHDRAWN, "the consent is withdrawn")
    outcome = _when_free(lambda: conclude_alone(settings, error, _say))
    return str(outcome).partition("\n")[2] or "It was in no run; there is nobody to tell."


@consent_app.command()
def give(config: Config, yes: Yes = False) -> None:
    """Give a withdrawn consent anew, as its file stands now. Editing the file alone does not undo a withdrawal."""
    from medsilo.silo.run.ending import own_journal

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    if not (settings.withdrawal.exists() or History.read(settings.journal).withdrawal):
        out.print("The consent is not withdrawn; there is nothing to do.")
        return
    file = ConsentFile.read(settings.consent)
    if missing := file.missing_to_ask(settings.coordinator_identity):
        raise file.refusal(missing, "taking part again")
    show_consent(config)
    if not yes:
        typer.confirm("Give this consent anew?", abort=True)
    with own_journal(settings) as (door, _):
        door.note("consent", consent=file.describe(), given=True)
        door.journal.checkpoint()
        settings.approval.unlink(missing_ok=True)
        settings.withdrawal.unlink(missing_ok=True)
    out.print(f"Given anew. To take part again: silo train --config {config}", soft_wrap=True)


def approve(
    config: Config,
    plan_sha256: Annotated[
        str | None, typer.Option("--plan-sha256", help="Approve only if the plan that is known here has this hash.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Let a run begin that waits for approval, after showing what would leave."""
    from medsilo.silo.preview import inspection
    from medsilo.silo.preview.inspection_display import show
    from medsilo.silo.run.approval import approve as leave_approval

    settings = SiloConfig.read(config)
    keep_private(settings.state)
    plan = known_plan(settings)
    digest = plan.sha256.hex()
    if plan_sha256 is not None and plan_sha256.lower() != digest:
        raise ConfigurationError(
            f"the plan of run {plan.run} has the SHA-256 {digest}, not {plan_sha256}; nothing is approved. Look at it "
            f"with `silo inspect --config {config}`"
        )
    found = inspection.inspect(settings, plan)
    if found.missing:
        raise ConsentFile.read(settings.consent).refusal(found.missing, f"run {plan.run} ({plan.method.name})")
    show(found, settings, out, as_json=False)
    out.print(f"The plan's SHA-256: {digest}", soft_wrap=True)
    if not yes:
        typer.confirm(f"Let run {plan.run} begin?", abort=True)
    leave_approval(settings, plan)
    out.print(f"Approved: run {plan.run}, with exactly this plan.")


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
    part = history.parts.get(record["plan_sha256"]) if record else None
    return {
        "at": asked.at if asked else record["time"] if record else None,
        "reason": record["reason"] if record else asked.reason if asked else "",
        "run": part.run if part else None,
        "rounds_acknowledged": list(record["rounds_acknowledged"]) if record else [],
        "coordinator_told": part.told if part else None,
    }


def _training(bounds: dict[str, Any]) -> str:
    return (
        f"at most {bounds['epochs']} epochs and {bounds['steps']} steps, learning rates up to "
        f"{bounds['learning_rate']:g}"
    )


def _withdrawn(found: dict[str, Any]) -> str:
    of_run = f"of run {found['run']}, " if found["run"] else ""
    told = {None: "there was nobody to tell", True: "the coordinator has been told"}.get(
        found["coordinator_told"], "the coordinator has NOT been told yet (`silo consent withdraw` tries again)"
    )
    return f"Withdrawn {found['at']}: {of_run}{updates_arrived(found['rounds_acknowledged'])}; {told}."


def _when_free(action: Callable[[], ConsentError]) -> ConsentError:
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
            out.print("Waiting for the running daemon to end …")
            waiting = True
        time.sleep(0.2)


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)
