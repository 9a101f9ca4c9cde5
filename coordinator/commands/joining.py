"""``coordinator init``, ``invite`` and ``doctor``: a federation from nothing, and the hospitals' way into it."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.consent.plan import ModelPlan, TrainingPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.state_folder import keep_private, writing_privately
from medsilo.privacy.party.console import ask, out

if TYPE_CHECKING:
    from medsilo.coordinator.joining.setting_up import Federation
    from medsilo.privacy.identity.invitation import Invitation

aside = Console(stderr=True, highlight=False)
"""For what is not the invitation itself."""

METHOD, MODEL = "fedavg", "diversifed-cnn"
_MOST_CHANNELS = 4

Config = Annotated[Path, typer.Option("--config", "-c", help="The coordinator's configuration (YAML).")]
Days = Annotated[float, typer.Option("--days", min=0.01, max=90, help="How long invitations are good.")]


def init(
    federation: Annotated[
        str | None, typer.Option("--federation", help="The federation's name.", show_default=False)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Name or address by which hospitals reach this machine.", show_default=False),
    ] = None,
    invite: Annotated[
        list[str] | None,
        typer.Option(
            "--invite", help="A hospital to invite, for example hospital1. Repeat for each.", show_default=False
        ),
    ] = None,
    method: Annotated[str, typer.Option("--method", help="What is trained (docs/methods.md).")] = METHOD,
    model: Annotated[str, typer.Option("--model", help="The model.")] = MODEL,
    shape: Annotated[str, typer.Option("--shape", help="The images: channels,height,width.")] = "3,28,28",
    classes: Annotated[int, typer.Option("--classes", min=2, help="How many classes they have.")] = 9,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many rounds are trained.")] = 10,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where hospitals call.")] = 7443,
    enrolment_port: Annotated[int, typer.Option("--enrolment-port", min=1, max=65535, help="Where they enrol.")] = 7444,
    config: Annotated[Path, typer.Option("--config", "-c", help="The file to write.")] = Path("coordinator.yaml"),
    days: Days = 7,
) -> None:
    """Begin a federation: its CA, this coordinator's keys, certificate and configuration, and invitations.

    Asks for what is missing. Overwrites nothing; after an interruption the same command goes on.
    """
    from medsilo.coordinator.joining.invitations import Invitations
    from medsilo.coordinator.joining.setting_up import Federation, set_up
    from medsilo.coordinator.joining.setting_up import invite as make_invitation

    asking = sys.stdin.isatty()
    wanted = Federation(
        name=federation or ask(asking, "The federation's name", "--federation"),
        host=host or ask(asking, "Name or address by which hospitals reach this machine", "--host"),
        silos=tuple(
            dict.fromkeys(
                invite or ask(asking, "The hospitals, separated by spaces", "--invite").replace(",", " ").split()
            )
        ),
        method=method,
        model=model,
        shape=_shape(shape),
        classes=classes,
        rounds=rounds,
        port=port,
        enrolment_port=enrolment_port,
    )
    _check_known(wanted)
    settings = set_up(wanted, config)
    _say(
        f"Configuration: {config}. The CA is in {settings.enrolment.ca if settings.enrolment else ''}: whoever has its "
        "key"
    )
    _say("can be anybody in this federation. The coordinator's keys are in " + str(settings.keys))
    kept = Invitations(settings.invitations).all()
    for silo in settings.silos:
        states = {one.state for one in kept if one.silo == silo}
        if states & {"open", "used"}:
            _say(f"{silo} has an invitation already; for another: coordinator invite {silo} --config {config}")
            continue
        _print(make_invitation(settings, silo, days=days))
    _say(f"Next: look through {config}, then: coordinator serve --config {config}")


def invite(
    config: Config,
    hospital: Annotated[str | None, typer.Argument(help="Its name, as under `silos:`.", show_default=False)] = None,
    days: Days = 7,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the hospital's open invitation back.")] = False,
    as_list: Annotated[bool, typer.Option("--list", help="Show all invitations and the CA's fingerprint.")] = False,
) -> None:
    """Print the line with which a hospital enrols (`silo init`); it is shown once, and good for one hospital."""
    from medsilo.coordinator.joining.invitations import Invitations
    from medsilo.coordinator.joining.setting_up import invite as make_invitation
    from medsilo.privacy.identity.certificates import fingerprint

    settings = CoordinatorConfig.read(config)
    keep_private(settings.state)
    invitations = Invitations(settings.invitations)
    if as_list:
        credentials = settings.open_credentials()
        table = Table(title=f"Invitations of {settings.federation}", title_justify="left")
        for column in ("hospital", "state", "made (UTC)", "expires", "used"):
            table.add_column(column)
        for one in invitations.all():
            table.add_row(one.silo, one.state, _time(one.made_at), _time(one.expires), _time(one.used_at))
        out.print(table)
        if credentials is not None:
            out.print(f"SHA-256 of the CA's certificate: {fingerprint(credentials.current.ca_pem)}", soft_wrap=True)
        return
    if hospital is None:
        raise ConfigurationError("say which hospital is invited, for example: coordinator invite hospital1 --config …")
    if revoke:
        count = invitations.revoke(hospital)
        _say(
            f"{hospital}: {count} open invitation{'s' * (count != 1)} taken back."
            if count
            else f"{hospital} has no open one."
        )
        if any(one.silo == hospital and one.state == "used" for one in invitations.all()):
            _say(f"{hospital} has used one before; its certificate stays valid.")
        return
    _print(make_invitation(settings, hospital, days=days))


def doctor(
    config: Config, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """Look whether the coordinator can serve, and say what to do if not."""
    from medsilo.coordinator.joining.doctor import examine
    from medsilo.privacy.party.examination import show

    with writing_privately():
        name, findings = examine(config)
    show(name, findings, out, as_json=as_json)


def _check_known(wanted: Federation) -> None:
    """Raises ``ConfigurationError`` for a method or model that nobody has; users' own factories are looked at later."""
    if (wanted.method, wanted.model) == (METHOD, MODEL):
        return
    from medsilo.algorithms.models import build  # PyTorch takes seconds to load
    from medsilo.algorithms.registry import make

    option = "--method"
    try:
        for warning in make(wanted.method, {}).warnings(len(wanted.silos), wanted.model, TrainingPlan().optimizer):
            _say(f"Note: {warning}")
        option = "--model"
        if ":" not in wanted.model or wanted.model.startswith("torchvision:"):
            channels, height, width = wanted.shape
            build(ModelPlan(name=wanted.model, input_shape=(channels, height, width), classes=wanted.classes))
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None


def _print(invitation: Invitation) -> None:
    _say(
        f"For {invitation.silo}, until {invitation.expires:%Y-%m-%d %H:%M} UTC. Send it this line by a way that others "
        "do not read; it runs: silo init LINE"
    )
    typer.echo(invitation.line)


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").replace(" ", "").split(",")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigurationError(f"--shape: {text!r} should be channels,height,width, for example 3,28,28")
    shape = tuple(int(part) for part in parts)
    if shape[0] > _MOST_CHANNELS >= shape[2]:
        raise ConfigurationError(
            f"--shape: {text} would be {shape[0]} channels; they come first: --shape {shape[2]},{shape[0]},{shape[1]}"
        )
    return shape


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _say(text: str) -> None:
    aside.print(text, markup=False, soft_wrap=True)
