"""Noise that is shared out: each hospital's share, what their sum is, and what it costs by another computation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from medsilo.privacy.budget.accounting import (
    GaussianRelease,
    Guarantee,
    SharedGaussian,
    as_group,
    describe,
    epsilon,
    noise_multiplier_for,
    own_share,
    read,
)
from medsilo.privacy.budget.noise import NoiseSource
from medsilo.privacy.budget.shared_noise import LEAST_DEVIATION, MOST_SILOS, SMOOTHING, Lattice
from medsilo.privacy.errors import TrainingError

LATTICE = Lattice(rate=0.05, clipping_norm=1.0, fraction_bits=32, noise_multiplier=10.0, honest=5, dimension=492)


def independent(multiplier: float, releases: int, delta: float) -> float:
    """The ε of so many Gaussian releases, by dp-accounting's own events."""
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4)
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), releases))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("multiplier", "honest", "releases"), [(10.0, 5, 24), (4.0, 2, 8), (40.0, 19, 96)])
def test_both_figures_are_those_of_an_independent_computation(multiplier: float, honest: int, releases: int) -> None:
    event = SharedGaussian(multiplier, honest, releases)
    assert epsilon([event], delta=1e-5) == pytest.approx(independent(multiplier, releases, 1e-5), abs=2e-3)
    alone = independent(multiplier / math.sqrt(honest), releases, 1e-5)
    assert epsilon([own_share(event)], delta=1e-5) == pytest.approx(alone, abs=4e-3)


def test_against_an_honest_hospital_that_looks_itself_one_share_fewer_protects() -> None:
    """The figures of the page: it takes its own share off the sum."""
    rounds, honest = 16, 5
    z = noise_multiplier_for(2.0, delta=1e-5, events=lambda z: [SharedGaussian(z, honest, rounds)])
    left = SharedGaussian(z * math.sqrt((honest - 1) / honest), honest - 1, rounds)
    assert epsilon([left], delta=1e-5) == pytest.approx(independent(left.noise_multiplier, rounds, 1e-5), abs=2e-3)
    assert epsilon([left], delta=1e-5) == pytest.approx(2.27, abs=0.005)
    assert own_share(left) == own_share(SharedGaussian(z, honest, rounds)), "each share is as large as before"
    assert epsilon([own_share(left)], delta=1e-5) == pytest.approx(5.0, abs=0.005)
    said = Guarantee(5.0, 1e-5, "image").if_alone
    assert "one of those that looks itself, and knows its own share, one share fewer protects" in said


def test_concentrated_privacy_of_discrete_gaussians_bounds_the_same_from_above() -> None:
    """Canonne, Kamath and Steinke, Theorem 4: the discrete Gaussian is ½Δ²/σ²-concentrated, as the continuous one is.
    That proves no less than what is claimed, by another way."""
    event = SharedGaussian(10.0, 5, 24)
    accountant = RdpAccountant(orders=[1 + x / 20 for x in range(1, 4000)])
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(10.0), 24))
    claimed, rough = epsilon([event], delta=1e-5), accountant.get_epsilon(1e-5)
    assert claimed <= rough <= 1.2 * claimed


def test_charges_are_written_read_and_grouped() -> None:
    event = SharedGaussian(8.0, 4, 12)
    assert read(describe(event)) == event
    assert as_group(event, 2) == SharedGaussian(4.0, 4, 12)
    assert own_share(GaussianRelease(2.0)) == GaussianRelease(2.0)
    for wrong in ({"honest": 1}, {"honest": 2.5}, {"releases": 0}, {"noise_multiplier": 0.0}):
        with pytest.raises(ValueError):
            read({**describe(event), **wrong})


def test_the_honest_hospitals_noise_is_what_the_claim_needs_with_rounding_and_smoothing_and_hardly_more() -> None:
    for lattice in (
        LATTICE,
        dataclasses.replace(LATTICE, fraction_bits=8),
        dataclasses.replace(LATTICE, fraction_bits=8, dimension=10**6, honest=2),
        dataclasses.replace(LATTICE, rate=1e-6, fraction_bits=8, noise_multiplier=0.1),
    ):
        needed = lattice.noise_multiplier * lattice.sensitivity
        together = math.sqrt(lattice.honest * lattice.deviation**2 - SMOOTHING**2)
        assert together >= needed
        fewer = lattice.honest * (lattice.deviation - 2) ** 2 - SMOOTHING**2
        assert lattice.deviation == LEAST_DEVIATION or fewer < needed**2
    exact = LATTICE.rate * LATTICE.clipping_norm * 2**LATTICE.fraction_bits
    assert LATTICE.deviation * math.sqrt(5) / exact == pytest.approx(10.0, rel=1e-6)


