"""Where tensors are computed, and with how many threads."""

from __future__ import annotations

from typing import Literal

import torch

from medsilo.privacy.errors import ConfigurationError

Precision = Literal["float32", "bfloat16"]


def choose_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one; raises ``ConfigurationError`` for CUDA where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            seen = f"sees {count} CUDA device(s), cuda:0 the first" if count else "sees no CUDA device"
            raise ConfigurationError(f"device: {name}: this machine's PyTorch {seen}; use another, cpu or auto")
    return device


def set_threads(threads: int | None, processes: int = 1) -> None:
    """The CPU threads of this process's training; None: PyTorch's choice, shared out among so many processes."""
    if threads is None and processes > 1:
        threads = max(1, torch.get_num_threads() // processes)
    if threads is not None:
        torch.set_num_threads(threads)
