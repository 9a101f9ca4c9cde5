"""A hospital's images as an extractor that nobody trains sees them: worked out once for a version of the data set."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, to_tensor
from medsilo.algorithms.features import Extractor
from medsilo.privacy.files.durable import write_atomically

_IMAGES_AT_ONCE = 256
_log = logging.getLogger(__name__)


class FixedFeatures:
    """The features of a data set's images, made when they are first asked for.

    Args:
        extractor: what makes them, a fixed one or a network's frozen front, on the device already.
        dataset: of what.
        device: where they are made, and where they are wanted.
        folder: where they are kept, in a file (mode 0600) that is found by the SHA-256 of the data set's fingerprint,
            the extractor's definition and the kind of device; files of other versions of the data are deleted when one
            is written. Nowhere by default. They say much of the images, and belong where the images may be.
    """

    def __init__(
        self, extractor: Extractor, dataset: ImageDataset, device: torch.device, folder: Path | None = None
    ) -> None:
        self._extractor = extractor
        self._dataset = dataset
        self._device = device
        self._folder = folder
        self._made: dict[str, Tensor] | None = None

    def of(self, split: Literal["train", "test", "validation"]) -> Tensor:
        """float32 ``[n, F]``: a split's features, in the order of its images."""
        if self._made is None:
            self._made = {name: one.to(self._device) for name, one in (self._kept() or self._make()).items()}
        return self._made[split]

    def forget(self) -> None:
        """The extractor is another one now: the next that asks is given what that one makes."""
        self._made = None
        self.__dict__.pop("_key", None)

    @property
    def _splits(self) -> dict[str, ImageSplit]:
        splits = {"train": self._dataset.train, "test": self._dataset.test, "validation": self._dataset.validation}
        return {name: split for name, split in splits.items() if split is not None}

    @cached_property
    def _key(self) -> dict[str, str]:
        return {
            "data_sha256": self._dataset.fingerprint,
            "extractor": self._extractor.definition,
            "device": self._device.type,
        }

    def _make(self) -> dict[str, Tensor]:
        found = {name: self._features(split) for name, split in self._splits.items()}
        if self._folder is not None:
            self._keep(self._folder, found)
        return found

    def _features(self, split: ImageSplit) -> Tensor:
        found = [torch.zeros(0, self._extractor.features)]
        for start in range(0, len(split), _IMAGES_AT_ONCE):
            images = to_tensor(split.images[start : start + _IMAGES_AT_ONCE]).to(self._device)
            found.append(self._extractor(images).cpu())
        return torch.cat(found)

    def _path(self, folder: Path) -> Path:
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        return folder / f"{name}.safetensors"

    def _kept(self) -> dict[str, Tensor] | None:
        if self._folder is None:
            return None
        path = self._path(self._folder)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                described = file.metadata()
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no mapping
        except (OSError, SafetensorError) as error:
            _log.warning("%s: cannot be read (%s); the features are made anew", path, error)
            return None
        wanted = {name: (len(split), self._extractor.features) for name, split in self._splits.items()}
        whole = described == self._key and {name: tuple(one.shape) for name, one in found.items()} == wanted
        if not whole or not all(one.dtype == torch.float32 and one.isfinite().all() for one in found.values()):
            _log.warning("%s: is not what its name says; the features are made anew", path)
            return None
        return found

    def _keep(self, folder: Path, found: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in folder.glob("*.safetensors"):
            if _data_of(other) != self._dataset.fingerprint:
                other.unlink(missing_ok=True)
        write_atomically(self._path(folder), save(found, metadata=self._key), mode=0o600)


def _data_of(path: Path) -> str | None:
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("data_sha256")
    except (OSError, SafetensorError):
        return None
