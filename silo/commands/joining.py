"""``silo init`` and ``silo doctor``: from an invitation to a hospital that can train, and whether it still can."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.tiers import learns
from medsilo.privacy.errors import ConfigurationError, ConsentError, DataError, MedsiloError, NotReadyError
from medsilo.privacy.exposure import MADE_OF_UPDATES, MEANING, Exposure, expand
from medsilo.privacy.files.configuration import with_home
from medsilo.privacy.files.state_folder import writing_privately
from medsilo.privacy.identity.invitation import Invitation
from medsilo.privacy.party.console import ask, out, say
from medsilo.privacy.party.examination import Finding, show
from medsilo.silo.state.config import SiloConfig


def init(
    invitation: Annotated[
        str | None, typer.Argument(help="The line that `coordinator invite` printed.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="The hospital's images (.npz).", show_default=False)
    ] = None,
    yes_to: Annotated[
        list[str] | None,
        typer.Option(
            "--yes-to",
            help="The run's method: agrees to what that method sends. Or the name of an optional exposure class, such "
            "as LOCAL_METRICS. Repeat for several; without it, and without a terminal, nothing is agreed to.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            min=1,
            help="With --yes-to: agrees to no run of more rounds. The consent is for as many as the run has.",
        ),
    ] = 100,
    folder: Annotated[Path, typer.Option("--folder", help="Where the hospital's files go.")] = Path(),
    proxy: Annotated[
        str | None, typer.Option("--proxy", help="The hospital's proxy, http://host:port.", show_default=False)
    ] = None,
    proxy_credentials: Annotated[
        Path | None,
        typer.Option("--proxy-credentials", help="A file with its name:password.", show_default=False),
    ] = None,
) -> None:
    """Set this hospital up with an invitation: keys, certificate, configuration and consent. Asks for what it needs.

    Overwrites nothing; after an interruption the same command goes on.
    """
    from medsilo.silo.joining import setting_up as steps
    from medsilo.silo.joining.doctor import skew_finding
    from medsilo.silo.joining.enrolment import trusted_authority

    asking = sys.stdin.isatty()
    invited = _invited(invitation or ask(asking, "The invitation, one line", "give the invitation"))
    path = folder / f"{invited.silo}.yaml"
    known = SiloConfig.read(path) if path.exists() else None
    if known is None:
        data = _readable(data, asking)
    way = steps.proxy_of(proxy, proxy_credentials) if known is None else known.proxy
    ca = None
    if known is None or not steps.is_enrolled(known, invited):
        ca = trusted_authority(invited, proxy=way)
        say(f"The coordinator shows the invitation's CA ({invited.ca_sha256[:16]}…).")
    config = steps.prepare(invited, data, folder, proxy=way)
    say(f"Configuration: {path}. Keys: {config.keys}; the private ones stay there.")
    skew: Finding | None = None
    if ca is not None:
        try:
            with writing_privately():
                skew = skew_finding(steps.obtain_certificate(config, invited, ca))
        except MedsiloError:
            say(f"{path} and the keys stay: `silo init` with an invitation that is good goes on from there.")
            raise
    say(f"Certificate: {config.tls_files.certificate}")
    plan = steps.plan_of(config)
    if config.consent is None:
        raise ConfigurationError(f"{path}: `consent:` names no file; name one")
    if config.consent.exists():
        ignored = " --yes-to changes nothing in it: edit the file." if yes_to else ""
        say(f"Consent: {config.consent} is there already and stays as it is.{ignored}")
    else:
        agreed, how = _agree(plan, yes_to or [], rounds, config, asking)
        steps.write_consent(config, plan, agreed, how=how)
        say(f"Consent: {config.consent}. {how}")
    _show_what_is_next(config, path, skew)


def _invited(line: str) -> Invitation:
    """The invitation, if it is still good."""
    invited = Invitation.parse(line)
    if invited.expires < datetime.now(UTC):
        raise ConfigurationError(
            f"the invitation was good until {invited.expires:%Y-%m-%d %H:%M} UTC; ask the operator of "
            f"{invited.coordinator_identity.uri} for another (`coordinator invite {invited.silo}`)"
        )
    say(
        f"{invited.silo} is invited to the federation {invited.federation} by the coordinator at {invited.address}; "
        f"the invitation is good until {invited.expires:%Y-%m-%d %H:%M} UTC."
    )
    return invited


def _show_what_is_next(config: SiloConfig, path: Path, skew: Finding | None) -> None:
    """Says whether the hospital can train, and the next commands; raises ``NotReadyError`` where more than its
    consent is missing."""
    from medsilo.silo.joining.doctor import examine

    with writing_privately():
        _, findings = examine(path)
    findings += [skew] if skew is not None and "clock" not in {finding.check for finding in findings} else []
    wrong = {finding.check for finding in findings if finding.state == "bad"}
    try:
        show(config.name, findings, out)
    except NotReadyError:
        if wrong != {"consent"}:
            raise
    if wrong:
        say(f"Next: read {config.consent}; take away the # from what the hospital agrees to, or leave it. Then:")
    else:
        say("Next:")
    say(f"  silo inspect --config {path}    # what would leave, byte by byte; sends nothing")
    say(f"  silo train --config {path}      # takes part")


def doctor(
    config: Annotated[Path, typer.Option("--config", "-c", help="The hospital's configuration (YAML).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Look whether this hospital can train, and say what to do if not. Nothing about patients leaves."""
    from medsilo.silo.joining.doctor import examine

    with writing_privately():
        name, findings = examine(config)
    show(name, findings, out, as_json=as_json)


