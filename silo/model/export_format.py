"""The formats of an exported model; by themselves, as the command line names them before PyTorch is loaded."""

from __future__ import annotations

from enum import StrEnum


class ExportFormat(StrEnum):
    """ONNX, or PyTorch's own (``torch.export``); spelled as in ``--format``."""

    ONNX = "onnx"
    PT2 = "pt2"
