"""Tensors in transit: parts, payloads, stacks of many silos' models; how they travel and lie on disk."""

from medsilo.algorithms.tensors.payload import (
    BLOCK,
    DTYPES,
    FileSource,
    MemorySource,
    Part,
    Payload,
    Source,
    TensorSpec,
    all_finite,
    payload_tensors,
)
from medsilo.algorithms.tensors.stack import MemoryWorkspace, Stack, Workspace, combine, transform

__all__ = [
    "BLOCK",
    "DTYPES",
    "FileSource",
    "MemorySource",
    "MemoryWorkspace",
    "Part",
    "Payload",
    "Source",
    "Stack",
    "TensorSpec",
    "Workspace",
    "all_finite",
    "combine",
    "payload_tensors",
    "transform",
]
