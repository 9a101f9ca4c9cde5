"""Whether this hospital takes part in a run: its consent, its privacy budget, the plan's own word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.protection.masked import check_masks, required
from medsilo.algorithms.registry import make
from medsilo.privacy.budget.ledger import Ledger, Subject
from medsilo.privacy.consent.consent import ConsentFile, Missing
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.gate import ConsentGate
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.consent.withdrawal import EndedError, History
from medsilo.privacy.door.door import Door
from medsilo.privacy.errors import BudgetError, DataError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.journal.records import RefusalRecord
from medsilo.silo.run.account import Account, budget_of, check_enough, check_promise, metrics_budget_of, sealed_keys
from medsilo.silo.run.approval import waits
from medsilo.silo.run.blinding import Blinding
from medsilo.silo.run.display import Display
from medsilo.silo.run.masking import Masking
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.uplink.uplink import Uplink

if TYPE_CHECKING:
    from medsilo.silo.training.private_count import PrivateCounts


def agree(
    config: SiloConfig,
    plan: RunPlan,
    uplink: Uplink,
    gate: ConsentGate,
    dataset: ImageDataset,
    door: Door,
    history: History,
    display: Display,
) -> tuple[ConsentGate, Account | None, PrivateCounts | None]:
    """The gate of a plan that consent and privacy budget cover and, where it has privacy, its account and what noises
    accuracies."""
    method = make(plan.method.name, plan.method.parameters)
    check_masks(plan, method)
    asked = {*required(method, plan.secure_aggregation, plan.rounds), *plan.model.asks}
    if not asked <= set(plan.required):
        needed = ", ".join(exposure for exposure in Exposure if exposure in asked)
        raise RefusedError(
            f"the plan asks for {', '.join(plan.required)}, but its method, {method.name}, and its starting model "
            f"expose {needed}: a plan must name all of that"
        )
    check_promise(plan, method)
    consent = gate.file
    earlier = history.rounds_with(plan.coordinator_identity.uri, beside=plan.sha256.hex())
    missing = consent.missing_for(plan, images=len(dataset.train), earlier_rounds=earlier)
    part = history.parts.get(plan.sha256.hex())
    if part and part.is_open:
        # A cap that was lowered on the way ends the run when it is reached, not before.
        missing = dataclasses.replace(missing, rounds=None, total_rounds=None)
    if missing:
        error = consent.refusal(missing, f"run {plan.run} ({plan.method.name})")
        door.note(RefusalRecord(**summary(plan), reason=str(error)))
        if part and part.is_open:
            raise EndedError(Cause.NARROWED, str(error))
        if not waits(consent, plan, history):
            uplink.answer(plan, missing)
        raise error
    try:
        account = _open_account(config, plan, consent, dataset, door)
        if account is not None:
            account.check_covers(method)
            if told := account.notice():
                display.notice(told)
        counts = _open_counts(config, plan, consent, dataset, door, display)
    except (BudgetError, DataError) as error:
        door.note(RefusalRecord(**summary(plan), reason=str(error)))
        if part and part.is_open:
            raise EndedError(Cause.BUDGET, str(error)) from None
        if not waits(consent, plan, history):
            uplink.answer(plan, Missing(privacy=(str(error),)))
        raise
    joining = gate.joining(plan, rounds=part.sent if part else (), earlier_rounds=earlier)
    uplink.use(door.through(joining), plan)
    return joining, account, counts


def _open_account(
    config: SiloConfig, plan: RunPlan, consent: ConsentFile, dataset: ImageDataset, door: Door
) -> Account | None:
    if plan.privacy is None:
        return None
    from medsilo.silo.training.private_training import owners_of  # Opacus takes seconds to load

    units = int(owners_of(dataset, plan.privacy.unit).max()) + 1
    check_enough(plan.privacy, consent.consent, units)
    ledger = Ledger(config.ledgers, Subject(dataset.fingerprint, plan.privacy.unit), dataset.contents)
    budget, sealed = budget_of(consent.consent, plan.privacy), sealed_keys(config, plan)
    account = Account(ledger, plan, plan.privacy, budget, door, sealed)
    door.paid_by = account.paid_by
    return account


def _open_counts(
    config: SiloConfig, plan: RunPlan, file: ConsentFile, dataset: ImageDataset, door: Door, display: Display
) -> PrivateCounts | None:
    """What noises accuracies of a private run; None where none leaves, as consent or shard have it."""
    if plan.privacy is None or plan.privacy.metrics is None or Exposure.LOCAL_METRICS not in file.consent.classes:
        return None
    budget = metrics_budget_of(file.consent, plan.privacy)
    if budget is None:
        display.notice("accuracies stay here: the consent has no budget for them (`privacy: metrics_epsilon`)")
        return None
    from medsilo.silo.training.private_count import PrivateCounts, held_out_owners

    try:
        owners = held_out_owners(dataset, plan.privacy.unit)
    except DataError as error:
        display.notice(f"accuracies stay here: {error}")
        return None
    subject = Subject(dataset.fingerprint, plan.privacy.unit, split="test")
    ledger = Ledger(config.ledgers, subject, dataset.contents)
    account = Account(ledger, plan, plan.privacy, budget, door, sealed_keys(config, plan))
    training = door.paid_by
    door.paid_by = lambda call: [*training(call), *account.paid_by(call)]
    return PrivateCounts(plan.privacy.metrics, owners, account.charge)


def open_masking(
    plan: RunPlan,
    kept: Path,
    credentials: Credentials | None,
    audit_key: Ed25519PrivateKey,
    gate: ConsentGate,
    door: Door,
    history: History,
) -> Masking | None:
    """What masks, or seals, this hospital's updates; None where the plan has no masks. ``kept``: the file of a sealed
    model's secret."""
    if plan.secure_aggregation is None:
        return None
    if credentials is None:
        raise RefusedError("masks need certificates, by which hospitals know each other; `insecure: true` has none")
    helped = history.helped.get(plan.sha256.hex(), Help()).found
    kind: Callable[..., Masking] = partial(Blinding, kept, helped=helped) if plan.is_blind else Masking
    return kind(
        plan,
        plan.secure_aggregation,
        credentials=credentials,
        audit_key=audit_key,
        consents=lambda: gate.consents,
        door=door,
        earlier=history.masked,
    )


def summary(plan: RunPlan) -> dict[str, Any]:
    """A run as the journal names it."""
    return {"run": plan.run, "plan_sha256": plan.sha256.hex(), "plan": plan.model_dump(mode="json")}