def _agree(
    plan: RunPlan, yes_to: list[str], rounds: int, config: SiloConfig, asking: bool
) -> tuple[frozenset[Exposure], str]:
    """What the hospital agrees to, and how it said so; nothing by default."""
    from medsilo.silo.joining.setting_up import needed_by_method

    nothing = frozenset[Exposure](), "Nothing is agreed to yet."
    if not yes_to and not asking:
        return nothing
    classes = [name for name in yes_to if name.isupper()]
    methods = sorted(set(yes_to) - set(classes))
    optional = expand(classes)
    if yes_to and methods != [plan.method.name]:
        raise ConsentError(
            f"run {plan.run} is of the method {plan.method.name}, and --yes-to says "
            f"{', '.join(methods) or 'no method'}; nothing is agreed to. If the hospital agrees to {plan.method.name}, "
            f"run the same command with --yes-to {plan.method.name}; if not, without --yes-to"
        )
    if extra := sorted(optional - set(plan.optional)):
        raise ConsentError(
            f"run {plan.run} does not ask for {', '.join(extra)}; it can ask, if the hospital wants, for: "
            f"{', '.join(plan.optional) or 'nothing more'}. Nothing is agreed to; leave the --yes-to away"
        )
    needed = needed_by_method(plan)
    if extra := [exposure for exposure in plan.required if exposure not in needed]:
        raise ConsentError(
            f"run {plan.run} asks for {', '.join(extra)}, which {plan.method.name} does not send by itself; nothing is "
            "agreed to. Ask the coordinator's operator why"
        )
    if yes_to and plan.rounds > rounds:
        raise ConsentError(
            f"run {plan.run} has {plan.rounds} rounds, and {rounds} are agreed to at most; nothing is agreed to. If "
            f"the hospital agrees, run the same command with --rounds {plan.rounds}"
        )
    if yes_to:
        left_out = [exposure for exposure in plan.optional if exposure not in optional]
        stays = f" Optional, and not agreed to: {', '.join(left_out)}." if left_out else ""
        return frozenset(needed) | optional, f"Agreed to with --yes-to {' --yes-to '.join(yes_to)}.{stays}"
    _show_plan(plan, needed)
    if not typer.confirm(f"Does {config.name} agree to this, as long as the consent says?", default=False):
        return nothing
    chosen = set(needed)
    for exposure in plan.optional:
        if typer.confirm(f"Optional: {exposure}. {MEANING[exposure]} Does that leave too?", default=False):
            chosen.add(exposure)
    return frozenset(chosen), "Agreed to at the terminal, with `silo init`."


def _show_plan(plan: RunPlan, needed: tuple[Exposure, ...]) -> None:
    shape = "×".join(map(str, plan.model.input_shape))
    table = Table(
        title=f"Run {plan.run}: {plan.method.name}, {plan.rounds} rounds, model {plan.model.name} for {shape} images "
        f"of {plan.model.classes} classes",
        title_justify="left",
    )
    table.add_column("the run needs")
    table.add_column("leaves this hospital")
    table.add_column("that is", overflow="fold")
    for exposure in needed:
        leaves = "no: made of what left" if exposure in MADE_OF_UPDATES else "yes"
        table.add_row(exposure.value, leaves, MEANING[exposure])
    out.print(table)
    if plan.model.weights is not None:
        say(plan.model.weights.words)
    if plan.privacy is None:
        say("Without differential privacy: models are sent without noise.")
    else:
        privacy = plan.privacy
        say(f"With differential privacy: ε = {privacy.epsilon:g} at δ = {privacy.delta:g}, per {privacy.unit}.")
    masks = plan.secure_aggregation
    for line in learns(masks, plan.rounds):
        say(line)
    if masks is not None and masks.mode == "blind":
        say("A round of training takes two of the run's rounds.")
    elif masks is not None:
        say(f"Sums are of {masks.minimum} or more hospitals.")


def _readable(data: Path | None, asking: bool) -> Path:
    from medsilo.algorithms.datasets import load_npz

    while True:
        path = data or Path(
            ask(asking, "The hospital's images (.npz)", "make them with `silo prepare` and say where: --data")
        )
        try:
            path = with_home(path)
            load_npz(path)
        except (ConfigurationError, DataError) as error:
            if not asking or data is not None:
                raise
            say(str(error))
        else:
            return path
