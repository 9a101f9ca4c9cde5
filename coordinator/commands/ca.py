"""``coordinator ca``: the federation's certificate authority."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from medsilo.privacy.identity.authority import create_authority, issue, issue_to_operator
from medsilo.privacy.identity.revocation import LIST, revoke
from medsilo.privacy.party.console import say

ca_app = typer.Typer(help="The federation's certificate authority.", no_args_is_help=True)


class IssuedRole(StrEnum):
    """The roles that a certificate can be for."""

    silo = "silo"
    coordinator = "coordinator"


class HeldRole(StrEnum):
    """The roles that a certificate can have."""

    silo = "silo"
    coordinator = "coordinator"
    operator = "operator"


@ca_app.command()
def init(
    federation: Annotated[str, typer.Option("--federation", help="The federation's name.")],
    directory: Annotated[Path, typer.Option("--directory", help="Where the CA's files go.")] = Path("ca"),
    days: Annotated[int, typer.Option("--days", min=1, help="How long the CA is valid.")] = 3650,
) -> None:
    """Make the federation's CA."""
    certificate = create_authority(directory, federation, days=days)
    say(f"CA of {federation}: {certificate} (give it to every party)")
    say(f"Its key, {directory / 'ca.key'}, stays here: whoever has it can be anybody.")


@ca_app.command()
def operator(
    name: Annotated[str, typer.Argument(help="The person's name, in lower-case letters, digits and hyphens.")],
    authority: Annotated[Path, typer.Option("--authority", help="The CA's folder.")] = Path("ca"),
    out: Annotated[Path | None, typer.Option("--out", help="The file for the browser; default NAME.p12.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How long the certificate is valid.")] = 365,
) -> None:
    """Make a key and certificate with which a person may look at the coordinator's page, as a file for a browser."""
    target = out or Path(f"{name}.p12")
    password = typer.prompt("A password for the file", hide_input=True, confirmation_prompt=True)
    identity = issue_to_operator(authority, name, target, password=password, days=days)
    say(f"{target}: key and certificate of {identity.uri}, valid for {days} days")
    say("Import it into the browser of this person alone, and delete the file.")


@ca_app.command(name="issue")
def issue_certificate(
    name: Annotated[str, typer.Argument(help="The party's name, for example hospital3.")],
    request: Annotated[Path, typer.Option("--request", help="Its request, made by `silo keys`.")],
    authority: Annotated[Path, typer.Option("--authority", help="The CA's folder.")] = Path("ca"),
    out: Annotated[Path | None, typer.Option("--out", help="The certificate; default NAME.pem.")] = None,
    role: Annotated[IssuedRole, typer.Option("--role", help="What the party may be.")] = IssuedRole.silo,
    days: Annotated[int, typer.Option("--days", min=1, help="How long the certificate is valid.")] = 365,
) -> None:
    """Sign a party's certificate request, after making sure by phone or in person that it is theirs."""
    target = out or Path(f"{name}.pem")
    identity = issue(authority, name, request, target, role=role.value, days=days)
    say(f"{target}: certificate of {identity.uri}, valid for {days} days")
    say(f"Give it to {name} together with {authority / 'ca.pem'}.")


@ca_app.command(name="revoke")
def revoke_certificates(
    name: Annotated[str, typer.Argument(help="The party's name, for example hospital3.")],
    authority: Annotated[Path, typer.Option("--authority", help="The CA's folder.")] = Path("ca"),
    role: Annotated[HeldRole, typer.Option("--role", help="What the party is.")] = HeldRole.silo,
    serial: Annotated[str | None, typer.Option("--serial", help="Only this certificate; default all so far.")] = None,
) -> None:
    """Revoke a party's certificates: no call with them is answered any more, on open connections neither."""
    for found in revoke(authority, name, role=role.value, serial=serial):
        say(f"revoked: certificate {found} of {name}")
    say(
        f"Put {authority / LIST} beside the coordinator's ca.pem (state/coordinator/keys/{LIST}); it counts at once.",
    )
