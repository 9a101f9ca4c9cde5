"""``silo export``: the personalised model as one file for other programs, which must say what the model says.

The exported graph takes pixels as they are in files, uint8 [n, C, H, W], and scales them itself; it gives ``logits``
and ``probabilities``, float32 [n, classes]. What it is, and its classes' names, stand in its metadata, ``medsilo``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medsilo.algorithms.datasets import Images, load_npz
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.model.evaluation import file_sha256
from medsilo.silo.model.export_format import ExportFormat
from medsilo.silo.model.kept_models import KeptModel, find_model
from medsilo.silo.model.model_card import NO_DEVICE
from medsilo.silo.model.performance import Floats
from medsilo.silo.model.prediction import PersonalisedModel, check_images, load_kept
from medsilo.silo.state.config import SiloConfig

INPUT, LOGITS, PROBABILITIES = "images", "logits", "probabilities"
METADATA = "medsilo"
TOLERANCE = 1e-4
"""The most by which a probability may differ from the model's own; a logit may by ten times as much of the largest."""

_BATCH = 256


@dataclass(frozen=True)
class Exported:
    """``model``: whose file it is. ``images``: test images on which it was held against that; ``difference``: the
    largest of a probability, ``logits``: of a logit."""

    model: KeptModel
    path: Path
    images: int
    difference: float
    logits: float


class _FromPixels(nn.Module):
    """A model behind the scaling of ``medsilo.algorithms.datasets.to_tensor``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images.to(torch.float32).div(255.0).sub(0.5).div(0.5))
        return logits, torch.softmax(logits, dim=1)


def export(
    config: SiloConfig, out: Path, kind: ExportFormat, *, run: str | None = None, round_: str | None = None
) -> Exported:
    """Writes a model (``medsilo.silo.model.kept_models.find_model``) to ``out``, after it was held against the original
    on the hospital's test images.

    Raises ``ConfigurationError`` if the packages for ONNX are missing or the file cannot be written; ``DataError`` if
    the model cannot be exported, or the exported one says something else; nothing is written then.
    """
    make, read = {ExportFormat.ONNX: (_to_onnx, _read_onnx), ExportFormat.PT2: (_to_pt2, _read_pt2)}[kind]
    kept = find_model(config.runs, run, round_)
    trained = load_kept(kept, trusted=config.trusted_models, weights=config.weights)
    shard = load_npz(config.shard)
    check_images(shard, trained)
    pixels = np.ascontiguousarray(shard.test.images.transpose(0, 3, 1, 2))
    whole = _FromPixels(trained.module).eval()
    try:
        with _quiet():
            content = make(_program(whole, pixels), json.dumps(_describe(trained, kept), ensure_ascii=False))
    except ImportError as error:
        raise ConfigurationError(
            f"--format onnx needs packages that are not installed ({error.name}); install `medsilo[onnx]`, or use "
            f"--format {ExportFormat.PT2}"
        ) from None
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{kept.path}: {trained.plan.name} cannot be exported to {kind}: {reason[0]}") from error
    with _quiet():
        difference, logits = _differences(whole, read(content), pixels)
    if not difference <= TOLERANCE or not logits <= 10 * TOLERANCE:
        raise DataError(
            f"{kept.path}: the exported model says something else: probabilities differ by up to "
            f"{difference:.1e}, logits by up to {logits:.1e} of the largest, on {len(pixels)} test images; nothing was "
            "written. Try the other format"
        )
    try:
        write_atomically(out, content, mode=0o600)
    except OSError as error:
        raise ConfigurationError(f"{out}: cannot be written ({error.strerror}); give another file") from None
    return Exported(kept, out, len(pixels), difference, logits)


def _program(whole: nn.Module, pixels: Images) -> torch.export.ExportedProgram:
    """Of any number of images. Tracing wants two: one would be taken to be the only number there is."""
    example = torch.from_numpy(np.resize(pixels[:2], (2, *pixels.shape[1:])))
    return torch.export.export(whole, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))


def _describe(trained: PersonalisedModel, kept: KeptModel) -> dict[str, Any]:
    channels, height, width = trained.plan.input_shape
    taken = ("silo", "federation", "run", "method", "rounds_trained", "plan_sha256", "synthetic")
    return {
        "class_names": list(trained.class_names),
        "input": f"{INPUT}: uint8 [n, {channels}, {height}, {width}], pixels from 0 to 255 "
        f"({'RGB' if channels == 3 else 'grey'}); the graph scales them itself",
        "output": f"{LOGITS}, {PROBABILITIES}: float32 [n, {trained.plan.classes}], in the order of class_names",
        **{key: trained.description.get(key) for key in taken},
        "architecture": trained.plan.model_dump(mode="json"),
        "model_sha256": file_sha256(kept.path),
        "made_by": f"Medsilo {version('medsilo')}",
        "use": NO_DEVICE,
    }


def _to_pt2(program: torch.export.ExportedProgram, description: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA: description})
    return file.getvalue()


def _read_pt2(content: bytes) -> Callable[[Images], tuple[Floats, Floats]]:
    model = torch.export.load(io.BytesIO(content)).module()

    def answer(pixels: Images) -> tuple[Floats, Floats]:
        with torch.inference_mode():
            logits, probabilities = model(torch.from_numpy(pixels))
        return logits.double().numpy(), probabilities.double().numpy()

    return answer


def _to_onnx(program: torch.export.ExportedProgram, description: str) -> bytes:
    import onnx
    import onnxruntime  # noqa: F401 without it, the file could not be held against the model

    made = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=[LOGITS, PROBABILITIES],
    )
    assert made is not None
    model = made.model_proto
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA, description
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _read_onnx(content: bytes) -> Callable[[Images], tuple[Floats, Floats]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def answer(pixels: Images) -> tuple[Floats, Floats]:
        logits, probabilities = session.run([LOGITS, PROBABILITIES], {INPUT: pixels})
        return logits.astype(np.float64), probabilities.astype(np.float64)

    return answer


def _differences(
    whole: nn.Module, other: Callable[[Images], tuple[Floats, Floats]], pixels: Images
) -> tuple[float, float]:
    """The largest of a probability, and of a logit in proportion to the largest logit (or to 1)."""
    own: list[tuple[Floats, Floats]] = []
    theirs = []
    with torch.inference_mode():
        for start in range(0, len(pixels), _BATCH):
            batch = pixels[start : start + _BATCH]
            logits, probabilities = whole(torch.from_numpy(batch))
            own.append((logits.double().numpy(), probabilities.double().numpy()))
            theirs.append(other(batch))
    logits, probabilities = (np.concatenate(parts) for parts in zip(*own, strict=True))
    their_logits, their_probabilities = (np.concatenate(parts) for parts in zip(*theirs, strict=True))
    scale = max(1.0, float(np.abs(logits).max()))
    return float(np.abs(probabilities - their_probabilities).max()), float(np.abs(logits - their_logits).max()) / scale


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporters say to their own developers."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
