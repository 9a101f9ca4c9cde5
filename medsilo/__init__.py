"""Hospitals train models together, and each can prove, byte for byte, what left its building.

What ``__all__`` names is public, and is loaded when it is asked for:

>>> import medsilo
>>> medsilo.verify_evidence("demo/hospital1-evidence.json", peer="demo/coordinator-evidence.json").sound
True

A method or a network of one's own also stands on ``medsilo.algorithms.method``, ``.models``, ``.tensors``,
``.families`` and ``medsilo.privacy.exposure`` (docs/adding-a-method.md). Everything else may change with any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import medsilo.privacy.environment  # noqa: F401 before any library reads the process's environment

if TYPE_CHECKING:
    from medsilo.privacy.audit.bundle import read_evidence
    from medsilo.privacy.audit.findings import Verification
    from medsilo.privacy.audit.verification import verify_evidence
    from medsilo.privacy.errors import MedsiloError
    from medsilo.privacy.identity.keys import load_audit_public
    from medsilo.privacy.report.builder import make_report
    from medsilo.privacy.report.format import Format
    from medsilo.privacy.report.model import Report
    from medsilo.privacy.report.writing import write_report
    from medsilo.silo.model.prediction import PersonalisedModel, Prediction, load_model
    from medsilo.simulation.experiment import ExperimentConfig
    from medsilo.simulation.notebook import Results, read_results, simulate

__all__ = [
    "ExperimentConfig",
    "Format",
    "MedsiloError",
    "PersonalisedModel",
    "Prediction",
    "Report",
    "Results",
    "Verification",
    "load_audit_public",
    "load_model",
    "make_report",
    "read_evidence",
    "read_results",
    "simulate",
    "verify_evidence",
    "write_report",
]

_WHERE = {
    "ExperimentConfig": "simulation.experiment",
    "Format": "privacy.report.format",
    "MedsiloError": "privacy.errors",
    "PersonalisedModel": "silo.model.prediction",
    "Prediction": "silo.model.prediction",
    "Report": "privacy.report.model",
    "Results": "simulation.notebook",
    "Verification": "privacy.audit.findings",
    "load_audit_public": "privacy.identity.keys",
    "load_model": "silo.model.prediction",
    "make_report": "privacy.report.builder",
    "read_evidence": "privacy.audit.bundle",
    "read_results": "simulation.notebook",
    "simulate": "simulation.notebook",
    "verify_evidence": "privacy.audit.verification",
    "write_report": "privacy.report.writing",
}


def __getattr__(name: str) -> Any:
    """Loads a public name: most of them stand on PyTorch, which takes seconds."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"medsilo.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
