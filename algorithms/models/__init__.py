"""Networks, and which of their parameters are what."""

from medsilo.algorithms.models.fixed import OnFixedFeatures
from medsilo.algorithms.models.frozen import (
    PartlyTrained,
    extractor_of,
    frozen_names,
    frozen_state,
    plain_state,
)
from medsilo.algorithms.models.layout import Features, Layout, classifier_of, state_of, whole_state
from medsilo.algorithms.models.networks import ARCHITECTURES, WITH_BATCH_NORMALISATION, build, build_start, mlp

__all__ = [
    "ARCHITECTURES",
    "WITH_BATCH_NORMALISATION",
    "Features",
    "Layout",
    "OnFixedFeatures",
    "PartlyTrained",
    "build",
    "build_start",
    "classifier_of",
    "extractor_of",
    "frozen_names",
    "frozen_state",
    "mlp",
    "plain_state",
    "state_of",
    "whole_state",
]
