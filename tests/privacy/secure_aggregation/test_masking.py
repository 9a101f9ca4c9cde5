"""Masks cancel in the sum over a whole roster and in no other; the sum is exact to fixed point; nothing wraps."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from securesystemslib import dsse

from medsilo.privacy.errors import RefusedError, TrainingError
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import Credentials, load_credentials
from medsilo.privacy.identity.envelope import key_id, seal
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.secure_aggregation.mask_keys import (
    MASK_KEY,
    VOUCHER,
    CertifiedKey,
    Occasion,
    Roster,
    certify,
    read_certified,
    vouch,
)
from medsilo.privacy.secure_aggregation.masking import LARGEST_WEIGHT, PairKey, decode, encode, mask, pair_keys

NAMES = ("a", "b", "c", "d")


def keys_of(names: Sequence[str], context: bytes = b"x" * 32) -> dict[str, Any]:
    private = {name: X25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in private.items()}
    return {
        name: pair_keys(name, private[name], {n: p for n, p in public.items() if n != name}, context) for name in names
    }


class TestSum:
    @pytest.mark.parametrize("silos", [2, 3, 7])
    def test_masks_cancel_over_all_silos_and_over_no_fewer(self, silos: int) -> None:
        names = [f"silo-{n}" for n in range(silos)]
        generator = np.random.default_rng(silos)
        values = {name: generator.integers(0, 2**64, 50, dtype=np.uint64) for name in names}
        masked = {name: mask(values[name], keys) for name, keys in keys_of(names).items()}
        assert (sum(masked.values()) == sum(values.values())).all()
        for size in range(1, silos):
            for some in itertools.combinations(names, size):
                total = sum(masked[name] for name in some)
                assert not (total == sum(values[name] for name in some)).any(), some

    @given(
        st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5), min_size=2, max_size=6),
        st.integers(1, 10_000),
        st.sampled_from([8, 24, 32]),
    )
    @settings(max_examples=50, deadline=None)
    def test_the_weighted_sum_is_exact_to_fixed_point(self, rows: list[list[float]], first: int, bits: int) -> None:
        names = [f"silo-{n}" for n in range(len(rows))]
        weights = {name: first + index for index, name in enumerate(names)}
        values = {name: np.array(row, dtype=np.float32) for name, row in zip(names, rows, strict=True)}
        total = np.zeros(5, dtype=np.uint64)
        for name, keys in keys_of(names).items():
            coded = encode(values[name], weight=weights[name], fraction_bits=bits, silos=len(rows), what=name)
            total += mask(coded, keys)
        truth = sum(weights[name] * values[name].astype(np.float64) for name in names)
        # What rounding each number to 2^-bits may cost, and float64's own rounding of the truth.
        assert np.abs(decode(total, fraction_bits=bits) - truth).max() <= len(rows) * 2.0 ** -(bits + 1) + 1e-6

    def test_a_vector_longer_than_a_block_is_masked_to_its_end(self) -> None:
        values = np.zeros((1 << 19) + 3, dtype=np.uint64)
        pairs = keys_of(("a", "b"))
        first, second = (mask(values, pairs[name]) for name in ("a", "b"))
        assert not (first + second).any()
        assert len(np.unique(first)) == len(first), "a stream that began again would repeat itself"

    def test_an_empty_vector_is_nothing_to_mask(self) -> None:
        assert len(mask(np.zeros(0, dtype=np.uint64), keys_of(("a", "b"))["a"])) == 0

    def test_another_context_gives_other_masks_from_the_same_keys(self) -> None:
        private, other = X25519PrivateKey.generate(), X25519PrivateKey.generate().public_key().public_bytes_raw()
        streams = [mask(np.zeros(8, np.uint64), pair_keys("a", private, {"b": other}, c)) for c in (b"1", b"2")]
        assert not (streams[0] == streams[1]).any()

    def test_a_masked_vector_shows_no_byte_more_often_than_chance(self) -> None:
        masked = mask(np.zeros(20_000, np.uint64), keys_of(("a", "b"))["a"]).view(np.uint8)
        counts = np.bincount(masked, minlength=256)
        expected = len(masked) / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < 400, "255 degrees of freedom: beyond 400 with a chance of one in 10^8"

    def test_a_key_that_gives_no_secret_is_refused(self) -> None:
        with pytest.raises(RefusedError, match="mask key of b"):
            pair_keys("a", X25519PrivateKey.generate(), {"b": bytes(32)}, b"")


class TestRange:
    @pytest.mark.parametrize("silos", [1, 3, 100])
    @pytest.mark.parametrize("bits", [8, 32, 48])
    def test_what_is_let_through_never_wraps_in_the_sum(self, silos: int, bits: int) -> None:
        largest = 2.0 ** ((2**63 - 1) // silos).bit_length() / 2
        edge = np.array([largest, -largest], dtype=np.float64) / 2.0**bits
        coded = encode(edge.astype(np.float32), weight=1, fraction_bits=bits, silos=silos, what="w")
        total = [int(v) * silos for v in coded.view(np.int64)]
        assert all(-(2**63) <= v < 2**63 for v in total)
        with pytest.raises(TrainingError, match="fewer `fraction_bits`"):
            encode((edge * 1.001).astype(np.float32), weight=1, fraction_bits=bits, silos=silos, what="w")

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
    def test_a_number_that_does_not_fit_is_named(self, bad: float) -> None:
        with pytest.raises(TrainingError, match=r"^hidden\.weight holds"):
            encode(np.array([0, bad], np.float32), weight=2, fraction_bits=32, silos=3, what="hidden.weight")

    @pytest.mark.parametrize("weight", [0, -1, LARGEST_WEIGHT + 1])
    def test_a_weight_beyond_the_range_is_refused(self, weight: int) -> None:
        with pytest.raises(TrainingError, match="weight"):
            encode(np.ones(1, np.float32), weight=weight, fraction_bits=8, silos=2, what="w")


class Party:
    """A silo with keys and a certificate of its own."""

    def __init__(self, folder: Path, name: str, authority: Path, role: str = "silo") -> None:
        identity = Identity("test", role, name)  # type: ignore[arg-type]
        keys = create_keys(folder / name, identity)
        issue(authority, name, keys.request, folder / name / "tls.pem", role=identity.role)
        self.credentials: Credentials = load_credentials(
            ca=authority / "ca.pem", certificate=folder / name / "tls.pem", key=keys.tls_key, expected=identity
        )
        self.audit_key: Ed25519PrivateKey = load_audit_key(keys.audit_key)
        self.private = X25519PrivateKey.generate()

    def states(self, occasion: Occasion, received: bytes = bytes(32)) -> CertifiedKey:
        return certify(
            self.private,
            occasion,
            received,
            identity=self.credentials.identity,
            audit_key=self.audit_key,
            voucher=vouch(self.credentials, self.audit_key),
        )


OCCASION = Occasion("test", "run", b"p" * 32, 3)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return folder


@pytest.fixture(scope="module")
def parties(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Party]:
    folder = tmp_path_factory.mktemp("silos")
    return {name: Party(folder, name, authority) for name in NAMES}


class TestRoster:
    def test_silos_that_hold_each_others_statements_sum_up(self, authority: Path, parties: dict[str, Party]) -> None:
        ca_pem = (authority / "ca.pem").read_bytes()
        own = {name: party.states(OCCASION) for name, party in parties.items()}
        values = {name: np.arange(5, dtype=np.uint64) * index for index, name in enumerate(parties, start=1)}
        total = np.zeros(5, dtype=np.uint64)
        for name, party in parties.items():
            roster = Roster.read([key.to_message() for key in own.values()], OCCASION, ca_pem=ca_pem)
            roster.check(own[name], minimum=4, audit_keys={n: key_id(k.audit_key) for n, k in own.items() if n != name})
            total += roster.mask(own[name], party.private, values[name])
        assert (total == np.arange(5) * 10).all()

    def test_silos_that_are_shown_different_rosters_do_not_cancel(self, parties: dict[str, Party]) -> None:
        own = {name: party.states(OCCASION) for name, party in parties.items()}
        three, four = Roster([own["a"], own["b"], own["c"]]), Roster(own.values())
        zeros = np.zeros(9, np.uint64)
        shown = {"a": three, "b": three, "c": four}
        total = sum(roster.mask(own[name], parties[name].private, zeros) for name, roster in shown.items())
        assert (total != 0).all()

    def test_a_coordinator_alone_cannot_put_its_key_in_a_silos_place(
        self, authority: Path, parties: dict[str, Party], tmp_path: Path
    ) -> None:
        ca_pem = (authority / "ca.pem").read_bytes()
        silo, forger = parties["b"], Ed25519PrivateKey.generate()
        coordinator = Party(tmp_path, "leader", authority, role="coordinator")
        create_authority(tmp_path / "other", "test")
        elsewhere = Party(tmp_path / "elsewhere", "b", tmp_path / "other")
        good = silo.states(OCCASION)
        forged = {"v": 1, "silo": "spiffe://test/silo/b", "audit_key": forger.public_key().public_bytes_raw().hex()}
        own_word = seal({**forged, "certificate": silo.credentials.certificate_pem.decode()}, VOUCHER, forger)
        led = vouch(coordinator.credentials, forger)
        unsigned = dsse.Envelope(good.voucher.payload, VOUCHER, {})
        stated = seal({**_payload(good), "mask_key": "11" * 32}, MASK_KEY, forger)
        for key, why in (
            (replace(good, statement=stated), "signature does not hold"),
            (
                replace(good, statement=stated, voucher=own_word),
                "voucher is not signed with the key of its certificate",
            ),
            (replace(good, statement=stated, voucher=led), "stated by spiffe://test/silo/b, and vouched for by"),
            (replace(good, voucher=unsigned), "voucher is not signed with the key of its certificate"),
            (replace(good, voucher=good.statement), "not vouched for"),
            (replace(good, voucher=parties["c"].states(OCCASION).voucher), "signature does not hold"),
            (coordinator.states(OCCASION), "vouched for by spiffe://test/coordinator/leader"),
            (elsewhere.states(OCCASION), "another CA"),
            (silo.states(replace(OCCASION, round=2)), "another run or round"),
            (silo.states(replace(OCCASION, run="old")), "another run or round"),
            (silo.states(replace(OCCASION, plan_sha256=b"q" * 32)), "another run or round"),
            (replace(good, statement=seal({"v": 1}, MASK_KEY, silo.audit_key)), "cannot be used"),
        ):
            with pytest.raises(RefusedError, match=why):
                read_certified(key.to_message(), OCCASION, ca_pem=ca_pem)
        assert read_certified(good.to_message(), OCCASION, ca_pem=ca_pem) == good

    def test_a_silo_masks_with_enough_silos_of_known_keys_or_not_at_all(self, parties: dict[str, Party]) -> None:
        own = {name: party.states(OCCASION) for name, party in parties.items()}
        roster = Roster([own["a"], own["b"], own["c"]])
        roster.check(own["a"], minimum=3, audit_keys={})
        with pytest.raises(RefusedError, match="4 are the least"):
            roster.check(own["a"], minimum=4, audit_keys={})
        odd = Roster([own["a"], own["b"], parties["c"].states(OCCASION, received=b"o" * 32)])
        with pytest.raises(RefusedError, match="c was given another model to train from than a"):
            odd.check(own["a"], minimum=3, audit_keys={})
        with pytest.raises(RefusedError, match="mask key that d gave last"):
            roster.check(own["d"], minimum=3, audit_keys={})
        fresh = replace(own["a"], statement=parties["a"].states(replace(OCCASION, round=4)).statement)
        with pytest.raises(RefusedError, match="mask key that a gave last"):
            roster.check(fresh, minimum=3, audit_keys={})
        known = {"b": key_id(own["b"].audit_key)}
        with pytest.raises(RefusedError, match="the roster holds c with the audit key"):
            roster.check(own["a"], minimum=3, audit_keys=known)
        with pytest.raises(RefusedError, match="the roster holds c with the audit key"):
            roster.check(own["a"], minimum=3, audit_keys={**known, "c": hashlib.sha256(b"another").hexdigest()})

    def test_no_silo_counts_twice(
        self, authority: Path, parties: dict[str, Party], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ca_pem = (authority / "ca.pem").read_bytes()
        twice = [parties["a"].states(OCCASION).to_message(), *(2 * [parties["b"].states(OCCASION).to_message()])]
        with pytest.raises(RefusedError, match="a silo stands in the roster twice"):
            Roster.read(twice, OCCASION, ca_pem=ca_pem)
        stolen = X25519PrivateKey.generate()
        for party in (parties["a"], parties["b"]):
            monkeypatch.setattr(party, "private", stolen)
        twins = [parties[name].states(OCCASION).to_message() for name in ("a", "b")]
        with pytest.raises(RefusedError, match="a key stands in the roster twice"):
            Roster.read(twins, OCCASION, ca_pem=ca_pem)


def _payload(key: CertifiedKey) -> dict[str, Any]:
    found: dict[str, Any] = read_canonical(key.statement.payload)
    return found


def test_streams_are_those_of_the_published_standard() -> None:
    """McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 13 and 14: AES-256 under a key of zeros, of
    the counters 0 (their H), 1 (the tag of case 13) and 2 (the ciphertext of case 14)."""
    expected = bytes.fromhex(
        "dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738bcea7403d4d606b6e074ec5d3baf39d18"
    )
    zeros: NDArray[np.uint64] = np.zeros(6, np.uint64)
    assert mask(zeros, [PairKey(bytes(32), True)]).astype("<u8").tobytes() == expected
