"""A budget belongs to images and patients: no new version, order, split, unit or name of theirs begins a fresh one."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medsilo.privacy.budget.accounting import (
    Adjacency,
    DiscreteLaplace,
    Event,
    GaussianRelease,
    SampledGaussian,
    SharedGaussian,
    as_group,
    epsilon,
)
from medsilo.privacy.budget.ledger import Budget, Entry, Ledger, Purpose, Subject
from medsilo.privacy.budget.units import KEY, SUFFIX, Content
from medsilo.privacy.errors import BudgetError, MedsiloError

DELTA = 1e-5
AMPLE = Budget(50.0, DELTA)
STEPS = SampledGaussian(0.1, 2.0, 50)
RELEASE = GaussianRelease(4.0)


def content(images: str, patients: str | None = None) -> Content:
    """One image for each letter; ``patients``: a name for each, of one letter."""
    pixels = [np.random.default_rng(ord(letter)).integers(0, 256, (4, 4, 1), dtype=np.uint8) for letter in images]
    return Content(np.stack(pixels), None if patients is None else np.array(list(patients)))


def account(
    folder: Path,
    version: str,
    train: Content,
    test: Content | None = None,
    *,
    unit: Any = "image",
    split: str = "train",
) -> Ledger:
    """``version``: any name; its hash stands for the fingerprint."""
    contents: Mapping[str, Content] = {"train": train, "test": test or content("x")}
    return Ledger(folder, Subject(hashlib.sha256(version.encode()).hexdigest(), unit, split), contents)


def charge(ledger: Ledger, event: Event = STEPS, budget: Budget = AMPLE, run: str = "r") -> Entry:
    return ledger.charge(event, Purpose("f", run, "cd" * 32, 0, "training"), budget)


def spent(ledger: Ledger) -> float:
    return ledger.guarantee(DELTA).epsilon


FORMER = content("abcd", "1122")


@pytest.mark.parametrize("unit", ["image", "patient"])
@pytest.mark.parametrize(
    "later",
    [
        pytest.param(FORMER, id="a corrected label"),
        pytest.param(content("abcde", "11223"), id="one image more"),
        pytest.param(content("dcab", "2211"), id="another order"),
        pytest.param(content("abcd", "7788"), id="other pseudonyms"),
        pytest.param(content("awyz", "1345"), id="one image of before"),
    ],
)
def test_a_new_version_inherits_what_its_images_have_cost(tmp_path: Path, unit: str, later: Content) -> None:
    charge(account(tmp_path, "former", FORMER, unit=unit))
    new = account(tmp_path, "new", later, unit=unit)
    assert spent(new) == epsilon([STEPS], delta=DELTA)
    budget = Budget(epsilon([STEPS], delta=DELTA) + 0.3, DELTA)
    with pytest.raises(BudgetError, match=r"of it is spent.*1 on data set \w{16} .unit \w+, split train"):
        charge(new, STEPS, budget)
    assert not new.entries()
    charge(new)
    assert spent(new) == epsilon([STEPS, STEPS], delta=DELTA)
    assert spent(account(tmp_path, "former", FORMER, unit=unit)) == spent(new), "and the former one from the new one"
    assert new.cost(DELTA).epsilon == epsilon([STEPS], delta=DELTA)


@pytest.mark.parametrize("unit", ["image", "patient"])
def test_versions_without_a_common_image_or_patient_do_not_inherit(tmp_path: Path, unit: str) -> None:
    charge(account(tmp_path, "former", FORMER, unit=unit))
    new = account(tmp_path, "new", content("efgh", "3344"), unit=unit)
    assert spent(new) == 0
    charge(new, RELEASE)
    assert spent(new) == epsilon([RELEASE], delta=DELTA)
    # One that joins both has images of either, and none that has borne both.
    both = account(tmp_path, "both", content("abefz", "11339"), unit=unit)
    assert spent(both) == epsilon([STEPS], delta=DELTA)


def test_a_patient_is_its_name_and_its_images(tmp_path: Path) -> None:
    charge(account(tmp_path, "first", content("ab", "11"), unit="patient"))
    # Other images under the same name, then those under another name: the same patient all along.
    charge(account(tmp_path, "second", content("cd", "11"), unit="patient"), RELEASE)
    last = account(tmp_path, "third", content("dz", "99"), unit="patient")
    assert spent(last) == epsilon([STEPS, RELEASE], delta=DELTA)
    assert spent(account(tmp_path, "third", content("dz", "99"))) == epsilon(
        [RELEASE], delta=DELTA, adjacency=Adjacency.REPLACE_ONE
    ), "as an image, d alone was in one of them"


def test_any_name_that_a_shard_can_hold_is_a_patients(tmp_path: Path) -> None:
    images = content("ab").images
    charge(account(tmp_path, "odd", Content(images, np.array(["\ud800", ""])), unit="patient"))
    assert spent(account(tmp_path, "other", Content(content("yz").images, np.array(["\ud800", "x"])), unit="patient"))


def test_an_image_that_moves_from_test_to_train_brings_along_what_accuracies_cost(tmp_path: Path) -> None:
    former = content("ab"), content("cd")
    measured = account(tmp_path, "former", *former, split="test")
    charge(measured, DiscreteLaplace(0.5))
    trained = account(tmp_path, "former", *former)
    charge(trained)
    assert spent(trained) == epsilon([STEPS], delta=DELTA), "train and test of one version share nothing"
    assert spent(measured) == 0.5
    cut_again = content("ac"), content("bd")
    assert spent(account(tmp_path, "again", *cut_again)) == epsilon([STEPS], delta=DELTA)
    assert spent(account(tmp_path, "again", *cut_again, split="test")) == epsilon([STEPS], delta=DELTA)
    only_moved = content("c"), content("d")
    assert spent(account(tmp_path, "moved", *only_moved)) == 0.5
    again = account(tmp_path, "again", *cut_again)
    charge(again)
    assert spent(account(tmp_path, "moved", *only_moved)) == 0.5 + epsilon([STEPS], delta=DELTA)


def test_charges_for_images_and_for_patients_of_the_same_images_compose(tmp_path: Path) -> None:
    alone = content("abcd", "1234")
    charge(account(tmp_path, "v", alone))
    charge(account(tmp_path, "v", alone, unit="patient"), RELEASE)
    both = epsilon([STEPS, RELEASE], delta=DELTA)
    assert spent(account(tmp_path, "v", alone)) == spent(account(tmp_path, "v", alone, unit="patient")) == both


def test_a_patient_with_several_images_bears_their_charges_together(tmp_path: Path) -> None:
    charge(account(tmp_path, "v", content("abcde", "11123")))
    patients = account(tmp_path, "v", content("abcde", "11123"), unit="patient")
    three = as_group(STEPS, 3)
    assert three is not None
    assert spent(patients) == epsilon([three], delta=DELTA) > 3 * epsilon([STEPS], delta=DELTA)
    charge(patients, RELEASE)
    assert spent(patients) == epsilon([three, RELEASE], delta=DELTA)
    # To blank one of several images changes the patient's gradient into another one.
    images = account(tmp_path, "v", content("abcde", "11123"))
    assert spent(images) == epsilon([STEPS, RELEASE], delta=DELTA, adjacency=Adjacency.REPLACE_ONE)
    assert spent(images) > epsilon([STEPS, RELEASE], delta=DELTA)


def grouped(event: Event, size: int) -> float:
    found = as_group(event, size)
    assert found is not None
    return epsilon([found], delta=DELTA)


def blank(count: int) -> Content:
    return Content(np.concatenate([np.zeros((count, 4, 4, 1), np.uint8), content("ab").images]), None)


def test_a_patient_who_is_split_into_several_bears_the_charges_for_all_of_them(tmp_path: Path) -> None:
    charge(account(tmp_path, "split", content("abc", "678"), unit="patient"))
    assert spent(account(tmp_path, "whole", content("abcz", "1112"), unit="patient")) == grouped(STEPS, 3)
    # Of the two halves, each other version's own word says whom it holds.
    assert spent(account(tmp_path, "split", content("abc", "678"), unit="patient")) == epsilon([STEPS], delta=DELTA)


def test_a_patient_is_split_under_names_that_were_anothers_too(tmp_path: Path) -> None:
    """The names run through everybody, as those of two prepared files do."""
    charge(account(tmp_path, "split", content("abcde", "23451"), unit="patient"))
    whole = account(tmp_path, "whole", content("abcde", "11234"), unit="patient")
    assert spent(whole) == grouped(STEPS, 2)
    renumbered = account(tmp_path, "renumbered", content("zabcde", "123456"), unit="patient")
    assert spent(renumbered) == epsilon([STEPS], delta=DELTA), "one patient more at the beginning of the list"


def test_an_image_that_stands_several_times_in_another_version_bears_all_of_that(tmp_path: Path) -> None:
    charge(account(tmp_path / "i", "merged", content("aaab")))
    assert spent(account(tmp_path / "i", "v", content("ab"))) == grouped(STEPS, 3)
    assert spent(account(tmp_path / "i", "v", content("aab"))) == grouped(STEPS, 2), "two of ours share three"
    assert spent(account(tmp_path / "i", "v", content("b"))) == epsilon([STEPS], delta=DELTA), "b is there once"
    charge(account(tmp_path / "p", "merged", content("aab", "123"), unit="patient"))
    assert spent(account(tmp_path / "p", "v", content("ab"))) == grouped(STEPS, 2), "under two patients"
    charge(account(tmp_path / "blank", "v", blank(40)))
    assert spent(account(tmp_path / "blank", "fewer", blank(1))) == epsilon([STEPS], delta=DELTA), "nobody's"


def test_images_of_nobody_known_may_all_be_one_patients(tmp_path: Path) -> None:
    charge(account(tmp_path, "nameless", content("abc")))
    patients = account(tmp_path, "named", content("axyz", "1123"), unit="patient")
    assert spent(patients) == grouped(STEPS, 3), "b and c may be of the same patient as a"
    charge(patients, RELEASE)
    strangers = account(tmp_path, "strangers", content("uv", "89"), unit="patient")
    assert spent(strangers) == grouped(STEPS, 2), "b and c may be theirs, and a is known to be another's"
    charge(account(tmp_path, "all", content("abc", "111"), unit="patient"), GaussianRelease(40.0))
    assert spent(account(tmp_path, "strangers", content("uv", "89"), unit="patient")) == 0, "now it is known whose"


def test_a_key_that_another_process_makes_meanwhile_hides_no_charge(tmp_path: Path) -> None:
    """Hashes under a key of one's own, from before there was one in the folder, are like nobody's."""
    charge(account(tmp_path, "before", content("x", "9")))
    as_before(tmp_path)
    former = account(tmp_path, "former", FORMER)
    assert spent(former) == epsilon([STEPS], delta=DELTA)
    charge(account(tmp_path, "latter", content("az", "17")))
    budget = Budget(epsilon([STEPS, STEPS], delta=DELTA) + 0.1, DELTA)
    with pytest.raises(BudgetError, match="refused: the privacy budget of these images"):
        charge(former, STEPS, budget)


def test_hashes_of_two_keys_are_not_compared(tmp_path: Path) -> None:
    """A daemon goes on while the folder's key is made anew."""
    running = account(tmp_path, "former", FORMER)
    charge(running)
    as_before(tmp_path)
    charge(account(tmp_path, "latter", FORMER))
    assert spent(running) == epsilon([STEPS, STEPS], delta=DELTA)


