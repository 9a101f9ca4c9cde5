"""`silo prepare`: files become one data set, patients stay on one side, and nothing of their names is kept."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.data import get_testdata_file
from typer.testing import CliRunner

from medsilo.algorithms.datasets import load_npz
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo.cli import app
from medsilo.silo.data import preparing
from medsilo.silo.data.image_files import read_image, read_patient
from medsilo.silo.data.preparing import Form, assemble, class_names, listed, passed_over, with_splits
from tests.support.hospital.image_files import dicom, made, picture


def table(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> Path:
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(target.getvalue(), encoding="utf-8")
    return path


def grey(path: Path, **options: Any) -> np.ndarray[Any, Any]:
    """A file's pixels at its own size, for rows of six."""
    return read_image(path, channels=1, height=1, width=6, **options).reshape(6)


@pytest.fixture
def hospital(tmp_path: Path) -> tuple[Path, Path]:
    """Twelve patients with two pictures each, in two classes."""
    rows = []
    for number in range(24):
        patient, label = f"MRN-{number // 2}", ("tumour", "benign")[number // 2 % 2]
        picture(tmp_path / "images" / f"{number:02}.png", number)
        rows.append({"file": f"{number:02}.png", "label": label, "patient": patient})
    return tmp_path / "images", table(tmp_path / "labels.csv", rows)


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "in" / ("tumour", "benign")[number % 2] / "deeper" / f"{number}.PNG", number)
    (tmp_path / "in" / "benign" / "notes.txt").write_text("not an image")
    (tmp_path / "in" / "benign" / ".DS_Store").write_bytes(b"")
    dataset = made(tmp_path / "in")
    assert dataset.class_names == ("benign", "tumour")
    for split in (dataset.train, dataset.test):
        # The shade is the picture's number, and odd numbers are benign.
        assert [int(image[0, 0, 0]) % 2 for image in split.images] == [1 - label for label in split.labels]
    assert len(dataset.train) + len(dataset.test) == 10
    assert passed_over(tmp_path / "in") == ["benign/notes.txt"]


def test_no_patient_is_in_two_splits_and_about_the_asked_share_is_held_out(hospital: tuple[Path, Path]) -> None:
    for seed in range(20):
        dataset = made(*hospital, seed=seed, test_share=1 / 3)
        assert dataset.train.patients is not None
        assert dataset.test.patients is not None
        assert not set(dataset.train.patients) & set(dataset.test.patients)
        assert len(dataset.test) == 8
    assert made(*hospital, seed=1).fingerprint != made(*hospital, seed=2).fingerprint


def test_no_class_is_missing_from_the_test_images_that_two_patients_have() -> None:
    entries = [
        preparing.Entry(Path("x"), f"{label}-{patient}-{number}.png", label, f"{label}-{patient}")
        for label, patients in (("benign", 9), ("malignant", 2), ("rare", 1))
        for patient in range(patients)
        for number in range(4)
    ]
    for seed in range(50):
        held = {e.label for e in with_splits(entries, test_share=0.1, seed=seed) if e.split == "test"}
        assert held == {"benign", "malignant"}, "and the only patient of a class is trained on"
    single = [preparing.Entry(Path("x"), name, name, name) for name in ("a", "b")]
    assert sorted(e.split or "" for e in with_splits(single, test_share=0.5, seed=1)) == ["test", "train"]


def test_more_images_later_leave_most_patients_on_their_side(hospital: tuple[Path, Path]) -> None:
    entries = listed(hospital[0], labels=hospital[1])
    more = [*entries, preparing.Entry(Path("x"), "x.png", "benign", "MRN-new")]
    before = {e.patient: e.split for e in with_splits(entries, test_share=0.25, seed=3)}
    after = {e.patient: e.split for e in with_splits(more, test_share=0.25, seed=3)}
    assert sum(after[patient] != split for patient, split in before.items()) <= 1


