"""How an inspection is shown: as a table, or as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from medsilo.privacy.budget.ledger import told_of
from medsilo.privacy.consent.consent import INVENTED_HOSPITALS
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.exposure import MEANING
from medsilo.privacy.pages.wording import shown
from medsilo.silo.preview.inspection import Inspection, Leaving
from medsilo.silo.state.config import SiloConfig


def show(found: Inspection, settings: SiloConfig, out: Console, *, as_json: bool) -> None:
    """Prints what would leave in a round."""
    if as_json:
        typer.echo(json.dumps(_content(found), indent=2))
        return
    table = Table(
        title=f"Run {found.plan.run}, {found.plan.method.name}: what would leave {settings.name} in the "
        f"first of {found.plan.rounds} rounds, to {settings.coordinator_identity.uri}",
        title_justify="left",
    )
    for column in ("exposure class", "what", "bytes", "ε of the run", "consented"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for item in found.content:
        what = [f"{name} {'×'.join(map(str, shape)) or 'one number'} {dtype}" for name, shape, dtype in item.tensors]
        fields = [f"{name}: {count}" for name, count in item.fields.items()]
        table.add_row(
            item.exposure.value,
            "\n".join(what or fields),
            str(item.bytes),
            str(item.loss),
            _consented(item),
        )
    out.print(table)
    _show_remarks(found, out)


def _content(found: Inspection) -> dict[str, Any]:
    return {
        "run": found.plan.run,
        "plan_sha256": found.plan.sha256.hex(),
        "messages_per_round": found.messages,
        "bytes_per_round": found.total,
        "bytes_per_request_for_a_task": found.asking,
        "content": [{**asdict(item), "loss": _loss(item)} for item in found.content],
        "starts_from": start.model_dump(mode="json") if (start := found.plan.model.weights) else None,
        "privacy": _privacy(found),
        "also_in_other_rounds": [exposure.value for exposure in found.other_rounds],
        "missing": found.missing.lines(),
        "optional_and_not_agreed_to": [exposure.value for exposure in found.not_agreed],
        "masks_with_anyone": found.masks_with_anyone,
        "learns": list(found.learns),
        "helped": found.helped,
        "ended": found.ended,
        "withdrawn": found.withdrawn,
    }


def _show_remarks(found: Inspection, out: Console) -> None:
    if (start := found.plan.model.weights) is not None:
        out.print(start.words, markup=False, soft_wrap=True)
    for line in _privacy_lines(found):
        out.print(line, markup=False, soft_wrap=True)
    for exposure in found.not_agreed:
        out.print(
            f"Optional, and not agreed to, so it stays here: {exposure}. {MEANING[exposure]}",
            markup=False,
            soft_wrap=True,
        )
    for line in (*found.learns, found.helped):
        if line:
            out.print(line, markup=False, soft_wrap=True)
    if found.masks_with_anyone:
        out.print(f"Masked, but {INVENTED_HOSPITALS}.", markup=False, soft_wrap=True)
    if found.ended:
        out.print(
            f"Run {found.plan.run} has ended here: nothing more of it leaves. `silo doctor` asks whether the "
            "coordinator leads another.",
            soft_wrap=True,
        )
    if found.withdrawn:
        out.print(
            "The consent is withdrawn: nothing leaves. `silo consent give`, if the hospital wants to.", soft_wrap=True
        )
    elif found.missing:
        out.print("The consent does not cover this run; nothing of it would leave. Missing:")
        for line in found.missing.lines():
            out.print(f"  - {line}", markup=False)
    else:
        out.print(f"{found.besides} Nothing was sent just now.", soft_wrap=True)


def _consented(item: Leaving) -> str:
    if item.leaves:
        return "yes"
    return "yes, but see below" if item.agreed else "no: stays here"


def _loss(item: Leaving) -> dict[str, object]:
    epsilon = item.loss.epsilon
    return {"epsilon": None if math.isinf(epsilon) else epsilon, "mechanism": item.loss.mechanism}


def _privacy(found: Inspection) -> dict[str, object] | None:
    if found.guarantee is None or found.spent is None or found.after is None:
        return None
    return {
        "run": asdict(found.guarantee),
        "spent": asdict(found.spent.guarantee),
        "after": asdict(found.after.guarantee),
        "trust": _trust(found.plan),
        "accounts": [{**one.describe(), "charges": count} for one, count in found.after.accounts.items()],
        "held_to": "the run's promise" if found.own_promise else "the consent's budget",
        "largest_group": found.largest_group,
        "releases": [release.model_dump() for release in found.plan.privacy.releases] if found.plan.privacy else [],
    }


def _privacy_lines(found: Inspection) -> list[str]:
    if found.plan.privacy is None or found.guarantee is None or found.spent is None or found.after is None:
        return ["The run has no differential privacy: there is no bound on what its content tells about a patient."]
    lines = [
        f"The run promises {found.guarantee}: one cost for all that it releases.",
        *_trust_lines(found.plan),
        *(
            f"Besides the training it releases the {one.content} {_times(one.times)}: an average of which each "
            f"{found.guarantee.unit} counts with at most {one.bound:g}, with noise of {one.noise_multiplier:g} times "
            "that on the sum."
            for one in found.plan.privacy.releases
        ),
        f"These images have cost {found.spent.guarantee} so far; after this run, from its first round, it would be "
        f"{shown(found.after.epsilon)}.{told_of(found.after)}",
    ]
    if found.own_promise:
        lines.append(
            "The consent names no budget for all runs (`privacy: epsilon`): the run is held to its own promise, "
            "whatever was spent before it."
        )
    if found.guarantee.unit == "image" and (found.largest_group or 1) > 1:
        lines.append(
            f"The unit is the image, and one patient has up to {found.largest_group} images here: a patient is "
            "protected less than the number says."
        )
    return lines


def _trust(plan: RunPlan) -> dict[str, object] | None:
    if plan.trust is None or plan.privacy is None:
        return None
    return {"honest": str(plan.trust), "without_it": asdict(plan.privacy.alone)}


def _trust_lines(plan: RunPlan) -> list[str]:
    if plan.trust is None or plan.privacy is None:
        return []
    return [
        f"Its noise is shared out: this hospital adds a share of it alone, and the promise presumes that {plan.trust} "
        "hospitals whose updates are summed, itself among them, add theirs and tell nobody of it. One of those that "
        "looks itself knows its own share, so that against it one share fewer protects. Against all the "
        f"others together, by its own share alone, the run costs {plan.privacy.alone}."
    ]


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
