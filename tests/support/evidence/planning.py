"""A plan of five rounds, as a coordinator announces it."""

from __future__ import annotations

from typing import Any

from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.method import Method
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.exposure import Exposure


def make_plan(method: Method | None = None, **changes: Any) -> RunPlan:
    method = method or DiversiFed()
    fields: dict[str, Any] = {
        "federation": "test",
        "coordinator": "c",
        "run": "r",
        "method": MethodPlan(name=method.name, parameters=method.parameters()),
        "model": ModelPlan(name="diversifed-cnn", input_shape=(3, 28, 28), classes=9),
        "training": TrainingPlan(),
        "rounds": 5,
        "seed": 1,
        "required": method.required,
        "optional": (Exposure.LOCAL_METRICS,),
        "downlink": (Exposure.INITIAL_MODEL, Exposure.PEER_DERIVED),
    }
    return RunPlan(**{**fields, **changes})
