"""A hospital's image files as one data set: which files, whose, in which class, and in which split.

    entries = listed(folder, labels=Path("labels.csv"))
    dataset = assemble(entries, Form(size=28), name="hospital1")

Patients are replaced by numbers, and no patient is in two splits. The same files give the same data set on any
machine: files are taken in the order of their names, whatever order the file system has.
"""

from __future__ import annotations

import csv
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from medsilo.algorithms.datasets import ImageDataset, Images, ImageSplit
from medsilo.algorithms.scope import beyond, file_kind
from medsilo.privacy.errors import DataError
from medsilo.silo.data.image_files import Window, is_image, read_image, read_patient

SPLITS = ("train", "val", "test")
_COLUMNS = ("file", "label", "patient", "split")
_SHOWN = 5
_MASKS = ("mask", "masks", "segmentation", "segmentations", "groundtruth", "ground_truth")
_BETWEEN = re.compile(r"\s*[,;/+&]\s*")


@dataclass(frozen=True)
class Entry:
    """One image file. ``name``: its path in the folder, as errors call it; ``patient``, ``split``: where known."""

    path: Path
    name: str
    label: str
    patient: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Form:
    """What every image becomes.

    Attributes:
        size: height and width in pixels.
        channels: 1 for grey, 3 for RGB.
        window: of monochrome DICOM images; by default each file's own.
    """

    size: int
    channels: int = 3
    window: Window | None = None