def test_given_splits_are_kept_and_one_that_tears_a_patient_apart_is_refused(tmp_path: Path) -> None:
    rows = [
        {"file": f"{n}.png", "label": str(n % 2), "patient": str(n), "split": ("train", "Test", "val")[n % 3]}
        for n in range(6)
    ]
    for row in rows:
        picture(tmp_path / "in" / row["file"], int(row["patient"]))
    dataset = made(tmp_path / "in", table(tmp_path / "labels.csv", rows))
    assert dataset.validation is not None
    shades = [[int(i[0, 0, 0]) for i in s.images] for s in (dataset.train, dataset.test, dataset.validation)]
    assert shades == [[0, 3], [1, 4], [2, 5]]
    rows[1]["patient"] = rows[0]["patient"]
    with pytest.raises(DataError, match=r"0\.png \(train\) and 1\.png \(test\) are of one patient"):
        made(tmp_path / "in", table(tmp_path / "labels.csv", rows))


def test_neither_the_order_of_the_file_system_nor_that_of_the_table_changes_anything(
    hospital: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(*hospital).fingerprint
    with hospital[1].open() as file:
        rows = list(csv.DictReader(file))
    assert made(hospital[0], table(tmp_path / "other.csv", rows[::-1], ";")).fingerprint == first
    in_folders = tmp_path / "folders"
    for number in range(8):
        picture(in_folders / "ab"[number % 2] / f"Gewebe ü{number}.png", number)
    expected, plain = made(in_folders).fingerprint, Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: sorted(plain(self, pattern), reverse=True))
    assert made(in_folders).fingerprint == expected
    for path in plain(in_folders, "*.png"):
        path.rename(path.with_name(path.name.replace("ü", "u\N{COMBINING DIAERESIS}")))
    assert made(in_folders).fingerprint == expected


def test_a_hospital_that_lacks_a_class_numbers_the_others_as_everybody(tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / "in" / "cd"[number % 2] / f"{number}.png", number)
    dataset = made(tmp_path / "in", wanted=["d", "a", "c"])
    assert dataset.class_names == ("d", "a", "c")
    assert set(dataset.train.labels) | set(dataset.test.labels) == {0, 2}
    with pytest.raises(DataError, match=r"c/0\.png: its class 'c' is not one of d, a"):
        made(tmp_path / "in", wanted=["d", "a"])


