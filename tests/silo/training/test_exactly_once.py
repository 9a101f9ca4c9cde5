"""A private release happens once: what a crash cut short is drawn again as it was, and paid for once."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import Correction
from medsilo.algorithms.models import state_of
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.accounting import GaussianRelease, SampledGaussian, epsilon
from medsilo.privacy.budget.ledger import Budget, Entry, Ledger, Subject
from medsilo.privacy.budget.promise import MetricsPlan
from medsilo.privacy.budget.sealed_keys import SealedKeys
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.errors import BudgetError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.records import ConsentRecord, VoidRecord
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.nonces import nonce
from medsilo.silo.run.account import Account
from medsilo.silo.training import private_training
from medsilo.silo.training.private_count import PrivateCounts
from medsilo.silo.training.site import LocalSite
from tests.support.hospital.averaging import averaging_plan
from tests.support.hospital.local_training import dataset
from tests.support.hospital.private_training import private_plan, private_site

KEY = Ed25519PrivateKey.generate()
SILO, COORDINATOR = (Identity("test", role, "c").uri for role in ("silo", "coordinator"))  # type: ignore[arg-type]
CONSENT = Consent(exposures=("PROTOCOL", "IDENTITY"), coordinator=COORDINATOR, methods=("local",), rounds=9)
PLAN = private_plan(noise_multiplier=2.0, training={"augmentation": [{"kind": "rotation", "amount": 20}]})


class Hospital:
    """A silo's account from one start of its daemon to the next."""

    def __init__(self, folder: Path, plan: RunPlan = PLAN, epsilon: float = 50.0) -> None:
        self.folder, self.plan = folder, plan
        self.budget = Budget(epsilon, 1e-5)
        self.sealed = SealedKeys(folder / "run/sealed")
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.folder / "journal", key=KEY, origin="medsilo/test/silo/c")
        self.door = Door(self.journal, identity=SILO, federation="test", gate=PlanGate(Exposure))
        content = {"sha256": "cd" * 32, **CONSENT.model_dump(mode="json")}
        self.door.note(ConsentRecord(consent=content, data="tissue", data_sha256="ab" * 32, synthetic=True))
        self.ledger = Ledger(self.folder / "ledger", Subject("ab" * 32, "image"))
        assert self.plan.privacy is not None
        self.account = Account(self.ledger, self.plan, self.plan.privacy, self.budget, self.door, self.sealed)

    def crash(self) -> None:
        self.journal.close()
        self.start()

    def site(self, data: ImageDataset | None = None) -> LocalSite:
        return private_site(self.plan, data, charge=self.account.charge, kept=self.account.kept)

    def train(self, *, moved: float = 0.0, **options: Any) -> bytes:
        """A round from the run's starting model, or one that is moved; the trained model's bytes."""
        site = self.site()
        site.load({name: tensor + moved for name, tensor in state_of(site.model).items()})
        site.fit(0, **options)
        return b"".join(tensor.numpy().tobytes() for tensor in state_of(site.model).values())

    def send_an_update(self) -> None:
        call = Call("SubmitUpdate", COORDINATOR, "", "update", self.plan.run, self.plan.sha256.hex(), 0)
        update = wire.Update(nonce=nonce(), silo="c", plan_sha256=self.plan.sha256)
        self.door.release([wire.SubmitUpdateRequest(update=update)], call)

    @property
    def charges(self) -> list[Entry]:
        return list(self.ledger.entries())

    def voids(self) -> list[dict[str, Any]]:
        return [record for record in read_records(self.folder / "journal") if record["kind"] == "void"]

    def verified(self) -> Any:
        self.journal.checkpoint()
        self.journal.close()
        return verify_evidence(self.folder / "journal")


def test_a_round_that_is_repeated_is_the_same_release_and_is_charged_once(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    first = one.train()
    one.crash()
    assert one.train() == first, "bit for bit: noise, samples and changes of images"
    assert len(one.charges) == 1
    assert not one.voids()
    one.crash()
    one.sealed.settle(0)
    one.crash()
    assert one.train() != first, "its key is gone"


def test_dropout_is_repeated_as_it_was(tmp_path: Path) -> None:
    def trained(one: Hospital) -> Tensor:
        torch.manual_seed(torch.seed())
        layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3 * 16 * 16, 3))
        with torch.no_grad():
            layers[2].weight.zero_()
            layers[2].bias.zero_()
        site = LocalSite("h", dataset(), layers, PLAN, device=torch.device("cpu"), charge=one.account.charge)
        site.fit(0)
        return layers[2].weight.detach().clone()

    one = Hospital(tmp_path)
    first = trained(one)
    one.crash()
    assert torch.equal(trained(one), first)
    assert len(one.charges) == 1


