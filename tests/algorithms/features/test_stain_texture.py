"""Stain and texture: what each number is, that an image's are its own to the last bit, and their bound."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.features import StainDirections, StainTexture
from medsilo.algorithms.features.public_constants import STAIN_TEXTURE_DIRECTIONS
from medsilo.algorithms.features.stain_texture import (
    EOSIN,
    HAEMATOXYLIN,
    NAMES,
    QUANTILES,
    unmixing,
)
from medsilo.silo.data.synthetic import generate_tissue

EXTRACTOR = StainTexture()


def pictures(count: int, height: int = 28, width: int = 28, channels: int = 3) -> torch.Tensor:
    numbers = np.random.default_rng(height * 1000 + width)
    return to_tensor(numbers.integers(0, 256, (count, height, width, channels), dtype=np.uint8))


def of(image: np.ndarray) -> dict[str, float]:
    """What is measured of one image, uint8 [H, W, 3]."""
    return dict(zip(NAMES, EXTRACTOR.measured(to_tensor(image[np.newaxis]))[0].tolist(), strict=True))


def test_there_are_122_numbers_and_a_constant() -> None:
    assert len(NAMES) == len(set(NAMES)) == 122
    found = EXTRACTOR(pictures(3))
    assert found.shape == (3, 123)
    assert found.dtype == torch.float32
    assert bool((found[:, -1] == 1).all())


@pytest.mark.parametrize(("height", "width"), [(16, 16), (28, 28), (17, 40), (64, 64)])
def test_an_images_features_are_the_same_bits_whatever_is_beside_it(height: int, width: int) -> None:
    images = (
        torch.cat(
            [pictures(37, height, width), to_tensor(generate_tissue(train=54, test=9, size=height).train.images[:20])]
        )
        if height == width
        else pictures(37, height, width)
    )
    alone = torch.cat([EXTRACTOR(image[None]) for image in images])
    assert torch.equal(EXTRACTOR(images), alone)
    assert torch.equal(EXTRACTOR(images.flip(0)).flip(0), alone)
    for at_once in (2, 7, 16):
        assert torch.equal(torch.cat([EXTRACTOR(part) for part in images.split(at_once)]), alone)


def test_a_batch_that_is_cut_for_memory_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    images = pictures(20)
    whole = EXTRACTOR(images)
    monkeypatch.setattr(StainTexture, "pixels_at_once", 3 * 28 * 28)
    assert torch.equal(EXTRACTOR(images), whole)


def test_more_threads_give_the_same_bits() -> None:
    images, threads = pictures(60), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = EXTRACTOR(images)
        torch.set_num_threads(4)
        assert torch.equal(EXTRACTOR(images), one)
    finally:
        torch.set_num_threads(threads)


def test_no_image_is_longer_than_the_bound_and_the_bound_is_close() -> None:
    extremes = [np.full((1, 28, 28, 3), level, dtype=np.uint8) for level in (0, 1, 127, 254, 255)]
    board = np.indices((28, 28)).sum(axis=0) % 2 * 255
    extremes.append(np.repeat(board[np.newaxis, :, :, np.newaxis], 3, axis=3).astype(np.uint8))
    images = torch.cat(
        [pictures(50), to_tensor(np.concatenate(extremes)), to_tensor(generate_tissue(train=90, test=9).train.images)]
    )
    lengths = EXTRACTOR(images).double().norm(dim=1)
    assert bool(torch.isfinite(lengths).all())
    assert float(lengths.max()) <= EXTRACTOR.bound < math.sqrt(2) + 1e-5
    assert float(lengths.min()) > EXTRACTOR.bound - 1e-5


def test_a_grey_image_is_three_equal_channels() -> None:
    grey = pictures(5, channels=1)
    assert torch.equal(EXTRACTOR(grey), EXTRACTOR(grey.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize("shape", [(2, 3, 15, 28), (2, 2, 28, 28), (2, 28, 28), (2, 4, 28, 28)])
def test_what_is_no_such_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are needed"):
        EXTRACTOR(torch.zeros(shape))


@pytest.mark.parametrize(("stain", "vector"), [("haematoxylin", HAEMATOXYLIN), ("eosin", EOSIN)])
def test_light_through_one_stain_is_that_stain_alone(stain: str, vector: tuple[float, ...]) -> None:
    # Beer and Lambert, by hand: a layer of density 0.6 along the stain's unit vector.
    unit = np.array(vector) / np.linalg.norm(vector)
    levels = np.round(256 * 10 ** (-0.6 * unit) - 1)
    found = of(np.tile(levels.astype(np.uint8), (28, 28, 1)))
    for name in ("haematoxylin", "eosin", "residual"):
        assert found[f"{name} mean whole"] == pytest.approx(0.6 if name == stain else 0, abs=0.01)
        assert found[f"{name} sd whole"] == 0


def test_unmixing_takes_the_stains_apart() -> None:
    stains = np.stack([np.array(vector) / np.linalg.norm(vector) for vector in (HAEMATOXYLIN, EOSIN)])
    assert np.allclose(stains @ unmixing().numpy(), [[1, 0, 0], [0, 1, 0]], atol=1e-7)


def test_moments_quantiles_and_rings_are_what_numpy_says() -> None:
    image = np.random.default_rng(1).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    found = of(image)
    red = image[:, :, 0] / 255
    assert found["red mean whole"] == pytest.approx(red.mean(), abs=1e-3)
    assert found["red sd whole"] == pytest.approx(red.std(), abs=1e-3)
    assert found["red mean centre"] == pytest.approx(red[9:19, 9:19].mean(), abs=1e-3)
    grey = image @ np.array([0.299, 0.587, 0.114]) / 255
    for q in QUANTILES:
        expected = np.sort(grey.flatten())[round(q * 783)]
        assert found[f"grey quantile {q} whole"] == pytest.approx(expected, abs=1e-3)
    # The innermost ring of 28 pixels: within 2⅓ pixels of the middle.
    far = np.hypot(*np.meshgrid(np.arange(28) - 13.5, np.arange(28) - 13.5))
    assert found["grey mean ring 0"] == pytest.approx(grey[far < 28 / 12].mean(), abs=1e-3)
    outer = (far >= 28 / 2 * 5 / 6) & (far < 14)
    assert found["grey sd ring 5"] == pytest.approx(grey[outer].std(), abs=1e-3)


def test_a_ramp_has_the_gradient_that_it_was_drawn_with() -> None:
    ramp = np.repeat(np.arange(28, dtype=np.uint8)[np.newaxis, :, np.newaxis] * 5 + 40, 28, axis=0)
    found = of(np.repeat(ramp, 3, axis=2))
    for step in (1, 2, 4):
        for kind in ("across", "gradient mean", "gradient centre"):
            assert found[f"grey step {step} {kind}"] == pytest.approx(step * 5 / 255, abs=1e-3)
        assert found[f"grey step {step} down"] == 0
        assert found[f"grey step {step} gradient sd"] < 1e-3


def test_what_the_definition_stands_for_does_not_change() -> None:
    """Kept features are found by the definition: another computation needs another one."""
    numbers = np.arange(28 * 28 * 3, dtype=np.int64).reshape(1, 28, 28, 3)
    image = to_tensor(((numbers * numbers * 7 + numbers * 13) // 11 % 256).astype(np.uint8))
    found = hashlib.sha256(EXTRACTOR(image).numpy().tobytes()).hexdigest()
    assert (EXTRACTOR.definition, found) == (
        "stain-texture 1",
        "4c0cdfb1948d1d10d78e9c46a0f2cc202abc865753ab3a2444ddc1bfd7d43ff8",
    )


# --- along public directions ---------------------------------------------------------------------------------------

DIRECTIONS = StainDirections()


def test_directions_are_at_right_angles_and_each_is_wider_than_the_one_before() -> None:
    rows = np.array(STAIN_TEXTURE_DIRECTIONS).reshape(24, 122)
    products = rows @ rows.T
    lengths = np.sqrt(np.diag(products))
    assert lengths[0] == pytest.approx(1, abs=1e-3)
    assert bool((np.diff(lengths) > 0).all())
    assert np.abs(products / np.outer(lengths, lengths) - np.eye(24)).max() < 2e-3, "four digits are kept"


def test_features_along_directions_are_products_with_them_scaled_to_norm_1() -> None:
    images = to_tensor(generate_tissue(train=27, test=9).train.images)
    along = EXTRACTOR(images)[:, :-1].double().numpy() @ np.array(STAIN_TEXTURE_DIRECTIONS).reshape(24, 122).T
    found = DIRECTIONS(images).numpy()
    assert found.shape == (27, 24)
    assert np.allclose(found, along / np.linalg.norm(along, axis=1, keepdims=True), atol=1e-4)
    assert float(np.linalg.norm(found, axis=1).max()) <= DIRECTIONS.bound


def test_features_along_directions_are_an_images_own_to_the_last_bit() -> None:
    images = torch.cat([pictures(30), to_tensor(generate_tissue(train=27, test=9).train.images)])
    alone = torch.cat([DIRECTIONS(image[None]) for image in images])
    assert torch.equal(DIRECTIONS(images), alone)
    assert torch.equal(DIRECTIONS(images.flip(0)).flip(0), alone)
