"""``silo predict``: the personalised model on images, with nothing but the files of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from algorithms.datasets import load_npz, to_tensor
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


def predict(
    folder: Path, images: Path, *, trusted: tuple[str, ...] = (), window: Window | None = None
) -> list[Prediction]:
    """Classifies images with the model in a run's folder.

    ``images``: a picture or DICOM file, a folder of such (each scaled to the model's size), or a MedMNIST ``.npz``,
    whose test images are taken. ``window``: as the training images were shown (``silo.image_files``).

    Raises ``DataError`` for files that are missing or do not fit.
    """
    description = _description(folder)
    plan = ModelPlan.model_validate(description["architecture"])
    model = build(plan, seed=0, trusted=trusted)
    try:
        model.load_state_dict(load_file(folder / MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{folder / MODEL}: does not hold this model: {error}") from None
    model.eval()
    names, pixels, truth = _read(images, plan, window)
    class_names = description["class_names"]
    found: list[Prediction] = []
    with torch.inference_mode():
        for start in range(0, len(names), _BATCH):
            batch = to_tensor(pixels[start : start + _BATCH])
            probabilities, labels = torch.softmax(model(batch), dim=1).max(dim=1)
            for offset, (probability, label) in enumerate(
                zip(probabilities.tolist(), labels.tolist(), strict=True), start=start
            ):
                name = class_names[label] if label < len(class_names) else str(label)
                known = None if truth is None else int(truth[offset])
                found.append(Prediction(names[offset], label, name, probability, known))
    return found


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