def test_classes_that_are_numbers_are_sorted_as_numbers() -> None:
    entries = [preparing.Entry(Path(), str(n), label) for n, label in enumerate(("10", "9", "2"))]
    assert class_names(entries) == ("2", "9", "10")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,label\n1.png,a\n1.png,a\n", "1.png stands there twice"),
        ("file,label\n1.png,a\n2.png,\n", "line 3: label is empty"),
        ("file,label\n9.png,a\n", "line 2: there is no file"),
        ("file,label\n../labels.csv,a\n", "line 2: ../labels.csv is not inside"),
        ("file,label,patient_id\n1.png,a,7\n", "it says file, label, patient_id"),
        ("file,label,label\n1.png,a,a\n", "each once"),
        ("file,label,split\n1.png,a,held out\n", "split is 'held out'; write train, val or test"),
        ("file,label\n1.png,a,b\n", "line 2: has not as many columns"),
        ("file,label\n1.png\n", "line 2: has not as many columns"),
        ('file,label\n"1.png,a\n', "cannot be read as CSV"),
        ("file,label\n1.png,é\n".encode("latin-1"), "cannot be read as CSV in UTF-8"),
        ("file,label\n", "names no images"),
        ("", "its first line should name"),
        ("file,label\n1.png,a\n2.png,a\n", "there must be two or more"),
        ("file,label,patient\n1.png,a,7\n2.png,b,7\n", "all images are of one patient"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    for number in (1, 2):
        picture(tmp_path / "in" / f"{number}.png", number)
    (tmp_path / "labels.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        made(tmp_path / "in", tmp_path / "labels.csv")
    assert words in str(caught.value)


def test_every_file_that_cannot_be_read_is_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / "in" / "ab"[number % 2] / f"{number}.png", number)
    (tmp_path / "in" / "a" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")
    (tmp_path / "in" / "b" / "text.dcm").write_text("no DICOM")
    Image.new("1", (10_000, 8_000)).save(tmp_path / "in" / "b" / "bomb.png")
    with pytest.raises(DataError) as caught:
        made(tmp_path / "in")
    for name in ("torn.png", "text.dcm", "bomb.png"):
        assert name in str(caught.value)
    result = CliRunner().invoke(
        app, ["prepare", "--images", str(tmp_path / "in"), "--size", "4", "--out", str(tmp_path / "h.npz")]
    )
    assert isinstance(result.exception, DataError)
    assert not list(tmp_path.glob("*.npz*"))


def test_the_command_writes_a_shard_that_is_named_and_never_overwritten(
    hospital: tuple[Path, Path], tmp_path: Path
) -> None:
    arguments = ["prepare", "--images", str(hospital[0]), "--labels", str(hospital[1]), "--size", "4"]
    arguments += ["--classes", "benign,tumour", "--out", str(tmp_path / "hospital1.npz")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    dataset = load_npz(tmp_path / "hospital1.npz")
    assert (dataset.name, dataset.synthetic, dataset.image_shape) == ("hospital1", False, (3, 4, 4))
    assert dataset.fingerprint in result.output
    content = (tmp_path / "hospital1.npz").read_bytes()
    for word in ("MRN", "00.png", str(hospital[0])):
        assert word.encode() not in content
        assert word.encode("utf-32-le") not in content
    with pytest.raises(ConfigurationError, match="is there already"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_picture_that_lies_on_its_side_is_set_up(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 50, 100, 150, 200, 250]], dtype=np.uint8).T)
    exif = Image.Exif()
    exif[0x0112] = 8  # the camera was turned: up is where the right side of the stored picture is
    image.save(tmp_path / "side.png", exif=exif)
    assert grey(tmp_path / "side.png").tolist() == [0, 50, 100, 150, 200, 250]


CT = np.array([[-1000, -160, 40, 140, 239, 240]], dtype=np.int16)


def test_a_window_shows_what_the_standard_says(tmp_path: Path) -> None:
    # PS3.3 C.11.2.1.2.1 with c = 40, w = 400: black to -159.5 - 0.5 = -160, white above 239, between them
    # ((x - 39.5) / 399 + 0.5) * 255.
    expected = [0, 0, 128, 192, 255, 255]
    assert round(((40 - 39.5) / 399 + 0.5) * 255) == expected[2]
    assert round(((140 - 39.5) / 399 + 0.5) * 255) == expected[3]
    path = dicom(tmp_path / "ct.dcm", CT + 1024, RescaleSlope="1", RescaleIntercept="-1024")
    assert grey(path, window=(40, 400)).tolist() == expected
    own = dicom(tmp_path / "own", CT, WindowCenter=["40", "-600"], WindowWidth=["400", "1500"])
    assert grey(own).tolist() == expected
    assert grey(own, window=(-600, 1500)).tolist() != expected
    turned = dicom(tmp_path / "turned.dcm", CT, PhotometricInterpretation="MONOCHROME1")
    assert grey(turned, window=(40, 400)).tolist() == [255 - value for value in expected]


def test_without_a_window_an_image_is_shown_from_its_smallest_to_its_largest_value(tmp_path: Path) -> None:
    values = np.array([[100, 100, 200, 300, 400, 600]], dtype=np.uint16)
    assert grey(dicom(tmp_path / "a.dcm", values)).tolist() == [0, 0, 51, 102, 153, 255]
    assert grey(dicom(tmp_path / "b.dcm", values, BitsStored=12, HighBit=11)).tolist() == [0, 0, 51, 102, 153, 255]
    assert set(grey(dicom(tmp_path / "c.dcm", np.full((1, 6), 7, dtype=np.uint8))).tolist()) == {0}


def test_a_voi_table_is_followed(tmp_path: Path) -> None:
    item = pydicom.Dataset()
    item.LUTDescriptor = [6, 0, 8]
    item.add_new(0x00283006, "OW", np.array([0, 10, 20, 40, 80, 255], dtype=np.uint16).tobytes())
    path = dicom(tmp_path / "dx.dcm", np.arange(6, dtype=np.uint8)[None], VOILUTSequence=[item])
    assert grey(path).tolist() == [0, 10, 20, 40, 80, 255]


def test_colours_and_compressed_images_of_other_makers_are_read() -> None:
    # pydicom's own test files; the two hold the same picture, as plain RGB and with a palette.
    for name, shade in (("examples_rgb_color.dcm", None), ("SC_rgb_rle.dcm", (255, 0, 0)), ("MR_small_RLE.dcm", None)):
        image = read_image(Path(str(get_testdata_file(name, download=False))), channels=3, height=64, width=64)
        assert image.std() > 5
        if shade:
            assert tuple(image[2, 2]) == shade
    plain, packed = (
        read_image(Path(str(get_testdata_file(name, download=False))), channels=1, height=64, width=64)
        for name in ("MR_small.dcm", "MR_small_RLE.dcm")
    )
    assert (plain == packed).all()


def test_nothing_of_a_patient_is_parsed_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[pydicom.Dataset] = []
    plain = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **k: seen.append(plain(*a, **k)) or seen[-1])
    for number in range(4):
        pixels = np.full((4, 4), number, dtype=np.uint8)
        dicom(tmp_path / "in" / "ab"[number % 2] / f"{number}.dcm", pixels, PatientID=f"MRN-{number // 2}")
    entries = listed(tmp_path / "in", dicom_patients=True)
    dataset = assemble(entries, Form(4), name="h")
    assert dataset.train.patients is not None
    assert dataset.test.patients is not None
    assert {*dataset.train.patients, *dataset.test.patients} == {"p000001", "p000002"}
    assert len(seen) == 8
    for found in seen:
        assert "PatientName" not in found
    assert sum("PatientID" in found for found in seen) == 4  # only where the ids were asked for
    assert [read_patient(entry.path) for entry in entries] == [entry.patient for entry in entries]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"BurnedInAnnotation": "YES"}, "BurnedInAnnotation"),
        ({"NumberOfFrames": "2", "PixelData": bytes(12)}, "2 frames"),
        ({"Rows": 60_000, "Columns": 60_000}, "pixels are more than"),
        ({"PixelData": b"\0\0"}, "cannot be read"),
        ({"PhotometricInterpretation": "YBR_ICT"}, "cannot be read"),
        ({"Rows": None}, "cannot be read"),
    ],
)
def test_a_dicom_file_that_cannot_be_taken_is_refused_with_the_reason(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    path = dicom(tmp_path / "x.dcm", np.zeros((1, 6), dtype=np.uint8), **fields)
    with pytest.raises(DataError) as caught:
        grey(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_without_a_patient_is_named(tmp_path: Path) -> None:
    path = dicom(tmp_path / "in" / "a" / "x.dcm", np.zeros((1, 6), dtype=np.uint8), PatientID="")
    with pytest.raises(DataError, match="tells no patient"):
        listed(tmp_path / "in", dicom_patients=True)
    assert path.exists()


@pytest.mark.parametrize("text", ["400", "40/", "40/1", "a/b", "40/-400", "1e9/4"])
def test_a_window_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    arguments = ["prepare", "--images", str(tmp_path), "--size", "4", "--out", str(tmp_path / "h.npz")]
    with pytest.raises(ConfigurationError, match="write CENTRE/WIDTH"):
        CliRunner().invoke(app, [*arguments, "--window", text], catch_exceptions=False)
