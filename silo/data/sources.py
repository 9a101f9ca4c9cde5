"""Data sets by name: PathMNIST, the generated tissue set, or a file."""

from __future__ import annotations

from pathlib import Path

from medsilo.algorithms.datasets import PATHMNIST_MD5, ImageDataset, load_npz, load_pathmnist
from medsilo.algorithms.scope import beyond, file_kind
from medsilo.privacy.errors import DataError
from medsilo.silo.data.synthetic import generate_tissue


def open_dataset(spec: str, *, seed: int = 0) -> ImageDataset:
    """The data set that a configuration or option names.

    Args:
        spec: ``pathmnist`` (with larger images ``pathmnist_64``, ``_128``, ``_224``), ``synthetic``, or the path of an
            ``.npz`` file.
        seed: of the generator; only ``synthetic`` uses it.

    Raises:
        DataError: there is no such data set, or its file cannot be used.
    """
    kind, _, size = spec.partition("_")
    if kind == "pathmnist" and (size or "28") in map(str, PATHMNIST_MD5):
        return load_pathmnist(size=int(size or 28))
    if spec == "synthetic":
        return generate_tissue(seed=seed)
    if (other := file_kind(spec)) is not None:
        raise DataError(f"{spec}: {beyond(f'this is {other}')}")
    if not spec.endswith(".npz"):
        raise DataError(
            f"{spec!r} is not a data set; give 'pathmnist', 'pathmnist_64' ('_128', '_224'), 'synthetic', or the path "
            "of an .npz file"
        )
    return load_npz(Path(spec))
