"""A blind mixture is opened by its recipient and by nobody else; the coordinator learns distances; silos have a
veto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.secure_aggregation import blind_mixing, ring
from medsilo.privacy.secure_aggregation.blind_distances import LARGEST, messages, sketch, squared_distance
from medsilo.privacy.secure_aggregation.blind_mixing import (
    ERROR,
    LARGEST_ROW,
    LIMIT,
    WEIGHT_BITS,
    Mix,
    Sealer,
    mixtures,
    opening_error,
    share_of,
    whole_weights,
)
from medsilo.privacy.secure_aggregation.masking import PairKey, pair_keys
from medsilo.privacy.secure_aggregation.mixing_rules import MixingRules, isolation

NAMES = ("a", "b", "c", "d")
COUNT = 5000
"""Of a model's numbers: two polynomials and a part of a third."""


def keys_of(names: tuple[str, ...], context: bytes = b"roster") -> dict[str, dict[str, PairKey]]:
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    found = {}
    for name in names:
        others = {other: key for other, key in public.items() if other != name}
        found[name] = dict(zip(others, pair_keys(name, private[name], others, context), strict=True))
    return found


def models_of(names: tuple[str, ...], count: int = COUNT) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(5)
    return {name: generator.normal(0, 0.3, count).astype(np.float32) for name in names}


def some_weights(silos: int) -> NDArray[np.int64]:
    """Some below 0, some above 1."""
    weights = np.random.default_rng(silos).normal(0, 0.4, (silos, silos))
    np.fill_diagonal(weights, 0)
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return whole_weights(weights)


class Attempt:
    """One attempt at a round among these silos."""

    def __init__(self, names: tuple[str, ...] = NAMES, context: bytes = b"round") -> None:
        self.models = models_of(names)
        self.silos = {name: Sealer(name, keys, context) for name, keys in keys_of(names).items()}
        self.sealed = {name: silo.seal(self.models[name], what=name) for name, silo in self.silos.items()}
        self.mix = Mix(names, some_weights(len(names)), b"digest")

    def opened(self) -> dict[str, NDArray[np.float32]]:
        """What every silo opens."""
        shares = [silo.shares(self.mix) for silo in self.silos.values()]
        mixed = mixtures(self.sealed, self.mix)
        return {name: silo.open(mixed[name], share_of(name, shares)) for name, silo in self.silos.items()}

    def expected(self) -> dict[str, NDArray[np.float64]]:
        whole = 1 << WEIGHT_BITS
        return {
            name: np.sum([self.mix.weight(name, j) / whole * self.models[j].astype(float) for j in self.models], axis=0)
            for name in self.models
        }


