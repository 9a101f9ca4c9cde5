"""Whole numbers of the discrete Gaussian, many at once, follow its exact probabilities; fixed keys, so that nothing
here fails by chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from medsilo.privacy.budget import discrete_gaussian
from medsilo.privacy.budget.noise import NoiseSource

COUNT = 40_000


def fit(drawn: np.ndarray, deviation: float) -> float:
    """The p-value of the chi-square test against exp(-k²/2σ²)."""
    edge = max(2, math.ceil(2.5 * deviation))
    values = np.arange(-edge, edge + 1)
    support = np.arange(-40 * math.ceil(deviation) - 40, 40 * math.ceil(deviation) + 41)
    total = np.exp(-(support**2) / (2 * deviation**2)).sum()
    shares = np.exp(-(values**2) / (2 * deviation**2)) / total
    seen = np.array([(drawn == value).sum() for value in values])
    return float(
        stats.chisquare([*seen, len(drawn) - seen.sum()], len(drawn) * np.array([*shares, 1 - shares.sum()])).pvalue
    )


@pytest.mark.parametrize("deviation", [1, 2, 3, 10])
def test_numbers_have_the_exact_probabilities(deviation: int) -> None:
    drawn = NoiseSource(bytes([deviation] * 32)).discrete_gaussians(COUNT, deviation)
    assert drawn.shape == (COUNT,)
    assert fit(drawn, deviation) > 1e-3
    assert fit(drawn, deviation * 1.05) < 1e-3, "a deviation that is 5 % off is found"


@pytest.mark.parametrize("deviation", [1, 3])
def test_coins_that_are_too_near_to_tell_are_decided_in_whole_numbers(
    deviation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discrete_gaussian, "_NEAR", 2.0)
    assert fit(NoiseSource(bytes([deviation] * 32)).discrete_gaussians(8000, deviation), deviation) > 1e-3
    monkeypatch.setattr(discrete_gaussian, "_NEAR", 0.2)
    assert fit(NoiseSource(bytes([deviation] * 32)).discrete_gaussians(8000, deviation), deviation) > 1e-3


@pytest.mark.parametrize("deviation", [2**12, 2**28 + 1, 2**45])
def test_large_deviations_look_normal_and_use_the_low_bits(deviation: int) -> None:
    drawn = NoiseSource(bytes(32)).discrete_gaussians(COUNT, deviation)
    assert stats.kstest(drawn / deviation, "norm").pvalue > 1e-3
    assert abs((drawn % 2).mean() - 0.5) < 0.01
    assert drawn.std() == pytest.approx(deviation, rel=0.02)


def test_a_key_gives_the_same_numbers_again_and_another_key_others() -> None:
    first, again = (NoiseSource(bytes(32)).discrete_gaussians(100, 1000) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, NoiseSource(bytes([1] * 32)).discrete_gaussians(100, 1000))
    source = NoiseSource(bytes(32))
    assert not np.array_equal(source.discrete_gaussians(100, 1000), source.discrete_gaussians(100, 1000))


def test_neighbours_are_independent() -> None:
    drawn = NoiseSource(bytes(32)).discrete_gaussians(COUNT, 1000).astype(float)
    for lag in (1, 2, 5):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 0.03


@pytest.mark.parametrize("deviation", [0, -1, 2**46])
def test_other_deviations_are_refused(deviation: int) -> None:
    with pytest.raises(ValueError, match="deviation"):
        NoiseSource().discrete_gaussians(1, deviation)
