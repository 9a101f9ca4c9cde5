"""``audit verify`` adds the privacy ledger's charges up again, and holds the sum against what the journal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.audit.bundle import export
from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.accounting import Event, GaussianRelease, SampledGaussian, epsilon
from medsilo.privacy.budget.ledger import Budget, Ledger, Purpose, Subject
from medsilo.privacy.budget.sealed_keys import SealedKeys
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.records import LedgerRecord
from medsilo.privacy.pages.wording import shown
from medsilo.silo.run.account import Account
from tests.support.evidence.charges import losses
from tests.support.hospital.account import mechanism, run_plan

PARTY = Identity("test", "silo", "north")
STEPS = SampledGaussian(0.1, 2.0, 10)


class Told:
    """A silo's account whose charges its journal tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder / "journal", key=Ed25519PrivateKey.generate(), origin="medsilo/test/silo/north")
        door = Door(self.journal, identity=PARTY.uri, federation="test", gate=PlanGate(Exposure))
        self.plan = run_plan()
        self.ledger = Ledger(folder / "ledger", Subject("ab" * 32, "image"))
        self.account = Account(
            self.ledger, self.plan, mechanism(self.plan), Budget(9.0, 1e-5), door, SealedKeys(folder / "sealed")
        )

    def verified(self, *, bundle: bool = False) -> Verification:
        self.journal.checkpoint()
        self.journal.close()
        path = self.folder / "journal"
        if bundle:
            path = self.folder / "bundle.json"
            export(self.folder / "journal", path)
        return verify_evidence(path)


def charge(told: Told, *events: Event) -> None:
    for number, event in enumerate(events):
        told.account.charge(number, "training", event, "")


@pytest.mark.parametrize("bundle", [False, True], ids=["journal", "bundle"])
def test_the_charges_come_to_the_same_epsilon(tmp_path: Path, bundle: bool) -> None:
    told = Told(tmp_path)
    charge(told, STEPS, GaussianRelease(10.0), STEPS)
    found = told.verified(bundle=bundle)
    assert found.sound, found.problem
    spent = told.ledger.guarantee(1e-5)
    assert spent.epsilon == epsilon([SampledGaussian(0.1, 2.0, 20), GaussianRelease(10.0)], delta=1e-5)
    (remark,) = [one for one in found.remarks if "privacy loss" in one]
    assert f"recomputed from 3 charges, is {spent}, as the journal says" in remark


@pytest.mark.parametrize("wrong", [0.5, None], ids=["less", "no bound"])
def test_a_sum_that_is_not_that_of_the_charges_is_named(tmp_path: Path, wrong: float | None) -> None:
    """Signed by its owner, and wrong all the same."""
    told = Told(tmp_path)
    charge(told, STEPS)
    (record,) = [r for r in read_records(tmp_path / "journal") if r["kind"] == "ledger"]
    told.account._door.note(LedgerRecord(charge=record["charge"], spent={**record["spent"], "epsilon": wrong}))
    found = told.verified()
    assert not found.sound
    assert found.index == record["index"] + 1
    said = "∞" if wrong is None else "0.500"
    assert f"come to ε = {said}; recomputed, the 1 charge come to {told.ledger.guarantee(1e-5)}" in found.problem


def test_charges_that_the_journal_does_not_tell_of_are_named(tmp_path: Path) -> None:
    """Another daemon that shares the ledger has charged it meanwhile; at the next start this journal tells of it."""
    told = Told(tmp_path)
    charge(told, STEPS)
    elsewhere = Ledger(tmp_path / "ledger", told.ledger.subject)
    elsewhere.charge(STEPS, Purpose("other", "run", "00" * 32, 0, "training"), Budget(9.0, 1e-5))
    charge(told, STEPS)
    found = told.verified()
    assert found.sound
    assert [r for r in found.remarks if "cannot be recomputed: charge 2 is not told of here" in r]


@pytest.mark.parametrize(
    "spent",
    [
        {},
        {"epsilon": 1.0},
        {"epsilon": "x", "delta": 1e-5},
        {"epsilon": 1.0, "delta": 2.0},
        {"epsilon": -1, "delta": 0.5},
        7,
    ],
)
def test_a_statement_that_is_none_is_broken(tmp_path: Path, spent: Any) -> None:
    told = Told(tmp_path)
    charge(told, STEPS)
    (record,) = [r for r in read_records(tmp_path / "journal") if r["kind"] == "ledger"]
    told.account._door.note(LedgerRecord(charge=record["charge"], spent=spent))
    assert not told.verified().sound


def test_what_other_accounts_add_is_the_journals_word_and_said_to_be(tmp_path: Path) -> None:
    told = Told(tmp_path)
    former = Ledger(tmp_path / "ledger", Subject("cd" * 32, "image"))
    former.charge(STEPS, Purpose("test", "before", "00" * 32, 0, "training"), Budget(9.0, 1e-5))
    charge(told, STEPS)
    most = told.ledger.guarantee(1e-5)
    assert most.epsilon == epsilon([STEPS, STEPS], delta=1e-5)
    found = told.verified()
    assert found.sound, found.problem
    own, others = (one for one in found.remarks if "data set abababababababab" in one)
    assert f"recomputed from 1 charge, is {told.ledger.cost(1e-5)}, as the journal says" in own
    assert f"has cost ε = {shown(most.epsilon)}: so the journal says" in others
    records = list(read_records(tmp_path / "journal"))
    budget = {"privacy": {"epsilon": 9.0, "delta": 1e-5, "unit": "image"}}
    (loss,) = losses(records).by_account([budget])
    assert loss.spent == told.ledger.cost(1e-5)
    assert loss.most == most
    assert loss.left == 9.0 - most.epsilon
    assert f"the image that has cost most has cost {most}; of the budget of 9, " in str(loss)
    (loss,) = losses(records).by_account([{"privacy": {**budget["privacy"], "delta": 1e-6}}])
    assert loss.left is None, "the statement is at another δ"


@pytest.mark.parametrize(
    "unit_spent", [{"epsilon": 0.1, "delta": 1e-5}, {"epsilon": 9.0, "delta": 1e-6}, {"epsilon": "x", "delta": 1e-5}, 7]
)
def test_an_image_that_has_cost_less_than_its_account_is_a_false_statement(tmp_path: Path, unit_spent: Any) -> None:
    told = Told(tmp_path)
    charge(told, STEPS)
    (record,) = [r for r in read_records(tmp_path / "journal") if r["kind"] == "ledger"]
    told.account._door.note(LedgerRecord(charge=record["charge"], spent=record["spent"], unit_spent=unit_spent))
    assert not told.verified().sound
