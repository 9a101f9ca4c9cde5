"""Plans with a privacy account."""

from __future__ import annotations

from typing import Any

from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.plan import MethodPlan, RunPlan, TrainingPlan
from tests.support.hospital.private_training import private_plan


def run_plan(
    method: str = "fedavg", *, rounds: int = 5, target: float = 4.0, parameters: Any = None, **changes: Any
) -> RunPlan:
    """As the coordinator makes it: calibrated for all rounds."""
    made, training = make(method, parameters or {}), TrainingPlan(epochs=1)
    config = PrivacyConfig(epsilon=target, delta=1e-5, sampling_rate=0.1)
    mechanism = config.plan(made, training, rounds).model_copy(update=changes)
    update = {
        "method": MethodPlan(name=method, parameters=made.parameters()),
        "training": training,
        "rounds": rounds,
        "required": made.required,
        "privacy": mechanism,
    }
    return private_plan().model_copy(update=update)


def mechanism(plan: RunPlan) -> PrivacyPlan:
    assert plan.privacy is not None
    return plan.privacy