def test_a_heads_rounds_are_each_charged_once_and_repeated_bit_for_bit(tmp_path: Path) -> None:
    """Full batches, momentum that goes on from round to round, averaged models; a crash after each training."""
    training = {"epochs": 4, "learning_rate": 0.1, "momentum": 0.9, "keep_optimizer_state": True}
    plan = private_plan(rate=1.0, noise_multiplier=9.0, averaged_share=0.5, training=training)
    one = Hospital(tmp_path, plan)
    start: dict[str, Tensor] = {}
    kept: Any = {}

    def trained(number: int) -> LocalSite:
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3))
        site = LocalSite("h", dataset(), layers, plan, device=torch.device("cpu"), charge=one.account.charge)
        site.load(start)
        site.optimizers.update(kept)
        site.fit(number)
        return site

    for number in range(3):
        first = state_of(trained(number).model)
        one.crash()
        again = trained(number)
        assert all(torch.equal(first[name], tensor) for name, tensor in state_of(again.model).items())
        start, kept = state_of(again.model), dict(again.optimizers)
        assert kept, "momentum stays"
        one.sealed.settle(number)
        one.crash()
    assert [(entry.purpose.round, entry.event) for entry in one.charges] == [
        (number, SampledGaussian(1.0, 9.0, 4)) for number in range(3)
    ]
    assert one.ledger.guarantee(1e-5).epsilon == epsilon([GaussianRelease(9.0, 12)], delta=1e-5)


READ: dict[str, Callable[[Hospital], bytes]] = {
    "another model": lambda one: one.train(moved=1e-7),
    "another correction": lambda one: one.train(correction=Correction(linear=state_of(one.site().model))),
    "other steps": lambda one: one.train(epochs=2),
    "other parameters": lambda one: one.train(trainable={next(iter(state_of(one.site().model)))}),
}


@pytest.mark.parametrize("what", READ)
def test_a_key_is_never_used_for_a_training_that_reads_anything_else(tmp_path: Path, what: str) -> None:
    """The same noise on other sums would show how they differ."""
    one = Hospital(tmp_path)
    one.train()
    keys = {path.read_bytes() for path in one.sealed.folder.iterdir()}
    one.crash()
    READ[what](one)
    assert not keys & {path.read_bytes() for path in one.sealed.folder.iterdir()}
    assert len(one.ledger.entries(voided=True)) == 2


@pytest.mark.parametrize("changed", ["threads", "version", "gpu"])
def test_a_key_is_never_used_where_the_same_could_come_out_with_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    one = Hospital(tmp_path)
    first = one.train()
    one.crash()
    threads = torch.get_num_threads()
    if changed == "threads":
        torch.set_num_threads(threads + 1)
    elif changed == "version":
        installed = private_training._installed()
        monkeypatch.setattr(private_training, "_installed", lambda: installed.replace(version("torch"), "0.0"))
    else:  # as on any device but the CPU: no two trainings are taken for the same
        monkeypatch.setattr(
            "medsilo.silo.training.private_training._computes", lambda: np.random.default_rng().bytes(32).hex()
        )
    try:
        assert one.train() != first
    finally:
        torch.set_num_threads(threads)
    assert len(one.ledger.entries(voided=True)) == 2
    assert len(one.charges) == 1, "nothing had left: the first charge is voided"


def test_two_trainings_of_one_name_in_a_round_are_two_releases(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    site = one.site()
    start = state_of(site.model)
    site.fit(0)
    first = state_of(site.model)
    site.load(start)
    site.fit(0)
    assert any(not torch.equal(first[name], tensor) for name, tensor in state_of(site.model).items())
    assert len(one.charges) == 2


def test_a_crash_before_the_charge_leaves_a_key_that_is_not_used(tmp_path: Path) -> None:
    one = Hospital(tmp_path, epsilon=1e-3)
    with pytest.raises(BudgetError):
        one.train()
    (before,) = [path.read_bytes() for path in one.sealed.folder.iterdir()]
    one.budget = Budget(50.0, 1e-5)
    one.crash()
    one.train()
    (after,) = [path.read_bytes() for path in one.sealed.folder.iterdir()]
    assert before != after
    assert len(one.charges) == 1


def test_keys_are_the_owners_alone_and_go_with_their_round(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    one.site().fit(0)
    one.site().fit(1)
    first, second = sorted(one.sealed.folder.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first, second)} == {0o600}
    assert stat.S_IMODE(one.sealed.folder.stat().st_mode) == 0o700
    key = json.loads(first.read_bytes())["key"]
    everything = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.parent != one.sealed.folder)
    assert key.encode() not in everything
    assert bytes.fromhex(key) not in everything
    one.sealed.settle(0)
    assert list(one.sealed.folder.iterdir()) == [second]


@pytest.mark.parametrize("lost", ["gone", "damaged"])
def test_a_charge_whose_key_is_lost_is_voided_where_nothing_left_and_the_evidence_says_so(
    tmp_path: Path, lost: str
) -> None:
    one = Hospital(tmp_path)
    one.train()
    (charge,) = one.charges
    one.crash()
    (path,) = one.sealed.folder.iterdir()
    path.unlink() if lost == "gone" else path.write_text("{")
    one.train()
    assert [entry.index for entry in one.charges] == [2]
    (record,) = one.voids()
    assert record["charge"] == charge.describe()
    assert one.ledger.voids()[1].record == record["index"]
    one.crash()
    assert [entry.index for entry in one.charges] == [2]
    found = one.verified()
    assert found.sound, found.problem
    assert any("Charge 1 of data set" in remark and "was voided" in remark for remark in found.remarks)
    assert any("recomputed from 1 charge," in remark for remark in found.remarks)


