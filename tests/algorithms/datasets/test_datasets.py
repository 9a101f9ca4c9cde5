"""What reading and writing data sets promises."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medsilo.algorithms import datasets
from medsilo.algorithms.datasets import (
    ImageDataset,
    ImageSplit,
    load_npz,
    load_pathmnist,
    save_npz,
    to_tensor,
    written_whole,
)
from medsilo.privacy.errors import DataError
from medsilo.silo.data.sources import open_dataset


def pathmnist_arrays() -> dict[str, np.ndarray[Any, Any]]:
    """A few random images under PathMNIST's own keys, shapes and types: labels are uint8 [n, 1]."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for split, n in (("train", 27), ("val", 9), ("test", 18)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (n, 28, 28, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(n) % 9).astype(np.uint8)[:, np.newaxis]
    return arrays


def write(path: Path, **changes: Any) -> Path:
    """PathMNIST's format with some keys replaced, added or (None) left out."""
    arrays = {**pathmnist_arrays(), **changes}
    np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def shard() -> ImageDataset:
    rng = np.random.default_rng(1)

    def split(n: int, start: int) -> ImageSplit:
        patients = np.array([f"patient-{start + i // 3}" for i in range(n)])
        return ImageSplit(
            rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8), np.arange(n, dtype=np.int64) % 3, patients
        )

    return ImageDataset("hospital1", "a test", True, ("a", "b", "ç"), split(12, 0), None, split(6, 100))


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_npz(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_in_pathmnists_format_is_read(tmp_path: Path) -> None:
    dataset = load_npz(write(tmp_path / "pathmnist.npz"))
    assert (len(dataset.train), len(dataset.test)) == (27, 18)
    assert dataset.validation is not None
    assert len(dataset.validation) == 9
    assert dataset.train.labels.dtype == np.int64
    assert dataset.train.labels.shape == (27,)
    assert dataset.image_shape == (3, 28, 28)
    assert dataset.num_classes == 9
    assert dataset.train.patients is None
    assert not dataset.synthetic


def test_grey_images_get_one_channel(tmp_path: Path) -> None:
    grey = {f"{split}_images": pathmnist_arrays()[f"{split}_images"][..., 0] for split in ("train", "test")}
    dataset = load_npz(write(tmp_path / "grey.npz", **grey, val_images=None, val_labels=None))
    assert dataset.image_shape == (1, 28, 28)
    assert dataset.train.images.shape == (27, 28, 28, 1)


def test_validation_is_optional_but_not_by_halves(tmp_path: Path) -> None:
    assert load_npz(write(tmp_path / "a.npz", val_images=None, val_labels=None)).validation is None
    assert "val_labels" in refused(write(tmp_path / "b.npz", val_labels=None))


def test_numbered_patients_become_text(tmp_path: Path) -> None:
    dataset = load_npz(write(tmp_path / "a.npz", train_patients=np.arange(27, dtype=np.int16)))
    assert dataset.train.patients is not None
    assert dataset.train.patients[26] == "26"
    assert dataset.test.patients is None


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    original = shard()
    save_npz(tmp_path / "new folder" / "hospital1.npz", original)
    loaded = load_npz(tmp_path / "new folder" / "hospital1.npz")
    assert loaded.fingerprint == original.fingerprint
    assert (loaded.name, loaded.source, loaded.synthetic) == ("hospital1", "a test", True)
    assert loaded.class_names == original.class_names
    assert loaded.train.patients is not None
    assert loaded.train.patients.tolist() == original.train.patients.tolist()  # type: ignore[union-attr]


def test_the_same_data_give_the_same_bytes_on_any_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_npz(tmp_path / "a.npz", shard())
    monkeypatch.setattr("time.time", lambda: 2e9)
    # Text in a wider field is the same text.
    same = shard()
    assert same.train.patients is not None
    wider = ImageSplit(same.train.images, same.train.labels, same.train.patients.astype("<U60"))
    save_npz(
        tmp_path / "b.npz",
        ImageDataset(same.name, same.source, True, same.class_names, wider, None, same.test),
    )
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_the_fingerprint_changes_with_every_part_of_the_data() -> None:
    base = shard()

    def changed(**changes: Any) -> str:
        fields = {"images": base.train.images, "labels": base.train.labels, "patients": base.train.patients}
        train = ImageSplit(**{**fields, **changes})
        return ImageDataset(base.name, base.source, True, base.class_names, train, None, base.test).fingerprint

    image, label = base.train.images.copy(), base.train.labels.copy()
    image[3, 2, 1, 0] ^= 1
    label[3] = (label[3] + 1) % 3
    patient = np.where(np.arange(12) == 3, "someone", base.train.patients)  # type: ignore[arg-type]
    versions = [changed(), changed(images=image), changed(labels=label), changed(patients=patient)]
    versions.append(changed(patients=None))
    assert len(set(versions)) == 5
    assert versions[0] == base.fingerprint == shard().fingerprint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "hospital9.npz")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path)


