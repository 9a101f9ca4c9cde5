"""What cutting a data set into shards promises."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, load_npz, save_npz
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.silo.commands.shard import ImagesFrom, SettingName
from medsilo.silo.commands.shard import shard as shard_command
from medsilo.silo.data.dealing import LEAST_POOLED, by_patient, largest_remainder, pooled_dirichlet
from medsilo.silo.data.settings import (
    ByPatient,
    Dirichlet,
    Pathological,
    PooledDirichlet,
    PracticalGroups,
    Setting,
    TestFrom,
)
from medsilo.silo.data.sharding import cut

REAL = Path(__file__).parents[3].parent / "shared" / "data" / "coloncells.npz"


@functools.cache
def real() -> ImageDataset:
    if not REAL.is_file():
        pytest.skip("the real images are not here")
    return load_npz(REAL)


def split(labels: np.ndarray[Any, Any], patients: np.ndarray[Any, Any] | None, first: int) -> ImageSplit:
    """Images of one pixel that tell their place in the full set, so that shards can be traced back to it."""
    places = np.arange(first, first + len(labels), dtype="<u4")
    images = np.repeat(places.view(np.uint8).reshape(-1, 2, 2, 1), 1, axis=3)
    return ImageSplit(images, labels.astype(np.int64), patients)


def dataset(
    *, train: int = 900, test: int = 450, classes: int = 9, patients: bool = True, seed: int = 0
) -> ImageDataset:
    rng = np.random.default_rng(seed)

    def names(n: int, first: int) -> np.ndarray[Any, Any] | None:
        return np.array([f"p{first + number}" for number in rng.integers(n // 15, size=n)]) if patients else None

    return ImageDataset(
        "a set",
        "a test",
        False,
        tuple(f"class {label}" for label in range(classes)),
        split(rng.permutation(np.arange(train) % classes), names(train, 0), 0),
        None,
        split(rng.permutation(np.arange(test) % classes), names(test, 1000), train),
    )


def places(shard_split: ImageSplit) -> list[int]:
    found: list[int] = shard_split.images.reshape(-1, 4).view("<u4")[:, 0].tolist()
    return found


def assert_disjoint(full: ImageDataset, shards: list[ImageDataset], test_from: str = "test") -> None:
    train = [place for shard in shards for place in places(shard.train)]
    test = [place for shard in shards for place in places(shard.test)]
    assert len(set(train + test)) == len(train) + len(test)
    assert max(train) < len(full.train)
    if test_from == "test":
        assert min(test) >= len(full.train)
    else:
        assert max(test) < len(full.train)


SETTINGS: list[Setting] = [
    PracticalGroups(groups=(2, 2, 2), train_per_silo=100, test_per_silo=20),
    Pathological(silos=7, classes_per_silo=2, train_per_silo=60, test_per_silo=10),
    Dirichlet(silos=6, alpha=0.3, train_per_silo=120, test_per_silo=30),
    ByPatient(silos=6),
    PracticalGroups(groups=(2, 2, 2), train_per_silo=100, test_per_silo=20, test_from="train"),
    Pathological(silos=7, train_per_silo=60, test_per_silo=10, test_from="train"),
    Dirichlet(silos=6, alpha=0.3, train_per_silo=120, test_per_silo=30, test_from="train"),
    ByPatient(silos=6, test_from="train"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{type(setting).__name__}-{setting.test_from}")
class TestEverySetting:
    def test_the_same_seed_gives_the_same_shards(self, setting: Setting) -> None:
        versions = [[shard.fingerprint for shard in cut(dataset(), setting, seed=seed)] for seed in (1, 1, 2)]
        assert versions[0] == versions[1]
        assert versions[0] != versions[2]

    def test_no_image_is_in_two_places(self, setting: Setting) -> None:
        assert_disjoint(dataset(), cut(dataset(), setting, seed=0), setting.test_from)

    def test_shards_carry_names_labels_and_patients(self, setting: Setting) -> None:
        full = dataset()
        shards = cut(full, setting, seed=0, prefix="clinic")
        assert [shard.name for shard in shards] == [f"clinic{k + 1}" for k in range(setting.silos)]
        assert full.train.patients is not None
        for shard in shards:
            assert shard.class_names == full.class_names
            assert shard.validation is None
            assert shard.train.patients is not None
            for place, label, patient in zip(
                places(shard.train), shard.train.labels, shard.train.patients, strict=True
            ):
                assert full.train.labels[place] == label
                assert full.train.patients[place] == patient

    def test_a_negative_seed_is_refused(self, setting: Setting) -> None:
        with pytest.raises(ConfigurationError, match="seed is -1"):
            cut(dataset(), setting, seed=-1)


class TestPracticalGroups:
    @pytest.mark.parametrize("test_from", ["test", "train"])
    def test_the_share_of_dominant_images_is_kept_in_train_and_test(self, test_from: TestFrom) -> None:
        setting = PracticalGroups((2, 1, 2), train_per_silo=100, test_per_silo=20, test_from=test_from)
        shards = cut(dataset(train=1800), setting, seed=4)
        for shard, group in zip(shards, (0, 0, 1, 2, 2), strict=True):
            dominant = list(setting.dominant[group])
            assert (len(shard.train), len(shard.test)) == (100, 20)
            assert shard.train.counts(9)[dominant].sum() == 80
            assert shard.test.counts(9)[dominant].sum() == 16

    def test_each_test_count_is_its_exact_share_rounded(self) -> None:
        setting = PracticalGroups((2, 2, 2), train_per_silo=100, test_per_silo=20)
        for shard in cut(dataset(), setting, seed=4):
            exact = shard.train.counts(9) * 20 / 100
            assert (np.abs(shard.test.counts(9) - exact) < 1).all()

    def test_a_share_of_one_leaves_only_dominant_classes(self) -> None:
        setting = PracticalGroups((1,), ((2, 5),), share=1.0, train_per_silo=100, test_per_silo=20)
        (shard,) = cut(dataset(), setting, seed=0)
        assert set(shard.train.labels) == set(shard.test.labels) == {2, 5}

    def test_a_class_that_runs_out_is_named_with_numbers_that_fit(self) -> None:
        setting = PracticalGroups((2, 2, 2), train_per_silo=150, test_per_silo=20)
        with pytest.raises(ConfigurationError, match=r"class \d runs out: .* need \d+ .* are 100; .* about \d+"):
            cut(dataset(), setting, seed=0)

    def test_dominant_classes_that_do_not_exist_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="dominant class 5 does not exist"):
            cut(dataset(classes=4), PracticalGroups(), seed=0)

    def test_no_other_classes_for_the_rest_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="all classes"):
            cut(dataset(classes=3), PracticalGroups((1,), ((0, 1, 2),)), seed=0)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"groups": ()}, "groups is empty"),
            ({"groups": (6, 0, 8)}, "groups is 0"),
            ({"groups": (6, 6)}, "3 groups, groups has 2"),
            ({"dominant": ((0,), (), (1,))}, "dominant"),
            ({"dominant": ((0, 0), (1,), (2,))}, "dominant"),
            ({"share": 1.2}, "share is 1.2"),
            ({"share": float("nan")}, "share is nan"),
            ({"train_per_silo": 0}, "train_per_silo is 0"),
            ({"test_per_silo": -4}, "test_per_silo is -4"),
            ({"test_from": "val"}, "test_from is 'val'"),
        ],
    )
    def test_a_wrong_field_is_named(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            PracticalGroups(**wrong)

    def test_twenty_hospitals_fit_the_real_images(self) -> None:
        setting = PracticalGroups((10, 10), ((0, 1), (2, 3)), train_per_silo=160, test_per_silo=36)
        shards = cut(real(), setting, seed=0)
        assert [shard.train.counts(4)[:2].sum() for shard in shards] == [128] * 10 + [32] * 10


class TestPathological:
    def test_every_silo_has_so_many_classes_in_equal_parts(self) -> None:
        shards = cut(dataset(), SETTINGS[1], seed=0)
        for shard in shards:
            assert sorted(shard.train.counts(9))[-2:] == [30, 30]
            assert set(shard.train.labels) == set(shard.test.labels)
        held = np.sum([shard.train.counts(9) > 0 for shard in shards], axis=0)
        assert np.ptp(held) <= 1

    def test_more_classes_than_there_are_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="at most 9"):
            cut(dataset(), Pathological(silos=2, classes_per_silo=10), seed=0)


class TestDirichlet:
    @settings(max_examples=40, deadline=None)
    @given(
        silos=st.integers(1, 9),
        alpha=st.floats(1e-3, 1e3),
        train=st.integers(1, 100),
        test=st.integers(1, 50),
        seed=st.integers(0, 2**32),
        test_from=st.sampled_from(["test", "train"]),
    )
    def test_sizes_hold_and_images_stay_disjoint_however_uneven(
        self, silos: int, alpha: float, train: int, test: int, seed: int, test_from: TestFrom
    ) -> None:
        full = dataset(patients=False)
        if test_from == "train":
            train = max(1, train - test)
        shards = cut(full, Dirichlet(silos, alpha, train, test, test_from), seed=seed)
        assert_disjoint(full, shards, test_from)
        assert {len(shard.train) for shard in shards} == {train}
        assert {len(shard.test) for shard in shards} == {test}

    def test_every_image_can_be_used(self) -> None:
        shards = cut(dataset(), Dirichlet(9, 0.05, train_per_silo=100, test_per_silo=50), seed=0)
        assert np.sum([shard.train.counts(9) for shard in shards], axis=0).tolist() == [100] * 9

    def test_test_images_have_the_training_images_proportions(self) -> None:
        for shard in cut(dataset(), Dirichlet(3, 0.5, 60, 30), seed=1):
            assert (np.abs(shard.test.counts(9) - shard.train.counts(9) / 2) < 1).all()

    def test_small_alpha_is_more_uneven_than_large(self) -> None:
        def largest_share(alpha: float) -> float:
            shards = cut(dataset(), Dirichlet(8, alpha, 60, 10), seed=0)
            return float(np.mean([shard.train.counts(9).max() / 60 for shard in shards]))

        assert largest_share(0.05) > 0.6 > 0.2 > largest_share(1000.0)

    def test_too_many_images_are_refused_with_the_numbers(self) -> None:
        with pytest.raises(ConfigurationError, match="need 1,000 training images together, and there are 900"):
            cut(dataset(), Dirichlet(10, 0.5, 100, 10), seed=0)

    @pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_wrong_alpha_is_refused(self, alpha: float) -> None:
        with pytest.raises(ConfigurationError, match="alpha"):
            Dirichlet(3, alpha)


class TestPooledDirichlet:
    @settings(max_examples=40, deadline=None)
    @given(
        silos=st.integers(1, 9),
        alpha=st.floats(0.5, 1e3),
        test_share=st.floats(0.001, 0.999),
        seed=st.integers(0, 2**32),
    )
    def test_every_image_of_both_splits_is_in_one_place(
        self, silos: int, alpha: float, test_share: float, seed: int
    ) -> None:
        full = dataset(patients=False)
        shards = cut(full, PooledDirichlet(silos, alpha, test_share), seed=seed)
        whole = np.concatenate([full.train.labels, full.test.labels])
        dealt = []
        for piece in shards:
            total = len(piece.train) + len(piece.test)
            assert total >= LEAST_POOLED
            assert min(len(piece.train), len(piece.test)) >= 1
            assert abs(len(piece.test) - test_share * total) <= 1
            for part in (piece.train, piece.test):
                dealt += places(part)
                assert whole[places(part)].tolist() == part.labels.tolist()
        assert sorted(dealt) == list(range(len(whole)))

    def test_the_same_seed_gives_the_same_shards(self) -> None:
        versions = [
            [piece.fingerprint for piece in cut(dataset(patients=False), PooledDirichlet(5, 0.5), seed=seed)]
            for seed in (1, 1, 2)
        ]
        assert versions[0] == versions[1]
        assert versions[0] != versions[2]

    def test_training_and_test_images_come_from_both_splits_alike(self) -> None:
        full = dataset(patients=False)
        for piece in cut(full, PooledDirichlet(2, 100.0), seed=0):
            for part in (piece.train, piece.test):
                # Two thirds of the images were training images.
                assert np.mean(np.array(places(part)) < len(full.train)) == pytest.approx(2 / 3, abs=0.1)

    def test_a_silos_halves_have_its_classes_alike(self) -> None:
        for piece in cut(dataset(train=6000, test=3000, patients=False), PooledDirichlet(3, 0.5), seed=2):
            train, test = (part.counts(9) / len(part) for part in (piece.train, piece.test))
            assert np.abs(train - test).max() < 0.05

    def test_small_alpha_is_more_uneven_than_large_in_classes_and_sizes(self) -> None:
        def spread(alpha: float) -> tuple[float, float]:
            shards = cut(dataset(patients=False), PooledDirichlet(6, alpha), seed=0)
            sizes = [len(piece.train) for piece in shards]
            return float(np.mean([piece.train.counts(9).max() / len(piece.train) for piece in shards])), np.ptp(sizes)

        (uneven, apart), (even, together) = spread(0.3), spread(1000.0)
        assert uneven > 0.3 > 0.2 > even
        assert apart > 60 > 30 > together

    def test_a_class_without_images_does_no_harm(self) -> None:
        labels = np.repeat([0, 2], 40)
        shards = pooled_dirichlet(labels, PooledDirichlet(2, 10.0), num_classes=3, seed=0)
        assert sum(len(piece.train) + len(piece.test) for piece in shards) == 80

    @pytest.mark.parametrize("known", ["train", "test"])
    def test_known_patients_are_refused(self, known: str) -> None:
        told, untold = dataset(), dataset(patients=False)
        full = ImageDataset(
            "a set", "a test", False, told.class_names,
            (told if known == "train" else untold).train, None, (told if known == "test" else untold).test,
        )  # fmt: skip
        with pytest.raises(DataError, match=r"a set: the images tell their patients.*deals whole patients"):
            cut(full, PooledDirichlet(2, 0.5), seed=0)

    def test_too_few_images_are_refused_with_the_numbers(self) -> None:
        with pytest.raises(ConfigurationError, match=r"need 1,360 training and test images .* there are 1,350"):
            cut(dataset(patients=False), PooledDirichlet(136, 0.5), seed=0)

    def test_shares_too_uneven_for_ten_images_each_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"fewer than 10 images; .* alpha than 0\.001, or for fewer silos"):
            cut(dataset(patients=False), PooledDirichlet(20, 0.001), seed=0)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"silos": 0}, "silos is 0"),
            ({"alpha": 0.0}, "alpha is 0"),
            ({"alpha": float("nan")}, "alpha is nan"),
            ({"test_share": 0.0}, "test_share is 0"),
            ({"test_share": 1.0}, "test_share is 1"),
            ({"test_share": float("nan")}, "test_share is nan"),
        ],
    )
    def test_a_wrong_field_is_named(self, wrong: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            PooledDirichlet(**{"silos": 3, "alpha": 0.5, **wrong})

    def test_the_command_cuts_it_and_refuses_what_it_has_no_use_for(self, tmp_path: Path) -> None:
        source = tmp_path / "full.npz"
        save_npz(source, dataset(patients=False))
        chosen = SettingName.DIRICHLET_POOLED
        shard_command(source=str(source), out=tmp_path / "out", setting=chosen, silos=3, alpha=5.0, test_share=0.25)
        index = json.loads((tmp_path / "out" / "shards.json").read_text())
        assert index["setting"] == {"name": "dirichlet-pooled", "silos": 3, "alpha": 5.0, "test_share": 0.25}
        sizes = [(sum(piece["train"]), sum(piece["test"])) for piece in index["shards"]]
        assert sum(map(sum, sizes)) == 1350
        assert all(tested == round((trained + tested) / 4) for trained, tested in sizes)
        for option, value in {"train": 5, "test": 5, "test_from": ImagesFrom.TEST}.items():
            words: Any = {option: value}
            with pytest.raises(ConfigurationError, match=f"--{option.replace('_', '-')} has no meaning"):
                shard_command(source=str(source), out=tmp_path / "out", setting=chosen, **words)
        with pytest.raises(ConfigurationError, match="--test-share has no meaning with --setting dirichlet"):
            shard_command(source=str(source), out=tmp_path / "out", setting=SettingName.DIRICHLET, test_share=0.5)


class TestByPatient:
    @settings(max_examples=50, deadline=None)
    @given(data=st.data(), silos=st.integers(1, 6), seed=st.integers(0, 1000))
    def test_no_patient_is_in_two_shards(self, data: st.DataObject, silos: int, seed: int) -> None:
        number = st.integers(0, 30)
        train = data.draw(hnp.arrays(np.int64, st.integers(1, 120), elements=number)).astype(str)
        test = data.draw(hnp.arrays(np.int64, st.integers(1, 120), elements=number)).astype(str)
        test_from: TestFrom = data.draw(st.sampled_from(["test", "train"]))
        try:
            shards = by_patient(train, test, ByPatient(silos, test_from), seed=seed)
        except ConfigurationError as error:
            assert "patients" in str(error)  # noqa: PT017 (either outcome is right here)
            return
        tested = test if test_from == "test" else train
        owners: dict[str, tuple[int, str]] = {}
        for number_of_shard, shard in enumerate(shards):
            assert len(shard.train)
            assert len(shard.test)
            for part, patients in (("train", train[shard.train]), ("test", tested[shard.test])):
                for patient in set(patients):
                    assert owners.setdefault(patient, (number_of_shard, part)) == (number_of_shard, part)
        assert sorted(np.concatenate([shard.train for shard in shards])) == sorted(
            index for index, patient in enumerate(train) if owners.get(patient, (0, ""))[1] == "train"
        )

    def test_real_patients_stay_whole_and_every_image_is_used(self) -> None:
        full = real()
        shards = cut(full, ByPatient(silos=12), seed=0)
        seen: set[str] = set()
        for shard in shards:
            for part in (shard.train, shard.test):
                assert part.patients is not None
                patients = set(part.patients.tolist())
                assert not patients & seen
                seen |= patients
        assert sum(len(shard.train) for shard in shards) == len(full.train)
        assert sum(len(shard.test) for shard in shards) == len(full.test)

    def test_shards_are_about_the_same_size(self) -> None:
        sizes = [len(shard.train) for shard in cut(dataset(), ByPatient(silos=4), seed=0)]
        assert max(sizes) - min(sizes) < 40

    def test_patients_of_both_splits_are_not_tested_on(self) -> None:
        train, test = np.array(["a", "b", "b"]), np.array(["b", "c", "c", "a"])
        (shard,) = by_patient(train, test, ByPatient(1), seed=0)
        assert test[shard.test].tolist() == ["c", "c"]

    def test_too_few_patients_are_counted_in_the_refusal(self) -> None:
        with pytest.raises(ConfigurationError, match="20 silos need a patient each, and there are 12 test"):
            cut(real(), ByPatient(silos=20), seed=0)

    def test_images_without_patients_are_refused(self) -> None:
        with pytest.raises(DataError, match="a set: the training images do not tell their patients"):
            cut(dataset(patients=False), ByPatient(silos=2), seed=0)


class TestLargestRemainder:
    @given(
        weights=st.lists(st.just(0.0) | st.floats(1e-3, 1e6), min_size=1, max_size=12).filter(
            lambda weights: sum(weights) > 0
        ),
        total=st.integers(0, 10_000),
    )
    def test_counts_add_up_and_stay_within_one_of_the_exact_share(self, weights: list[float], total: int) -> None:
        array = np.array(weights)
        counts = largest_remainder(array, total)
        assert counts.sum() == total
        assert (np.abs(counts - array * (total / array.sum())) < 1 + 1e-6).all()
        assert (counts[array == 0] == 0).all()

    @pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
    def test_weights_that_give_no_shares_are_refused(self, weights: list[float]) -> None:
        with pytest.raises(ConfigurationError, match="weights"):
            largest_remainder(np.array(weights), 5)
