"""What the generated tissue promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from medsilo.algorithms.datasets import ImageDataset, to_tensor
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.data.synthetic import generate_tissue


@pytest.fixture(scope="module")
def tissue() -> ImageDataset:
    return generate_tissue(seed=3, train=1500, test=450)


def test_it_says_that_it_is_synthetic(tissue: ImageDataset) -> None:
    assert tissue.synthetic
    assert "synthetic" in tissue.name
    assert "not real" in tissue.source
    assert all(name.startswith("synthetic ") for name in tissue.class_names)
    assert tissue.train.patients is not None
    assert all(patient.startswith("synthetic-patient-") for patient in tissue.train.patients)


def test_it_has_pathmnists_shape_and_even_classes(tissue: ImageDataset) -> None:
    assert tissue.image_shape == (3, 28, 28)
    assert tissue.num_classes == 9
    assert np.ptp(tissue.train.counts(9)) <= 1
    assert np.ptp(tissue.test.counts(9)) <= 1


def test_the_same_seed_gives_the_same_images() -> None:
    first, again, other = (generate_tissue(seed=seed, train=40, test=10) for seed in (5, 5, 6))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


def test_no_patient_is_in_both_train_and_test(tissue: ImageDataset) -> None:
    assert tissue.train.patients is not None
    assert tissue.test.patients is not None
    assert not set(tissue.train.patients) & set(tissue.test.patients)
    assert len(set(tissue.train.patients)) >= 20


def test_patients_differ_in_stain(tissue: ImageDataset) -> None:
    """Patients' mean colours vary more than they would if images were dealt to patients at random."""
    assert tissue.train.patients is not None
    _, patient = np.unique(tissue.train.patients, return_inverse=True)
    class_means = np.stack([tissue.train.images[tissue.train.labels == c].mean((0, 1, 2)) for c in range(9)])
    colour = tissue.train.images.mean((1, 2)) - class_means[tissue.train.labels]

    def between(groups: np.ndarray[Any, Any]) -> float:
        return float(np.std([colour[groups == group].mean(0) for group in np.unique(groups)], axis=0).sum())

    shuffled = np.random.default_rng(0).permutation(patient)
    assert between(patient) > 1.5 * between(shuffled)


@pytest.mark.parametrize(("train", "test", "size"), [(1, 1, 28), (20, 9, 32), (20, 9, 8)])
def test_any_size_can_be_asked_for(train: int, test: int, size: int) -> None:
    dataset = generate_tissue(train=train, test=test, size=size)
    assert dataset.train.images.shape == (train, size, size, 3)
    assert len(dataset.test) == test


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"train": 0}, {"test": 0}, {"size": 7}])
def test_a_wrong_argument_is_named(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=name):
        generate_tissue(**wrong)


def test_a_small_network_learns_it_but_not_perfectly(tissue: ImageDataset) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 90), nn.ReLU(), nn.Linear(90, 9)),
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
    images, labels = to_tensor(tissue.train.images), torch.from_numpy(tissue.train.labels)
    for _ in range(15):
        for batch in torch.split(torch.randperm(len(labels)), 50):
            optimiser.zero_grad()
            loss = F.cross_entropy(network(images[batch]), labels[batch])
            torch.autograd.backward(loss)
            optimiser.step()
    with torch.no_grad():
        predicted = network(to_tensor(tissue.test.images)).argmax(1).numpy()
    accuracy = float((predicted == tissue.test.labels).mean())
    assert 0.5 < accuracy < 0.97
