"""``silo witness`` and ``coordinator witness``: cosign others' checkpoints; name the keys by which that is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from medsilo.privacy.identity.cosignature import COSIGNATURE, ED25519, key_text
from medsilo.privacy.identity.keys import load_audit_key, load_audit_public, write_private
from medsilo.privacy.party import logs
from medsilo.privacy.party.commands import Log
from medsilo.privacy.party.logs import LogFormat
from medsilo.privacy.party.party import PartyConfig

_Config = Annotated[Path, typer.Option("--config", "-c", help="The witness's configuration (YAML).")]


def witness_app(read: Callable[[Path], PartyConfig]) -> typer.Typer:
    """The ``witness`` commands of a party whose configuration ``read`` reads."""
    app = typer.Typer(help="Cosign the checkpoints of others' journals, or have one's own cosigned.")

    @app.command()
    def serve(config: _Config, log: Log = LogFormat.TEXT) -> None:
        """Run a witness: it cosigns what continues all that it has cosigned before, and keeps sizes and roots alone."""
        from medsilo.privacy.witness.config import WitnessConfig
        from medsilo.privacy.witness.serving import serve

        logs.begin(log)
        serve(WitnessConfig.read(config))

    @app.command()
    def key(config: _Config) -> None:
        """Print the witness's public key for `witnesses:` and `--witness`; the first time the key is made."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from medsilo.privacy.witness.config import WitnessConfig

        settings = WitnessConfig.read(config)
        if not settings.key.exists():
            write_private(settings.key, Ed25519PrivateKey.generate())
        public = load_audit_key(settings.key).public_key().public_bytes_raw()
        typer.echo(key_text(settings.name, public, COSIGNATURE))

    @app.command("journal-key")
    def journal_key(
        config: Annotated[Path, typer.Option("--config", "-c", help="This party's configuration.")],
    ) -> None:
        """Print the key of this party's journal, for the `logs:` of a witness."""
        party = read(config)
        typer.echo(key_text(party.journal_origin, load_audit_public(party.keys / "audit.pub"), ED25519))

    return app