def test_what_one_budget_of_ten_allowed_twice_it_allows_once(tmp_path: Path) -> None:
    """7.365 for images and 7.365 for patients passed a budget of 10, each with an account of its own."""
    event, budget = SampledGaussian(0.1, 0.837, 50), Budget(10.0, DELTA)
    assert 7.2 < epsilon([event], delta=DELTA) < 7.5
    charge(account(tmp_path, "v", FORMER), event, budget)
    with pytest.raises(BudgetError, match="unit image, split train"):
        charge(account(tmp_path, "v", FORMER, unit="patient"), event, budget)


def test_images_of_another_size_may_be_the_same_ones_and_count_as_such(tmp_path: Path) -> None:
    charge(account(tmp_path, "small", content("ab")))
    larger = Content(np.repeat(content("yz").images, 2, axis=1), None)
    assert spent(account(tmp_path, "larger", larger)) == epsilon([STEPS], delta=DELTA)


def as_before(folder: Path) -> None:
    """An account as it was made before there were hashes."""
    for path in [*folder.glob(f"*{SUFFIX}"), folder / KEY]:
        path.unlink()


def test_an_account_of_before_counts_for_everyone_until_its_shard_is_shown(tmp_path: Path) -> None:
    charge(account(tmp_path, "former", FORMER))
    as_before(tmp_path)
    stranger = account(tmp_path, "new", content("yz", "89"))
    assert spent(stranger) == epsilon([STEPS], delta=DELTA), "nobody knows that they have nothing in common"
    assert account(tmp_path, "new", content("yz", "89"), unit="patient").guarantee(DELTA).epsilon == float("inf")
    charge(stranger)
    assert spent(stranger) == epsilon([STEPS, STEPS], delta=DELTA)
    account(tmp_path, "former", FORMER).remember()
    assert spent(account(tmp_path, "new", content("yz", "89"))) == epsilon([STEPS], delta=DELTA)
    assert spent(account(tmp_path, "third", content("e"))) == 0