class TestRing:
    def test_products_are_those_of_whole_numbers(self) -> None:
        generator = np.random.default_rng(1)
        one = generator.integers(0, ring.Q, (3, ring.DEGREE), dtype=np.uint64)
        one[1], one[2] = ring.Q - 1, ring.Q // 2
        other = generator.integers(0, ring.Q, ring.DEGREE, dtype=np.uint64)
        other[:3] = ring.Q - 1, ring.Q // 2, ring.Q // 2 + 1
        found = ring.Factor(other).times(one)
        for row, product in zip(one, found, strict=True):
            assert [int(n) for n in product] == _product([int(n) for n in row], [int(n) for n in other])

    def test_the_largest_digits_are_multiplied_exactly(self) -> None:
        # All digits -2^15 or 2^15 - 1, so that sums and their rounding are the largest.
        high = sum((2**15 - 1) << shift for shift in (0, 16, 32)) + (2**12 - 1 << 48)
        ones = np.full((1, ring.DEGREE), high, dtype=np.uint64)
        assert [int(n) for n in ring.Factor(ones[0]).times(ones)[0]] == _product(
            [high] * ring.DEGREE, [high] * ring.DEGREE
        )

    def test_combinations_are_those_of_whole_numbers(self) -> None:
        generator = np.random.default_rng(2)
        rows = [generator.integers(0, ring.Q, 9001, dtype=np.uint64) for _ in range(5)]
        weights = generator.integers(-(2**28), 2**28, (3, 5))
        found = ring.combined(rows, weights)
        for i in range(3):
            for place in (0, 1, 8191, 8192, 9000):
                whole = sum(int(weights[i, j]) * int(rows[j][place]) for j in range(5))
                assert int(found[i][place]) % ring.Q == whole % ring.Q
        assert [int(n) % ring.Q for n in ring.scaled(rows[0][:50], -(2**28) - 1)] == [
            -(2**28 + 1) * int(n) % ring.Q for n in rows[0][:50]
        ]

    def test_known_answers(self) -> None:
        """AES-256 in counter mode under 32 zero bytes, as anybody computes it: NIST's key of zeros, block of zeros."""
        first = bytes.fromhex("dc95c078a2408989ad48a21492842087")
        assert ring.words(bytes(32), 2).tobytes() == first
        assert ring.words(bytes(32), 4)[2:].tobytes() == ring.words(bytes(32), 2, start=2).tobytes()

    def test_the_pages_numbers(self) -> None:
        """docs/blind-mixing.md, "Numbers to check against": the product is held by whole numbers."""
        public = ring.public_polynomials(b"medsilo", 0, 2)
        secret = ring.stream(bytes(range(32)), ring.DEGREE)
        product = ring.Factor(secret).times(public)
        assert [int(n) for n in product[0]] == _product([int(n) for n in public[0]], [int(n) for n in secret])
        page = (Path(__file__).parents[3] / "docs" / "blind-mixing.md").read_text()
        for numbers in (public[0][:3], public[1][-1:], secret[:2], product[0][:2], product[1][-1:]):
            assert ", ".join(str(int(n)) for n in numbers) in page


