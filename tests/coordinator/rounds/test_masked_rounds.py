"""What the rounds make of masks: one sum a round over silos that stay the same, or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from medsilo.algorithms.families.sharing import count_part
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.protection.masked import encode_upload, masked_payload
from medsilo.algorithms.tensors import MemorySource, Part, Payload
from medsilo.algorithms.tensors.files import write_payload
from medsilo.algorithms.tensors.transfer import check_parts
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds import rounds
from medsilo.coordinator.rounds.machine import Order
from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.errors import ConfigurationError, LateError, RefusedError, StoreError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.certificates import Credentials, load_credentials
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.records import content
from medsilo.privacy.secure_aggregation.mask_keys import CertifiedKey, Occasion, Roster, certify, vouch
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire

NAMES = ("a", "b", "c", "d")
WAIT, TRAIN, MASK, FINISH = (wire.TASK_KIND_WAIT, wire.TASK_KIND_TRAIN, wire.TASK_KIND_MASK, wire.TASK_KIND_FINISH)


class Hospital:
    """Certified keys, and an update of random numbers that is the same however often a round is asked for."""

    def __init__(self, folder: Path, authority: Path, name: str) -> None:
        identity = Identity("test", "silo", name)
        keys = create_keys(folder / name, identity)
        issue(authority, name, keys.request, folder / name / "tls.pem")
        self.credentials: Credentials = load_credentials(
            ca=authority / "ca.pem", certificate=folder / name / "tls.pem", key=keys.tls_key, expected=identity
        )
        self.audit_key = load_audit_key(keys.audit_key)
        self.voucher = vouch(self.credentials, self.audit_key)
        self.private: dict[bytes, X25519PrivateKey] = {}

    def key(self, run: Any, number: int) -> CertifiedKey:
        """A fresh one."""
        private = X25519PrivateKey.generate()
        occasion = Occasion("test", "r", run.plan.sha256, number)
        found = certify(
            private,
            occasion,
            bytes(32),
            identity=self.credentials.identity,
            audit_key=self.audit_key,
            voucher=self.voucher,
        )
        self.private[found.digest] = private
        return found


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hospital]:
    folder = tmp_path_factory.mktemp("hospitals")
    create_authority(folder / "ca", "test")
    return {name: Hospital(folder, folder / "ca", name) for name in NAMES}


class MaskedRun:
    """A coordinator's rounds with four hospitals in one process."""

    def __init__(self, folder: Path, hospitals: dict[str, Hospital], **settings: Any) -> None:
        self.folder, self.hospitals, self.settings = folder, hospitals, settings
        self.config = CoordinatorConfig.model_validate(
            {
                "federation": "test",
                "listen": "127.0.0.1:1",
                "state": folder / "state",
                "silos": NAMES,
                "run": {
                    "name": "r",
                    "method": {"name": "fedavg"},
                    "model": {"name": "mlp-64", "input_shape": (1, 16, 16), "classes": 3},
                    "rounds": 3,
                    "secure_aggregation": {"minimum": 3},
                    **settings,
                },
            }
        )
        (folder / "state").mkdir(exist_ok=True)
        self.plan = self.config.plan()
        self.counts = Exposure.SAMPLE_COUNT in self.config.make_method().uploads
        self.layout = Layout.of(build(self.plan.model, seed=1))
        self.store = Store(self.config.database)
        self.notes: list[dict[str, Any]] = []
        self.rounds = Rounds(
            self.config,
            self.plan,
            self.config.make_method(),
            self.store,
            note=lambda record: self.notes.append(content(record)),
        )
        self.keys: dict[str, CertifiedKey] = {}
        self.rounds.start()

    def join(self, *names: str) -> None:
        for name in names:
            self.store.answer("r", name, accepted=True, missing=[], audit_key="00" * 32, certificate_sha256="")
            self.rounds.joined(name)

    def restarted(self) -> MaskedRun:
        """The same after a crash of the coordinator."""
        self.close()
        return MaskedRun(self.folder, self.hospitals, **self.settings)

    def close(self) -> None:
        self.rounds.stop()
        self.store.close()

    def ask(self, name: str, key: CertifiedKey | None = None, *, patience: float = 0.05) -> Order:
        """A silo's call for a task, with its mask key or without."""
        with self.rounds.task(name, patience, lambda: True, holds_model=True, key=key) as (order, _):
            return order

    def given(self, name: str) -> dict[str, torch.Tensor]:
        with self.rounds.task(name, 20, lambda: True, holds_model=True) as (_, payload):
            return payload[Exposure.PEER_DERIVED].tensors()

    def train(self, *names: str, number: int) -> None:
        """States a key each."""
        for name in names:
            assert self.ask(name, patience=20) == Order(TRAIN, number)
            self.keys[name] = self.hospitals[name].key(self, number)
            self.ask(name, self.keys[name], patience=0)

    def due(self, name: str) -> Order:
        order = self.ask(name, self.keys[name], patience=20)
        assert order.kind == MASK, f"{name} is not to mask"
        return order

    def update(self, name: str, number: int) -> Payload:
        rng = np.random.default_rng([number, *name.encode()])
        parts = {
            exposure: Part.of({s.name: torch.from_numpy(rng.normal(size=s.shape).astype(np.float32)) for s in specs})
            for exposure, specs in self.layout.model_parts().items()
        }
        return {**parts, Exposure.SAMPLE_COUNT: count_part(10 + ord(name))} if self.counts else parts

    def masked(self, name: str, order: Order) -> tuple[Payload, bytes]:
        own, roster = self.keys[name], Roster(order.roster)
        assert self.plan.secure_aggregation is not None
        upload = self.update(name, order.round)
        _, numbers = encode_upload(upload, self.plan.secure_aggregation, len(roster))
        private = self.hospitals[name].private[own.digest]
        return masked_payload(upload, roster.mask(own, private, numbers)), roster.sha256

    def deliver(self, name: str, order: Order) -> None:
        payload, roster_sha256 = self.masked(name, order)
        found = {exposure: part.specs for exposure, part in payload.items()}
        check_parts(found, self.rounds.expected_parts(name, order.round))
        path = self.rounds.new_upload_path(name, order.round)
        write_payload(path, payload)
        receipt = {"of": name}
        self.rounds.accept(name, order.round, file=path, receipt=receipt, metrics={}, roster_sha256=roster_sha256)

    def mean(self, names: tuple[str, ...], number: int) -> dict[str, torch.Tensor]:
        """The weighted mean, in double precision."""
        weights = {name: 10 + ord(name) if self.counts else 1 for name in names}
        sums: dict[str, torch.Tensor] = {}
        for name in names:
            for exposure, part in self.update(name, number).items():
                if exposure != Exposure.SAMPLE_COUNT:
                    for key, tensor in part.tensors().items():
                        sums[key] = sums.get(key, 0) + weights[name] * tensor.double()
        return {key: (total / sum(weights.values())).float() for key, total in sums.items()}

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if self.rounds.failure is not None:
                raise self.rounds.failure
            assert time.monotonic() < deadline, f"stuck in round {self.rounds.round_number}"
            time.sleep(0.002)

    def opened(self, number: int) -> None:
        self.until(lambda: self.rounds.round_number == number)

    def assert_summed(self, names: tuple[str, ...], number: int) -> None:
        given, expected = self.given("a"), self.mean(names, number)
        assert set(given) == set(expected)
        for key, tensor in given.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-8)

    def uploads(self) -> list[str]:
        return [path.name for path in self.config.state.rglob("upload-*.safetensors")]


