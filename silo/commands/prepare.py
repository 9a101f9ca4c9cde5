"""``silo prepare``: makes a hospital's one file of images from its picture or DICOM files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.party.console import out, say

if TYPE_CHECKING:
    from medsilo.algorithms.datasets import ImageDataset


def prepare(
    images: Annotated[
        Path, typer.Option("--images", help="The folder of pictures or DICOM files; a folder in it for each class.")
    ],
    target: Annotated[Path, typer.Option("--out", help="The file to write (.npz).")],
    size: Annotated[int, typer.Option("--size", min=1, max=4096, help="Height and width in pixels.")],
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels",
            help="In place of folders for classes: a CSV with columns file, label, and where known patient and split "
            "(train, val, test).",
            show_default=False,
        ),
    ] = None,
    grey: Annotated[bool, typer.Option("--grey", help="One grey channel; by default three, RGB.")] = False,
    classes: Annotated[
        str | None,
        typer.Option(
            "--classes",
            help="The federation's classes in their order, such as benign,malignant; by default those found, sorted.",
            show_default=False,
        ),
    ] = None,
    dicom_patients: Annotated[
        bool, typer.Option("--dicom-patients", help="Take patient ids from the DICOM files; they become numbers.")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window", help="DICOM: CENTRE/WIDTH, such as 40/400; by default each file's own.", show_default=False
        ),
    ] = None,
    test_share: Annotated[
        float, typer.Option("--test-share", help="Share of the images to test on, where the CSV has no split.")
    ] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed draws the same patients to test on.")] = 0,
) -> None:
    """Make the file that `shard:` names from this hospital's pictures or DICOM files. Sends nothing.

    No patient is in both training and test images, if the CSV or the files say whose they are.
    """
    from rich.progress import track

    from medsilo.algorithms.datasets import image_hashes, save_npz
    from medsilo.silo.data.preparing import Form, assemble, listed, passed_over

    if target.suffix != ".npz":
        raise ConfigurationError(f"--out {target}: give a file that ends in .npz")
    if target.exists():
        raise ConfigurationError(
            f"--out {target}: is there already; give another name. (Budgets of privacy belong to the old file's images)"
        )
    if not 0 < test_share < 1:
        raise ConfigurationError(f"--test-share is {test_share}; give a number above 0 and below 1")
    form = Form(size, 1 if grey else 3, None if window is None else read_window(window))
    wanted = [] if classes is None else [name.strip() for name in classes.split(",")]
    entries = listed(images, labels=labels, dicom_patients=dicom_patients)
    errors = Console(stderr=True)
    dataset = assemble(
        entries,
        form,
        name=target.stem,
        wanted=wanted,
        test_share=test_share,
        seed=seed,
        progress=lambda placed: track(placed, "reading images", console=errors, transient=True),
    )
    save_npz(target, dataset)
    _show_counts(dataset, f"{len(entries)} images as {size}×{size}")
    if labels is None and (others := passed_over(images)):
        say(f"{len(others)} files are no images and were passed over, such as {others[0]}.")
    if dataset.train.patients is None:
        say("Whose the images are is not known: one patient's may be in training and test images.")
    if shared := set(image_hashes(dataset.train.images)) & set(image_hashes(dataset.test.images)):
        say(f"{len(shared)} test images equal a training image pixel by pixel; look for copies.")
    if not wanted:
        say("All hospitals must number the classes alike: give everybody the same --classes.")
    say(f"data set version {dataset.fingerprint}")
    say(f"wrote {target}")


def _show_counts(dataset: ImageDataset, title: str) -> None:
    """Images of each class in each split, and the classes of which a split has none."""
    table = Table(title=title, title_justify="left")
    splits = [("train", dataset.train), ("val", dataset.validation), ("test", dataset.test)]
    known = [(name, split) for name, split in splits if split is not None]
    for column in ("", "class", *(name for name, _ in known)):
        table.add_column(column, justify="left" if column == "class" else "right")
    counts = [split.counts(dataset.num_classes) for _, split in known]
    for label, class_name in enumerate(dataset.class_names):
        table.add_row(str(label), class_name, *(str(each[label]) for each in counts))
    out.print(table)
    for (name, _), each in zip(known, counts, strict=True):
        if lacking := [one for one, count in zip(dataset.class_names, each, strict=True) if not count]:
            say(
                f"No {name} images of: {', '.join(lacking)}."
                + (" Accuracies will say nothing about them; add a patient's, or a column `split`." * (name == "test"))
            )


def read_window(text: str) -> tuple[float, float]:
    """CENTRE/WIDTH; raises ``ConfigurationError`` for anything else."""
    number = r"-?\d{1,6}(?:\.\d{1,3})?"
    if not (match := re.fullmatch(rf"({number})/({number})", text)) or float(match[2]) < 2:
        raise ConfigurationError(f"--window {text!r}: write CENTRE/WIDTH, such as 40/400, with a width of 2 or more")
    return float(match[1]), float(match[2])
