"""A hospital's personalised model, loaded and put to work with nothing but the files of a run."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.datasets import load_npz, to_tensor
from algorithms.models import build
from privacy.errors import DataError
from privacy.plan import ModelPlan
from silo.run_state import DESCRIPTION, MODEL

PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
_BATCH = 256
_MOST_PIXELS = 50_000_000
# What Pillow has been seen to raise for damaged pictures.
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, MemoryError, struct.error),
    *(UnidentifiedImageError, Image.DecompressionBombError, NotImplementedError, AttributeError, RuntimeError),
)


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one image and its probability; ``truth`` where a data set tells it."""

    image: str
    label: int
    class_name: str
    probability: float
    truth: int | None


@dataclass(frozen=True)
class PersonalisedModel:
    """A hospital's own model after a run.

    ``module``: in evaluation mode, on the CPU; takes float32 [n, C, H, W] as ``algorithms.datasets.to_tensor`` scales
    pixels, gives logits [n, classes]. ``plan``: its architecture. ``class_names``: what the logits stand for, in order.
    ``description``: all that ``model.json`` says: silo, federation, run, method, data set and its fingerprint, whether
    the images that it was trained on are ``synthetic``.
    """

    module: nn.Module
    plan: ModelPlan
    class_names: tuple[str, ...]
    description: Mapping[str, Any]

    def probabilities(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """Each class's probability: float32 [n, classes].

        ``images``: pixels, [n, H, W, C]; raises ``DataError`` for another type or size.
        """
        channels, height, width = self.plan.input_shape
        if images.dtype != np.uint8 or images.shape[1:] != (height, width, channels):
            raise DataError(
                f"images are {images.dtype} {images.shape[1:]} (height, width, channels); the model takes uint8 "
                f"{(height, width, channels)}"
            )
        with torch.inference_mode():
            batches = [self.module(to_tensor(images[at : at + _BATCH])) for at in range(0, len(images), _BATCH)]
            return torch.softmax(torch.cat(batches), dim=1) if batches else torch.zeros(0, self.plan.classes)

    def classify(self, images: str | Path) -> list[Prediction]:
        """Classifies a picture, a folder of pictures (each scaled to the model's size), or a MedMNIST ``.npz``, whose
        test images are taken. Raises ``DataError`` for files that are missing or do not fit."""
        names, pixels, truth = _read(Path(images), self.plan)
        probabilities, labels = self.probabilities(pixels).max(dim=1)
        return [
            Prediction(
                name,
                label,
                self.class_names[label] if label < len(self.class_names) else str(label),
                probability,
                None if truth is None else int(truth[index]),
            )
            for index, (name, label, probability) in enumerate(
                zip(names, labels.tolist(), probabilities.tolist(), strict=True)
            )
        ]


def load_model(folder: str | Path, *, trusted: tuple[str, ...] = ()) -> PersonalisedModel:
    """The model in a run's folder (``STATE/runs/RUN``).

    ``trusted``: modules that may define an architecture, as a silo's ``trusted_models``. Raises ``DataError`` for files
    that are missing or do not fit, ``ConfigurationError`` for an architecture that is not known or not trusted.
    """
    folder = Path(folder)
    description = _description(folder)
    plan = ModelPlan.model_validate(description["architecture"])
    module = build(plan, seed=0, trusted=trusted)
    try:
        module.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{folder / MODEL}: does not hold this model: {error}") from None
    return PersonalisedModel(module.eval(), plan, tuple(map(str, description["class_names"])), description)


def find_run(runs: Path, run: str | None) -> Path:
    """The folder of the named run, or of the one whose model is newest; raises ``DataError`` if there is none."""
    if run is not None:
        if run != Path(run).name or "\0" in run:
            raise DataError(f"{run!r:.80} is not the name of a run")
        if not (runs / run / MODEL).exists():
            raise DataError(f"{runs / run}: holds no model; `silo train` writes one after every round")
        return runs / run
    trained = sorted(runs.glob(f"*/{MODEL}"), key=lambda path: path.stat().st_mtime)
    if not trained:
        raise DataError(f"{runs}: no run has left a model there yet; `silo train` writes one after every round")
    return trained[-1].parent


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        ModelPlan.model_validate(description["architecture"])
        list(description["class_names"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"{path}: does not describe a model: {error}") from None
    return dict(description)


def _read(images: Path, plan: ModelPlan) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    channels, height, width = plan.input_shape
    if images.suffix == ".npz":
        test = load_npz(images).test
        if test.images.shape[1:] != (height, width, channels):
            raise DataError(
                f"{images}: images are {test.images.shape[1:]} (height, width, channels); the model takes "
                f"{(height, width, channels)}"
            )
        return [f"{images.name}#{index}" for index in range(len(test))], test.images, test.labels
    if images.is_dir():
        paths = sorted(path for path in images.iterdir() if path.suffix.lower() in PICTURES)
    else:
        paths = [images]
    if not paths:
        raise DataError(f"{images}: holds no pictures ({', '.join(PICTURES)})")
    pixels = np.stack([_picture(path, channels, height, width) for path in paths])
    return [path.name for path in paths], pixels, None


def _picture(path: Path, channels: int, height: int, width: int) -> np.ndarray:
    if channels not in (1, 3):
        raise DataError(f"pictures have 1 or 3 channels; this model takes {channels}: give an .npz")
    try:
        with Image.open(path) as picture:
            # A small file can say that it is a very large picture, and unpacked it is one.
            if math.prod(picture.size) > _MOST_PIXELS:
                raise ValueError(f"{picture.size[0]} × {picture.size[1]} pixels are more than {_MOST_PIXELS:,}")
            scaled = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a picture: {error}") from None
    return np.asarray(scaled, dtype=np.uint8).reshape(height, width, channels)
