"""The accountant's numbers, against the specification's and against another implementation."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from medsilo.privacy.budget.accounting import (
    Adjacency,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    GaussianRelease,
    Guarantee,
    SampledGaussian,
    as_group,
    describe,
    epsilon,
    noise_multiplier_for,
    read,
)
from medsilo.privacy.errors import BudgetError

PLAN = SampledGaussian(sampling_rate=0.2, noise_multiplier=2, steps=500)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([PLAN], 12.621),
        ([PLAN, GaussianRelease(4)], 12.704),
        ([PLAN, GaussianRelease(10, releases=100)], 13.914),
        ([SampledGaussian(0.2, 2, 200), SampledGaussian(0.2, 2, 300)], 12.621),
    ],
)
def test_reference_values_to_three_decimals(events: list[Event], expected: float) -> None:
    assert round(epsilon(events, delta=1e-5), 3) == expected


@pytest.mark.parametrize(
    ("adjacency", "expected"),
    [(Adjacency.ADD_REMOVE, 9.579), (Adjacency.ZERO_OUT, 9.579), (Adjacency.REPLACE_ONE, 22.493)],
)
def test_reference_values_of_the_adjacencies(adjacency: Adjacency, expected: float) -> None:
    assert round(epsilon([PLAN], delta=1e-3, adjacency=adjacency), 3) == expected


def test_an_identifier_noised_once_and_resent_costs_one_release() -> None:
    once = epsilon([PLAN, GaussianRelease(10)], delta=1e-5)
    assert once < epsilon([PLAN, GaussianRelease(10, releases=100)], delta=1e-5) - 1


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("noise", [0.8, 1.5, 3.0])
@pytest.mark.parametrize("steps", [100, 1000])
def test_agreement_with_opacus_prv_accountant(rate: float, noise: float, steps: int) -> None:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = accountant.get_epsilon(1e-5)
    ours = epsilon([SampledGaussian(rate, noise, steps)], delta=1e-5)
    # Opacus' own error bound is 0.01, and its value is its upper end.
    assert ours == pytest.approx(theirs, abs=0.02)


def test_calibration_covers_all_releases_together() -> None:
    """The specification's example: target 8, with one identifier and twenty noisy selections (all at 10)."""

    def steps(noise: float) -> list[Event]:
        return [SampledGaussian(0.2, noise, 500)]

    def everything(noise: float) -> list[Event]:
        return [*steps(noise), GaussianRelease(10), GaussianRelease(10, releases=20)]

    alone = noise_multiplier_for(8, delta=1e-5, events=steps)
    together = noise_multiplier_for(8, delta=1e-5, events=everything)
    assert round(alone, 2) == 2.81
    assert round(together, 2) == 2.91
    assert epsilon(everything(together), delta=1e-5) <= 8 < epsilon(everything(together - 1e-3), delta=1e-5)


def test_calibration_says_when_no_noise_is_enough() -> None:
    with pytest.raises(BudgetError, match="fewer rounds"):
        noise_multiplier_for(1, delta=1e-5, events=lambda z: [SampledGaussian(0.2, z, 500), GaussianRelease(0.5)])


def test_nothing_released_costs_nothing_and_hopeless_noise_has_no_bound() -> None:
    assert epsilon([], delta=1e-5) == 0
    assert math.isinf(epsilon([SampledGaussian(0.5, 0.3, 100_000)], delta=1e-5))
    assert str(Guarantee(math.inf, 1e-5, "image")).startswith("ε = ∞ at δ = 1e-05 (unit image, adjacency zero-out")


def test_counts_add_up() -> None:
    assert epsilon([DiscreteLaplace(0.5, 3)], delta=1e-5) == 1.5
    assert epsilon([PLAN, DiscreteLaplace(0.5)], delta=1e-5) == pytest.approx(0.5 + epsilon([PLAN], delta=1e-5))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_groups_step_costs_what_its_densities_say(size: int) -> None:
    """δ of one step at the ε that is claimed, integrated over the two densities themselves."""
    rate, noise, delta = 0.2, 2.0, 1e-5
    event = as_group(SampledGaussian(rate, noise, 1), size)
    assert event is not None
    claimed = epsilon([event], delta=delta)
    x = np.linspace(-60, 60, 2_000_001)
    chance = binom.pmf(np.arange(size + 1), size, rate)
    there = sum(p * norm.pdf(x, k, noise) for k, p in enumerate(chance))
    blank = norm.pdf(x, 0, noise)
    for one, other in ((there, blank), (blank, there)):
        lost = np.maximum(one - np.exp(claimed) * other, 0).sum() * (x[1] - x[0])
        assert lost <= delta * (1 + 1e-6)
    tight = np.maximum(there - np.exp(claimed - 0.01) * blank, 0).sum() * (x[1] - x[0])
    assert tight > delta, "and not much less would do"


