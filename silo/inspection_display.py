"""How an inspection is shown: as a table, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from silo.config import SiloConfig
from silo.inspection import Inspection


def show(found: Inspection, settings: SiloConfig, out: Console, *, as_json: bool) -> None:
    """Prints what would leave in a round."""
    if as_json:
        content = {
            "run": found.plan.run,
            "plan_sha256": found.plan.sha256.hex(),
            "messages_per_round": found.messages,
            "bytes_per_round": found.total,
            "bytes_per_request_for_a_task": found.asking,
            "content": [{**asdict(item), "epsilon": _epsilon(item.exposure.value)} for item in found.content],
            "also_in_other_rounds": [exposure.value for exposure in found.other_rounds],
            "missing": found.missing.lines(),
        }
        typer.echo(json.dumps(content, indent=2))
        return
    table = Table(
        title=f"Run {found.plan.run}, {found.plan.method.name}: what would leave {settings.name} in the "
        f"first of {found.plan.rounds} rounds, to {settings.coordinator_identity.uri}",
        title_justify="left",
    )
    for column in ("exposure class", "what", "bytes", "ε", "consented"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for item in found.content:
        what = [f"{name} {'×'.join(map(str, shape)) or 'one number'} {dtype}" for name, shape, dtype in item.tensors]
        fields = [f"{name}: {count}" for name, count in item.fields.items()]
        table.add_row(
            item.exposure.value,
            "\n".join(what or fields),
            str(item.bytes),
            _epsilon(item.exposure.value),
            "yes" if item.leaves else "no: stays here",
        )
    out.print(table)
    if found.other_rounds:
        also = ", ".join(exposure.value for exposure in found.other_rounds)
        out.print(f"In another round, as the method's phases have it, also: {also}.")
    if found.missing:
        out.print("The consent does not cover this run; nothing of it would leave. Missing:")
        for line in found.missing.lines():
            out.print(f"  - {line}", markup=False)
    else:
        out.print(
            f"{found.total} bytes in {found.messages} messages a round, once the run is joined, and {found.asking} "
            "bytes (PROTOCOL, IDENTITY) each time it asks for a task. Each also carries signed receipts for what was "
            "exchanged before (PROTOCOL, IDENTITY; some 1 to 4 kB). Nothing was sent just now.",
            soft_wrap=True,
        )


def _epsilon(exposure: str) -> str:
    """Privacy loss: without a mechanism there is no bound for what tells about patients."""
    return "0" if exposure in ("PROTOCOL", "IDENTITY", "INITIAL_MODEL") else "∞ (no noise)"
