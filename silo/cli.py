"""The ``silo`` command."""

from __future__ import annotations

from medsilo.privacy.party.audit_commands import audit_app
from medsilo.privacy.party.console import application
from medsilo.privacy.party.console import run as run_app
from medsilo.privacy.party.witness_commands import witness_app
from medsilo.silo.commands.consent import approve, consent_app
from medsilo.silo.commands.joining import doctor, init
from medsilo.silo.commands.model import evaluate, export, models, predict
from medsilo.silo.commands.oversight import budget, dossier, open_sent, page, report
from medsilo.silo.commands.prepare import prepare
from medsilo.silo.commands.preview import inspect, rehearse
from medsilo.silo.commands.run import flower, keys, train
from medsilo.silo.commands.shard import shard
from medsilo.silo.flower.config import read_party

app = application(
    "A hospital's side of a federation: trains on its own images, decides and records what leaves.", program="silo"
)
audit = audit_app(read_party)
audit.command("open")(open_sent)
app.add_typer(consent_app, name="consent")
app.add_typer(audit, name="audit")
app.add_typer(witness_app(read_party), name="witness")
for command in (
    *(init, doctor, approve, prepare, keys, train, flower, inspect, rehearse, budget, report, dossier, page),
    *(predict, evaluate, export, models, shard),
):
    app.command()(command)


def main() -> None:
    """Entry point."""
    run_app(app)
