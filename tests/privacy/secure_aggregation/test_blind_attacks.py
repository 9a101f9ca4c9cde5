"""What breaks blind mixing, and what does not: docs/blind-mixing.md, "What breaks it"."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.secure_aggregation import blind_mixing, ring
from medsilo.privacy.secure_aggregation.blind_mixing import (
    ERROR_BITS,
    FRACTION_BITS,
    SPREAD_BITS,
    WEIGHT_BITS,
    NoiseSource,
    whole_weights,
)
from medsilo.privacy.secure_aggregation.mixing_rules import MixingRules
from medsilo.privacy.secure_aggregation.ring import Words
from tests.support.runs import blind_attempt
from tests.support.runs.blind_attacks import changing, errors_by_kernel, errors_of
from tests.support.runs.blind_attempt import Attempt, keys_of, sha256_of

NAMES = ("a", "b", "c", "d")


def models_of(names: tuple[str, ...], count: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(5)
    return {name: generator.normal(0, 0.3, count).astype(np.float32) for name in names}


def even(silos: int) -> NDArray[np.int64]:
    return whole_weights(np.full((silos, silos), 1 / silos))


def mixed(count: int = 9000) -> Attempt:
    return Attempt(models_of(NAMES, count), even(4))


def in_ring(value: float) -> Words:
    """A number as a mixture holds it."""
    numbers = np.array([round(value * (1 << WEIGHT_BITS))])
    return ring.shifted(ring.from_signed(numbers), FRACTION_BITS + SPREAD_BITS)


def with_added(mixture: Words, value: float) -> Words:
    changed = mixture.copy()
    changed[:, 5:6] = ring.add(changed[:, 5:6], in_ring(value))
    return changed


class TestCoordinatorWithRecipients:
    """Of each case the rows are ones that no rule of a hospital's is against, not even for so many colluders."""

    @pytest.mark.parametrize(("silos", "colluding"), [(7, 2), (7, 3), (9, 3), (9, 4), (13, 4), (13, 6)])
    def test_errors_are_found_where_they_are_narrow_and_not_as_they_are(
        self, monkeypatch: pytest.MonkeyPatch, silos: int, colluding: int
    ) -> None:
        names = tuple(f"silo-{place:02}" for place in range(silos))
        weights = whole_weights(np.random.default_rng(7).dirichlet(np.full(silos, 20.0), size=silos))
        count = 64

        def found(width: float | None) -> tuple[list[bool], float]:
            if width is not None:
                monkeypatch.setattr(blind_mixing, "_errors", lambda noise, n: _narrow(noise, n, width))
            attempt = Attempt(models_of(names, 100), weights)
            for name in names:
                MixingRules(largest_isolation=2.0).check(attempt.state(), name)
            attempt.help()
            guessed, shortest = errors_by_kernel(attempt, names[silos - colluding :], count)
            true = [errors_of(attempt, name)[:count] for name in names[: silos - colluding]]
            as_rounded = np.hypot(width or 2.0**ERROR_BITS, 12**-0.5)
            assert abs(np.std(np.array(true, dtype=float)) / as_rounded - 1) < 0.3
            return [
                one == other for one, other in zip(zip(*guessed, strict=True), zip(*true, strict=True), strict=True)
            ], shortest

        right, shortest = found(None)
        assert not any(right)
        assert shortest < 2.0 ** (ERROR_BITS - 2), "the kernel's vectors are nowhere longer than errors are wide"
        right, _ = found(max(0.5, shortest / 30))
        assert all(right), "of narrow errors each is found, and with them the secrets"


def _narrow(noise: NoiseSource, count: int, width: float) -> NDArray[np.int64]:
    return np.rint(noise.gaussian((count,), width)).astype(np.int64)


