"""PathMNIST, where it is at hand or may be downloaded."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from medsilo.algorithms.datasets.images import ImageDataset
from medsilo.algorithms.datasets.npz import UNREADABLE, load_npz
from medsilo.privacy.errors import DataError

PATHMNIST_MD5 = {
    28: "a8b06965200029087d5bd730944a56c1",
    64: "55aa9c1e0525abe5a6b9d8343a507616",
    128: "ac42d08fb904d92c244187169d1fd1d9",
    224: "2c51a510bcdc9cf8ddb2af93af1eadec",
}
"""MD5 of the published ``pathmnist.npz``, ``pathmnist_64.npz`` … by the images' height and width in pixels (MedMNIST v2
and MedMNIST+, Zenodo 10519652)."""


def load_pathmnist(root: Path | None = None, *, size: int = 28, download: bool = True) -> ImageDataset:
    """PathMNIST: RGB tiles of colorectal tissue, nine classes, 89,996 / 10,004 / 7,180 images.

    Source: MedMNIST v2 (Yang et al. 2023) from NCT-CRC-HE-100K and CRC-VAL-HE-7K (Kather et al. 2019), CC BY
    4.0; its larger images are MedMNIST+. Only a published file (by its MD5) is called ``pathmnist`` or, say,
    ``pathmnist_64``; any other file of that name and format is called ``unofficial pathmnist``, so that no result on
    it passes for PathMNIST's.

    Args:
        root: the folder of ``pathmnist.npz``; ``~/.medmnist`` when None.
        size: the images' height and width: 28, 64, 128 or 224.
        download: fetch the file (206 MB for 28×28) through the ``medmnist`` package where it is absent.

    Raises:
        DataError: the file is absent and cannot be fetched, or is not of this format and size.
    """
    root = Path.home() / ".medmnist" if root is None else root
    name = "pathmnist" if size == 28 else f"pathmnist_{size}"
    path = root / f"{name}.npz"
    if not path.is_file():
        if not download:
            raise DataError(f"{path}: PathMNIST is not there. {_by_hand(path, size)}")
        _download_pathmnist(path, size)
    dataset = load_npz(path)
    if dataset.image_shape != (3, size, size):
        raise DataError(f"{path}: its images are not RGB of {size}×{size} pixels. {_by_hand(path, size)}")
    digest = _md5(path)
    official = digest == PATHMNIST_MD5[size]
    class_names = _pathmnist_class_names()
    try:
        return ImageDataset(
            name=name if official else f"unofficial {name}",
            source=(
                f"PathMNIST{'' if size == 28 else f' {size}×{size}'}, MedMNIST v2, CC BY 4.0"
                if official
                else f"a file in PathMNIST's format, not the published one (md5 {digest})"
            ),
            synthetic=dataset.synthetic,
            class_names=class_names,
            train=dataset.train,
            validation=dataset.validation,
            test=dataset.test,
        )
    except DataError as error:
        raise DataError(f"{path}: {error}. {_by_hand(path, size)}") from None


def _by_hand(path: Path, size: int) -> str:
    return (
        f"Download {path.name}{' (206 MB)' if size == 28 else ''} from MedMNIST's record 10519652 on Zenodo, "
        f"check that its md5 is {PATHMNIST_MD5[size]}, and put it at {path}"
    )


def _pathmnist_class_names() -> tuple[str, ...]:
    # medmnist makes ~/.medmnist and loads scikit-learn on import, so it is imported only when it is needed.
    from medmnist import INFO

    labels: dict[str, str] = INFO["pathmnist"]["label"]
    return tuple(labels[str(label)] for label in range(len(labels)))


def _download_pathmnist(path: Path, size: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A download that breaks off must not leave a half file where the next start would find it.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pathmnist-") as folder:
            from medmnist import PathMNIST

            fetched = Path(folder) / path.name
            PathMNIST(split="test", download=True, root=folder, size=size)
            digest = _md5(fetched)
            if digest != PATHMNIST_MD5[size]:
                raise DataError(
                    f"the download of {path.name} was discarded: its md5 is {digest}, not the published one. "
                    + _by_hand(path, size)
                )
            fetched.replace(path)
    except (ImportError, *UNREADABLE) as error:
        raise DataError(f"{path}: PathMNIST is not there and cannot be downloaded. {_by_hand(path, size)}") from error


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