def test_the_least_share_is_large_enough_that_the_proofs_factors_are_nothing() -> None:
    """The figures of the module, for the smallest noise that there can be and the most hospitals."""
    least = dataclasses.replace(LATTICE, rate=1e-9, fraction_bits=8, noise_multiplier=0.01, dimension=1)
    exponents = [2 * (math.pi * least.deviation) ** 2 * k / (k + 1) for k in range(1, MOST_SILOS)]
    of_sum = math.log10(10 * sum(math.exp(-one) for one in exponents))
    of_smoothing = math.log10(5) - 2 * (math.pi * SMOOTHING) ** 2 / math.log(10)
    assert of_sum < -153
    assert of_smoothing < -136
    assert 30 + max(of_sum, of_smoothing) + math.log10(2) < -100


def test_whole_numbers_of_neighbours_lie_no_farther_apart_than_is_claimed() -> None:
    """Planted neighbours: one unit's clipped gradient is taken out of sums at the worst places for rounding."""
    random = np.random.default_rng(1)
    for bits in (8, 12, 32):
        lattice = dataclasses.replace(LATTICE, fraction_bits=bits, dimension=64)
        farthest = 0.0
        for _ in range(200):
            unit = random.standard_normal(64)
            unit *= lattice.clipping_norm / np.linalg.norm(unit)
            with_it = random.standard_normal(64) * 100
            sums = [np.rint(total * lattice.rate * 2.0**bits) for total in (with_it, with_it - unit)]
            farthest = max(farthest, float(np.linalg.norm(sums[0] - sums[1])))
        assert farthest <= lattice.sensitivity
        unrounded = lattice.rate * lattice.clipping_norm * 2.0**bits
        assert bits > 8 or farthest > 1.05 * unrounded, "where multiples are coarse, rounding counts"


def test_the_sum_of_shares_is_a_discrete_gaussian_of_their_variances() -> None:
    """The first step of the proof, at deviations so small that it would show."""
    source, honest, deviation = NoiseSource(bytes(32)), 3, 2
    drawn = sum(source.discrete_gaussians(60_000, deviation) for _ in range(honest))
    values = np.arange(-9, 10)
    support = np.arange(-200, 201)
    weights = np.exp(-(support**2) / (2 * honest * deviation**2))
    shares = np.exp(-(values**2) / (2 * honest * deviation**2)) / weights.sum()
    seen = np.array([(drawn == value).sum() for value in values])
    expected = 60_000 * np.array([*shares, 1 - shares.sum()])
    assert stats.chisquare([*seen, 60_000 - seen.sum()], expected).pvalue > 1e-3


@pytest.mark.parametrize("smoothing", [1.0, 1.5])
def test_a_discrete_gaussian_is_made_from_a_continuous_one(smoothing: float) -> None:
    """The second step of the proof, by numerical integration, with the factor that it allows."""
    deviation = 3.0
    x = np.arange(-60, 61)
    y = np.linspace(-60, 60, 60_001)
    density = stats.norm.pdf(y, scale=math.sqrt(deviation**2 - smoothing**2))
    kernel = np.exp(-((x[:, None] - y) ** 2) / (2 * smoothing**2))
    made = (kernel / kernel.sum(axis=0) * density).sum(axis=1) * (y[1] - y[0])
    exact = np.exp(-(x**2) / (2 * deviation**2))
    exact /= exact.sum()
    inner = np.abs(x) <= 20
    worst = np.abs(made[inner] / exact[inner] - 1).max()
    assert worst <= 5 * math.exp(-2 * math.pi**2 * smoothing**2) + 1e-9


def test_what_has_no_room_is_refused_by_public_numbers_alone() -> None:
    LATTICE.check_room(1000)
    with pytest.raises(TrainingError, match="fraction_bits"):
        dataclasses.replace(LATTICE, fraction_bits=48).check_room(1000)
    with pytest.raises(TrainingError, match="learning rate"):
        dataclasses.replace(LATTICE, rate=1e6).check_room(1000)


def test_noised_numbers_are_the_sum_and_one_share() -> None:
    lattice = dataclasses.replace(LATTICE, dimension=20_000)
    total = np.random.default_rng(1).standard_normal(20_000)
    noised = lattice.noised(total, NoiseSource(bytes(32)))
    exact = np.rint(total * lattice.rate * 2.0**lattice.fraction_bits)
    assert (noised - exact).std() == pytest.approx(lattice.deviation, rel=0.03)
    assert stats.kstest((noised - exact) / lattice.deviation, "norm").pvalue > 1e-3
