"""A hospital's personalised model, loaded and put to work with nothing but the files of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.datasets import Images, load_npz, to_tensor
from algorithms.models import build
from privacy.errors import DataError
from privacy.plan import ModelPlan
from silo.image_files import PICTURES, Window, is_image, read_image
from silo.run_state import DESCRIPTION, MODEL

_BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one image and its probability; ``truth`` where a data set tells it."""

    image: str
    label: int
    class_name: str
    probability: float
    truth: int | None


@dataclass(frozen=True, eq=False)
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
        return (
            torch.softmax(logits_of(self.module, images), dim=1) if len(images) else torch.zeros(0, self.plan.classes)
        )

    def classify(self, images: str | Path, *, window: Window | None = None) -> list[Prediction]:
        """Classifies a picture or DICOM file, a folder of such (each scaled to the model's size), or a MedMNIST
        ``.npz``, whose test images are taken. ``window``: as the training images were shown (``silo.image_files``).

        Raises ``DataError`` for files that are missing or do not fit.
        """
        names, pixels, truth = _read(Path(images), self.plan, window)
        probabilities, labels = self.probabilities(pixels).max(dim=1)
        return [
            Prediction(
                name,
                label,
                self.class_names[label],
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
    named = tuple(str(name) for name in description["class_names"])[: plan.classes]
    names = named + tuple(f"class {number}" for number in range(len(named), plan.classes))
    return PersonalisedModel(module.eval(), plan, names, description)


def logits_of(model: nn.Module, images: Images, *, device: torch.device | None = None) -> Tensor:
    """What a model in evaluation mode says of images, uint8 [n, H, W, C]: float32 [n, classes], on the CPU."""
    with torch.inference_mode():
        parts = [
            model(to_tensor(images[start : start + _BATCH]).to(device)).cpu() for start in range(0, len(images), _BATCH)
        ]
    return torch.cat(parts)


def find_run(runs: Path, run: str | None) -> Path:
    """The folder of the named run, or of the one whose model is newest; raises ``DataError`` if there is none."""
    if run is not None:
        if run != Path(run).name or "\0" in run:
            raise DataError(f"{run!r:.80} is not the name of a run")
        if not (runs / run / MODEL).exists():
            others = ", ".join(sorted(path.parent.name for path in runs.glob(f"*/{MODEL}")))
            there = f"; models are there of: {others}" if others else "; `silo train` writes one after every round"
            raise DataError(f"{runs / run}: holds no model{there}")
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


def _read(images: Path, plan: ModelPlan, window: Window | None) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    channels, height, width = plan.input_shape
    if images.suffix == ".npz":
        test = load_npz(images).test
        if test.images.shape[1:] != (height, width, channels):
            raise DataError(
                f"{images}: images are {test.images.shape[1:]} (height, width, channels); the model takes "
                f"{(height, width, channels)}"
            )
        return [f"{images.name}#{index}" for index in range(len(test))], test.images, test.labels
    if not images.exists():
        raise DataError(f"{images}: there is no such file or folder")
    if images.is_dir():
        paths = sorted(path for path in images.iterdir() if path.is_file() and is_image(path))
    else:
        paths = [images]
    if not paths:
        raise DataError(f"{images}: holds no pictures ({', '.join(PICTURES)}) and no DICOM files")
    pixels = np.stack(
        [read_image(path, channels=channels, height=height, width=width, window=window) for path in paths]
    )
    return [path.name for path in paths], pixels, None
