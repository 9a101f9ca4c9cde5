"""A blind mixture is opened by its recipient and by nobody else; the coordinator learns distances; silos have a
veto."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.secure_aggregation import blind_mixing, ring
from medsilo.privacy.secure_aggregation.blind_distances import LARGEST, messages, sketch, squared_distance
from medsilo.privacy.secure_aggregation.blind_mixing import (
    ERROR_BITS,
    LARGEST_ROW,
    LEFT_ERROR,
    LIMIT,
    SMALLEST,
    WEIGHT_BITS,
    Mix,
    Sealer,
    opening_error,
    whole_weights,
    withstands,
)
from medsilo.privacy.secure_aggregation.mixing_rules import MixingRules, isolation
from tests.support.runs.blind_attempt import Attempt, keys_of, pieces, share_of

NAMES = ("a", "b", "c", "d")
COUNT = 4 * 4096 + 5000
"""Of a model's numbers: five polynomials and a part of a sixth."""
PRIMES = (2**61 - 1, 2**31 - 1)


def models_of(names: tuple[str, ...], count: int = COUNT) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(5)
    return {name: generator.normal(0, 0.3, count).astype(np.float32) for name in names}


def some_weights(silos: int) -> NDArray[np.int64]:
    """Some below 0, some above 1."""
    weights = np.random.default_rng(silos).normal(0, 0.4, (silos, silos))
    np.fill_diagonal(weights, 0)
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return whole_weights(weights)


def attempt_of(names: tuple[str, ...] = NAMES, count: int = COUNT) -> Attempt:
    return Attempt(models_of(names, count), some_weights(len(names)))


def expected_of(attempt: Attempt) -> dict[str, NDArray[np.float64]]:
    shares = attempt.weights / (1 << WEIGHT_BITS)
    models = np.stack([attempt.models[name].astype(float) for name in attempt.names])
    return dict(zip(attempt.names, shares @ models, strict=True))