def test_a_truncated_npz_is_refused_with_its_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.npz").read_bytes()
    for length in (0, 1, 4, 100, len(whole) // 2, len(whole) - 1):
        path = tmp_path / f"first-{length}-bytes.npz"
        path.write_bytes(whole[:length])
        refused(path)


def test_a_damaged_npz_never_crashes_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "damaged.npz"
    small = {key: value[:9] if "labels" in key else value[:9, :4, :4] for key, value in pathmnist_arrays().items()}
    whole = write(path, **small).read_bytes()
    rng = np.random.default_rng(2)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(len(whole), size=rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_npz(path)
        except DataError as error:
            assert str(path) in str(error)  # noqa: PT017 (a lucky flip may leave it readable)


def test_an_array_header_that_is_no_python_is_refused(tmp_path: Path) -> None:
    """Found by fuzzing: NumPy tries it as Python 2 then, and lets the tokeniser's error through."""
    header = b"{'descr': (1L,\n"
    path = tmp_path / "header.npz"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    refused(path)


def test_text_and_single_arrays_are_no_data_sets(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("images, labels\n")
    refused(text)
    with (tmp_path / "single.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    assert "single array" in refused(tmp_path / "single.npz")
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("train_images", "not an array")
    assert "train_images" in refused(tmp_path / "other.npz")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", train_labels=np.array([os.getcwd] * 27, dtype=object))
    assert "train_labels" in refused(path)


@pytest.mark.parametrize("key", ["train_images", "train_labels", "test_images", "test_labels"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    assert f"{key!r} is missing" in refused(write(tmp_path / "a.npz", **{key: None}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train_images", np.zeros((27, 28, 28, 3), np.float32), "float32"),
        ("train_images", np.zeros((27, 28, 28, 28), np.uint8), "of 28 slices"),
        ("train_images", np.zeros((27, 28), np.uint8), "[27, 28]"),
        ("train_images", np.zeros((27, 0, 28, 3), np.uint8), "[27, 0, 28, 3]"),
        ("test_images", np.zeros((18, 14, 14, 3), np.uint8), "one shape"),
        ("train_labels", np.zeros(26, np.int64), "27 images"),
        ("train_labels", np.zeros((27, 2), np.int64), "[27, 2]"),
        ("train_labels", np.zeros(27), "float64"),
        ("train_labels", np.full(27, -1), "from 0"),
        ("train_labels", np.full(27, 1 << 40), "65,536"),
        ("train_patients", np.zeros(26, np.int64), "train_patients"),
        ("train_patients", np.zeros(27), "float64"),
        ("class_names", np.array(["a", "b"]), "2 classes"),
        ("class_names", np.arange(9), "class_names"),
        ("synthetic", np.array("yes"), "True or False"),
        ("source", np.arange(3), "source"),
    ],
)
def test_a_malformed_array_is_named_with_what_is_wrong(
    tmp_path: Path, key: str, value: np.ndarray[Any, Any], said: str
) -> None:
    message = refused(write(tmp_path / "a.npz", **{key: value}))
    assert said in message
    assert key.split("_")[0] in message


def test_an_empty_test_split_is_refused(tmp_path: Path) -> None:
    empty = {"test_images": np.zeros((0, 28, 28, 3), np.uint8), "test_labels": np.zeros((0, 1), np.uint8)}
    assert "test split has no images" in refused(write(tmp_path / "a.npz", **empty))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def half_written() -> None:
        with written_whole(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        half_written()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/a\.npz: cannot be written"):
        save_npz(tmp_path / "file" / "a.npz", shard())


def test_only_the_published_file_is_called_pathmnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "pathmnist.npz")
    unofficial = load_pathmnist(tmp_path, download=False)
    assert unofficial.name == "unofficial pathmnist"
    assert unofficial.class_names[0] == "adipose"
    assert unofficial.num_classes == 9
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setitem(datasets.PATHMNIST_MD5, 28, digest)
    assert load_pathmnist(tmp_path, download=False).name == "pathmnist"


@pytest.mark.parametrize("size", [64, 128, 224])
def test_pathmnists_larger_images_are_taken_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    from medmnist import INFO

    assert datasets.PATHMNIST_MD5[size] == INFO["pathmnist"][f"MD5_{size}"]
    large = {f"{split}_images": np.zeros((9, size, size, 3), dtype=np.uint8) for split in ("train", "val", "test")}
    labels = {f"{split}_labels": np.arange(9)[:, None] for split in ("train", "val", "test")}
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".medmnist").mkdir()
    path = write(tmp_path / ".medmnist" / f"pathmnist_{size}.npz", **large, **labels)
    monkeypatch.setitem(datasets.PATHMNIST_MD5, size, hashlib.md5(path.read_bytes()).hexdigest())
    dataset = open_dataset(f"pathmnist_{size}")
    assert (dataset.name, dataset.image_shape) == (f"pathmnist_{size}", (3, size, size))
    path.rename(path.with_name("pathmnist.npz"))
    with pytest.raises(DataError, match="are not RGB of 28×28 pixels"):
        open_dataset("pathmnist")


def test_pathmnist_that_is_absent_says_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = str(tmp_path / "pathmnist.npz")
    with pytest.raises(DataError) as caught:
        load_pathmnist(tmp_path, download=False)
    assert where in str(caught.value)

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Automatic download failed!")

    monkeypatch.setattr("medmnist.PathMNIST", no_network)
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        load_pathmnist(tmp_path)
    assert where in str(caught.value)
    assert datasets.PATHMNIST_MD5[28] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_download_with_another_checksum_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*, split: str, download: bool, root: str, size: int) -> None:
        write(Path(root) / "pathmnist.npz")

    monkeypatch.setattr("medmnist.PathMNIST", download)
    with pytest.raises(DataError, match="was discarded"):
        load_pathmnist(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_open_dataset_takes_a_path_and_refuses_a_typing_error(tmp_path: Path) -> None:
    assert open_dataset(str(write(tmp_path / "a.npz"))).name == "a"
    with pytest.raises(DataError, match="'pathmist' is not a data set"):
        open_dataset("pathmist")


def test_tensors_run_from_minus_one_to_one_channels_first() -> None:
    images = np.zeros((2, 4, 5, 3), np.uint8)
    images[1, 3, 4, 2] = 255
    tensor = to_tensor(images)
    assert tensor.dtype == torch.float32
    assert tensor.shape == (2, 3, 4, 5)
    assert tensor[1, 2, 3, 4] == 1.0
    assert tensor.min() == -1.0
    assert to_tensor(images[:0]).shape == (0, 3, 4, 5)
