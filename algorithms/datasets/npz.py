"""Labelled images of one hospital, and the MedMNIST ``.npz`` files in which they are kept.

    dataset = open_dataset("shards/hospital1.npz")
    x = to_tensor(dataset.train.images)  # float32 [n, C, H, W] in [-1, 1]

The format is MedMNIST v2's (Yang et al., Scientific Data 2023): ``train_images``, ``train_labels`` and so on.
Files are read with ``allow_pickle=False``: a shard can hold data, never code.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import secrets
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from medsilo.algorithms.datasets.images import ImageDataset, ImageSplit, labels_of, pixels_of
from medsilo.algorithms.scope import beyond, file_kind
from medsilo.privacy.errors import DataError
from medsilo.privacy.files.durable import fsync_folder

_FORMAT_HELP = (
    "A data set file has train_images, train_labels, test_images and test_labels as MedMNIST writes them: "
    "uint8 images [n, H, W] or [n, H, W, C], integer labels [n] or [n, 1]"
)

# Images shrink to a tenth, empty ones to a hundredth; what shrinks more is made to fill the memory.
_LARGEST_PACKED = 256 << 20
_MOST_PACKED = 200

# What reading an archive that is damaged, or made to do harm, has been seen to raise.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    ArithmeticError,
    NotImplementedError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)


def load_npz(path: Path | str) -> ImageDataset:
    """Reads a data set from an ``.npz`` file of MedMNIST's format.

    Keys: ``train_images``, ``train_labels``, ``test_images``, ``test_labels``; ``val_images`` and
    ``val_labels`` together or not at all; ``train_patients``, ``val_patients``, ``test_patients`` where
    known; ``class_names``; scalars ``name``, ``source`` and ``synthetic``. Images are uint8 [n, H, W] or
    [n, H, W, C] with C of 1 or 3; labels are integers of shape [n] or [n, 1].

    Raises:
        DataError: the file is missing, damaged, or not of this format; the message names file and key.
    """
    path = Path(path)
    with _opened(path) as arrays:
        train = _read_split(path, arrays, "train")
        test = _read_split(path, arrays, "test")
        validation = None
        if "val_images" in arrays or "val_labels" in arrays:
            validation = _read_split(path, arrays, "val")
        class_names = _read_class_names(path, arrays)
        name = _read_text(path, arrays, "name", path.stem)
        source = _read_text(path, arrays, "source", f"the file {path.name}")
        synthetic = _read_flag(path, arrays, "synthetic")
    if class_names is None:
        splits = [train, test] if validation is None else [train, test, validation]
        highest = max((int(split.labels.max()) for split in splits if len(split)), default=-1)
        class_names = tuple(f"class {label}" for label in range(highest + 1))
    try:
        return ImageDataset(name, source, synthetic, class_names, train, validation, test)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        if not path.exists():
            raise DataError(
                f"{path}: there is no such file; check the path, make it from images with 'silo prepare', or cut "
                "shards with 'silo shard'"
            )
        if (kind := file_kind(path)) is not None:
            raise DataError(f"{path}: {beyond(f'this is {kind}')}")
        arrays = np.load(path, allow_pickle=False)
    except (PermissionError, IsADirectoryError) as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); give a file that this user may read") from error
    except UNREADABLE as error:
        raise DataError(
            f"{path}: this is not a readable .npz file ({_reason(error)}); copy or write it again"
        ) from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: this is a single array, not an .npz archive. {_FORMAT_HELP}")
    with arrays:
        yield arrays


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    if lines and "allow_pickle" in lines[0]:  # NumPy's advice would let a file run code
        return "it is none, or holds Python objects, which are never read"
    return lines[0] if lines else type(error).__name__


def _read_array(path: Path, arrays: Any, key: str) -> npt.NDArray[Any]:
    if key not in arrays:
        raise DataError(f"{path}: the key {key!r} is missing (there are: {', '.join(arrays)}). {_FORMAT_HELP}")
    try:
        entry = arrays.zip.getinfo(f"{key}.npy")
        if entry.file_size > max(_LARGEST_PACKED, _MOST_PACKED * entry.compress_size):
            raise ValueError(f"{entry.compress_size} bytes would become {entry.file_size}")
        array = arrays[key]
    except UNREADABLE as error:
        way_out = "save it as plain numbers or text" if "Object arrays" in str(error) else "copy it again"
        raise DataError(f"{path}: the key {key!r} cannot be read ({_reason(error)}); {way_out}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: the key {key!r} is not a NumPy array. {_FORMAT_HELP}")
    return array


def _read_split(path: Path, arrays: Any, split: str) -> ImageSplit:
    images = _read_array(path, arrays, f"{split}_images")
    if (other := pixels_of(images)) is not None:
        raise DataError(f"{path}: '{split}_images' is {images.dtype} of shape {list(images.shape)}: {other}")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or 0 in images.shape[1:]:
        raise DataError(
            f"{path}: '{split}_images' has the shape {list(images.shape)}; "
            "save [n, H, W], or [n, H, W, C] with 1 or 3 channels"
        )
    labels = _read_array(path, arrays, f"{split}_labels")
    if (other := labels_of(labels, len(images))) is not None:
        raise DataError(f"{path}: '{split}_labels' is {labels.dtype} of shape {list(labels.shape)}: {other}")
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: '{split}_labels' is {labels.dtype}; a label is the number of its class, from 0, and "
            "'class_names' says what the numbers stand for"
        )
    labels = _as_column(path, f"{split}_labels", labels, len(images))
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < 1 << 16:
        raise DataError(
            f"{path}: '{split}_labels' holds labels from {labels.min()} to {labels.max()}; "
            "number the classes from 0 (65,536 classes at most)"
        )
    patients = None
    if f"{split}_patients" in arrays:
        patients = _read_array(path, arrays, f"{split}_patients")
        if patients.dtype.kind not in "iuU":
            raise DataError(f"{path}: '{split}_patients' is {patients.dtype}; save the patients as text or integers")
        patients = _as_column(path, f"{split}_patients", patients, len(images)).astype(np.str_)
    return ImageSplit(np.ascontiguousarray(images), labels.astype(np.int64), patients)


def _as_column(path: Path, key: str, array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    if array.shape == (length, 1):
        return array[:, 0]
    if array.shape != (length,):
        raise DataError(
            f"{path}: {key!r} has the shape {list(array.shape)}; "
            f"save one for each of the {length} images: [{length}] or [{length}, 1]"
        )
    return array


def _read_class_names(path: Path, arrays: Any) -> tuple[str, ...] | None:
    if "class_names" not in arrays:
        return None
    array = _read_array(path, arrays, "class_names")
    if array.dtype.kind != "U" or array.ndim != 1:
        raise DataError(f"{path}: 'class_names' is {array.dtype} of shape {list(array.shape)}; save a list of texts")
    return tuple(str(name) for name in array)


def _read_text(path: Path, arrays: Any, key: str, default: str) -> str:
    if key not in arrays:
        return default
    array = _read_array(path, arrays, key)
    if array.dtype.kind != "U" or array.size != 1:
        raise DataError(
            f"{path}: {key!r} is {array.dtype} of shape {list(array.shape)}; save one text, or leave it out"
        )
    return str(array.item())


def _read_flag(path: Path, arrays: Any, key: str) -> bool:
    if key not in arrays:
        return False
    array = _read_array(path, arrays, key)
    if array.dtype.kind not in "biu" or array.size != 1 or array.item() not in (0, 1):
        raise DataError(f"{path}: {key!r} is {array.dtype} of shape {list(array.shape)}; save one True or False")
    return bool(array.item())


def save_npz(path: Path | str, dataset: ImageDataset) -> None:
    """Writes ``dataset`` so that :func:`load_npz` gives it back, fingerprint and all.

    The same data set gives the same bytes on every day and machine: entries are stored uncompressed and with
    a fixed time. The file appears whole or not at all (see :func:`written_whole`).

    Raises:
        DataError: the file cannot be written there.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for split_name, split in (("train", dataset.train), ("val", dataset.validation), ("test", dataset.test)):
        if split is None:
            continue
        fits = int(split.labels.max()) <= np.iinfo(np.uint8).max
        arrays[f"{split_name}_images"] = split.images
        arrays[f"{split_name}_labels"] = split.labels.astype(np.uint8 if fits else "<i8")[:, np.newaxis]
        if split.patients is not None:
            arrays[f"{split_name}_patients"] = np.array(split.patients.tolist(), dtype=np.str_)
    arrays["class_names"] = np.array(dataset.class_names, dtype=np.str_)
    arrays["name"] = np.array(dataset.name)
    arrays["source"] = np.array(dataset.source)
    arrays["synthetic"] = np.array(dataset.synthetic)
    with written_whole(Path(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for key, array in arrays.items():
            entry = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # otherwise Windows and Unix would write different bytes
            entry.external_attr = 0o644 << 16
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write, which takes the place of ``path`` at the end of the block, synced to disk.

    When the block raises, or the machine stops, ``path`` is as it was before.

    Raises:
        DataError: the folder cannot be made or the file not be written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not mkstemp: its mode 0600 would override the umask, and a silo may run as another user.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free some space, or choose another place"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
