"""Noise that is Gaussian, unforeseeable, and never the same twice."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from medsilo.privacy.budget.noise import NoiseSource


def test_the_noise_is_gaussian_with_the_given_deviation() -> None:
    drawn = NoiseSource().gaussian((200_000,), 3.0)
    assert drawn.dtype == np.float64
    # 200,000 numbers: the deviation is known to 0.2 %; a good source fails the test of fit once in a million runs.
    assert drawn.std() == pytest.approx(3.0, rel=0.012)
    assert abs(drawn.mean()) < 0.05
    assert stats.kstest(drawn / 3.0, "norm").pvalue > 1e-6


def test_numbers_are_independent_of_their_neighbours() -> None:
    drawn = NoiseSource().gaussian((200_000,), 1.0)
    for lag in (1, 2, 3, 4, 64):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 0.015


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.5])
def test_noise_on_counts_is_the_two_sided_geometric(epsilon: float) -> None:
    source = NoiseSource()
    drawn = np.array([source.discrete_laplace(epsilon) for _ in range(8000)])
    ratio = math.exp(-epsilon)
    edge = max(2, round(2 / epsilon))
    values = np.arange(-edge, edge + 1)
    shares = (1 - ratio) / (1 + ratio) * ratio ** np.abs(values)
    seen = np.array([(drawn == value).sum() for value in values])
    rest = 1 - shares.sum()
    test = stats.chisquare([*seen, len(drawn) - seen.sum()], len(drawn) * np.array([*shares, rest]))
    assert test.pvalue > 1e-6


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_noise_on_counts_needs_an_epsilon(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        NoiseSource().discrete_laplace(epsilon)


def test_samples_take_each_unit_with_the_rate_and_may_be_empty() -> None:
    source = NoiseSource()
    samples = [source.sample(50, 0.1) for _ in range(4000)]
    sizes = np.array([len(sample) for sample in samples])
    assert sizes.mean() == pytest.approx(5, abs=0.2)
    assert sizes.var() == pytest.approx(4.5, rel=0.15), "a binomial size, not a fixed one"
    assert (sizes == 0).any()
    assert np.bincount(np.concatenate(samples), minlength=50).std() < 60
    assert len(source.sample(7, 1.0)) == 7


def test_no_noise_comes_twice_from_one_source_or_from_two() -> None:
    one, other = NoiseSource(), NoiseSource()
    drawn = np.concatenate([source.gaussian((5000,), 1.0) for _ in range(20) for source in (one, other)])
    assert len(np.unique(drawn)) == len(drawn)


def test_no_seed_that_a_coordinator_could_set_matters() -> None:
    drawn = []
    for _ in range(2):
        np.random.seed(1)
        torch.manual_seed(1)
        drawn.append(NoiseSource().gaussian((100,), 1.0))
    assert not np.intersect1d(*drawn).size


def test_a_restart_gives_other_noise() -> None:
    program = "from medsilo.privacy.budget.noise import NoiseSource; print(NoiseSource().gaussian((4,), 1.0).tolist())"
    said = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(said) == 2
    assert all(line.startswith("[") for line in said)


def test_a_forked_process_draws_from_a_stream_of_its_own() -> None:
    source = NoiseSource()
    source.gaussian((3,), 1.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, source.gaussian((100,), 1.0).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reader, 800))
    assert len(theirs) == 100
    assert not np.intersect1d(theirs, source.gaussian((100,), 1.0)).size


def test_a_source_can_be_neither_copied_nor_saved() -> None:
    source = NoiseSource()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be"):
            attempt(source)


@pytest.mark.parametrize("deviation", [-1.0, float("nan"), float("inf")])
def test_a_deviation_that_gives_no_noise_is_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="standard deviation"):
        NoiseSource().gaussian((2,), deviation)


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.5, 9.18])
def test_gaussian_noise_on_counts_is_the_discrete_gaussian(deviation: float) -> None:
    source = NoiseSource()
    drawn = np.array([source.discrete_gaussian(deviation) for _ in range(6000)])
    weights = {k: math.exp(-(k**2) / (2 * deviation**2)) for k in range(-200, 201)}
    edge = max(1, round(2 * deviation))
    shares = np.array([weights[k] for k in range(-edge, edge + 1)]) / sum(weights.values())
    seen = np.array([(drawn == value).sum() for value in range(-edge, edge + 1)])
    test = stats.chisquare([*seen, len(drawn) - seen.sum()], len(drawn) * np.array([*shares, 1 - shares.sum()]))
    assert test.pvalue > 1e-6


@pytest.mark.parametrize("deviation", [0.0, -1.0, float("inf"), float("nan")])
def test_gaussian_noise_on_counts_needs_a_deviation(deviation: float) -> None:
    with pytest.raises(ValueError, match="deviation"):
        NoiseSource().discrete_gaussian(deviation)


def test_the_same_key_gives_the_same_numbers_of_every_kind_and_another_none_of_them() -> None:
    def draw(source: NoiseSource) -> list[object]:
        return [
            source.gaussian((3,), 1.0).tolist(),
            source.sample(50, 0.3).tolist(),
            source.shuffled(20).tolist(),
            source.uniform((4,)).tolist(),
            source.seed(),
            [source.discrete_laplace(0.01) for _ in range(3)],
            [source.discrete_gaussian(100.0) for _ in range(3)],
        ]

    one = draw(NoiseSource(b"k" * 32))
    assert draw(NoiseSource(b"k" * 32)) == one
    assert not [here for here, there in zip(draw(NoiseSource(b"l" * 32)), one, strict=True) if here == there]
    with pytest.raises(ValueError, match="31 bytes"):
        NoiseSource(b"k" * 31)