class TestRing:
    def test_products_are_those_of_whole_numbers(self) -> None:
        one = ring.stream(bytes(32), 3 * ring.DEGREE).reshape(2, 3, ring.DEGREE)
        other = ring.stream(b"1" * 32, ring.DEGREE)
        for which, prime in enumerate(PRIMES):
            one[which, 1], one[which, 2] = prime - 1, prime // 2
            other[which, :3] = prime - 1, prime // 2, prime // 2 + 1
        found = ring.Factor(other).times(one)
        for which, prime in enumerate(PRIMES):
            for row in range(3):
                assert found[which, row].tolist() == _product(one[which, row].tolist(), other[which].tolist(), prime)

    def test_the_largest_digits_are_multiplied_exactly(self) -> None:
        """All digits 2^15 - 1, and digits whose transforms have all that there is at one frequency."""
        once = np.full(ring.DEGREE, 2**15 - 1)
        wave = ((2**15 - 1) * np.cos(np.pi * 75 * np.arange(ring.DEGREE) / ring.DEGREE)).astype(np.int64)
        for digits in (once, wave):
            words = np.zeros((2, 1, ring.DEGREE), dtype=np.uint64)
            for which, shifts in enumerate(((0, 16, 32), (0,))):
                whole = [int(d) * sum(1 << shift for shift in shifts) % PRIMES[which] for d in digits]
                words[which, 0] = whole
            found = ring.Factor(words[:, 0]).times(words)
            for which, prime in enumerate(PRIMES):
                assert found[which, 0].tolist() == _product(*[words[which, 0].tolist()] * 2, prime)

    def test_combinations_are_those_of_whole_numbers(self) -> None:
        rows = [ring.stream(bytes([seed]) * 32, 9001) for seed in range(5)]
        rows[0][0, :50], rows[0][1, :50] = PRIMES[0] - 1, PRIMES[1] - 1
        generator = np.random.default_rng(2)
        weights = generator.integers(-(ring.LARGEST_SUM // 5), ring.LARGEST_SUM // 5, (3, 5))
        found = ring.combined(rows, weights)
        for which, prime in enumerate(PRIMES):
            for i, place in itertools.product(range(3), (0, 1, 8191, 8192, 9000)):
                whole = sum(int(weights[i, j]) * int(rows[j][which, place]) for j in range(5))
                assert int(found[which, i, place]) == whole % prime
            scaled = ring.scaled(rows[0][:, :60], -ring.LARGEST_SUM)
            assert scaled[which].tolist() == [-ring.LARGEST_SUM * n % prime for n in rows[0][which, :60].tolist()]

    def test_sums_differences_and_signed_numbers_are_those_of_whole_numbers(self) -> None:
        edges = [np.array([0, 1, p // 2, p // 2 + 1, p - 2, p - 1], dtype=np.uint64) for p in PRIMES]
        one = np.stack([np.repeat(e, 6) for e in edges])
        other = np.stack([np.tile(e, 6) for e in edges])
        for which, prime in enumerate(PRIMES):
            pairs = list(zip(one[which].tolist(), other[which].tolist(), strict=True))
            assert ring.add(one, other)[which].tolist() == [(a + b) % prime for a, b in pairs]
            assert ring.subtract(one, other)[which].tolist() == [(a - b) % prime for a, b in pairs]
        whole = [0, 1, -1, 2**31 - 1, 2**61, -(2**61), 2**61 - 1]
        words = ring.from_signed(np.array(whole))
        assert [words[which].tolist() for which in (0, 1)] == [[n % p for n in whole] for p in PRIMES]
        assert ring.to_real(words, 3).tolist() == [n / 8 for n in whole]
        large = [(n << 29) + 5 for n in whole]
        assert ring.to_real(ring.add(ring.shifted(words, 29), ring.from_signed(np.array([5]))), 0) == pytest.approx(
            [float(n) for n in large], rel=1e-15
        )

    def test_numbers_travel_as_twelve_bytes_each(self) -> None:
        words = ring.stream(bytes(32), 7)
        packed = ring.pack(words)
        assert packed.shape == (7, 12)
        assert packed[0].tobytes() == int(words[0, 0]).to_bytes(8, "little") + int(words[1, 0]).to_bytes(4, "little")
        assert (ring.unpack(packed.tobytes()) == words).all()
        above = (2**64 - 1).to_bytes(8, "little") + (2**32 - 1).to_bytes(4, "little")
        assert ring.unpack(above)[:, 0].tolist() == [(2**64 - 1) % PRIMES[0], (2**32 - 1) % PRIMES[1]]

    def test_known_answers(self) -> None:
        """AES-256 in counter mode under 32 zero bytes, as anybody computes it: NIST's key of zeros, block of zeros."""
        first = bytes.fromhex("dc95c078a2408989ad48a21492842087")
        assert ring.words(bytes(32), 2).tobytes() == first
        assert ring.words(bytes(32), 4)[2:].tobytes() == ring.words(bytes(32), 2, start=2).tobytes()
        drawn = ring.stream(bytes(32), 1)
        assert drawn[0, 0] == int.from_bytes(first[:8], "little") % PRIMES[0]
        assert drawn[1, 0] == int.from_bytes(first[8:], "little") % PRIMES[1]

    def test_the_pages_numbers(self) -> None:
        """docs/blind-mixing.md, "Numbers to check against": the product is held by whole numbers."""
        public = ring.public_polynomials(b"medsilo", 0, 2)
        secret = ring.stream(bytes(range(32)), ring.DEGREE)
        product = ring.Factor(secret).times(public)
        for which, prime in enumerate(PRIMES):
            assert product[which, 0].tolist() == _product(public[which, 0].tolist(), secret[which].tolist(), prime)
        page = (Path(__file__).parents[3] / "docs" / "blind-mixing.md").read_text()
        for numbers in (public[:, 0, :2], public[:, 1, -1:], secret[:, :2], product[:, 0, :2], product[:, 1, -1:]):
            assert ", ".join(f"({long}, {short})" for long, short in numbers.T.tolist()) in page


class TestMixture:
    @pytest.mark.parametrize("names", [("a", "b", "c"), NAMES, tuple(f"silo-{n:02}" for n in range(9))])
    def test_every_silo_opens_its_own_mixture(self, names: tuple[str, ...]) -> None:
        attempt = attempt_of(names)
        expected = expected_of(attempt)
        for name, found in attempt.opened().items():
            error = found - expected[name]
            stated = opening_error(attempt.mix.row(name))
            assert np.abs(error).max() < 7 * stated + 1e-6
            assert 0.9 * stated < np.std(error) < 1.1 * stated

    @pytest.mark.parametrize("count", [1, 700, 4096, SMALLEST])
    def test_small_models_are_sealed_with_zeros(self, count: int) -> None:
        attempt = attempt_of(count=count)
        expected = expected_of(attempt)
        assert attempt.sealed["a"].shape == (2, SMALLEST)
        for name, found in attempt.opened().items():
            assert np.abs(found - expected[name]).max() < 1e-3 / 4

    def test_a_mixture_of_ones_own_model_alone_is_that_model(self) -> None:
        attempt = Attempt(models_of(NAMES), np.eye(4, dtype=np.int64) << WEIGHT_BITS)
        for name, found in attempt.opened().items():
            assert np.abs(found - attempt.models[name]).max() < 1e-3 / 8

    def test_what_is_sealed_and_shared_looks_uniform(self) -> None:
        attempt = attempt_of()
        for words in (*attempt.sealed.values(), *attempt.silos["a"].shares(attempt.state()).values()):
            for which, prime in enumerate(PRIMES):
                share = words[which].astype(float) / prime
                assert abs(share.mean() - 0.5) < 6 / np.sqrt(12 * len(share))
                own = attempt.models["a"][: len(share)]
                assert abs(np.corrcoef(share[: len(own)], own)[0, 1]) < 0.1

    def test_errors_are_normal_to_their_last_bits(self) -> None:
        drawn = blind_mixing._errors(blind_mixing.NoiseSource(), 200_000)
        assert abs(np.std(drawn) / 2.0**ERROR_BITS - 1) < 0.02
        far = drawn[np.abs(drawn) > 2 << ERROR_BITS]  # where a float64 has no bits left below 4
        assert len(far) > 5000
        for bits in (0, 3, 6, 9, 12, 15, 18):  # also where what is drawn apart meets what is rounded
            counts = np.bincount((far >> bits) & 15, minlength=16)
            assert ((counts - len(far) / 16) ** 2 / (len(far) / 16)).sum() < 60, "chi-squared of 15 degrees of freedom"

    def test_the_same_model_is_never_sealed_the_same(self) -> None:
        one, other = attempt_of(), attempt_of()
        assert (one.models["a"] == other.models["a"]).all()
        assert not (one.sealed["a"][0] == other.sealed["a"][0]).any()

    def test_nobody_else_opens_a_mixture(self) -> None:
        """Neither the coordinator, without a silo's pads, nor another silo, with its own."""
        attempt = attempt_of()
        attempt.help()
        with pytest.raises(RefusedError, match=r"mixture_as_stated: the mixture for b is not the one"):
            attempt.silos["b"].open(pieces(attempt.mixed["a"]), COUNT, attempt.opener("b"), attempt.sums["b"])
        public = ring.public_polynomials(b"round", 0, 1)
        bare = ring.Factor(share_of("a", attempt.shares)).times(public)[:, 0]
        left = ring.to_real(ring.subtract(attempt.mixed["a"][:, : ring.DEGREE], bare), 88)
        assert np.abs(left).max() > 7, "of a range of ±8"

    def test_what_one_silo_gives_for_another_tells_that_other_nothing_but_the_sum(self) -> None:
        """Silo b, with a's pads taken away, does not come to a's secret times its weight: others' masks are on it."""
        attempt = attempt_of()
        given = attempt.silos["a"].shares(attempt.state())["b"]
        pad = blind_mixing._pad(attempt.silos["b"]._keys["a"], attempt.mix, "a", "b")
        bare = ring.subtract(given, pad)
        assert not (bare == ring.scaled(attempt.silos["a"]._secret, attempt.mix.weight("b", "a"))).all(axis=0).any()

    def test_a_missing_share_opens_nothing(self) -> None:
        attempt = attempt_of()
        attempt.help()
        attempt.shares.pop()
        with pytest.raises(RefusedError, match="the mixture for a does not open"):
            attempt.open("a")

    def test_a_wrong_share_spoils_a_mixture_and_gives_nothing_away(self) -> None:
        attempt = attempt_of()
        attempt.help()
        attempt.shares[3] = {n: ring.add(words, np.ones_like(words)) for n, words in attempt.shares[3].items()}
        with pytest.raises(RefusedError, match="the mixture for a does not open"):
            attempt.open("a")

    def test_silos_that_were_told_other_weights_open_nothing_for_anybody(self) -> None:
        attempt = attempt_of()
        attempt.help()
        other = replace(attempt.mix, weights=np.roll(attempt.weights, 1, axis=1), digest=b"another digest")
        told = Sealer("c", attempt.silos["c"]._keys, b"round", seed=attempt.silos["c"].seed)
        attempt.shares[2] = told.shares(other)
        for name in ("a", "b", "d"):
            with pytest.raises(RefusedError, match="does not open"):
                attempt.open(name)
        attempt.tags["c"] = told.tags(other, attempt.sums["c"])
        with pytest.raises(RefusedError, match="check_sums: those that came for c are not what c gave"):
            attempt.open("a")

    def test_weights_of_another_roster_or_a_second_set_of_them_are_refused(self) -> None:
        attempt = attempt_of()
        silo = attempt.silos["a"]
        with pytest.raises(RefusedError, match=r"weights are for a, b, c, which are not the silos of the roster"):
            silo.shares(Mix(("a", "b", "c"), some_weights(3), b"digest"))
        first = silo.shares(attempt.state())
        again = silo.shares(attempt.mix)
        assert all((first[name] == again[name]).all() for name in first)
        with pytest.raises(RefusedError, match="the same models are asked for by other weights"):
            silo.shares(replace(attempt.mix, digest=b"another"))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), LIMIT, -2 * LIMIT])
    def test_a_number_without_room_is_refused_by_its_tensors_name(self, value: float) -> None:
        silo = Sealer("a", keys_of(NAMES)["a"], b"round")
        numbers = np.array([0.5, value], dtype=np.float32)
        with pytest.raises(TrainingError, match=r"tensor conv1\.weight holds .* Nothing of it was sent"):
            silo.seal(numbers, what="tensor conv1.weight")

    def test_the_largest_numbers_and_weights_still_fit(self) -> None:
        nearly = np.nextafter(np.float32(LIMIT), np.float32(0))
        numbers = np.array([nearly, -nearly, 0.1, 0.2, 0.3], dtype=np.float32)
        row = [2560, -1536, 0]  # sizes of 4 in all
        weights = np.array([row, [0, 1024, 0], [0, 0, 1024]])
        attempt = Attempt({"a": numbers, "b": -numbers, "c": -numbers}, weights)
        assert np.abs(attempt.opened()["a"] - 4 * numbers).max() < 1e-3


class TestDistances:
    @pytest.mark.parametrize("count", [1, 2047, 2048])
    def test_models_no_larger_than_a_sketch_have_their_true_distances(self, count: int) -> None:
        models, keys = models_of(NAMES, count), keys_of(NAMES)
        sent = {n: messages(sketch(models[n], size=2048, context=b"c")[None], keys[n]) for n in NAMES}
        for one in NAMES:
            for other in NAMES:
                if one != other:
                    true = float(np.square(models[one].astype(float) - models[other]).sum())
                    assert squared_distance(sent[one][other][0], sent[other][one][0]) == pytest.approx(
                        true, rel=1e-4, abs=1e-4
                    )

    def test_sketches_are_right_on_average_and_as_far_off_as_is_said(self) -> None:
        models, keys = models_of(("a", "b"), 20_000), keys_of(("a", "b"))
        true = float(np.square(models["a"].astype(float) - models["b"]).sum())
        found = []
        for draw in range(60):
            context = bytes([draw])
            one, other = (messages(sketch(models[n], size=512, context=context)[None], keys[n]) for n in ("a", "b"))
            found.append(squared_distance(one["b"][0], other["a"][0]) / true - 1)
        assert abs(np.mean(found)) < 4 * np.sqrt(2 / 512 / 60)
        assert 0.7 < np.std(found) / np.sqrt(2 / 512) < 1.35

    def test_no_choice_of_a_context_leaves_a_number_alone_in_a_sketch(self) -> None:
        """Who makes the plan chooses it, and may try thousands."""
        for count, size in ((84, 10), (41, 5), (1000, 125)):
            for number in range(200):
                context = number.to_bytes(2)
                sums = np.stack([sketch(row, size=size, context=context) for row in np.eye(count, dtype=np.float32)])
                assert (np.abs(sums).sum(axis=0) >= count // size).all()
                assert (np.abs(sums).sum(axis=1) == 1).all()
                if size > 20 and number > 3:
                    break

    def test_what_is_sent_for_two_models_at_one_distance_is_all_but_the_last_word_uniform(self) -> None:
        """Models that have nothing in common but how far they lie apart: what is sent tells them from uniform words as
        little as from each other."""
        keys = keys_of(("a", "b"))
        shift = np.zeros(2048, dtype=np.float32)
        shift[0] = 3
        for start in (np.zeros(2048, dtype=np.float32), np.full(2048, 7, dtype=np.float32)):
            (one,) = messages(start.astype(float)[None], keys["a"])["b"]
            (other,) = messages((start + shift).astype(float)[None], keys["b"])["a"]
            assert squared_distance(one, other) == pytest.approx(9, abs=1e-3)
            for sent in (one.hidden, other.hidden):
                assert abs((sent / 2.0**64).mean() - 0.5) < 6 / np.sqrt(12 * 2048)

    def test_a_model_too_large_for_distances_is_refused(self) -> None:
        with pytest.raises(TrainingError, match="squared norm"):
            messages(np.array([[np.sqrt(LARGEST)]]), keys_of(("a", "b"))["a"])


def exact_isolation(weights: NDArray[np.int64], own: int, recipients: tuple[int, ...]) -> float:
    """By Gram and Schmidt in fractions: each row less what it shares with those before."""
    unknown = [place for place in range(len(weights)) if place not in (own, *recipients)]
    before: list[tuple[list[Fraction], Fraction]] = []
    total = Fraction(0)
    for recipient in recipients:
        row = [Fraction(int(weights[recipient, place])) for place in unknown]
        mine = Fraction(int(weights[recipient, own]))
        for one, part in before:
            share = sum((a * b for a, b in zip(row, one, strict=True)), Fraction()) / sum(a * a for a in one)
            row, mine = [a - share * b for a, b in zip(row, one, strict=True)], mine - share * part
        if not any(row):
            if mine:
                return float("inf")
            continue
        before.append((row, mine))
        total += mine * mine / sum(a * a for a in row)
    return math.sqrt(total)


class TestRules:
    def test_weights_that_are_some_methods_own_pass(self) -> None:
        even = np.full((5, 5), 0.2)
        MixingRules(minimum=4).check(Mix(("a", "b", "c", "d", "e"), whole_weights(even), b""), "c")
        MixingRules().check(Mix(NAMES, np.eye(4, dtype=np.int64) << WEIGHT_BITS, b""), "a")

    @pytest.mark.parametrize(
        ("row", "rule"),
        [
            ([1024, 0, 0, 0], "minimum"),  # silo b is to get a's model itself
            ([2048, -1024, 0, 0], "minimum"),
            ([1000, 8, 8, 8], "minimum"),
            ([600, 300, 100, 24], "largest_isolation"),
            ([300, 300, 300, 300], "a row of weights has to add up to 1024"),
            ([4096, -1024, -1024, -1024], "a row of weights"),
        ],
    )
    def test_weights_that_show_one_model_are_refused_by_the_rules_name(self, row: list[int], rule: str) -> None:
        weights = whole_weights(np.full((4, 4), 0.25))
        weights[1] = row
        with pytest.raises(RefusedError, match=rule):
            MixingRules().check(Mix(NAMES, weights, b""), "a")

    def test_a_silos_own_mixture_is_held_to_the_same_rules(self) -> None:
        """A coordinator that gives it one model whole reads that model's owner's next moves off what it trains then."""
        weights = whole_weights(np.full((4, 4), 0.25))
        weights[0] = [0, 1024, 0, 0]
        with pytest.raises(RefusedError, match="minimum: the mixture of a would hold 1 models"):
            MixingRules().check(Mix(NAMES, weights, b""), "a")

    @pytest.mark.parametrize(
        "weights",
        [
            np.array([[0.25] * 4] * 4) * 1024,  # no whole numbers
            np.array([[1, -(2**63), -(2**63), 1023], *[[256] * 4] * 3], dtype=np.int64),  # sums that wrap
        ],
    )
    def test_weights_that_are_no_small_whole_numbers_are_refused(self, weights: NDArray[np.int64]) -> None:
        with pytest.raises(RefusedError, match="weights have to be whole numbers of at most 4096"):
            MixingRules().check(Mix(NAMES, weights, b""), "b")

    def test_two_recipients_whose_difference_is_one_model_are_refused_where_two_may_collude(self) -> None:
        names = ("a", "b", "c", "d", "e", "f")
        weights = whole_weights(np.full((6, 6), 1 / 6))
        weights[1] = weights[2] = [170, 171, 171, 171, 171, 170]
        weights[2, 0] += 60
        weights[2, 2] -= 60
        mix = Mix(names, weights, b"")
        MixingRules(colluders=1).check(mix, "a")
        assert isolation([mix.weights], 0, (1, 2)) == float("inf")
        with pytest.raises(
            RefusedError, match="largest_isolation: a's model would stand out inf times in what b, c get"
        ):
            MixingRules(colluders=2).check(mix, "a")

    @pytest.mark.parametrize(("silos", "one", "other"), [(7, 340, 339), (7, 201, 200), (7, 60, 59), (20, 100, 99)])
    def test_also_where_one_model_is_a_difference_of_large_multiples(self, silos: int, one: int, other: int) -> None:
        """Weights m and m - 1 for the model, m + 1 and m for all others: m times the one mixture less m + 1 times the
        other."""
        names = tuple(f"silo-{place:02}" for place in range(silos))
        weights = whole_weights(np.full((silos, silos), 1 / silos))
        for row, rest in ((1, one), (2, other)):
            weights[row, [0, 1, 2]], weights[row, 3:] = (rest - 1, 0, 0), rest
            weights[row, row] = 1024 - weights[row].sum()
        assert (other * weights[1] - one * weights[2])[[0, *range(3, silos)]].tolist() == [1] + [0] * (silos - 3)
        mix = Mix(names, weights, b"")
        MixingRules(colluders=1).check(mix, names[0])
        with pytest.raises(RefusedError, match="would stand out inf times in what silo-01, silo-02 get"):
            MixingRules(colluders=2).check(mix, names[0])
        # One part more in one place, and it is not the model alone, but nearly.
        weights[1, 3] += 1
        weights[1, 1] -= 1
        assert isolation([weights], 0, (1, 2)) == pytest.approx(exact_isolation(weights, 0, (1, 2)), rel=1e-12)
        # One recipient, in two rounds: such rows are no less one model's, if models stay.
        swapped = weights.copy()
        weights[1, 3] -= 1
        swapped[1], swapped[1, 1:3] = weights[2], 0
        assert isolation([weights, swapped], 0, (1,)) > 10

    @pytest.mark.parametrize("largest", [1, 3, 400])
    def test_isolation_in_one_round_is_exact_whatever_rows_depend_on_each_other(self, largest: int) -> None:
        generator = np.random.default_rng(largest)
        infinite = 0
        for _ in range(100):
            weights = generator.integers(-largest, largest + 1, (6, 6))
            weights[generator.integers(6)] = weights[generator.integers(6)] + weights[generator.integers(6)]
            recipients = tuple(
                int(place) for place in generator.permutation(np.arange(1, 6))[: generator.integers(1, 5)]
            )
            expected = exact_isolation(weights, 0, recipients)
            assert isolation([weights], 0, recipients) == pytest.approx(expected, rel=1e-12)
            infinite += expected == float("inf")
        assert 0 < infinite < 100

    @pytest.mark.parametrize("limit", [0.4, 1.0, 3.0])
    @pytest.mark.parametrize("silos", [3, 4, 9])
    def test_weights_that_are_taken_down_to_the_rules_are_refused_by_nobody(self, silos: int, limit: float) -> None:
        """Whatever a method wants: models that stand out, rows without room, mixtures of too few."""
        rules, names = MixingRules(largest_isolation=limit), tuple("abcdefghi"[:silos])
        generator = np.random.default_rng(silos)
        for scale in (0.001, 0.05, 0.4, 3.0):
            wanted = generator.normal(0, scale, (silos, silos)) ** 3
            wanted[0] = 0
            wanted[0, 1] = 0.9
            np.fill_diagonal(wanted, 0)
            np.fill_diagonal(wanted, 1 - wanted.sum(axis=1))
            found = rules.nearest(whole_weights(wanted))
            for name in names:
                rules.check(Mix(names, found, b""), name)
            assert found[0].tolist() == [1024] + [0] * (silos - 1), "of one model alone nothing is given"

    def test_weights_that_no_rule_is_against_stay_as_they_are(self) -> None:
        weights = whole_weights(np.full((5, 5), 0.2))
        assert (MixingRules().nearest(weights) == weights).all()

    @pytest.mark.parametrize("others", [2, 3, 9])
    def test_isolation_in_an_even_mixture(self, others: int) -> None:
        weights = np.full((others + 1, others + 1), 1024)
        assert isolation([weights], 0, (1,)) == pytest.approx((others - 1) ** -0.5)

    def test_isolation_is_the_best_that_recipients_can_do(self) -> None:
        generator = np.random.default_rng(3)
        weights = generator.integers(-500, 500, (7, 7))
        found = isolation([weights], 0, (2, 4))
        rows = np.delete(weights[[2, 4]].astype(float), [2, 4], axis=1)
        angles = np.linspace(0, np.pi, 20_001)
        sums = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ rows
        tried = np.abs(sums[:, 0]) / np.linalg.norm(sums[:, 1:], axis=1)
        assert found == pytest.approx(tried.max(), rel=1e-6)


class TestColluders:
    """docs/blind-mixing.md, "What it stands on": what recipients that work with the coordinator leave unknown."""

    def test_the_parameters_are_those_of_a_published_table(self) -> None:
        """Homomorphic Encryption Standard (2018), Table 1: 128 bits, n = 4096, errors of 3.19: a modulus of 109 bits at
        most (for short secrets; for uniform ones more)."""
        assert ring.DEGREE == 4096
        assert ring.Q.bit_length() == 92 <= 109
        assert LEFT_ERROR == 3.19

    def test_of_any_weights_that_have_room_four_recipients_give_nothing_away(self) -> None:
        largest = math.hypot(2560, 1536)  # 4,096 in sizes, of which others' is all
        assert largest**4 * math.sqrt(2) * LEFT_ERROR < 2**ERROR_BITS
        rows = np.zeros((9, 9), dtype=np.int64)
        for i in range(9):
            rows[i, (i + 1) % 9], rows[i, (i + 2) % 9] = 2560, -1536
        assert np.abs(rows).sum(axis=1).max() == LARGEST_ROW
        assert withstands(rows) == 4
        with pytest.raises(RefusedError, match="colluders: by these weights what is sealed withstands 4 recipients"):
            MixingRules(colluders=5).check(Mix(tuple("abcdefghi"), rows, b""), "a")

    @pytest.mark.parametrize(("silos", "least"), [(7, 6), (20, 8), (100, 13)])
    def test_of_even_mixtures_more(self, silos: int, least: int) -> None:
        assert withstands(whole_weights(np.full((silos, silos), 1 / silos))) >= least

    @pytest.mark.parametrize(("silos", "colluding"), [(5, 1), (7, 2), (7, 3), (9, 4)])
    def test_the_kernel_has_vectors_no_longer_than_the_bound(self, silos: int, colluding: int) -> None:
        """By whole numbers: minors of the colluders' rows are a matrix of vectors that no mixture of theirs shows, and
        its norm is at most the product of the rows' norms."""
        weights = whole_weights(np.random.default_rng(silos).dirichlet(np.full(silos, 5.0), size=silos))
        rows = [[int(w) for w in weights[i, colluding:]] for i in range(colluding)]
        pivots, free = range(colluding), range(colluding, silos - colluding)
        pivot = _determinant([[row[p] for p in pivots] for row in rows])
        assert pivot != 0
        columns = []
        for f in free:
            column = [0] * (silos - colluding)
            column[f] = pivot
            for place in pivots:
                replaced = [[row[f] if p == place else row[p] for p in pivots] for row in rows]
                column[place] = -_determinant(replaced)
            assert all(sum(a * b for a, b in zip(row, column, strict=True)) == 0 for row in rows)
            columns.append(column)
        norm = float(np.linalg.norm(np.array(columns, dtype=float), ord=2))
        bound = math.prod(math.sqrt(sum(n * n for n in row)) for row in rows)
        assert norm <= bound * (1 + 1e-9)
        assert bound * math.sqrt(2) * LEFT_ERROR < 2**ERROR_BITS


def _determinant(matrix: list[list[int]]) -> int:
    rows = [[Fraction(n) for n in row] for row in matrix]
    found = Fraction(1)
    for place in range(len(rows)):
        pivot = next((row for row in range(place, len(rows)) if rows[row][place]), None)
        if pivot is None:
            return 0
        if pivot != place:
            rows[place], rows[pivot] = rows[pivot], rows[place]
            found = -found
        found *= rows[place][place]
        for row in range(place + 1, len(rows)):
            factor = rows[row][place] / rows[place][place]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    return int(found)


def _product(one: list[int], other: list[int], prime: int) -> list[int]:
    """Modulo X^n + 1 and a prime, by Kronecker's substitution."""
    room = 160
    product = sum(n << room * i for i, n in enumerate(one)) * sum(n << room * i for i, n in enumerate(other))
    parts = [(product >> room * i) & ((1 << room) - 1) for i in range(2 * ring.DEGREE)]
    return [(low - high) % prime for low, high in zip(parts[: ring.DEGREE], parts[ring.DEGREE :], strict=True)]
