"""Networks, and which of their parameters are what."""

from medsilo.algorithms.models.fixed import OnFixedFeatures
from medsilo.algorithms.models.layout import Features, Layout, classifier_of, state_of
from medsilo.algorithms.models.networks import ARCHITECTURES, WITH_BATCH_NORMALISATION, build, build_start, mlp

__all__ = [
    "ARCHITECTURES",
    "WITH_BATCH_NORMALISATION",
    "Features",
    "Layout",
    "OnFixedFeatures",
    "build",
    "build_start",
    "classifier_of",
    "mlp",
    "state_of",
]
