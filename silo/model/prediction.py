"""A hospital's personalised model, loaded and put to work with nothing but the files of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, Images, load_npz, to_tensor
from medsilo.algorithms.models import build
from medsilo.algorithms.scope import beyond, file_kind
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import DataError
from medsilo.silo.data.image_files import PICTURES, Window, is_grey, is_image, read_picture
from medsilo.silo.data.preparing import Entry, class_names, listed
from medsilo.silo.model.kept_models import KeptModel
from medsilo.silo.run.run_state import DESCRIPTION, MODEL

_BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """The most likely class of one image and its probability; ``truth`` where a data set tells it.

    >>> from medsilo import load_model
    >>> found = load_model("demo/state/hospital1/runs/tissue-1").classify("demo/shards/hospital1.npz")
    >>> 0 <= found[0].probability <= 1
    True
    """

    image: str
    label: int
    class_name: str
    probability: float
    truth: int | None


@dataclass(frozen=True, eq=False)
class PersonalisedModel:
    """A hospital's own model after a run.

    ``module``: in evaluation mode, on the CPU; takes float32 [n, C, H, W] as ``medsilo.algorithms.datasets.to_tensor``
    scales pixels, gives logits [n, classes]. ``plan``: its architecture. ``class_names``: what the logits stand for, in
    order.
    ``description``: all that ``model.json`` says: silo, federation, run, method, data set and its fingerprint, whether
    the images that it was trained on are ``synthetic``.

    >>> import numpy as np
    >>> from medsilo import load_model
    >>> model = load_model("demo/state/hospital1/runs/tissue-1")
    >>> model.probabilities(np.zeros((2, 28, 28, 3), dtype=np.uint8)).shape
    torch.Size([2, 9])
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

    def classify(
        self,
        images: str | Path,
        *,
        window: Window | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> list[Prediction]:
        """Classifies a picture or DICOM file, a folder of such or of a folder for each class (as ``silo prepare``
        takes it), or a MedMNIST ``.npz``, whose test images are taken.

        Pictures are scaled to what the model was trained on, by the same code; ``notice`` is told what was changed.
        ``window``: as the training images were shown (``medsilo.silo.data.image_files``).

        Raises ``DataError`` for files that are missing or do not fit, an ``.npz`` of another size, and other classes.
        """
        names, pixels, truth = self._read(Path(images), window, notice)
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

    def _read(
        self, images: Path, window: Window | None, notice: Callable[[str], None]
    ) -> tuple[list[str], np.ndarray, np.ndarray | None]:
        channels, height, width = self.plan.input_shape
        if images.suffix == ".npz":
            dataset = load_npz(images)
            check_images(dataset, self)
            self._say_colour([is_grey(image) for image in dataset.test.images], notice)
            return (
                [f"{images.name}#{index}" for index in range(len(dataset.test))],
                dataset.test.images,
                dataset.test.labels,
            )
        if not images.exists():
            raise DataError(f"{images}: there is no such file or folder")
        entries = _entries(images)
        truth = None
        if all(entry.label for entry in entries):
            class_names(entries, self.class_names)
            truth = np.array([self.class_names.index(entry.label) for entry in entries])
        read = [
            read_picture(entry.path, channels=channels, height=height, width=width, window=window) for entry in entries
        ]
        if others := sorted({one.size for one in read} - {(width, height)}):
            shown = ", ".join(f"{w} × {h}" for w, h in others[:3]) + (", …" if len(others) > 3 else "")
            stretched = " and stretched" if any(w * height != h * width for w, h in others) else ""
            count = sum(one.size != (width, height) for one in read)
            notice(
                f"{count} of {len(read)} pictures were scaled{stretched} from {shown} pixels to the {width} × {height} "
                "that the model was trained on, as `silo prepare` does."
            )
        self._say_colour([one.grey for one in read], notice)
        return [entry.name for entry in entries], np.stack([one.pixels for one in read]), truth

    def _say_colour(self, grey: Sequence[bool], notice: Callable[[str], None]) -> None:
        trained = "grey" if self.plan.input_shape[0] == 1 else self.description.get("colour")
        if trained == "grey" and (count := len(grey) - sum(grey)):
            became = ", and were turned grey" if self.plan.input_shape[0] == 1 else ""
            notice(f"{count} of {len(grey)} images have colour{became}; the model was trained on grey ones.")
        if trained == "colour" and (count := sum(grey)):
            notice(f"{count} of {len(grey)} images are grey; the model was trained on images with colour.")


def check_images(dataset: ImageDataset, trained: PersonalisedModel) -> None:
    """Raises ``DataError`` if a data set's images or classes are not the model's."""
    if dataset.image_shape != trained.plan.input_shape:
        raise DataError(
            f"{dataset.source}: images are {'×'.join(map(str, dataset.image_shape))} (channels, height, width); the "
            f"model takes {'×'.join(map(str, trained.plan.input_shape))}"
        )
    unnamed = tuple(f"class {number}" for number in range(dataset.num_classes))
    theirs = trained.class_names[: dataset.num_classes]
    if dataset.num_classes > trained.plan.classes or dataset.class_names not in (unnamed, theirs):
        raise DataError(
            f"{dataset.source}: its classes are {', '.join(dataset.class_names)}; the model's are "
            f"{', '.join(trained.class_names)}. Give images with the same classes in the same order"
        )


def _entries(images: Path) -> list[Entry]:
    """A file, a folder's files, or those of a folder for each class, then with labels."""
    if not images.is_dir():
        return [Entry(images, images.name, "")]
    for path in sorted(images.iterdir()):
        if (kind := file_kind(path)) is not None:
            raise DataError(f"{path}: {beyond(f'it is {kind}')}")
    flat = sorted(path for path in images.iterdir() if path.is_file() and is_image(path))
    deep = [path for path in images.rglob("*") if path.is_file() and path.parent != images and is_image(path)]
    if not flat and not deep:
        raise DataError(f"{images}: holds no pictures ({', '.join(PICTURES)}) and no DICOM files")
    return listed(images) if deep else [Entry(path, path.name, "") for path in flat]


def load_kept(model: KeptModel, *, trusted: tuple[str, ...] = (), weights: Sequence[Path] = ()) -> PersonalisedModel:
    """A model that a run has left; see ``load_model``."""
    loaded = load_model(model.folder, file=model.path, trusted=trusted, weights=weights)
    return replace(loaded, description={**loaded.description, "rounds_trained": model.rounds})


def load_model(
    folder: str | Path,
    *,
    file: str | Path = MODEL,
    trusted: tuple[str, ...] = (),
    weights: Sequence[str | Path] = (),
) -> PersonalisedModel:
    """The model in a run's folder (``STATE/runs/RUN``).

    ``file``: the last model by default. ``trusted``: modules that may define an architecture, as a silo's
    ``trusted_models``. ``weights``: files or folders of weights, as a silo's, for a model that stands on a
    ``torchvision-features:`` extractor. Raises ``DataError`` for files that are missing or do not fit,
    ``ConfigurationError`` for an architecture that is not known or not trusted, or whose weights are not there.

    >>> from medsilo import load_model
    >>> load_model("demo/state/hospital1/runs/tissue-1").description["method"]["name"]
    'diversifed'
    """
    folder = Path(folder)
    description = _description(folder)
    plan = ModelPlan.model_validate(description["architecture"])
    module = build(plan, seed=0, trusted=trusted, weights=[Path(place) for place in weights])
    try:
        module.load_state_dict(load_file(folder / file))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{folder / file}: does not hold this model: {error}") from None
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


def _description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        ModelPlan.model_validate(description["architecture"])
        list(description["class_names"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"{path}: does not describe a model: {error}") from None
    return dict(description)