class TestMixture:
    @pytest.mark.parametrize("names", [("a", "b", "c"), NAMES, tuple(f"silo-{n:02}" for n in range(9))])
    def test_every_silo_opens_its_own_mixture(self, names: tuple[str, ...]) -> None:
        attempt = Attempt(names)
        expected = attempt.expected()
        for name, found in attempt.opened().items():
            error = found - expected[name]
            stated = opening_error(attempt.mix.row(name))
            assert np.abs(error).max() < 7 * stated + 1e-6
            assert 0.9 * stated < np.std(error) < 1.1 * stated

    def test_a_mixture_of_ones_own_model_alone_is_that_model(self) -> None:
        attempt = Attempt()
        attempt.mix = replace(attempt.mix, weights=np.eye(4, dtype=np.int64) << WEIGHT_BITS)
        for name, found in attempt.opened().items():
            assert np.abs(found - attempt.models[name]).max() < 1e-3 / 8

    def test_what_is_sealed_and_shared_looks_uniform(self) -> None:
        attempt = Attempt()
        for words in (*attempt.sealed.values(), *attempt.silos["a"].shares(attempt.mix).values()):
            share = words.astype(float) / ring.Q
            assert abs(share.mean() - 0.5) < 6 / np.sqrt(12 * len(words))
            assert abs(np.corrcoef(share[: len(attempt.models["a"])], attempt.models["a"][: len(words)])[0, 1]) < 0.15

    def test_the_same_model_is_never_sealed_the_same(self) -> None:
        one, other = Attempt(), Attempt()
        assert (one.models["a"] == other.models["a"]).all()
        assert not (one.sealed["a"] == other.sealed["a"]).any()

    def test_nobody_else_opens_a_mixture(self) -> None:
        """Neither the coordinator, without a silo's pads, nor another silo, with its own."""
        attempt = Attempt()
        shares = [silo.shares(attempt.mix) for silo in attempt.silos.values()]
        mixed = mixtures(attempt.sealed, attempt.mix)
        with pytest.raises(RefusedError, match="the mixture for b does not open"):
            attempt.silos["b"].open(mixed["a"], share_of("a", shares))
        bare = ring.Factor(share_of("a", shares)).times(ring.public_polynomials(b"round", 0, 1))[0]
        assert np.abs(ring.to_signed(ring.subtract(mixed["a"][: ring.DEGREE], bare))).max() > ring.Q // 8

    def test_what_one_silo_gives_for_another_tells_that_other_nothing_but_the_sum(self) -> None:
        """Silo b, with a's pads taken away, does not come to a's secret times its weight: others' masks are on it."""
        attempt = Attempt()
        given = attempt.silos["a"].shares(attempt.mix)["b"]
        pad = blind_mixing._pad(attempt.silos["b"]._keys["a"], attempt.mix, "a", "b")
        bare = ring.subtract(given, pad)
        assert not (bare == ring.scaled(attempt.silos["a"]._secret, attempt.mix.weight("b", "a"))).any()

    def test_a_missing_share_opens_nothing(self) -> None:
        attempt = Attempt()
        shares = [silo.shares(attempt.mix) for name, silo in attempt.silos.items() if name != "d"]
        attempt.silos["d"].shares(attempt.mix)
        with pytest.raises(RefusedError, match="the mixture for a does not open"):
            attempt.silos["a"].open(mixtures(attempt.sealed, attempt.mix)["a"], share_of("a", shares))

    def test_a_wrong_share_spoils_a_mixture_and_gives_nothing_away(self) -> None:
        attempt = Attempt()
        shares = [silo.shares(attempt.mix) for silo in attempt.silos.values()]
        shares[3] = {name: ring.add(words, np.ones_like(words)) for name, words in shares[3].items()}
        with pytest.raises(RefusedError, match="the mixture for a does not open"):
            attempt.silos["a"].open(mixtures(attempt.sealed, attempt.mix)["a"], share_of("a", shares))

    def test_silos_that_were_told_other_weights_open_nothing_for_anybody(self) -> None:
        attempt = Attempt()
        other = Mix(NAMES, np.roll(attempt.mix.weights, 1, axis=1), b"another digest")
        shares = [silo.shares(other if name == "c" else attempt.mix) for name, silo in attempt.silos.items()]
        mixed = mixtures(attempt.sealed, attempt.mix)
        for name, silo in attempt.silos.items():
            with pytest.raises(RefusedError, match="does not open"):
                silo.open(mixed[name], share_of(name, shares))

    def test_weights_of_another_roster_or_a_second_set_of_them_are_refused(self) -> None:
        attempt = Attempt()
        silo = attempt.silos["a"]
        with pytest.raises(RefusedError, match=r"weights are for a, b, c, which are not the silos of the roster"):
            silo.shares(Mix(("a", "b", "c"), some_weights(3), b"digest"))
        first = silo.shares(attempt.mix)
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
        names = ("a", "b", "c")
        silos = {name: Sealer(name, keys, b"round") for name, keys in keys_of(names).items()}
        numbers = np.array([LIMIT * 0.999, -LIMIT * 0.999, 0.1, 0.2, 0.3], dtype=np.float32)
        models = {"a": numbers, "b": -numbers, "c": -numbers}
        sealed = {name: silo.seal(models[name], what=name) for name, silo in silos.items()}
        row = [2560, -1536, 0]  # sizes of 4 in all
        mix = Mix(names, np.array([row, [0, 1024, 0], [0, 0, 1024]]), b"digest")
        shares = [silo.shares(mix) for silo in silos.values()]
        found = silos["a"].open(mixtures(sealed, mix)["a"], share_of("a", shares))
        assert np.abs(found - 4 * numbers).max() < 1e-3


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


def test_a_recipient_that_colludes_leaves_errors_as_wide_as_learning_with_errors_asks_for() -> None:
    """docs/blind-mixing.md: with one recipient's help the errors that are left are at least σ / (√2 ‖w‖) wide, and
    2^61 / 2^54.3 is what the published table asks for at 128 bits, n = 2048 and uniform secrets."""
    assert ERROR / (2**0.5 * LARGEST_ROW) > 2 ** (61 - 54.3)
    assert ring.DEGREE == 2048


def _product(one: list[int], other: list[int]) -> list[int]:
    """Modulo X^n + 1 and q, by Kronecker's substitution."""
    room = 160
    product = sum(n << room * i for i, n in enumerate(one)) * sum(n << room * i for i, n in enumerate(other))
    parts = [(product >> room * i) & ((1 << room) - 1) for i in range(2 * ring.DEGREE)]
    return [(low - high) % ring.Q for low, high in zip(parts[: ring.DEGREE], parts[ring.DEGREE :], strict=True)]