def listed(folder: Path, *, labels: Path | None = None, dicom_patients: bool = False) -> list[Entry]:
    """The images to take, in the order of their names.

    Args:
        folder: where they are. Without ``labels`` each class has a folder of its name in it, with images at any depth.
        labels: a CSV (commas or semicolons, UTF-8) with a column ``file``, relative to the folder, a column ``label``,
            and, where known, ``patient`` and ``split`` (train, val or test); files that it does not list are left out.
        dicom_patients: take patients from the DICOM files.

    Raises ``DataError`` naming the file, and line, that is wrong, or what the data are if they are of a kind that
    Medsilo does not work on: volumes, masks, several labels for an image.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder")
    entries = _in_folders(folder) if labels is None else _in_csv(folder, labels)
    if not entries:
        raise DataError(f"{labels or folder}: names no images")
    entries.sort(key=lambda entry: entry.name)
    _check_single(entries, labels or folder)
    if dicom_patients:
        if any(entry.patient for entry in entries):
            raise DataError(f"{labels}: names the patients already; leave the column out, or do not ask the files")
        entries = [replace(entry, patient=read_patient(entry.path)) for entry in entries]
    return entries


def _check_single(entries: Sequence[Entry], where: Path) -> None:
    """Raises ``DataError`` if a label is no single class."""
    known = {entry.label for entry in entries}
    for entry in entries:
        parts = [part for part in _BETWEEN.split(entry.label) if part]
        if "|" in entry.label or (len(parts) > 1 and known.issuperset(parts)):
            kind = f"the label {entry.label!r} of {entry.name} names several classes (multi-label)"
        elif is_image(Path(entry.label)) or file_kind(entry.label) is not None:
            kind = f"the label {entry.label!r} of {entry.name} is a file: a mask, not a class (segmentation)"
        elif entry.label.lower() in _MASKS:
            kind = f"{entry.name} is labelled {entry.label!r}: masks are no class of images (segmentation)"
        else:
            continue
        raise DataError(f"{where}: {beyond(kind)}")


def passed_over(folder: Path) -> list[str]:
    """Names of the files in a folder that are no images by their names, hidden ones apart."""
    return [name for name, path in _files(folder) if not is_image(path)]


def _files(folder: Path) -> list[tuple[str, Path]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    named = [(_normal(path.relative_to(folder).as_posix()), path) for path in found]
    return sorted((name, path) for name, path in named if not any(part.startswith(".") for part in name.split("/")))


def _normal(name: str) -> str:
    # Some file systems take names apart (u and two dots), others keep them whole.
    return unicodedata.normalize("NFC", name)


def _in_folders(folder: Path) -> list[Entry]:
    entries = []
    for name, path in _files(folder):
        if (kind := file_kind(path)) is not None:
            raise DataError(f"{path}: {beyond(f'it is {kind}')}")
        if is_image(path):
            label, _, rest = name.partition("/")
            if not rest:
                raise DataError(
                    f"{path}: lies in no class's folder; put each class's images into a folder of its name, or list "
                    "them in a CSV"
                )
            entries.append(Entry(path, name, label))
    return entries


def _in_csv(folder: Path, labels: Path) -> list[Entry]:
    try:
        with labels.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            rows = csv.DictReader(file, delimiter=";" if ";" in header else ",", strict=True)
            columns = [column.strip().lower() for column in rows.fieldnames or ()]
            if not {"file", "label"} <= set(columns) <= set(_COLUMNS) or len(set(columns)) < len(columns):
                raise DataError(
                    f"{labels}: its first line should name the columns file and label, and where known patient and "
                    f"split, each once, and no others; it says {', '.join(columns)}. If several of them are findings "
                    f"that an image may have or not, {beyond('that is multi-label')}"
                )
            rows.fieldnames = columns
            return _unrepeated(labels, [_entry(folder, labels, rows.line_num, row) for row in rows])
    except FileNotFoundError:
        raise DataError(f"{labels}: there is no such file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{labels}: cannot be read as CSV in UTF-8: {error}") from None


def _entry(folder: Path, labels: Path, line: int, row: dict[str, str | None]) -> Entry:
    where = f"{labels}, line {line}"
    if None in row or None in row.values():
        raise DataError(f"{where}: has not as many columns as the first line")
    cells = {column: (value or "").strip() for column, value in row.items()}
    if empty := [column for column, value in cells.items() if not value]:
        raise DataError(f"{where}: {empty[0]} is empty; fill it in for every image, or leave the column out")
    path = folder / cells["file"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{where}: {cells['file']} is not inside {folder}")
    if not path.is_file():
        raise DataError(f"{where}: there is no file {path}")
    split = cells.get("split")
    if split is not None and (split := split.lower()) not in SPLITS:
        raise DataError(f"{where}: split is {cells['split']!r}; write train, val or test")
    name = _normal(path.resolve().relative_to(folder.resolve()).as_posix())
    return Entry(path, name, cells["label"], cells.get("patient"), split)


def _unrepeated(labels: Path, entries: list[Entry]) -> list[Entry]:
    seen: dict[str, str] = {}
    for entry in entries:
        if (first := seen.setdefault(entry.name, entry.label)) != entry.label:
            two = f"{entry.name} stands there with the labels {first!r} and {entry.label!r} (multi-label)"
            raise DataError(f"{labels}: {beyond(two)}")
    if len(seen) < len(entries):
        twice = next(name for name, times in Counter(entry.name for entry in entries).items() if times > 1)
        raise DataError(f"{labels}: {twice} stands there twice; list every image once")
    return entries


def class_names(entries: Iterable[Entry], wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The classes in the order of their numbers: as wanted, else sorted (whole numbers by their size).

    Raises ``DataError`` naming a file whose class is not wanted, or for fewer than two classes.
    """
    entries = list(entries)
    if wanted:
        names = tuple(wanted)
        if unknown := next((entry for entry in entries if entry.label not in names), None):
            raise DataError(f"{unknown.name}: its class {unknown.label!r} is not one of {', '.join(names)}")
    else:
        found = {entry.label for entry in entries}
        numbers = all(label.isascii() and label.isdigit() for label in found)
        names = tuple(sorted(found, key=(lambda label: (int(label), label)) if numbers else None))
    if len(names) < 2 or len(set(names)) < len(names):
        raise DataError(f"the classes are {', '.join(names)}; there must be two or more, each named once")
    return names


