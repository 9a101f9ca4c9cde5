"""``silo predict``: the personalised model on images, with nothing but the files of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A run's personalised model in evaluation mode, on the CPU, and what ``model.json`` says of it.

    ``class_names``: one for each class of the architecture.
    """

    model: nn.Module
    plan: ModelPlan
    class_names: tuple[str, ...]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one image and its probability; ``truth`` where a data set tells it."""

    image: str
    label: int
    class_name: str
    probability: float
    truth: int | None


def predict(
    folder: Path, images: Path, *, trusted: tuple[str, ...] = (), window: Window | None = None
) -> list[Prediction]:
    """Classifies images with the model in a run's folder.

    ``images``: a picture or DICOM file, a folder of such (each scaled to the model's size), or a MedMNIST ``.npz``,
    whose test images are taken. ``window``: as the training images were shown (``silo.image_files``).

    Raises ``DataError`` for files that are missing or do not fit.
    """
    trained = open_model(folder, trusted=trusted)
    names, pixels, truth = _read(images, trained.plan, window)
    probabilities = torch.softmax(logits_of(trained.model, pixels), dim=1)
    found: list[Prediction] = []
    for number, (probability, label) in enumerate(
        zip(*(one.tolist() for one in probabilities.max(dim=1)), strict=True)
    ):
        known = None if truth is None else int(truth[number])
        found.append(Prediction(names[number], label, trained.class_names[label], probability, known))
    return found


def open_model(folder: Path, *, trusted: tuple[str, ...] = ()) -> TrainedModel:
    """The model in a run's folder; raises ``DataError`` for files that are missing or do not fit each other."""
    description = _description(folder)
    plan = ModelPlan.model_validate(description["architecture"])
    model = build(plan, seed=0, trusted=trusted)
    try:
        model.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{folder / MODEL}: does not hold this model: {error}") from None
    model.eval()
    named = tuple(str(name) for name in description["class_names"])[: plan.classes]
    names = named + tuple(f"class {number}" for number in range(len(named), plan.classes))
    return TrainedModel(model, plan, names, description)


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
