"""How a model does on a silo's images, none of which it learns from here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medsilo.silo.training.measuring import Measurement

EVALUATION_BATCH = 1024
"""Images at a time where nothing is learnt from them."""


def judge(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[npt.NDArray[np.bool_], float]:
    """On which of m images ``[m, C, H, W]`` a model is right, ``bool [m]``, and the sum of its cross entropies."""
    model.eval()
    right, loss = [], 0.0
    with torch.inference_mode():
        for start in range(0, len(labels), EVALUATION_BATCH):
            logits = model(images[start : start + EVALUATION_BATCH])
            truth = labels[start : start + EVALUATION_BATCH]
            right.append((logits.argmax(dim=1) == truth).cpu().numpy())
            loss += float(F.cross_entropy(logits, truth, reduction="sum"))
    return np.concatenate(right) if right else np.zeros(0, dtype=np.bool_), loss


def mean(right: npt.NDArray[np.bool_], loss: float, labels: npt.NDArray[np.int64]) -> Measurement | None:
    """What ``judge`` found of images with the labels ``int64 [m]``, by image; None where there were none."""
    if not len(right):
        return None
    counts = np.bincount(labels)
    found = counts > 0
    shares = np.bincount(labels, weights=right)[found] / counts[found]
    return Measurement(int(right.sum()) / len(right), loss / len(right), of_classes=float(shares.mean()))
