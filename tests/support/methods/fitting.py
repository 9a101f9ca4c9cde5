"""A model on which a method can be tried, whichever method it is."""

from __future__ import annotations

from medsilo.algorithms.method import Federation, Method
from medsilo.algorithms.models import Layout, build
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import ConfigurationError


def fitting(method: Method, *models: str) -> str:
    """The first of the architectures that the method neither refuses nor warns of; fixed features at last."""
    for name in (*models, "stain-texture"):
        layout = Layout.of(build(ModelPlan(name=name, input_shape=(3, 28, 28), classes=3)))
        try:
            method.coordinator_side(Federation(layout, rounds=2, seed=1))
        except ConfigurationError:
            continue
        if not method.warnings(3, name, "sgd"):
            return name
    raise AssertionError(f"{method.name} is made for none of {', '.join(models)}")
