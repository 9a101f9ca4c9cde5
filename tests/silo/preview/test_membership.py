"""The lower bound on ε from one training run: what guesses prove, and what they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from medsilo.silo.preview.membership import SHARES, area_under_curve, audit_scores, epsilon_lower_bound, p_value


def naive_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Theorem 3.1 of Steinke, Nasr and Jagielski (2023), term by term."""
    q = math.exp(epsilon) / (math.exp(epsilon) + 1)
    chances = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    beta = sum(chances[right:])
    alpha = max(sum(chances[max(right - i, 0) : right]) / i for i in range(1, canaries + 1))
    return min(1.0, beta + 2 * canaries * delta * alpha)


@pytest.mark.parametrize("numbers", [(10, 10, 10), (30, 10, 9), (100, 60, 41), (100, 100, 60), (12, 4, 1)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
def test_the_probability_is_the_theorems(numbers: tuple[int, int, int], delta: float, epsilon: float) -> None:
    canaries, guesses, right = numbers
    found = p_value(epsilon, canaries=canaries, guesses=guesses, right=right, delta=delta)
    assert found == pytest.approx(naive_p_value(canaries, guesses, right, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize("right", [5, 10, 50, 200, 1000])
def test_perfect_guesses_prove_the_closed_form_at_delta_zero(right: int) -> None:
    """All r right is refuted while q^r ≤ 0.05, for q = e^ε / (e^ε + 1)."""
    q = 0.05 ** (1 / right)
    found = epsilon_lower_bound(canaries=right, guesses=right, right=right, delta=0)
    assert found == pytest.approx(math.log(q / (1 - q)), abs=1e-5)
    assert found <= math.log(q / (1 - q)), "rounded down"


@pytest.mark.parametrize(("guesses", "right"), [(100, 70), (100, 95), (500, 300), (20, 18)])
def test_at_delta_zero_the_bound_is_where_the_binomial_tail_is_five_percent(guesses: int, right: int) -> None:
    found = epsilon_lower_bound(canaries=guesses, guesses=guesses, right=right, delta=0)
    assert stats.binom.sf(right - 1, guesses, 1 / (1 + math.exp(-found))) == pytest.approx(0.05, abs=1e-5)


def test_five_right_guesses_are_the_fewest_that_prove_anything() -> None:
    """Five right of five come by chance once in 32 times, four of four once in 16."""
    assert epsilon_lower_bound(canaries=4, guesses=4, right=4, delta=0) == 0
    assert epsilon_lower_bound(canaries=5, guesses=5, right=5, delta=0) > 0


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_no_better_than_a_coin_proves_nothing(delta: float) -> None:
    for guesses, right in ((0, 0), (1, 1), (100, 50), (100, 0), (1000, 500)):
        assert epsilon_lower_bound(canaries=1000, guesses=guesses, right=right, delta=delta) == 0


def test_abstentions_cost_nothing_but_what_delta_allows() -> None:
    at_zero = {epsilon_lower_bound(canaries=m, guesses=50, right=48, delta=0) for m in (50, 500, 5000)}
    assert len(at_zero) == 1
    with_delta = [epsilon_lower_bound(canaries=m, guesses=50, right=48, delta=1e-5) for m in (50, 500, 5000)]
    assert at_zero.pop() > with_delta[0] > with_delta[1] > with_delta[2]


def test_more_right_guesses_more_delta_and_more_confidence_each_have_their_direction() -> None:
    def bounds(values: Sequence[dict[str, float]]) -> list[float]:
        usual = {"canaries": 200, "guesses": 100, "right": 80, "delta": 1e-5, "confidence": 0.95}
        return [epsilon_lower_bound(**{**usual, **value}) for value in values]  # type: ignore[arg-type]

    rising = bounds([{"right": right} for right in range(60, 101, 5)])
    assert rising == sorted(rising)
    assert rising[0] < rising[-1]
    for falling in (
        bounds([{"delta": delta} for delta in (0, 1e-6, 1e-5, 1e-4, 1e-3)]),
        bounds([{"confidence": level} for level in (0.5, 0.9, 0.95, 0.99)]),
    ):
        assert falling == sorted(falling, reverse=True)
        assert falling[0] > falling[-1]


def test_randomised_response_is_hardly_ever_accused_of_more_than_its_epsilon() -> None:
    """The mechanism that is exactly (ε, 0)-private and tells the most: each coin, turned round now and then."""
    numbers = np.random.default_rng(1)
    epsilon, count, above, bounds = 1.0, 300, 0, []
    for _ in range(200):
        coins = numbers.random(count) < 0.5
        told = np.where(numbers.random(count) < 1 / (1 + math.exp(-epsilon)), coins, ~coins)
        found = audit_scores({"told": told + 0.1 * numbers.random(count)}, coins, delta=0).epsilon
        bounds.append(found)
        above += found > epsilon
    assert above <= 0.05 * 200
    assert np.mean(bounds) > 0.4, "and the bound is not idle"


def test_guessing_at_random_proves_more_than_nothing_in_few_of_many_audits() -> None:
    numbers = np.random.default_rng(2)
    proven = 0
    for _ in range(200):
        scores = {name: numbers.standard_normal(200) for name in ("one", "other")}
        proven += audit_scores(scores, numbers.random(200) < 0.5, delta=1e-5).epsilon > 0
    assert proven <= 0.05 * 200


def test_who_knows_all_coins_proves_as_much_as_so_many_canaries_can() -> None:
    coins = np.random.default_rng(3).permutation(np.repeat([True, False], 100))
    audit = audit_scores({"knows": coins.astype(np.float64)}, coins, delta=1e-5)
    assert audit.epsilon == audit.highest
    assert audit.best.auc == 1
    assert (audit.best.best.made, audit.best.best.right) == (200, 200)
    # Each of the tests has its share of the 5 %.
    alone = epsilon_lower_bound(canaries=200, guesses=200, right=200, delta=1e-5, confidence=1 - 0.05 / len(SHARES))
    assert audit.epsilon == alone


def test_the_surest_guesses_are_tried_alone() -> None:
    """Who knows a tenth of the coins and nothing of the others is not drowned in them."""
    numbers = np.random.default_rng(4)
    coins = numbers.permutation(np.repeat([True, False], 200))
    known = np.zeros(400, dtype=bool)
    known[np.flatnonzero(coins)[:20]] = known[np.flatnonzero(~coins)[:20]] = True
    scores = np.where(known, np.where(coins, 10.0, -10.0), numbers.standard_normal(400))
    best = audit_scores({"knows some": scores}, coins, delta=0).best.best
    assert (best.made, best.right) == (40, 40)


def test_area_under_curve_counts_pairs() -> None:
    scores = np.array([3.0, 1.0, 2.0, 2.0])
    assert area_under_curve(scores, np.array([True, False, True, False])) == (1 + 1 + 1 + 0.5) / 4
    assert math.isnan(area_under_curve(scores, np.ones(4, dtype=bool)))


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong in ({"right": 11}, {"guesses": 21}, {"canaries": 0, "guesses": 0, "right": 0}, {"delta": 1.0}):
        numbers = {"canaries": 20, "guesses": 10, "right": 5, "delta": 0.0, **wrong}
        with pytest.raises(ValueError):
            p_value(1.0, **numbers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon"):
        p_value(-1.0, canaries=2, guesses=2, right=2, delta=0)
    with pytest.raises(ValueError, match="confidence"):
        epsilon_lower_bound(canaries=2, guesses=2, right=2, delta=0, confidence=1)
    for scores in (np.array([1.0]), np.array([1.0, math.nan])):
        with pytest.raises(ValueError, match="finite"):
            audit_scores({"a": scores}, np.array([True, False]), delta=0)
