"""A plan with noised averages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from medsilo.algorithms.feddfq import FedDFQ
from medsilo.privacy.budget.accounting import Event, Unit
from medsilo.privacy.budget.kept_releases import KeptReleases
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject
from medsilo.privacy.budget.sealed_keys import Paid, unsealed
from medsilo.privacy.consent.plan import RunPlan
from tests.support.hospital.private_training import private_plan, private_site

BOUND = 0.4


METHOD = FedDFQ(selection="argmin")


def averaging_plan(unit: Unit = "image", *, bound: float = BOUND, noise: float = 10.0, **changes: Any) -> RunPlan:
    releases = [
        {"content": content, "bound": bound, "noise_multiplier": noise, "times": 9}
        for content in ("identifier", "choice")
    ]
    return private_plan(unit=unit, releases=releases, **changes)


class Account:
    """A ledger, and what was drawn when it was charged."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder, Subject("ab" * 32, "image"))
        self.kept = KeptReleases(self.ledger)

    def charge(self, round_number: int, phase: str, event: Event, reads: str) -> Paid:
        purpose = Purpose("f", "r", "00", round_number, phase)
        return dataclasses.replace(unsealed(), charge=self.ledger.charge(event, purpose, Budget(8.0, 1e-5)).sha256)


def identifier(account: Account, plan: RunPlan | None = None, **options: Any) -> Tensor:
    site = private_site(plan or averaging_plan(), charge=account.charge, kept=account.kept, **options)
    side = METHOD.silo_side(site)
    return side.identifier(0)  # type: ignore[attr-defined, no-any-return]