def with_splits(entries: Sequence[Entry], *, test_share: float, seed: int) -> list[Entry]:
    """The entries, each with its split: the given ones, or drawn.

    Whole patients are drawn (single images, where patients are not known) from the patients of each class, in an order
    that follows from the seed and the patient alone, until they have ``test_share`` of that class's patients' images:
    more images later move few patients to the other side, and no class is missing where it has two patients. A patient
    with images of several classes counts for the one that most of them have.

    Raises ``DataError`` if given splits tear a patient apart, or if there is but one patient.
    """
    if entries[0].split is not None:
        sides: dict[str, Entry] = {}
        for entry in entries:
            first = sides.setdefault(entry.patient or entry.name, entry)
            if first.split != entry.split:
                raise DataError(
                    f"{first.name} ({first.split}) and {entry.name} ({entry.split}) are of one patient; put all of a "
                    "patient's images into one split"
                )
        return list(entries)
    groups: dict[str, Counter[str]] = {}
    for entry in entries:
        groups.setdefault(entry.patient or entry.name, Counter())[entry.label] += 1
    if len(groups) < 2:
        raise DataError("all images are of one patient, so there is nobody to test on; add another patient's")
    order = sorted(groups, key=lambda group: hashlib.sha256(f"{seed}/{group}".encode()).digest())
    alike: dict[str, list[str]] = {}
    for group in order:
        most = min(groups[group], key=lambda label: (-groups[group][label], label))
        alike.setdefault(most, []).append(group)
    held: set[str] = set()
    for members in alike.values():
        wanted, count = test_share * sum(groups[group].total() for group in members), 0
        for group in members[:-1]:
            if count >= wanted:
                break
            held.add(group)
            count += groups[group].total()
    held = held or {order[0]}  # each class has one patient
    return [replace(entry, split="test" if (entry.patient or entry.name) in held else "train") for entry in entries]


def assemble(
    entries: Sequence[Entry],
    form: Form,
    *,
    name: str,
    wanted: Sequence[str] = (),
    test_share: float = 0.2,
    seed: int = 0,
    progress: Callable[[Sequence[Entry]], Iterable[Entry]] = iter,
) -> ImageDataset:
    """Reads all images into a data set.

    Patients are called by numbers in the order of their files, so that nothing of their ids is kept; file names are not
    kept either.

    Args:
        entries: at least one, as ``listed`` gives them.
        form: what every image becomes.
        name: of the data set; it stands in the hospital's journal.
        wanted: the classes in the federation's order.
        test_share: how much to test on, in (0, 1), where the entries do not say.
        seed: at least 0.
        progress: is given the entries, and gives them back one by one.

    Raises ``DataError`` naming the files that cannot be read, or what else is wrong.
    """
    names = class_names(entries, wanted)
    placed = with_splits(entries, test_share=test_share, seed=seed)
    numbers = {label: number for number, label in enumerate(names)}
    patients = dict.fromkeys(entry.patient for entry in placed if entry.patient is not None)
    pseudonyms = {patient: f"p{number:06d}" for number, patient in enumerate(patients, start=1)}
    pixels = _read_all(placed, form, progress)

    def split(chosen: str) -> ImageSplit | None:
        where = np.flatnonzero([entry.split == chosen for entry in placed])
        if not len(where) and chosen == "val":
            return None
        own = [placed[index] for index in where]
        whose = np.array([pseudonyms[entry.patient] for entry in own if entry.patient], dtype=np.str_)
        return ImageSplit(
            pixels[where],
            np.array([numbers[entry.label] for entry in own], dtype=np.int64),
            whose if pseudonyms else None,
        )

    train, test = split("train"), split("test")
    assert train is not None
    assert test is not None
    source = f"{len(placed)} of the hospital's own image files, scaled to {form.size}×{form.size} pixels"
    return ImageDataset(name, source, False, names, train, split("val"), test)


def _read_all(entries: Sequence[Entry], form: Form, progress: Callable[[Sequence[Entry]], Iterable[Entry]]) -> Images:
    try:
        pixels = np.empty((len(entries), form.size, form.size, form.channels), dtype=np.uint8)
    except MemoryError:
        raise DataError(
            f"{len(entries)} images of {form.size}×{form.size} pixels do not fit into this machine's memory; choose a "
            "smaller size"
        ) from None
    unreadable: list[str] = []
    for index, entry in enumerate(progress(entries)):
        try:
            pixels[index] = read_image(
                entry.path, channels=form.channels, height=form.size, width=form.size, window=form.window
            )
        except DataError as error:
            unreadable.append(str(error))
    if unreadable:
        more = f"\nand {len(unreadable) - _SHOWN} more" if len(unreadable) > _SHOWN else ""
        raise DataError("\n".join(unreadable[:_SHOWN]) + more + "\nMend or remove them; nothing was written")
    return pixels