def test_the_present_versions_account_of_before_is_carried_over(tmp_path: Path) -> None:
    tested = account(tmp_path, "v", FORMER, content("yz"), split="test")
    charge(tested, DiscreteLaplace(0.5))
    charge(account(tmp_path, "v", FORMER, content("yz")))
    as_before(tmp_path)
    unread = Ledger(tmp_path, account(tmp_path, "v", FORMER).subject)
    assert spent(unread) == epsilon([STEPS], delta=DELTA), "no accuracy left where a unit was in both splits"
    charge(account(tmp_path, "v", FORMER, content("yz")), RELEASE)
    assert sorted(path.name.rpartition("-")[2] for path in tmp_path.glob(f"*{SUFFIX}")) == [
        f"test{SUFFIX}",
        f"train{SUFFIX}",
    ]
    assert spent(account(tmp_path, "later", content("ae", "16"))) == epsilon([STEPS, RELEASE], delta=DELTA)
    assert spent(account(tmp_path, "later", content("y"))) == 0.5


@pytest.mark.parametrize("how", ["cut", "changed", "swapped", "empty"])
def test_a_damaged_file_of_hashes_is_refused_with_a_way_out(tmp_path: Path, how: str) -> None:
    charge(account(tmp_path, "former", FORMER))
    charge(account(tmp_path, "other", content("yz", "89")))
    path, another = sorted(tmp_path.glob(f"*-train{SUFFIX}"))
    whole = path.read_bytes()
    damaged = {"cut": whole[:-1], "changed": whole[:-1] + b"?", "swapped": another.read_bytes(), "empty": b""}[how]
    path.write_bytes(damaged)
    for ledger in (account(tmp_path, "former", FORMER), account(tmp_path, "new", content("zz"))):
        with pytest.raises(BudgetError, match=r"damaged.*Delete it.*--shard.*lost as well, a backup"):
            spent(ledger)
        with pytest.raises(BudgetError, match="damaged"):
            charge(ledger)
    path.unlink()  # the way out
    assert spent(account(tmp_path, "new", content("k"))) >= epsilon([STEPS], delta=DELTA), "it counts for everyone"


