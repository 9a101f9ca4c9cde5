"""What a coordinator shows one hospital, the others hear in that hospital's own word: a second journal is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from medsilo.privacy.audit.fork_proof import ForkProof
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.door.attestation import Attestation
from medsilo.privacy.door.door import Door
from medsilo.privacy.door.gossip import ForkError, Heard, Word
from medsilo.privacy.errors import JournalError, ReceiptError
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.identity.envelope import from_json, key_id
from medsilo.privacy.journal.journal import read_records
from medsilo.privacy.journal.records import read
from tests.support.evidence.exchanging import COORDINATOR, Exchange, Party, key_of

DOCS = Path(__file__).parents[3] / "docs"
HOSPITALS = [f"spiffe://test/silo/hospital{number}" for number in range(1, 7)]


def federation(folder: Path, count: int, *, version: int = 2) -> list[Exchange]:
    """Hospitals that have joined with one coordinator; ``version``: of the protocol that they speak."""
    coordinator = Party(COORDINATOR, folder / "coordinator", key_of(200))
    found = []
    for number, identity in enumerate(HOSPITALS[:count]):
        silo = Party(identity, folder / f"hospital{number + 1}", key_of(number + 1))
        found.append(Exchange(silo, coordinator))
        coordinator.door.receipt_state(identity).version = version
        found[-1].begin()
    return found


def heard(exchange: Exchange) -> dict[str, Heard]:
    return exchange.silo.door.receipt_state(COORDINATOR).heard


def forked(folder: Path, monkeypatch: pytest.MonkeyPatch, *, padding: int) -> list[Exchange]:
    """Two hospitals of a coordinator that goes on with a copy of its journal towards the second, and hands on what the
    first has signed, as it has to."""
    one, other = federation(folder, 2)
    for exchange in (one, other):
        exchange.rounds(range(2))
    genuine = one.coordinator
    genuine.journal.close()
    shutil.copytree(genuine.folder, folder / "copy")
    genuine.open()
    other.coordinator = Party(COORDINATOR, folder / "copy", genuine.key)
    for party in (genuine, other.coordinator):
        for identity in HOSPITALS[:2]:
            party.door.receipt_state(identity).version = 2
    for number in range(padding):
        other.coordinator.door.note(read({"kind": "padding", "number": number}))
    words = Door._words

    def relayed(self: Door, peer: str) -> list[Word]:
        return words(genuine.door if self is other.coordinator.door else self, peer)

    monkeypatch.setattr(Door, "_words", relayed)
    return [one, other]


def test_hospitals_of_an_honest_coordinator_hear_of_each_other_and_find_nothing(tmp_path: Path) -> None:
    exchanges = federation(tmp_path, 3)
    for number in range(3):
        for exchange in exchanges:
            exchange.rounds([number])
    for exchange in exchanges:
        others = {other.silo.identity for other in exchanges} - {exchange.silo.identity}
        assert set(heard(exchange)) == others
        assert not [r for r in read_records(exchange.silo.folder) if r["kind"] == "refusal"]
        exchange.attest()
        exchange.silo.journal.close()
        found = verify_evidence(exchange.silo.bundle(exchange.silo.folder.with_suffix(".json")))
        assert found.sound, found.sentences()
        assert [remark for remark in found.remarks if "hospital" in remark and "heard" in remark]


def test_what_a_hospital_that_joins_again_has_not_signed_for_yet_is_told_to_nobody(tmp_path: Path) -> None:
    """It says how much it has seen; its signature for that comes with its next message."""
    one, other = federation(tmp_path, 2)
    one.rounds([0])
    one.join()
    other.rounds([0])
    one.rounds([1])
    other.rounds([1])
    assert set(heard(other)) == {one.silo.identity}


def test_each_word_is_told_once_and_no_attestation_holds_more_than_a_few(tmp_path: Path) -> None:
    exchanges = federation(tmp_path, 6)
    for exchange in exchanges:
        exchange.rounds([0])
    exchanges[0].rounds([1, 2])
    told = [
        [(word.party, word.checkpoint) for word in document.shown]
        for record in read_records(exchanges[0].silo.folder)
        if record["kind"] == "message" and record["direction"] == "received" and "attestation" in record
        for document in [Attestation.model_validate(read_canonical(from_json(record["attestation"]).payload))]
    ]
    assert max(map(len, told)) == 4
    every = [word for words in told for word in words]
    assert len(every) == len(set(every))
    assert len(heard(exchanges[0])) == 5


def test_a_hospital_of_an_earlier_release_is_told_nothing_that_it_does_not_know(tmp_path: Path) -> None:
    exchanges = federation(tmp_path, 2, version=1)
    for exchange in exchanges:
        exchange.rounds([0, 1])
        assert not heard(exchange)
        payloads = [
            read_canonical(from_json(r["attestation"]).payload)
            for r in read_records(exchange.silo.folder)
            if r.get("attestation")
        ]
        assert len(payloads) > 5
        assert not any("shown" in payload for payload in payloads)


@pytest.mark.parametrize("padding", [0, 1, 3, 40, 300])
def test_a_second_journal_is_found_with_the_next_message_and_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    one, other = forked(tmp_path, monkeypatch, padding=padding)
    one.rounds([2])
    with pytest.raises(ForkError, match="shows two journals") as stopped:
        other.rounds([2])
    sent = [r["rpc"] for r in read_records(other.silo.folder) if r.get("direction") == "sent"]
    assert sent[-1] == "GetTask", "no update left for a coordinator that keeps two journals"
    assert stopped.value.proof is not None
    proof = ForkProof.model_validate(stopped.value.proof)
    assert proof.check(one.coordinator.public).party == COORDINATOR
    proof.write(tmp_path / "proof.json")
    shutil.copy(DOCS / "verify_by_hand.py", tmp_path)
    by_hand = [sys.executable, "-I", "verify_by_hand.py", "proof.json"]
    assert subprocess.run(by_hand, cwd=tmp_path, capture_output=True).returncode == 0
    # What was refused is in the hospital's journal, with the coordinator's signature.
    (refusal,) = (r for r in read_records(other.silo.folder) if r["kind"] == "refusal")
    assert "shown" in read_canonical(from_json(refusal["attestation"]).payload)


def test_a_proof_of_one_history_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = forked(tmp_path, monkeypatch, padding=3)
    one.rounds([2])
    with pytest.raises(ForkError) as stopped:
        other.rounds([2])
    assert stopped.value.proof is not None
    content = json.loads(json.dumps(dict(stopped.value.proof)))
    content["views"][1] = content["views"][0]
    with pytest.raises(JournalError, match="prove nothing"):
        ForkProof.model_validate(content).check()


def lying(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """A coordinator that makes up a word, in one respect."""
    words = Door._words

    def made_up(self: Door, peer: str) -> Sequence[Word]:
        found = words(self, peer)
        if change == "another key":
            return [Word(w.party, key_of(99).public_key().public_bytes_raw(), w.note, w.cosignature) for w in found]
        return [Word(peer, w.key, w.note, w.cosignature) for w in found]

    monkeypatch.setattr(Door, "_words", made_up)


@pytest.mark.parametrize("change", ["another key", "the hospital's own"])
def test_a_word_that_the_hospital_did_not_sign_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    one, other = federation(tmp_path, 2)
    one.rounds([0])
    lying(monkeypatch, change)
    with pytest.raises(ReceiptError):
        other.rounds([0])


def test_a_hospital_whose_key_the_consent_names_cannot_be_invented(tmp_path: Path) -> None:
    one, other = federation(tmp_path, 2)
    one.rounds([0])
    state = other.silo.door.receipt_state(COORDINATOR)
    state.named = {one.silo.identity: key_id(key_of(99).public_key().public_bytes_raw())}
    other.rounds([0])
    assert one.silo.identity not in state.heard
    state.named = {one.silo.identity: key_id(one.silo.key.public_key().public_bytes_raw())}
    one.rounds([1])
    other.rounds([1])
    assert one.silo.identity in state.heard
