"""Features of a fixed extractor: made once for a version of the data, kept at the hospital, and the same training."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from medsilo.algorithms.datasets import ImageDataset, to_tensor
from medsilo.algorithms.features import StainTexture
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.models import Layout, OnFixedFeatures, build, state_of
from medsilo.algorithms.protection.private import check_model
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.budget.sealed_keys import unsealed
from medsilo.privacy.consent.plan import AugmentationPlan, ModelPlan, RunPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.local_training import dataset, plan, site

NAMES = ("stain-texture", "scattering")


def on(name: str, **training: Any) -> RunPlan:
    return plan(**training).model_copy(update={"model": ModelPlan(name=name, input_shape=(3, 16, 16), classes=3)})


class Counting(StainTexture):
    """Counts the images that it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def of(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return super().of(images)


def counted(run: RunPlan, folder: Path | None = None, data: ImageDataset | None = None) -> tuple[LocalSite, Counting]:
    extractor = Counting()
    return site(run, data, model=OnFixedFeatures(extractor, 3), features=folder), extractor


@pytest.mark.parametrize("name", NAMES)
def test_only_the_linear_layer_is_trained_sent_and_kept(name: str) -> None:
    model = build(on(name).model, seed=1)
    layout = Layout.of(model)
    assert [spec.name for spec in layout.parameters] == ["classifier.weight"] == list(model.state_dict())
    assert layout.extractor == layout.buffers == layout.statistics == ()
    side = FedAvg().silo_side(site(on(name)))
    side.begin(state_of(model))
    side.train(0, {})
    assert [spec.name for spec in side.upload()[Exposure.MODEL_PARAMETERS_CLASSIFIER].specs] == ["classifier.weight"]
    assert side.upload()[Exposure.MODEL_PARAMETERS_EXTRACTOR].specs == ()


@pytest.mark.parametrize("name", NAMES)
def test_kept_features_train_the_model_that_images_train(name: str) -> None:
    run = on(name)
    one = site(run)
    wrapped = nn.Sequential(build(run.model, seed=1))  # in which nobody sees a fixed extractor
    other = site(run, model=wrapped)
    one.fit(0)
    other.fit(0)
    trained, expected = state_of(one.model)["classifier.weight"], state_of(wrapped)["0.classifier.weight"]
    assert bool(trained.any())
    assert torch.allclose(trained, expected, atol=1e-6)
    assert (one.test(state_of(one.model))[0] == other.test(state_of(wrapped))[0]).all()


def test_a_run_of_many_rounds_asks_about_each_image_once() -> None:
    data = dataset(train=10, test=5)
    one, extractor = counted(on("stain-texture"), data=data)
    for number in range(3):
        one.fit(number)
        one.measure(state_of(one.model))
    assert extractor.seen == 15


def test_another_start_reads_the_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    one, first = counted(on("stain-texture"), folder)
    one.fit(0)
    again, second = counted(on("stain-texture"), folder)
    again.fit(0)
    assert (first.seen, second.seen) == (15, 0)
    assert torch.equal(one.model.classifier.weight, again.model.classifier.weight)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_features_are_made_anew_for_other_data_and_another_extractor(tmp_path: Path) -> None:
    run = on("stain-texture")
    counted(run, tmp_path)[0].fit(0)
    (old,) = tmp_path.iterdir()
    newer = site(run, model=OnFixedFeatures(_Newer(), 3), features=tmp_path)
    newer.fit(0)
    assert old in tmp_path.iterdir()
    assert len(list(tmp_path.iterdir())) == 2
    other = dataset(train=11)
    site_, extractor = counted(run, tmp_path, other)
    site_.fit(0)
    assert extractor.seen == 16
    (file,) = tmp_path.iterdir()  # what was made of images that are no longer the hospital's is gone
    with safe_open(file, "pt") as read:
        assert read.metadata()["data_sha256"] == other.fingerprint


class _Newer(StainTexture):
    definition = "stain-texture, another computation"


@pytest.mark.parametrize("damage", ["cut", "other", "not finite"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    run = on("stain-texture")
    one, _ = counted(run, tmp_path)
    one.fit(0)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "pt") as read:
        metadata = read.metadata()
    tensors = load_file(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "other":
        save_file({**tensors, "train": tensors["train"][1:].clone()}, file, metadata)
    else:
        save_file({**tensors, "train": tensors["train"] * torch.inf}, file, metadata)
    again, extractor = counted(run, tmp_path)
    again.fit(0)
    assert extractor.seen == 15
    assert torch.equal(one.model.classifier.weight, again.model.classifier.weight)


def test_changed_images_have_features_of_their_own_at_every_step(tmp_path: Path) -> None:
    flips = (AugmentationPlan(kind="horizontal_flip", amount=0.5),)
    one, extractor = counted(on("stain-texture", augmentation=flips, epochs=2), tmp_path)
    one.fit(0)
    assert extractor.seen == 2 * 10
    assert not list(tmp_path.iterdir())


def test_methods_are_given_images_and_reserved_ones_are_not_trained_on() -> None:
    data = dataset()
    one, _ = counted(on("stain-texture"), data=data)
    assert torch.equal(one.train_data()[0], to_tensor(data.train.images))
    one.reserve(0.3)
    images, labels = one.train_data()
    features, same = one.inputs()
    assert len(images) == 7
    assert torch.equal(features, StainTexture()(images))
    assert torch.equal(labels, same)


@pytest.mark.parametrize("name", NAMES)
def test_with_differential_privacy_it_trains_on_kept_features(name: str) -> None:
    run = on(name)
    check_model(build(run.model, seed=1), name, run.model.input_shape)
    privacy = PrivacyPlan(epsilon=8, delta=1e-5, clipping_norm=1, noise_multiplier=1, sampling_rate=0.5, steps=4)
    run = run.model_copy(update={"privacy": privacy})
    one = site(run, charge=lambda *_: unsealed())
    one.fit(0)
    assert one.inputs()[0].shape == (10, StainTexture.features if name == "stain-texture" else 973)
    assert bool(state_of(one.model)["classifier.weight"].any())


@pytest.mark.parametrize("shape", [(3, 15, 28), (2, 28, 28)])
@pytest.mark.parametrize("name", NAMES)
def test_images_that_do_not_fit_are_refused_before_anything_is_trained(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="RGB or grey images of at least 16×16"):
        build(ModelPlan(name=name, input_shape=shape, classes=3))


def test_validation_images_are_judged_by_their_own_features() -> None:
    data = dataset()
    data = dataclasses.replace(data, validation=dataset(train=7).train)
    one, extractor = counted(on("stain-texture"), data=data)
    found = one.validate(state_of(one.model))
    assert found is not None
    assert extractor.seen == 10 + 5 + 7
