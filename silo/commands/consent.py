"""``silo consent`` and ``silo approve``: looking at a consent, taking it back, giving it anew, letting a run begin."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.errors import ConfigurationError, MedsiloError
from medsilo.privacy.files.state_folder import keep_private
from medsilo.privacy.journal.records import ConsentRecord
from medsilo.privacy.party.console import application, out, say
from medsilo.privacy.report.words import updates_arrived
from medsilo.silo.commands.options import Config, Yes
from medsilo.silo.oversight.consent import consent_content, take_back, tell_coordinator
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.state.plans import known_plan

consent_app = application("What this hospital consents to: look at it, take it back, give it anew.")

_APPROVAL = {
    "none": "none: no run waits",
    "changes": "changes: a run with another plan than the one that the consent was given for waits",
    "required": "required: each run waits",
}


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
        say(_withdrawn(content["withdrawal"]))


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
    if not (settings.withdrawal.exists() or _is_withdrawn(settings)):
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
    if told := tell_coordinator(settings, say):
        say(told)


def _is_withdrawn(settings: SiloConfig) -> bool:
    """Whether the journal says so. One that cannot be read keeps nobody from taking the consent back: a daemon that
    runs has read it before, and goes on."""
    try:
        return History.read(settings.journal).withdrawal is not None
    except MedsiloError:
        return False


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
        door.note(ConsentRecord(consent=file.describe(), given=True))
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
