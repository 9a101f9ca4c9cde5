"""Data that Medsilo does not work on are refused as what they are, and nothing proposes to force them into its form."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from medsilo.algorithms.datasets import ImageSplit, load_npz
from medsilo.algorithms.models import build
from medsilo.algorithms.scope import SCOPE
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.errors import DataError
from medsilo.silo.cli import app
from medsilo.silo.data.image_files import read_image
from medsilo.silo.data.preparing import listed
from medsilo.silo.data.sources import open_dataset
from medsilo.silo.model.prediction import PersonalisedModel
from tests.support.hospital.image_files import dicom, picture

ROOT = Path(__file__).parents[3]
INVITING = re.compile(
    r"\b(save|convert|flatten|divide|scale|export|split into|reduce|choose one|take the first|use only)\b",
    re.I,
)
"""How a message would propose to make something else of the data."""


def refusal(action: Callable[[], object], *words: str) -> str:
    """The words of a refusal, which name the data for what they are."""
    with pytest.raises(DataError) as caught:
        action()
    said = str(caught.value)
    for word in (*words, SCOPE):
        assert word in said
    assert INVITING.search(said) is None, said
    return said


def arrays(path: Path, **changed: Any) -> Path:
    """An ``.npz`` of 20 grey images of two classes, with some arrays changed."""
    images = np.arange(20 * 12 * 12, dtype=np.uint8).reshape(20, 12, 12)
    labels = np.arange(20)[:, np.newaxis] % 2
    content = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(path, **{**content, **changed})
    return path


def png_of_16_bits(path: Path, channels: int) -> Path:
    """A picture as PNG's standard has it: Pillow does not write colours of 16 bits."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + bytes(range(2 * 4 * channels)) for _ in range(4))
    header = struct.pack(">IIBBBBB", 4, 4, 16, 2 if channels == 3 else 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    return path


def nifti(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(struct.pack("<i", 348) + bytes(340) + b"n+1\0"))
    return path


def read(path: Path) -> object:
    return read_image(path, channels=3, height=4, width=4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_labels": np.zeros((20, 14), np.uint8)}, ("train_labels", "14 labels for each image", "multi-label")),
        ({"train_labels": np.zeros((20, 12, 12), np.uint8)}, ("train_labels", "masks", "segmentation")),
        ({"train_labels": np.zeros((20, 12, 12, 1), np.int64)}, ("train_labels", "masks")),
        ({"test_labels": np.array(["Mass", "Effusion|Mass"] * 10)}, ("test_labels", "'Effusion|Mass'", "multi-label")),
        ({"train_labels": np.linspace(0, 1, 20)}, ("train_labels", "float64", "regression")),
        ({"train_images": np.zeros((20, 12, 12, 12), np.uint8)}, ("[20, 12, 12, 12]", "volumes", "12 slices")),
        ({"train_images": np.zeros((20, 9, 12, 12, 3), np.uint8)}, ("volumes", "9 slices")),
        ({"train_images": np.zeros((20, 9, 12, 12), np.float32)}, ("float32", "volumes")),
        ({"train_images": np.zeros((20, 12, 12, 4), np.uint8)}, ("images of 4 channels",)),
        ({"test_images": np.full((20, 12, 12), 4095, np.uint16)}, ("test_images", "16 bits", "4095 to 4095")),
        ({"train_images": np.zeros((20, 12, 12, 3), np.float64)}, ("float64", "fractions")),
        ({"train_images": np.zeros((20, 12, 12), np.bool_)}, ("bool",)),
    ],
)
def test_arrays_of_another_kind_are_refused_as_what_they_are(
    tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = arrays(tmp_path / "a.npz", **changed)
    said = refusal(lambda: open_dataset(str(path)), str(path), *words)
    assert len(said) < 500


def test_the_arrays_that_are_changed_above_are_read_as_they_are(tmp_path: Path) -> None:
    assert load_npz(arrays(tmp_path / "a.npz")).image_shape == (1, 12, 12)
    colours = np.zeros((20, 12, 12, 3), np.uint8)
    path = arrays(tmp_path / "b.npz", train_images=colours, test_images=colours)
    assert load_npz(path).image_shape == (3, 12, 12)


def test_splits_that_a_program_makes_are_held_to_the_same() -> None:
    images, labels = np.zeros((5, 4, 4, 1), np.uint8), np.zeros(5, np.int64)
    refusal(lambda: ImageSplit(images.astype(np.uint16), labels), "16 bits")
    refusal(lambda: ImageSplit(np.zeros((5, 8, 4, 4, 1), np.uint8), labels), "volumes")
    refusal(lambda: ImageSplit(images, np.zeros((5, 14), np.int64)), "multi-label")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,label\n0.png,Effusion|Mass\n1.png,Mass\n", ("'Effusion|Mass'", "0.png", "multi-label")),
        ('file,label\n0.png,A\n1.png,B\n2.png,"B, A"\n', ("'B, A'", "2.png", "multi-label")),
        ("file,label\n0.png,A\n1.png,B\n2.png,A+B\n", ("'A+B'", "multi-label")),
        ("file,label\n0.png,Effusion\n0.png,Mass\n1.png,Mass\n", ("'Effusion' and 'Mass'", "multi-label")),
        ("file,Effusion,Mass\n0.png,1,1\n1.png,0,1\n", ("effusion, mass", "multi-label")),
        ("file,label\n0.png,0_mask.png\n1.png,1_mask.png\n", ("'0_mask.png'", "mask", "segmentation")),
        ("file,label\n0.png,a\n1.png,seg/1.nii.gz\n", ("'seg/1.nii.gz'", "mask")),
    ],
)
def test_labels_that_are_no_single_class_are_refused_as_what_they_are(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    for number in range(3):
        picture(tmp_path / "in" / f"{number}.png", number)
    table = tmp_path / "labels.csv"
    table.write_text(text)
    refusal(lambda: listed(tmp_path / "in", labels=table), str(table), *words)


def test_a_class_may_have_a_comma_or_a_stroke_in_its_name(tmp_path: Path) -> None:
    for number in range(2):
        picture(tmp_path / "in" / f"{number}.png", number)
    table = tmp_path / "labels.csv"
    table.write_text('file,label\n0.png,"melanoma, in situ"\n1.png,benign/other\n')
    assert [entry.label for entry in listed(tmp_path / "in", labels=table)] == ["melanoma, in situ", "benign/other"]


def test_a_folder_of_masks_beside_the_images_is_no_class(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        picture(tmp_path / "in" / kind / "1.png")
    refusal(lambda: listed(tmp_path / "in"), "masks/1.png", "segmentation")


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_16_bits_are_refused_whatever_a_reader_makes_of_them(tmp_path: Path, channels: int) -> None:
    path = png_of_16_bits(tmp_path / "deep.png", channels)
    refusal(lambda: read(path), str(path), "more than 8 bits")


def test_tiffs_of_16_bits_and_of_fractions_are_refused(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.uint16).reshape(4, 4)
    for name, pixels, words in (("a", values, "8 bits"), ("b", values.astype(np.float32), "fractions")):
        Image.fromarray(pixels).save(tmp_path / f"{name}.tif")
        refusal(lambda name=name: read(tmp_path / f"{name}.tif"), f"{name}.tif", words)  # type: ignore[misc]


def test_a_stack_of_pictures_is_refused_and_not_read_as_its_first(tmp_path: Path) -> None:
    pages = [Image.new("L", (4, 4), shade) for shade in (0, 90, 180)]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    refusal(lambda: read(tmp_path / "stack.tif"), "stack.tif", "3 pictures", "volume")
    pages[0].save(tmp_path / "one.tif")
    read(tmp_path / "one.tif")


def test_dicom_of_several_frames_of_masks_and_of_deep_colours_is_refused(tmp_path: Path) -> None:
    grey = np.zeros((1, 6), dtype=np.uint8)
    frames = dicom(tmp_path / "frames.dcm", grey, NumberOfFrames="2", PixelData=bytes(12))
    refusal(lambda: read(frames), str(frames), "2 frames", "volume")
    mask = dicom(tmp_path / "mask.dcm", grey, SOPClassUID="1.2.840.10008.5.1.4.1.1.66.4")
    refusal(lambda: read(mask), str(mask), "mask")
    deep = dicom(tmp_path / "deep.dcm", np.zeros((2, 3, 3), dtype=np.uint16))
    refusal(lambda: read(deep), str(deep), "more than 8 bits")
    # Greys of any depth are shown through a window, which the standard defines.
    read(dicom(tmp_path / "ct.dcm", np.array([[0, 4095]], dtype=np.uint16)))


@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.nii", "scan.mha", "scan.nrrd", "slide.svs", "film.mp4"])
def test_volumes_slides_and_films_are_refused_by_every_command_that_reads_images(tmp_path: Path, name: str) -> None:
    path = nifti(tmp_path / "in" / "a" / name)
    refusal(lambda: listed(tmp_path / "in"), str(path))
    refusal(lambda: read(path), str(path))
    refusal(lambda: open_dataset(str(path)), str(path))
    refusal(lambda: load_npz(path), str(path))  # as the shard of a configuration
    told = CliRunner().invoke(
        app, ["prepare", "--images", str(tmp_path / "in"), "--out", str(tmp_path / "a.npz"), "--size", "8"]
    )
    assert isinstance(told.exception, DataError)


def test_a_model_is_shown_no_folder_with_volumes_among_the_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "in" / "a.png")
    path = nifti(tmp_path / "in" / "b.nii.gz")
    plan = ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=9)
    model = PersonalisedModel(build(plan, seed=0), plan, tuple("abcdefghi"), {})
    refusal(lambda: model.classify(tmp_path / "in"), str(path), "NIfTI volume")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_page_one_says_what_medsilo_does_today(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    words = "single-label classification of 2-D images with 8 bits a channel"
    assert words in SCOPE
    assert words in text.replace("*", "").partition("## ")[0]