def test_a_charge_after_which_an_update_was_sent_is_never_voided(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    one.train()
    one.send_an_update()
    one.crash()
    one.sealed.settle(0)
    one.train()
    assert not one.voids()
    assert len(one.charges) == 2


def test_a_charge_whose_training_failed_by_its_outcome_is_never_voided(tmp_path: Path) -> None:
    """Whoever leads the run sees that the hospital went, and gives it another model for the same round: as often as he
    likes, at no cost, if nothing counted that was not sent."""
    one = Hospital(tmp_path)
    one.train()
    (told,) = [record["index"] for record in read_records(tmp_path / "journal") if record["kind"] == "ledger"]
    (charge,) = one.charges
    one.account.failed()
    one.crash()
    one.train(moved=0.1)
    assert not one.voids()
    assert len(one.charges) == 2
    one.door.note(VoidRecord(charge=charge.describe(), charged=told))
    found = one.verified()
    assert not found.sound
    assert "whose training failed by its outcome" in found.problem


def test_a_charge_that_the_journal_did_not_tell_of_when_it_was_made_is_never_voided(tmp_path: Path) -> None:
    """It is told of at the next start: too late to prove what was sent in between."""
    one = Hospital(tmp_path)
    one.door.note = lambda *_, **__: 0  # type: ignore[method-assign]
    one.train()
    one.crash()
    one.sealed.settle(0)
    one.train()
    assert not one.voids()
    assert len(one.charges) == 2


def test_a_crash_between_the_voids_record_and_its_line_is_made_good(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    one.train()
    one.crash()
    one.sealed.settle(0)
    one.ledger.void = lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        one.train()
    assert len(one.charges) == 1
    one.crash()
    assert not one.charges
    assert len(one.voids()) == 1
    one.train()
    assert one.verified().sound


def test_a_void_without_a_journal_that_proves_it_is_an_error(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    one.train()
    one.ledger.void(one.charges[0], party=SILO, record=2)
    with pytest.raises(BudgetError, match="charge 1 is voided by record 2 of this journal, which is no such record"):
        one.crash()


@pytest.mark.parametrize("forged", ["an update was sent", "never told", "another charge", "an average", "twice"])
def test_evidence_with_a_void_that_it_does_not_prove_is_broken(tmp_path: Path, forged: str) -> None:
    one = Hospital(tmp_path)
    one.train()
    event = GaussianRelease(10.0) if forged == "an average" else PLAN.privacy.training(2)  # type: ignore[union-attr]
    one.account.charge(1, "x", event, "")
    told = [r for r in read_records(tmp_path / "journal") if r["kind"] == "ledger"][-1]
    charge, charged = dict(told["charge"]), told["index"]
    words = "does not tell that this one was made"
    if forged == "an update was sent":
        one.send_an_update()
        words = "sent an update since"
    elif forged == "never told":
        charge["sha256"] = "00" * 32
    elif forged == "another charge":
        charge["index"] = 1
    elif forged == "an average":
        words = "voids the charge of an average"
    else:
        one.door.note(VoidRecord(charge=charge, charged=charged))
        words = "none to be voided"
    number = one.door.note(VoidRecord(charge=charge, charged=charged))
    found = one.verified()
    assert not found.sound
    assert words in found.problem
    assert found.index == number


def test_an_average_that_a_crash_kept_from_disk_is_drawn_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Hospital(tmp_path, averaging_plan())
    drawn: list[list[float]] = []

    def crash(_kept: object, _release: object, numbers: list[float], **_: object) -> None:
        drawn.append(list(numbers))
        raise KeyboardInterrupt

    def identifier() -> Tensor:
        return one.site().average(
            "identifier", lambda images, _: images.flatten(1)[:, :50], round_number=0, lasting=True
        )

    with monkeypatch.context() as patch:
        patch.setattr("medsilo.privacy.budget.kept_releases.KeptReleases.keep", crash)
        with pytest.raises(KeyboardInterrupt):
            identifier()
    one.crash()
    found = identifier()
    assert drawn == [found.tolist()]
    assert len(one.charges) == 1
    one.crash()
    one.sealed.settle(0)
    assert torch.equal(identifier(), found), "and then it is kept"
    assert len(one.charges) == 1


def test_an_accuracy_is_repeated_with_the_same_noise_and_the_same_images_of_patients(tmp_path: Path) -> None:
    one = Hospital(tmp_path)
    right = np.arange(40) % 3 == 0

    def accuracy(answers: Any = right) -> float:
        counts = PrivateCounts(MetricsPlan(epsilon=0.01, releases=9), np.arange(40) // 4, one.account.charge)
        return counts.accuracy(answers, round_number=1)

    first = accuracy()
    one.crash()
    assert accuracy() == first
    assert len(one.charges) == 1
    one.crash()
    accuracy(~right)
    assert len(one.charges) == 1, "another model's: the first, which never left, is voided"
    assert len(one.ledger.entries(voided=True)) == 2
