"""``silo shard``: cuts a data set into hospitals' shards and shows what each has got."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from medsilo.privacy.errors import ConfigurationError

if TYPE_CHECKING:
    from medsilo.algorithms.datasets import ImageDataset
    from medsilo.silo.data.settings import Setting


class SettingName(StrEnum):
    """The settings of :mod:`medsilo.silo.data.sharding`, as the command line calls them."""

    PRACTICAL = "practical"
    PATHOLOGICAL = "pathological"
    DIRICHLET = "dirichlet"
    DIRICHLET_POOLED = "dirichlet-pooled"
    BY_PATIENT = "by-patient"


class ImagesFrom(StrEnum):
    """Where test images come from, as the command line calls it."""

    TEST = "test"
    TRAIN = "train"


_OPTIONS = {
    SettingName.PRACTICAL: {"groups", "dominant", "share", "train", "test", "test-from"},
    SettingName.PATHOLOGICAL: {"silos", "classes-per-silo", "train", "test", "test-from"},
    SettingName.DIRICHLET: {"silos", "alpha", "train", "test", "test-from"},
    SettingName.DIRICHLET_POOLED: {"silos", "alpha", "test-share"},
    SettingName.BY_PATIENT: {"silos", "test-from"},
}


def shard(
    source: Annotated[
        str,
        typer.Option("--from", help="'pathmnist' (or 'pathmnist_64', …), 'synthetic', or the path of an .npz file."),
    ] = "pathmnist",
    out: Annotated[Path, typer.Option(help="The folder to write the shards into.")] = Path("shards"),
    setting: Annotated[SettingName, typer.Option(help="How to cut the data set.")] = SettingName.PRACTICAL,
    groups: Annotated[
        str | None, typer.Option(help="practical: silos of each group, such as 6,6,8 (the default).")
    ] = None,
    dominant: Annotated[
        str | None,
        typer.Option(help="practical: each group's dominant classes; default 0,1,2/3,4,5/6,7,8."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="practical: share of images with a dominant class, 0 to 1; default 0.8."),
    ] = None,
    silos: Annotated[int | None, typer.Option(help="All but practical: number of silos; default 20.")] = None,
    classes_per_silo: Annotated[
        int | None, typer.Option(help="pathological: classes that a silo has; default 2.")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="dirichlet, dirichlet-pooled: concentration; smaller is more uneven; default 0.5."),
    ] = None,
    train: Annotated[
        int | None,
        typer.Option(help="All but by-patient and dirichlet-pooled: training images per silo; default 500."),
    ] = None,
    test: Annotated[
        int | None, typer.Option(help="All but by-patient and dirichlet-pooled: test images per silo; default 100.")
    ] = None,
    test_share: Annotated[
        float | None,
        typer.Option(help="dirichlet-pooled: share of each silo's images to test on, 0 to 1; default 0.5."),
    ] = None,
    test_from: Annotated[
        ImagesFrom | None,
        typer.Option(
            help="All but dirichlet-pooled: take test images from the test split (the default), or from unused "
            "training images."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same shards.")] = 0,
    prefix: Annotated[str, typer.Option(help="Shards are called this and a number from 1.")] = "hospital",
) -> None:
    """Cuts a data set into hospital shards.

    Writes hospital1.npz and so on, label_distribution.png and shards.json (the data set's fingerprint, the
    setting, the seed and every count).
    """
    # PyTorch and Matplotlib take seconds to load; the other commands' help need not wait for them.
    from medsilo.algorithms.datasets import save_npz, written_whole
    from medsilo.silo.data.label_distribution import draw_label_distribution
    from medsilo.silo.data.sharding import cut
    from medsilo.silo.data.sources import open_dataset

    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", prefix):
        raise ConfigurationError(
            f"--prefix {prefix!r} cannot begin a file's name; give a letter, then letters, digits, - or _"
        )
    given = {
        "groups": groups,
        "dominant": dominant,
        "share": share,
        "silos": silos,
        "classes-per-silo": classes_per_silo,
        "alpha": alpha,
        "train": train,
        "test": test,
        "test-share": test_share,
        "test-from": None if test_from is None else test_from.value,
    }
    chosen = _setting(setting, given)
    dataset = open_dataset(source, seed=seed)
    shards = cut(dataset, chosen, seed=seed, prefix=prefix)
    _refuse_leftovers(out, prefix, len(shards))
    picture, index = out / "label_distribution.png", out / "shards.json"
    # The index is written last, so a folder that has one holds a whole cut.
    if index.exists():
        index.unlink()
    paths = [out / f"{piece.name}.npz" for piece in shards]
    for piece, path in zip(shards, paths, strict=True):
        save_npz(path, piece)
    draw_label_distribution(shards, picture, title=dataset.name)
    with written_whole(index) as file:
        file.write(json.dumps(_index(dataset, setting, chosen, seed, shards), indent=2).encode() + b"\n")
    _show(Console(), dataset, shards, [*paths, picture, index])


def _setting(name: SettingName, given: dict[str, Any]) -> Setting:
    from medsilo.silo.data.settings import ByPatient, Dirichlet, Pathological, PooledDirichlet, PracticalGroups

    for option, value in given.items():
        if value is not None and option not in _OPTIONS[name]:
            settings = " or ".join(setting for setting in SettingName if option in _OPTIONS[setting])
            raise ConfigurationError(
                f"--{option} has no meaning with --setting {name}; leave it out, or use --setting {settings}"
            )

    # What is not given is left to the setting's own default.
    fields: dict[str, Any] = {}
    for option, field in (
        ("train", "train_per_silo"),
        ("test", "test_per_silo"),
        ("test-from", "test_from"),
        ("test-share", "test_share"),
        ("share", "share"),
    ):
        if given[option] is not None:
            fields[field] = given[option]
    silos = 20 if given["silos"] is None else given["silos"]
    alpha = 0.5 if given["alpha"] is None else given["alpha"]
    if name is SettingName.PRACTICAL:
        if given["groups"] is not None:
            fields["groups"] = _numbers("groups", given["groups"])
        if given["dominant"] is not None:
            fields["dominant"] = tuple(_numbers("dominant", part) for part in given["dominant"].split("/"))
        return PracticalGroups(**fields)
    if name is SettingName.PATHOLOGICAL:
        if given["classes-per-silo"] is not None:
            fields["classes_per_silo"] = given["classes-per-silo"]
        return Pathological(silos=silos, **fields)
    if name is SettingName.DIRICHLET:
        return Dirichlet(silos=silos, alpha=alpha, **fields)
    if name is SettingName.DIRICHLET_POOLED:
        return PooledDirichlet(silos=silos, alpha=alpha, **fields)
    return ByPatient(silos=silos, **fields)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d{1,6}\s*(,\s*\d{1,6}\s*)*", text):
        example = "6,6,8" if option == "groups" else "0,1,2/3,4,5/6,7,8"
        raise ConfigurationError(f"--{option}: {text!r} are no whole numbers with commas; write {example}")
    return tuple(int(number) for number in text.split(","))


def _refuse_leftovers(out: Path, prefix: str, silos: int) -> None:
    """An earlier cut's shards must not pass for this one's."""
    expected = {f"{prefix}{number}.npz" for number in range(1, silos + 1)}
    leftovers = sorted(path.name for path in out.glob("*.npz") if path.name not in expected)
    if leftovers:
        raise ConfigurationError(
            f"{out} has other data sets, such as {leftovers[0]}, which would be mistaken for this cut's "
            "shards; remove them, or give another --out"
        )


def _index(
    dataset: ImageDataset, name: SettingName, setting: Setting, seed: int, shards: list[ImageDataset]
) -> dict[str, Any]:
    return {
        "dataset": dataset.name,
        "source": dataset.source,
        "synthetic": dataset.synthetic,
        "fingerprint": dataset.fingerprint,
        "class_names": dataset.class_names,
        "setting": {"name": name.value, **dataclasses.asdict(setting)},
        "seed": seed,
        "shards": [
            {
                "name": piece.name,
                "file": f"{piece.name}.npz",
                "fingerprint": piece.fingerprint,
                "train": piece.train.counts(dataset.num_classes).tolist(),
                "test": piece.test.counts(dataset.num_classes).tolist(),
            }
            for piece in shards
        ],
    }


def _show(console: Console, dataset: ImageDataset, shards: list[ImageDataset], written: list[Path]) -> None:
    table = Table(
        title=f"{dataset.name}: training images of each class, of all classes, and test images",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("shard", no_wrap=True)
    # Numbers head the columns: nine names of tissue would not fit a terminal.
    for label in range(dataset.num_classes):
        table.add_column(str(label), justify="right")
    table.add_column("train", justify="right", style="bold", no_wrap=True)
    table.add_column("test", justify="right", style="bold", no_wrap=True)
    for piece in shards:
        counts = piece.train.counts(dataset.num_classes)
        numbers = [str(count) if count else "·" for count in counts]
        table.add_row(piece.name, *numbers, str(len(piece.train)), str(len(piece.test)))
    console.print(table)
    for label, class_name in enumerate(dataset.class_names):
        console.print(f"  {label}  {class_name}", markup=False, highlight=False)
    console.print(f"data set version {dataset.fingerprint}", highlight=False, soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if dataset.synthetic:
        console.print(
            Panel(
                "These images are GENERATED, not real tissue. No result on them says anything about patients.",
                title="SYNTHETIC DATA",
                style="bold red",
            )
        )