@pytest.mark.parametrize("how", ["gone", "another", "empty"])
def test_a_lost_key_is_refused_and_never_a_fresh_budget(tmp_path: Path, how: str) -> None:
    charge(account(tmp_path, "former", FORMER))
    key = (tmp_path / KEY).read_bytes()
    if how == "gone":
        (tmp_path / KEY).unlink()
    else:
        (tmp_path / KEY).write_bytes(bytes(32) if how == "another" else b"")
    new = account(tmp_path, "new", content("ab"))
    with pytest.raises(BudgetError, match=f"{KEY}.*was only moved.*--shard.*lost as well, only a backup"):
        charge(new)
    with pytest.raises(BudgetError, match=KEY):
        charge(account(tmp_path, "former", FORMER))
    (tmp_path / KEY).write_bytes(key)
    assert spent(account(tmp_path, "new", content("ab"))) == epsilon([STEPS], delta=DELTA)
    # Or, where there is no copy: without the hashes, all that was charged counts for all.
    as_before(tmp_path)
    charge(account(tmp_path, "new", content("yz")), RELEASE)
    assert spent(account(tmp_path, "new", content("yz"))) == epsilon([STEPS, RELEASE], delta=DELTA)


def test_the_files_tell_a_stranger_nothing(tmp_path: Path) -> None:
    charge(account(tmp_path / "a", "v", FORMER))
    charge(account(tmp_path / "b", "v", FORMER))
    (one, other) = (next((tmp_path / name).glob(f"*-train{SUFFIX}")) for name in "ab")
    assert len({line for path in (one, other) for line in [path.read_bytes().partition(b"\n")[2]]}) == 2
    for folder in (tmp_path / "a", tmp_path / "b"):
        for path in folder.iterdir():
            assert path.stat().st_mode & 0o077 == 0, path
    rows = [one.read_bytes().partition(b"\n")[2][: 4 * 16][at : at + 16] for at in range(0, 64, 16)]
    assert rows == sorted(rows), "in no order of the shard's"


