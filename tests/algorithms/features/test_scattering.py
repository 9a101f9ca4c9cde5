"""The scattering transform against what is known of it without computing it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.features import Scattering
from medsilo.algorithms.features.scattering import PATHS, low_pass, propagate, wavelets
from medsilo.silo.data.synthetic import generate_tissue

SIZE = 32
EXTRACTOR = Scattering()


def noise(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def transformed(images: Tensor) -> Tensor:
    low = torch.from_numpy(low_pass(SIZE, SIZE)).float()
    return torch.fft.ifft2(torch.fft.fft2(propagate(images)) * low).real


def test_973_numbers() -> None:
    images = to_tensor(generate_tissue(train=18, test=9).train.images)
    assert PATHS == 81
    assert EXTRACTOR(images).shape == (18, 973)
    assert bool((EXTRACTOR(images)[:, -1] == 1).all())


@pytest.mark.parametrize(("height", "width"), [(16, 16), (28, 28), (29, 33)])
def test_other_images_do_not_matter_and_no_image_is_longer_than_the_bound(height: int, width: int) -> None:
    images = torch.rand(9, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = EXTRACTOR(images)
    alone = torch.cat([EXTRACTOR(image[None]) for image in images])
    assert torch.allclose(found, alone, atol=1e-6)
    assert float(found.double().norm(dim=1).max()) <= EXTRACTOR.bound
    constant = EXTRACTOR(torch.ones(1, 3, height, width))
    assert bool(torch.isfinite(constant).all())


@pytest.mark.parametrize("grid", [(24, 24), (36, 36), (37, 41)])
def test_no_frequency_is_made_louder(grid: tuple[int, int]) -> None:
    # Littlewood and Paley's sum, which bounds ‖Sx - Sy‖ by ‖x - y‖.
    energy = (wavelets(*grid) ** 2).sum(axis=(0, 1))
    mirrored = np.roll(energy[::-1, ::-1], 1, axis=(0, 1))
    total = low_pass(*grid) ** 2 + (energy + mirrored) / 2
    assert total.max() <= 1 + 1e-9
    assert np.sort(total.flat)[-3] > 1 - 1e-9  # and they could not be louder: not at frequency 0 alone


def test_it_brings_no_two_images_further_apart() -> None:
    one, other = noise(20, 1), noise(20, 2)
    apart = (transformed(one) - transformed(other)).flatten(1).norm(dim=1)
    assert bool((apart <= (one - other).flatten(1).norm(dim=1) * (1 + 1e-5)).all())


def test_energy_decays_from_order_to_order() -> None:
    images = noise(5)
    energy = propagate(images).square().sum(dim=(1, 3, 4))
    zero, first, second = energy[:, 0], energy[:, 1:17].sum(dim=1), energy[:, 17:].sum(dim=1)
    assert bool((first < zero).all())
    assert bool((second < first).all())


def test_an_image_that_is_moved_has_the_same_transform_moved() -> None:
    images = noise(3)
    moved = transformed(images.roll((5, -3), dims=(2, 3)))
    assert torch.allclose(moved, transformed(images).roll((5, -3), dims=(3, 4)), atol=1e-5)


def test_a_quarter_turn_turns_the_directions() -> None:
    images = noise(2)
    first = propagate(images)[:, :, 1:17].unflatten(2, (2, 8))
    turned = propagate(images.transpose(2, 3))[:, :, 1:17].unflatten(2, (2, 8))
    # Mirrored at the diagonal, direction θ becomes 90° - θ; ψ of θ + 180° is the conjugate of ψ of θ.
    swapped = [(4 - direction) % 8 for direction in range(8)]
    assert torch.allclose(turned, first[:, :, :, swapped].transpose(4, 5), atol=1e-5)


def test_a_flat_image_has_no_edges() -> None:
    flat = torch.full((1, 1, SIZE, SIZE), 0.7)
    found = transformed(flat)
    assert torch.allclose(found[:, :, 0], flat, atol=1e-6)
    assert float(found[:, :, 1:].abs().max()) < 1e-6


def test_a_filter_is_the_morlet_wavelet_worked_out_by_hand() -> None:
    # ψ(u) ∝ exp(-(x² + (y/2)²) / (2 · 0.8²)) (e^{i 3π/4 x} - κ), along x, with mean 0, on a grid large enough.
    size = 64
    x = np.where(np.arange(size) < size / 2, np.arange(size), np.arange(size) - size).astype(float)
    envelope = np.exp(-(x[None, :] ** 2 + (x[:, None] / 2) ** 2) / (2 * 0.8**2))
    wave = envelope * np.exp(1j * 0.75 * math.pi * x[None, :])
    expected = wave - envelope * wave.sum() / envelope.sum()
    found = np.fft.ifft2(wavelets(size, size)[0, 0])
    scale = found[0, 0] / expected[0, 0]
    assert abs(scale.imag) < 1e-9
    assert np.allclose(found, expected * scale, atol=1e-9)


def test_stripes_answer_to_the_wavelet_across_them() -> None:
    across = torch.cos(0.75 * math.pi * torch.arange(SIZE)).repeat(SIZE, 1)[None, None]
    answers = propagate(across)[0, 0, 1:9].mean(dim=(1, 2))
    assert int(answers.argmax()) == 0
    assert float(answers[4]) < 0.1 * float(answers[0])


def test_each_quarter_is_averaged_apart() -> None:
    image = torch.full((1, 3, 28, 28), -1.0)
    image[:, :, :10, :10] = 1
    zero = EXTRACTOR.measured(image)[0, [0, 81, 162]].exp() - 0.01
    assert bool((zero[:, 0] > 0.4).all())
    assert bool((zero[:, 3] < 0.01).all())


def test_what_the_definition_stands_for_does_not_change() -> None:
    """Kept features are found by the definition: another computation needs another one."""
    numbers = np.arange(28 * 28 * 3, dtype=np.int64).reshape(1, 28, 28, 3)
    image = to_tensor(((numbers * numbers * 7 + numbers * 13) // 11 % 256).astype(np.uint8))
    found = EXTRACTOR(image)[0, [0, 100, 300, 500, 700, 900, 971]].tolist()
    assert EXTRACTOR.definition == "scattering 1"
    assert found == pytest.approx([-0.0171, 0.0348, 0.0348, 0.026, 0.0242, 0.0348, 0.0348], abs=2e-4)
