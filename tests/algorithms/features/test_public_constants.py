"""The constants' module is what its command writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medsilo.algorithms.datasets import to_tensor
from medsilo.algorithms.features import StainTexture, public_constants
from medsilo.algorithms.features.measure_constants import module
from medsilo.silo.data.synthetic import generate_tissue

NAMES = {"STAIN_TEXTURE": 122, "SCATTERING": 243}


@pytest.mark.parametrize(("name", "count"), NAMES.items())
def test_every_number_has_a_mean_and_a_deviation_to_divide_by(name: str, count: int) -> None:
    assert len(getattr(public_constants, f"{name}_MEANS")) == count
    deviations = getattr(public_constants, f"{name}_DEVIATIONS")
    assert len(deviations) == count
    assert min(deviations) > 0


def test_the_command_writes_a_module_of_the_given_images_statistics(tmp_path: Path) -> None:
    tiles = tmp_path / "tiles.npz"
    images = generate_tissue(train=27, test=9).train.images
    np.savez(tiles, images_28=images)
    written: dict[str, object] = {}
    exec(compile(module(tiles), "module", "exec"), written)
    assert {f"{name}_{what}" for name in NAMES for what in ("MEANS", "DEVIATIONS")} <= set(written)
    directions = np.array(written["STAIN_TEXTURE_DIRECTIONS"]).reshape(24, 122)
    assert bool((directions[np.arange(24), np.abs(directions).argmax(axis=1)] > 0).all()), (
        "signs are not left to chance"
    )
    expected = StainTexture().measured(to_tensor(images)).numpy()
    assert np.allclose(written["STAIN_TEXTURE_MEANS"], expected.mean(axis=0), rtol=1e-4)
    assert np.allclose(written["STAIN_TEXTURE_DEVIATIONS"], expected.std(axis=0, ddof=1), rtol=1e-4)
