"""Labelled images in memory, and what tells two of them apart."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.scope import beyond
from medsilo.privacy.budget.units import Content
from medsilo.privacy.errors import DataError

if TYPE_CHECKING:
    import torch
from typing import Any

Images = npt.NDArray[np.uint8]


Labels = npt.NDArray[np.int64]


Patients = npt.NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images, their labels and, where known, whose they are.

    Attributes:
        images: uint8 [n, H, W, C]; grey images have C = 1.
        labels: int64 [n], each at least 0.
        patients: str [n], a pseudonym for each image's patient, or None where unknown.

    Raises:
        DataError: the arrays do not have these types and shapes, or differ in length.
    """

    images: Images
    labels: Labels
    patients: Patients | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4:
            raise DataError(
                f"images are {self.images.dtype} of shape {list(self.images.shape)}, not uint8 of shape [n, H, W, C]: "
                + (pixels_of(self.images) or beyond("this is no list of images"))
            )
        if self.labels.ndim > 1 and (other := labels_of(self.labels, len(self.images))) is not None:
            raise DataError(f"labels are of shape {list(self.labels.shape)}: {other}")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {list(self.labels.shape)}; "
                f"give int64, one for each of the {len(self.images)} images"
            )
        if len(self.labels) and int(self.labels.min()) < 0:
            raise DataError(f"a label is {int(self.labels.min())}; number the classes from 0")
        if self.patients is not None and (
            self.patients.dtype.kind != "U" or self.patients.shape != self.images.shape[:1]
        ):
            raise DataError(
                f"patients are {self.patients.dtype} of shape {list(self.patients.shape)}; "
                f"give a str for each of the {len(self.images)} images, or None"
            )

    def __len__(self) -> int:
        """The number of images, n."""
        return len(self.labels)

    def take(self, indices: npt.NDArray[np.int64]) -> ImageSplit:
        """A copy of the images at ``indices`` (int64 [m]), in that order."""
        return ImageSplit(
            images=self.images[indices],
            labels=self.labels[indices],
            patients=None if self.patients is None else self.patients[indices],
        )

    def counts(self, num_classes: int) -> npt.NDArray[np.int64]:
        """How many images each class has: int64 [num_classes]."""
        return np.bincount(self.labels, minlength=num_classes).astype(np.int64)


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """The splits of one data set, or of one hospital's shard of it.

    Attributes:
        name: what to call it, for example ``pathmnist`` or ``hospital1``.
        source: where the images are from, and on what terms.
        synthetic: True when the images were generated; results on them say nothing about patients.
        class_names: one name for each label; a shard has the full set's even where it lacks a class.
        train: images to train on; at least one.
        validation: images to choose hyper-parameters on, if any.
        test: images to report accuracy on; at least one.

    Raises:
        DataError: train or test is empty, the splits' images differ in shape, or a label has no class name.
    """

    name: str
    source: str
    synthetic: bool
    class_names: tuple[str, ...]
    train: ImageSplit
    validation: ImageSplit | None
    test: ImageSplit

    def __post_init__(self) -> None:
        for split_name, split in self._splits():
            if not len(split):
                raise DataError(f"{self.name}: the {split_name} split has no images; it needs at least one")
            if split.images.shape[1:] != self.train.images.shape[1:]:
                raise DataError(
                    f"{self.name}: {split_name} images are {list(split.images.shape[1:])} (H, W, C), train "
                    f"images {list(self.train.images.shape[1:])}; resize them to one shape"
                )
            if int(split.labels.max()) >= self.num_classes:
                raise DataError(
                    f"{self.name}: a {split_name} label is {int(split.labels.max())}, but class_names names "
                    f"{self.num_classes} classes; correct the labels or name every class"
                )

    def _splits(self) -> list[tuple[str, ImageSplit]]:
        named = [("train", self.train), ("val", self.validation), ("test", self.test)]
        return [(name, split) for name, split in named if split is not None]

    @property
    def num_classes(self) -> int:
        """The number of classes of the full set."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W), as a model takes them."""
        height, width, channels = self.train.images.shape[1:]
        return channels, height, width

    @property
    def contents(self) -> Mapping[str, Content]:
        """What may be charged to a privacy ledger, split by split."""
        splits = {"train": self.train, "test": self.test}
        return {name: Content(split.images, split.patients) for name, split in splits.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """The data set's version: SHA-256 (hex) over every split's images, labels and patients.

        It depends on the content and its order only: not on names, nor on how the file is compressed.
        """
        digest = hashlib.sha256()
        for name, split in self._splits():
            header = {
                "split": name,
                "shape": list(split.images.shape),
                "patients": None if split.patients is None else split.patients.tolist(),
            }
            encoded = json.dumps(header, sort_keys=True).encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
            digest.update(np.ascontiguousarray(split.images).data)
            digest.update(np.ascontiguousarray(split.labels.astype("<i8")).data)
        return digest.hexdigest()


def largest_group(dataset: ImageDataset) -> int | None:
    """The most training images of one patient; None where the shard does not say whose they are.

    Where the image is the unit of privacy, a patient with k images is protected as a group of k is: less.
    """
    if dataset.train.patients is None:
        return None
    return int(np.unique(dataset.train.patients, return_counts=True)[1].max())


def to_tensor(images: Images) -> torch.Tensor:
    """uint8 [n, H, W, C] to float32 [n, C, H, W] in [-1, 1]: (x / 255 - 0.5) / 0.5, MedMNIST's scaling."""
    import torch  # takes seconds to load; looking at a data set does without it

    channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return torch.from_numpy(channels_first).to(torch.float32).div_(255.0).sub_(0.5).div_(0.5)


def image_hashes(images: Images) -> list[bytes]:
    """SHA-256 of each image's pixels (uint8, row-major), shape apart: equal images of two files have equal hashes."""
    return [hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest() for image in images]


def pixels_of(images: npt.NDArray[Any]) -> str | None:
    """What an array of images is, in words, if Medsilo does not work on such; else None."""
    if images.ndim == 5 or (images.ndim == 4 and images.shape[-1] > 4 and images.shape[1] not in (1, 3)):
        depth = images.shape[1]
        return beyond(f"these are volumes (3-D, of {depth} slices), or images of many channels")
    if images.ndim == 4 and images.shape[-1] in (2, 4):
        return beyond(f"these are images of {images.shape[-1]} channels; they may have 1 (grey) or 3 (RGB)")
    if images.dtype.kind in "iu" and images.dtype.itemsize > 1:
        lowest, highest = (images.min(), images.max()) if images.size else (0, 0)
        return beyond(f"these are images of {8 * images.dtype.itemsize} bits, here from {lowest} to {highest}")
    if images.dtype.kind == "f":
        return beyond("these are images of fractions, whose range and meaning Medsilo does not know")
    if images.dtype != np.uint8:
        return beyond(f"these are no pixels of 8 bits, but {images.dtype}")
    return None


def labels_of(labels: npt.NDArray[Any], images: int) -> str | None:
    """What an array of labels is, in words, if Medsilo does not work on such; else None."""
    if labels.ndim >= 3:
        return beyond("these are masks, a label for each pixel (segmentation)")
    if labels.ndim == 2 and labels.shape[1] > 1 and len(labels) == images:
        return beyond(f"these are {labels.shape[1]} labels for each image (multi-label)")
    if labels.dtype.kind == "U" and any("|" in str(label) for label in labels.flat):
        several = next(str(label) for label in labels.flat if "|" in str(label))
        return beyond(f"{several!r:.80} names several labels of one image (multi-label)")
    if labels.dtype.kind == "f":
        return beyond("these are fractions: measurements (regression), or a probability for each image")
    return None
