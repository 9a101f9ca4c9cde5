"""``silo budget --html``: the picture shows what the ledger says."""

from __future__ import annotations

import io
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, load_npz, save_npz
from medsilo.privacy.budget.accounting import DiscreteLaplace, GaussianRelease, SampledGaussian, SharedGaussian, epsilon
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject
from medsilo.privacy.budget.units import Content
from medsilo.privacy.errors import DataError
from medsilo.privacy.pages.plots import spending
from medsilo.privacy.pages.wording import shown
from medsilo.silo.oversight.budget import (
    POINTS,
    as_json,
    lines,
    patients_table,
    read_accounts,
    read_patients,
    remember,
    tables,
    to_html,
)

STEPS = SampledGaussian(0.1, 2.0, 10)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A silo with 60 charges for training and one for measuring, whose run has a hostile name."""
    folder = tmp_path / "ledger"
    for split, event, count in (("train", STEPS, POINTS + 20), ("test", DiscreteLaplace(0.5), 1)):
        ledger = Ledger(folder, Subject("ab" * 32, "image", split))
        for number in range(count):
            ledger.charge(event, Purpose("f", "<script>", "00", number, "training"), Budget(50, 1e-5))
    consent = tmp_path / "consent.yaml"
    consent.write_text("privacy: {epsilon: 9, delta: 1.0e-5}\n")
    return SimpleNamespace(ledgers=folder, consent=consent)


def test_the_course_begins_at_the_first_charge_and_ends_with_what_is_spent(config: Any) -> None:
    tested, trained = read_accounts(config, course=True)
    assert [tested.subject.split, trained.subject.split] == ["test", "train"]
    assert tested.course == ((1, 0.5),)
    assert len(trained.course) == POINTS
    assert trained.course[0] == (1, epsilon([STEPS], delta=1e-5))
    assert trained.course[-1] == (POINTS + 20, trained.spent.epsilon)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(trained.course, trained.course[1:], strict=False))
    assert "course" not in as_json(trained)


def test_the_page_stands_alone_and_names_every_number(config: Any) -> None:
    accounts = read_accounts(config, course=True)
    page = to_html("north", accounts)
    assert not re.search(r"<script|src=|https?://(?!www\.w3\.org/2000/svg)", page)
    for account in accounts:
        assert f"ε = {shown(account.spent.epsilon)}" in page
    assert "unit image, adjacency zero-out, accountant PLD" in page
    assert "budget 9" in page
    assert "&lt;script&gt;" in page
    for svg in re.findall(r"<svg.*?</svg>", page):
        ElementTree.fromstring(svg)
    assert "no privacy ledger" in to_html("north", [])


def test_the_line_is_as_high_as_the_numbers() -> None:
    drawn = spending([(1, 1.0), (2, 2.0), (4, 4.0)], 8.0, identifier="a")
    found = re.search(r'<polyline points="([^"]*)"', drawn)
    assert found
    points = [tuple(map(float, pair.split(","))) for pair in found[1].split()]
    (x0, y0), first, second, last = points
    assert first[0] - x0 == pytest.approx((last[0] - x0) / 4, abs=0.2)
    assert y0 - second[1] == pytest.approx(2 * (y0 - first[1]), abs=0.2)
    assert y0 - last[1] == pytest.approx(4 * (y0 - first[1]), abs=0.2)
    budget = re.search(r'y1="([\d.]+)"[^>]*stroke-dasharray', drawn)
    assert budget
    assert y0 - float(budget[1]) == pytest.approx(8 * (y0 - first[1]), abs=0.5)


@pytest.mark.parametrize("course", [[], [(1, math.inf)], [(1, 2.0), (2, math.inf)]])
def test_accounts_without_charges_or_without_bound_are_drawn(course: list[tuple[int, float]]) -> None:
    drawn = spending(course, None, identifier="a")
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert ("∞" in drawn) == bool(course)


def test_spending_is_shown_by_version_and_by_the_image_that_has_cost_most(tmp_path: Path, config: Any) -> None:
    pixels = np.arange(3, dtype=np.uint8)[:, None, None, None] + np.zeros((3, 4, 4, 1), np.uint8)
    for number, images in enumerate((pixels[:2], pixels[1:], pixels[2:])):
        content = {"train": Content(images, None)}
        ledger = Ledger(tmp_path / "two", Subject(f"{number:064x}", "image"), content)
        ledger.charge(STEPS, Purpose("f", "r", "00", 0, "training"), Budget(50, 1e-5))
    accounts = read_accounts(SimpleNamespace(ledgers=tmp_path / "two", consent=config.consent), course=True)
    one, two = (epsilon([STEPS] * count, delta=1e-5) for count in (1, 2))
    assert [account.spent.epsilon for account in accounts] == [two, two, two]
    assert [account.version.epsilon for account in accounts] == [one, one, one]
    assert [account.left for account in accounts] == [9 - two] * 3
    first = accounts[0]
    assert [part.name for part in first.versions] == [f"{n:064x}"[:16] + ", unit image, split train" for n in (0, 1)]
    assert first.course == ((1, one), (2, two))
    assert "it is in 2 accounts" in lines(first)[1]
    assert f"for this version alone come to {first.version}" in lines(first)[1]
    assert as_json(first)["versions"] == tuple(asdict(part) for part in first.versions)
    assert "By version" in to_html("north", accounts)
    assert [table.title for table in tables(first) if "by version" in str(table.title)]


def test_an_older_versions_file_shows_whom_its_charges_are_for(tmp_path: Path, config: Any) -> None:
    def dataset(number: int) -> ImageDataset:
        images = np.full((1, 4, 4, 1), number, np.uint8)
        split = ImageSplit(images, np.zeros(1, np.int64))
        test = ImageSplit(images + 100, np.zeros(1, np.int64))
        return ImageDataset("h", "made", True, ("a",), split, None, test)

    settings = SimpleNamespace(ledgers=tmp_path / "old", consent=config.consent)
    for number in (1, 2):
        ledger = Ledger(settings.ledgers, Subject(dataset(number).fingerprint, "image"))
        ledger.charge(STEPS, Purpose("f", "r", "00", 0, "training"), Budget(50, 1e-5))
        save_npz(tmp_path / f"{number}.npz", dataset(number))
    save_npz(tmp_path / "3.npz", dataset(3))
    one, two = (epsilon([STEPS] * count, delta=1e-5) for count in (1, 2))
    assert [account.spent.epsilon for account in read_accounts(settings)] == [two, two]
    for number in (1, 2):
        assert remember(settings, tmp_path / f"{number}.npz") == dataset(number).fingerprint
    assert [account.spent.epsilon for account in read_accounts(settings)] == [one, one]
    with pytest.raises(DataError, match="nothing was ever charged"):
        remember(settings, tmp_path / "3.npz")


def test_each_patients_spending_is_listed_by_the_shards_own_numbers_and_nowhere_else(
    config: Any, tmp_path: Path
) -> None:
    """Of two versions, patient 7 is in both, and 9 in the second alone; both figures where noise was shared out."""
    pixels = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    labels = np.array([0, 1, 0, 1])

    def version(rows: list[int], patients: list[str]) -> ImageDataset:
        split = ImageSplit(pixels[rows], labels[rows], np.array(patients))
        return ImageDataset("h", "a test", False, ("a", "b"), split, None, ImageSplit(255 - pixels[:2], labels[:2]))

    config.ledgers = tmp_path / "patients"
    for number, (one, event) in enumerate(
        [(version([0, 1], ["7", "8"]), GaussianRelease(9.0)), (version([0, 2], ["7", "9"]), SharedGaussian(8.0, 4))]
    ):
        config.shard = tmp_path / f"{number}.npz"
        save_npz(config.shard, one)
        loaded = load_npz(config.shard)
        ledger = Ledger(config.ledgers, Subject(loaded.fingerprint, "patient"), loaded.contents)
        ledger.charge(event, Purpose("f", "r", "00", number, "training"), Budget(50, 1e-5))
    found = read_patients(config)
    assert [(one.patient, one.charges) for one in found] == [("7", 2), ("9", 1)]
    both = [GaussianRelease(9.0), GaussianRelease(8.0)]
    assert found[0].spent.epsilon == pytest.approx(epsilon(both, delta=1e-5), abs=1e-9)
    assert found[1].spent.epsilon == pytest.approx(epsilon(both[1:], delta=1e-5), abs=1e-9)
    assert found[0].alone is not None
    own = epsilon([GaussianRelease(9.0), GaussianRelease(4.0)], delta=1e-5)
    assert found[0].alone.epsilon == pytest.approx(own, abs=1e-9)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(patients_table(found))
    told = console.export_text()
    for figure in (found[0].spent, found[0].alone, found[1].spent):
        assert shown(figure.epsilon) in told
    assert "unit patient" in " ".join(told.split())
    nameless = ImageDataset("h", "a test", False, ("a", "b"), ImageSplit(pixels, labels), None, loaded.test)
    save_npz(config.shard, nameless)
    with pytest.raises(DataError, match="whose the images are"):
        read_patients(config)