@pytest.fixture
def begin(tmp_path: Path, hospitals: dict[str, Hospital]) -> Iterator[Callable[..., MaskedRun]]:
    made: list[MaskedRun] = []

    def make(*, members: tuple[str, ...] = NAMES, **settings: Any) -> MaskedRun:
        made.append(MaskedRun(tmp_path, hospitals, **settings))
        made[-1].join(*members)
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_a_round_gives_the_weighted_mean_of_all_and_nobody_masks_before_all_have_trained(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin()
    run.train("a", "b", "c", number=0)
    assert run.ask("a", run.keys["a"]).kind == WAIT
    run.train("d", number=0)
    orders = {name: run.due(name) for name in NAMES}
    assert len({Roster(order.roster).sha256 for order in orders.values()}) == 1
    for name in NAMES:
        run.deliver(name, orders[name])
    run.opened(1)
    run.assert_summed(NAMES, 0)
    (note,) = [note for note in run.notes if note["kind"] == "roster"]
    assert (note["round"], note["silos"]) == (0, list(NAMES))


def test_a_silo_that_lost_its_key_makes_all_mask_again_and_nothing_of_before_is_used(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    first = {name: run.due(name) for name in NAMES}
    for name in ("a", "b"):
        run.deliver(name, first[name])
        run.keys[name] = run.hospitals[name].key(run, 0)
        assert run.ask(name, run.keys[name]).kind == WAIT
    assert len(run.uploads()) == 2
    run.keys["d"] = run.hospitals["d"].key(run, 0)  # it was started anew
    again = run.due("d")
    assert Roster(again.roster).sha256 != Roster(first["d"].roster).sha256
    assert run.uploads() == []
    with pytest.raises(LateError, match="fresh masks"):
        run.deliver("c", first["c"])  # which has heard of nothing
    assert run.uploads() == []
    for name in NAMES:
        run.deliver(name, run.due(name))
    run.opened(1)
    run.assert_summed(NAMES, 0)
    assert [note["silos"] for note in run.notes] == [list(NAMES)] * 2


def test_a_silo_that_is_started_anew_after_it_delivered_disturbs_nobody(begin: Callable[..., MaskedRun]) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    orders = {name: run.due(name) for name in NAMES}
    run.deliver("a", orders["a"])
    run.keys["a"] = run.hospitals["a"].key(run, 0)
    assert run.ask("a", run.keys["a"]).kind == WAIT
    assert run.rounds.earlier_receipt("a", 0, Roster(orders["a"].roster).sha256) == {"of": "a"}
    for name in ("b", "c", "d"):
        run.deliver(name, orders[name])
    run.opened(1)
    run.assert_summed(NAMES, 0)
    assert len(run.notes) == 1


BOUNDED = {
    "method": {"name": "fedavg", "weighting": "uniform"},
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "sampling_rate": 0.25},
    "training": {"epochs": 1},
}
"""A run in which nothing that a single silo sends is without a bound: its sums may be of other silos every round."""


def test_a_run_whose_silo_withdraws_ends_for_the_sum_of_the_others_would_give_it_away(
    begin: Callable[..., MaskedRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    for name in NAMES:
        run.deliver(name, run.due(name))
    run.opened(1)
    run.rounds.withdraw("r", "d", reason="withdrawn by the hospital", rounds_acknowledged=[0], statement={})
    run.opened(3)
    assert [note["silos"] for note in run.notes] == [list(NAMES)]
    for name in ("a", "b", "c"):
        assert run.ask(name, run.keys[name], patience=20).kind == FINISH
    assert "d has withdrawn, and a masked sum over the others" in caplog.text
    run.assert_summed(NAMES, 0)


def test_a_silo_that_withdraws_before_the_first_sum_is_in_none_and_the_others_go_on(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin()
    run.train("a", "b", "c", number=0)
    run.rounds.withdraw("r", "d", reason="withdrawn by the hospital", rounds_acknowledged=[], statement={})
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    run.opened(1)
    run.assert_summed(("a", "b", "c"), 0)


def test_rounds_after_the_first_are_of_the_same_silos_and_who_comes_late_gets_the_end(
    begin: Callable[..., MaskedRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(quorum=3, deadline_minutes=0)
    run.train("a", "b", "c", number=0)
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    run.opened(1)
    assert "d takes no part in the masked rounds" in caplog.text
    assert run.ask("d").kind == WAIT
    run.train("a", "b", number=1)
    assert run.ask("a", run.keys["a"]).kind == WAIT, "past the deadline c is waited for all the same"
    again = run.restarted()
    try:
        for number in (1, 2):
            for name in ("a", "b", "c"):
                assert again.ask(name, patience=20) == Order(TRAIN, number)
                again.keys[name] = again.hospitals[name].key(again, number)
                again.ask(name, again.keys[name], patience=0)
            for name in ("a", "b", "c"):
                again.deliver(name, again.due(name))
            again.opened(number + 1)
        assert [note["silos"] for note in (*run.notes, *again.notes)] == [["a", "b", "c"]] * 3
        assert again.ask("d", patience=20).kind == FINISH
    finally:
        again.close()


def test_a_bounded_round_whose_silo_withdraws_is_given_up_and_never_summed_over_the_others(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin(**BOUNDED)
    run.train(*NAMES, number=0)
    orders = {name: run.due(name) for name in NAMES}
    for name in ("a", "b", "c"):
        run.deliver(name, orders[name])
    run.rounds.withdraw("r", "d", reason="withdrawn by the hospital", rounds_acknowledged=[], statement={})
    run.opened(1)
    assert run.store.downloads("r") == {}
    state = run.store.round("r", 0)
    assert state is not None
    assert [p.delivered_at for p in state.participants.values()] == [None] * 3
    run.train("a", "b", "c", number=1)
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    run.opened(2)
    run.assert_summed(("a", "b", "c"), 1)
    assert [note["silos"] for note in run.notes] == [list(NAMES), ["a", "b", "c"]]


def test_a_silo_that_is_late_with_training_is_in_no_roster(begin: Callable[..., MaskedRun]) -> None:
    run = begin(quorum=3, deadline_minutes=0)
    run.train("a", "b", number=0)
    assert run.ask("a", run.keys["a"]).kind == WAIT, "two are fewer than the minimum, whatever the clock says"
    run.train("c", number=0)
    for name in ("a", "b", "c"):
        run.due(name)
    run.keys["d"] = run.hospitals["d"].key(run, 0)
    assert run.ask("d", run.keys["d"]).kind == WAIT
    assert [note["silos"] for note in run.notes] == [["a", "b", "c"]]
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    run.opened(1)
    run.assert_summed(("a", "b", "c"), 0)


def test_past_the_deadline_a_roster_that_is_not_complete_is_given_up(
    begin: Callable[..., MaskedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LEAST_MINUTES_TO_DELIVER", 0)
    run = begin(quorum=3, deadline_minutes=0.03, **BOUNDED)
    run.train(*NAMES, number=0)
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    run.opened(1)
    assert run.store.downloads("r") == {}


def test_without_a_bound_a_roster_waits_past_the_deadline_until_the_last_is_back(
    begin: Callable[..., MaskedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LEAST_MINUTES_TO_DELIVER", 0)
    run = begin(quorum=3, deadline_minutes=0.03)
    run.train(*NAMES, number=0)
    for name in ("a", "b", "c"):
        run.deliver(name, run.due(name))
    past = time.monotonic() + 2.5
    run.until(lambda: time.monotonic() > past)
    assert run.rounds.round_number == 0
    run.deliver("d", run.due("d"))
    run.opened(1)
    run.assert_summed(NAMES, 0)


def test_masks_over_other_silos_in_each_round_are_refused_unless_single_updates_have_a_bound(
    hospitals: dict[str, Hospital], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"`run.participation`: a participation of 0.9 draws other silos"):
        MaskedRun(tmp_path, hospitals, participation=0.9)
    counting = {**BOUNDED, "method": {"name": "fedavg"}}
    with pytest.raises(ConfigurationError, match="in which silos count alike"):
        MaskedRun(tmp_path, hospitals, participation=0.9, **counting)
    run = MaskedRun(tmp_path, hospitals, participation=0.75, **BOUNDED)
    run.close()
    assert run.plan.participation == 0.75


def test_a_run_that_has_too_few_silos_left_for_a_sum_ends_and_says_so_to_the_others(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin()
    run.train("a", "b", number=0)
    for name in ("c", "d"):
        run.rounds.withdraw("r", name, reason="withdrawn by the hospital", rounds_acknowledged=[], statement={})
    run.opened(3)
    for name in ("a", "b"):
        assert run.ask(name, run.keys[name], patience=20).kind == FINISH
        run.rounds.accept(name, 3, file=None, receipt={"of": name}, metrics={})
    run.rounds.wait_until_done()
    assert run.notes == []
    why = EarlyEnd(0, EndReason.TOO_FEW_FOR_MASKS)
    assert run.rounds.early_end == why
    again = run.restarted()
    again.close()
    assert again.rounds.early_end == why


def test_rounds_that_were_done_before_too_few_were_left_are_counted(begin: Callable[..., MaskedRun]) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    for name in NAMES:
        run.deliver(name, run.due(name))
    run.opened(1)
    for name in ("c", "d"):
        run.rounds.withdraw("r", name, reason="withdrawn by the hospital", rounds_acknowledged=[0], statement={})
    run.opened(3)
    assert run.rounds.early_end == EarlyEnd(1, EndReason.WITHDRAWN_FROM_MASKS)


def test_after_a_crash_of_the_coordinator_the_same_silos_deliver_again(
    begin: Callable[..., MaskedRun],
) -> None:
    run = begin(quorum=3, deadline_minutes=1000)
    run.train(*NAMES, number=0)
    for name in ("a", "b"):
        run.deliver(name, run.due(name))
    again = run.restarted()
    try:
        assert again.uploads() == []
        for name in NAMES:
            again.keys[name] = again.hospitals[name].key(again, 0)
            patience = 0 if name == "d" else 0.05
            assert again.ask(name, again.keys[name], patience=patience).kind == WAIT, (
                "the roster stays that of all four"
            )
        for name in NAMES:
            again.deliver(name, again.due(name))
        again.opened(1)
        again.assert_summed(NAMES, 0)
    finally:
        again.close()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("change", ["fix_roster", "deliver", "restart_round", "close_round"])
def test_whether_or_not_a_failing_database_kept_a_change_the_same_silos_are_summed_once(
    begin: Callable[..., MaskedRun], monkeypatch: pytest.MonkeyPatch, change: str, kept: bool
) -> None:
    monkeypatch.setattr(rounds, "PAUSE_SECONDS", 0.01)
    run = begin()
    write = getattr(run.store, change)
    failed = []

    def failing(*arguments: Any, **options: Any) -> Any:
        if failed or kept:
            found = write(*arguments, **options)
        if failed:
            return found
        failed.append(change)
        raise StoreError("the connection was lost")

    monkeypatch.setattr(run.store, change, failing)
    started_anew = change != "restart_round"

    def step(name: str) -> None:
        """One call of a silo, which states its key whenever it asks."""
        nonlocal started_anew
        order = run.ask(name, run.keys.get(name), patience=0)
        if order.round != 0:
            return
        if order.kind == TRAIN:
            run.keys[name] = run.hospitals[name].key(run, 0)
        elif order.kind == MASK and name == "d" and not started_anew:
            run.keys[name] = run.hospitals[name].key(run, 0)
            started_anew = True
        elif order.kind == MASK:
            run.deliver(name, order)
            run.keys[name] = run.hospitals[name].key(run, 0)

    def worked() -> bool:
        for name in NAMES:
            with suppress(StoreError, LateError):  # it asks again
                step(name)
        return run.rounds.round_number == 1

    run.until(worked)
    assert failed == [change]
    run.assert_summed(NAMES, 0)
    cut_short = change in ("deliver", "restart_round") or (change == "close_round" and not kept)
    assert [note["silos"] for note in run.notes] == [list(NAMES)] * (2 if cut_short else 1)
    state = run.store.round("r", 0)
    assert state is not None
    assert {name: p.receipt for name, p in state.participants.items()} == {name: {"of": name} for name in NAMES}


def test_masks_that_do_not_cancel_spoil_no_model(begin: Callable[..., MaskedRun]) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    orders = {name: run.due(name) for name in NAMES}
    for name in ("a", "b", "c"):
        run.deliver(name, orders[name])
    (specs,) = (part.specs for part in run.masked("d", orders["d"])[0].values())
    numbers = torch.zeros(sum(spec.nbytes for spec in specs) // 8, dtype=torch.int64)
    path = run.rounds.new_upload_path("d", 0)
    write_payload(path, {Exposure.MASKED_UPDATE: Part(specs, MemorySource([numbers]))})
    run.rounds.accept("d", 0, file=path, receipt={}, metrics={}, roster_sha256=Roster(orders["d"].roster).sha256)
    run.opened(1)
    assert run.store.downloads("r") == {}, "the sum of the weights shows it"


def test_an_update_for_no_roster_is_not_taken(begin: Callable[..., MaskedRun]) -> None:
    run = begin()
    run.train(*NAMES, number=0)
    order = run.due("a")
    with pytest.raises(LateError):
        run.rounds.accept("a", order.round, file=None, receipt={}, metrics={})
    with pytest.raises(RefusedError, match="not one that"):
        run.rounds.earlier_receipt("a", 2, Roster(order.roster).sha256)