class TestCoordinatorThatChangesMixtures:
    def test_what_it_adds_before_it_states_the_mixtures_is_refused(self) -> None:
        attempt = mixed()
        attempt.mixed["b"] = with_added(attempt.mixed["b"], 12.0)
        attempt.help()
        with pytest.raises(RefusedError, match="mixture_of_sealed: the mixture for b is not made of the models"):
            attempt.open("b")
        for name in "acd":
            attempt.open(name)

    @pytest.mark.parametrize("by", [1, 2**61 - 1, 2**31 - 1])
    def test_nor_the_least_that_can_be_added_nor_what_one_prime_does_not_show(self, by: int) -> None:
        attempt = mixed()
        mixture = attempt.mixed["b"].copy()
        mixture[:, 7:8] = ring.add(mixture[:, 7:8], ring.from_signed(np.array([by])))
        attempt.mixed["b"] = mixture
        attempt.help()
        with pytest.raises(RefusedError, match="mixture_of_sealed"):
            attempt.open("b")

    def test_what_it_adds_afterwards_is_refused(self) -> None:
        attempt = mixed()
        attempt.help()
        attempt.mixed["b"] = with_added(attempt.mixed["b"], 12.0)
        with pytest.raises(RefusedError, match="mixture_as_stated: the mixture for b is not the one"):
            attempt.open("b")

    def test_without_the_checks_it_would_have_added_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attempt = mixed()
        attempt.mixed["b"] = with_added(attempt.mixed["b"], 12.0)
        attempt.help()
        monkeypatch.setattr(
            blind_mixing, "sum_of_sums", lambda sums, row: blind_attempt.check_sums(attempt.mixed["b"], attempt.mix)
        )
        opened = attempt.open("b")
        assert opened[5] - np.mean([attempt.models[name][5] for name in NAMES]) == pytest.approx(12, abs=1e-3)

    @pytest.mark.parametrize("stated", [True, False])
    def test_one_silos_mixture_for_another_is_refused(self, stated: bool) -> None:
        weights = whole_weights(np.random.default_rng(3).dirichlet(np.full(4, 20.0), size=4))
        attempt = Attempt(models_of(NAMES, 9000), weights)
        if not stated:
            attempt.help()
        attempt.mixed["a"], attempt.mixed["b"] = attempt.mixed["b"], attempt.mixed["a"]
        if stated:
            attempt.help()
        for name in "ab":
            with pytest.raises(RefusedError, match="mixture_of_sealed" if stated else "mixture_as_stated"):
                attempt.open(name)

    def test_an_attempt_that_is_played_again_is_refused(self) -> None:
        """The same silos, weights and models, sealed for another roster: nothing of the first opens the second."""
        first, second = (Attempt(models_of(NAMES, 9000), even(4), context=context) for context in (b"one", b"two"))
        first.help()
        second.help()
        kept = second.mixed["b"]
        second.mixed["b"] = first.mixed["b"]
        with pytest.raises(RefusedError, match="mixture_as_stated"):
            second.open("b")
        second.mixed["b"] = kept
        second.tags, second.sums = first.tags, {**first.sums, "b": second.sums["b"]}
        with pytest.raises(RefusedError, match="check_sums: those that came for a are not what a gave"):
            second.open("b")

    def test_check_sums_of_its_own_making_are_refused(self) -> None:
        attempt = mixed()
        attempt.mixed["b"] = with_added(attempt.mixed["b"], 12.0)
        attempt.help()
        weight = pow(attempt.mix.weight("b", "a"), -1, 2**61 - 1), pow(attempt.mix.weight("b", "a"), -1, 2**31 - 1)
        is_off = ring.subtract(
            blind_attempt.check_sums(attempt.mixed["b"], attempt.mix),
            blind_mixing.sum_of_sums([attempt.sums[name] for name in NAMES], attempt.mix.row("b")),
        )
        primes = 2**61 - 1, 2**31 - 1
        shift = [[n * w % p for n in row] for row, w, p in zip(is_off.tolist(), weight, primes, strict=True)]
        attempt.sums = {**attempt.sums, "a": ring.add(attempt.sums["a"], np.array(shift, dtype=np.uint64))}
        with pytest.raises(RefusedError, match="check_sums: those that came for a"):
            attempt.open("b")
        # With a hospital's keys they pass: that is a model of that hospital's choice, for this recipient.
        attempt.tags["a"] = attempt.silos["a"].tags(attempt.mix, attempt.sums["a"])
        attempt.open("b")
        # But the same sums, which all have to have been told, fail every other recipient, and that hospital itself.
        for name, rule in (("c", "mixture_of_sealed"), ("d", "mixture_of_sealed"), ("a", "check_sums: those that are")):
            with pytest.raises(RefusedError, match=rule):
                attempt.open(name)


class TestCoordinatorThatChangesShares:
    def test_a_change_that_suits_the_only_polynomial_would_pass_without_zeros(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def opened() -> NDArray[np.float32]:
            attempt = Attempt(models_of(NAMES, ring.DEGREE), even(4))
            attempt.help()
            opener = attempt.opener("b")
            share = ring.subtract(opener.share, changing(attempt, 5, 12.0))
            changed = replace(opener, share=share)
            pieces = blind_attempt.pieces(attempt.mixed["b"])
            found = attempt.silos["b"].open(pieces, attempt.count, changed, attempt.given_sums["b"])
            return found - np.mean([attempt.models[name] for name in NAMES], axis=0)

        with pytest.raises(RefusedError, match="the mixture for b does not open"):
            opened()
        for module in (blind_mixing, blind_attempt):
            monkeypatch.setattr(module, "sealed_size", lambda count: count)
        error = opened()
        assert error[5] == pytest.approx(12, abs=1e-3)
        assert np.abs(np.delete(error, 5)).max() < 1e-3

    def test_shares_for_another_attempt_open_nothing(self) -> None:
        keys = keys_of(NAMES)
        first, second = (Attempt(models_of(NAMES, 9000), even(4), context=c, keys=keys) for c in (b"one", b"two"))
        first.help()
        second.help()
        assert sha256_of(first.mixed["b"]) != sha256_of(second.mixed["b"])
        second.shares = first.shares
        with pytest.raises(RefusedError, match="the mixture for b does not open"):
            second.open("b")