def test_what_a_group_bears_of_other_releases() -> None:
    assert as_group(GaussianRelease(6.0, 2), 3) == GaussianRelease(2.0, 2)
    assert as_group(DiscreteLaplace(0.5, 2), 3) == DiscreteLaplace(1.5, 2)
    assert as_group(SampledGaussian(1.0, 6.0, 2), 3) == GaussianRelease(2.0, 2)
    assert as_group(PLAN, 1) == PLAN
    assert as_group(PLAN, None) is as_group(PLAN, 1000) is None
    group = as_group(PLAN, 2)
    assert group is not None
    assert math.isinf(epsilon([group], delta=1e-5, adjacency=Adjacency.REPLACE_ONE))
    assert epsilon([DiscreteLaplace(0.5, 2)], delta=1e-5, adjacency=Adjacency.REPLACE_ONE) == 2.0


@pytest.mark.parametrize("event", [PLAN, GaussianRelease(4, 3), DiscreteLaplace(0.5)])
def test_events_survive_writing_and_reading(event: Event) -> None:
    assert read(describe(event)) == event


@pytest.mark.parametrize(
    "damaged",
    [
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": -1.0, "releases": 1},
        {"kind": "gaussian", "noise_multiplier": 1.0, "releases": 1.5},
        {"kind": "gaussian", "noise_multiplier": math.nan, "releases": 1},
        {"kind": "sampled-gaussian", "sampling_rate": 2, "noise_multiplier": 1, "steps": 1},
        {"kind": "none"},
        {"kind": "gaussian", "noise_multiplier": True, "releases": 1},
        [],
    ],
)
def test_damaged_events_are_refused(damaged: object) -> None:
    with pytest.raises(ValueError):
        read(damaged)


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0])
def test_one_discrete_gaussian_costs_what_its_two_neighbouring_distributions_say(deviation: float) -> None:
    """δ(ε) of a count and the count less one, summed up number by number."""
    found = epsilon([DiscreteGaussian(deviation)], delta=1e-5)
    weights = [math.exp(-(k**2) / (2 * deviation**2)) for k in range(-60, 61)]
    total = sum(weights)

    def delta(value: float) -> float:
        pairs = zip(weights, [0.0, *weights[:-1]], strict=True)
        return sum(max(0.0, p - math.exp(value) * q) for p, q in pairs) / total

    assert delta(found) <= 1e-5 <= delta(found - 0.01)


def test_discrete_gaussians_compose_as_one_budget_with_whatever_else_there_is() -> None:
    counts = DiscreteGaussian(9.18, releases=21)
    assert epsilon([counts], delta=1e-5) == pytest.approx(epsilon([GaussianRelease(9.18, 21)], delta=1e-5), abs=0.02)
    assert epsilon([counts], delta=1e-5) == epsilon([DiscreteGaussian(9.18)] * 21, delta=1e-5) <= 2.0
    both = epsilon([counts, PLAN], delta=1e-5)
    assert epsilon([PLAN], delta=1e-5) < both < epsilon([PLAN], delta=1e-5) + epsilon([counts], delta=1e-5)
    assert epsilon([counts, DiscreteLaplace(0.5)], delta=1e-5) == epsilon([counts], delta=1e-5) + 0.5
    assert read(describe(counts)) == counts
    with pytest.raises(ValueError, match="deviation"):
        DiscreteGaussian(0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_bears_a_count_that_changes_by_its_size(size: int) -> None:
    """δ at the ε that is claimed, summed over the two distributions; under replace-one as of twice as many."""
    deviation = 6.0
    counts = DiscreteGaussian(deviation)
    group = as_group(counts, size)
    assert group is not None
    claimed = epsilon([group], delta=1e-5)
    k = np.arange(-200, 201)

    def chances(shift: int) -> np.ndarray:
        weights = np.exp(-((k - shift) ** 2) / (2 * deviation**2))
        return weights / weights.sum()

    def delta(value: float) -> float:
        return float(np.maximum(chances(size) - math.exp(value) * chances(0), 0).sum())

    assert delta(claimed) <= 1e-5 * (1 + 1e-6) <= delta(claimed - 0.01)
    assert epsilon([counts], delta=1e-5, adjacency=Adjacency.REPLACE_ONE) == epsilon(
        [as_group(counts, 2) or PLAN], delta=1e-5
    )
    assert epsilon([group, group], delta=1e-5) == epsilon(
        [as_group(DiscreteGaussian(deviation, 2), size) or PLAN], delta=1e-5
    )


@pytest.mark.parametrize(("noise", "steps"), [(68.898, 96), (5.882, 96), (3.0, 8), (0.3, 4), (40.0, 10_000)])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_full_batch_steps_cost_what_dp_accounting_says_of_so_many_gaussian_releases(
    noise: float, steps: int, delta: float
) -> None:
    """No amplification: nothing is sampled. Beside it the exact ε of the Gaussian mechanism (Balle and Wang 2018)."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    ours = epsilon([SampledGaussian(1.0, noise, steps)], delta=delta)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), steps))
    theirs = accountant.get_epsilon(delta)
    assert ours == pytest.approx(theirs, abs=1e-3 * math.sqrt(steps) + 1e-6)
    mu = math.sqrt(steps) / noise
    exact = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta, 0, 700)
    assert exact - 1e-6 <= ours <= exact + 2e-3
    rounds = [SampledGaussian(1.0, noise, steps // 4)] * 4
    assert epsilon(rounds, delta=delta) == ours, "charged round by round, it adds up to the same"