def test_looking_writes_nothing(tmp_path: Path) -> None:
    assert spent(account(tmp_path / "none", "v", FORMER)) == 0
    assert not (tmp_path / "none").exists()
    charge(account(tmp_path, "former", FORMER))
    as_before(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert spent(account(tmp_path, "new", FORMER)) > 0
    assert {path.name for path in tmp_path.iterdir()} == before


def _charge_often(folder: Path, number: int, refused: Any) -> None:
    """Each process has a version of its own, of which the others have an image too."""
    ledger = account(folder, f"version {number}", content("s" + "abcd"[number]))
    for _ in range(6):
        try:
            charge(ledger, GaussianRelease(10.0), Budget(1.5, DELTA), run=str(number))
        except MedsiloError:
            with refused.get_lock():
                refused.value += 1


def test_processes_that_charge_different_versions_at_once_do_not_overspend(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    refused = context.Value("i", 0)
    processes = [context.Process(target=_charge_often, args=(tmp_path, number, refused)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    found = account(tmp_path, "all", content("s"))
    held = sum(found.spending(DELTA).accounts.values())
    assert held + refused.value == 24
    assert 0 < held < 24
    assert spent(found) <= 1.5 < epsilon([GaussianRelease(10.0, held + 1)], delta=DELTA)
    assert len(list(tmp_path.glob(KEY))) == 1


def test_many_groups_of_images_are_reckoned_as_one_that_bore_all(tmp_path: Path) -> None:
    letters = "abcdefghijklmn"
    for letter in letters:
        charge(account(tmp_path, letter, content(letter)), GaussianRelease(20.0))
    everything = account(tmp_path, "everything", content(letters))
    assert spent(everything) >= epsilon([GaussianRelease(20.0)], delta=DELTA)
    assert spent(account(tmp_path, "few", content(letters[:5]))) == epsilon([GaussianRelease(20.0)], delta=DELTA)


def test_each_patient_has_cost_what_the_versions_that_hold_it_were_charged(tmp_path: Path) -> None:
    charge(account(tmp_path, "first", content("aabb", "1122"), unit="patient"))
    second = account(tmp_path, "second", content("bbccd", "22334"), unit="patient")
    charge(second, RELEASE)
    charge(account(tmp_path, "pixels", content("d")))  # its images, under no name
    found = second.of_patients(DELTA)
    alone = epsilon([RELEASE], delta=DELTA)
    twice = epsilon([STEPS, RELEASE], delta=DELTA)
    assert {name: one.epsilon for name, one in found.items()} == {"2": twice, "4": twice, "3": alone}
    assert list(found)[-1] == "3", "the most-spent first"
    assert [len(one.course) for one in found.values()] == [2, 2, 1]
    assert max(one.epsilon for one in found.values()) == spent(second)
    assert not account(tmp_path, "second", content("bbccd"), unit="patient").of_patients(DELTA), "nobody is named"


def test_each_patient_bears_what_was_charged_by_image_as_often_as_it_has_images(tmp_path: Path) -> None:
    shard = content("abcdefg", "1111122")
    charge(account(tmp_path, "v", shard), RELEASE)
    more = content("abcdefghi", "111112233")  # and patient 3 was in no run
    patients = account(tmp_path, "more", more, unit="patient")
    found = {name: one.epsilon for name, one in patients.of_patients(DELTA).items()}
    five, two = (epsilon([as_group(RELEASE, size)], delta=DELTA) for size in (5, 2))  # type: ignore[list-item]
    assert found == {"1": five, "2": two, "3": 0}
    assert spent(patients) == five > 2 * two


def test_patients_of_a_version_that_is_not_on_record_may_be_anybody(tmp_path: Path) -> None:
    charge(Ledger(tmp_path, Subject("ab" * 32, "patient")))
    now = account(tmp_path, "now", content("ab", "12"), unit="patient")
    assert [one.epsilon for one in now.of_patients(DELTA).values()] == [epsilon([STEPS], delta=DELTA)] * 2


def test_by_the_own_share_of_noise_alone_it_is_more(tmp_path: Path) -> None:
    patients = account(tmp_path, "v", content("ab", "12"), unit="patient")
    charge(patients, RELEASE)
    assert next(iter(patients.of_patients(DELTA).values())).alone is None
    charge(patients, SharedGaussian(6.0, 4))
    (one, _) = patients.of_patients(DELTA).values()
    assert one.epsilon == pytest.approx(epsilon([RELEASE, GaussianRelease(6.0)], delta=DELTA), abs=1e-9)
    assert one.alone is not None
    assert one.alone.epsilon == pytest.approx(epsilon([RELEASE, GaussianRelease(3.0)], delta=DELTA), abs=1e-9)
