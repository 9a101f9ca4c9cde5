"""Receipts both ways: what a hospital and a coordinator sign for each other, and what neither believes of the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.door.attestation import MOST_CALLS
from medsilo.privacy.door.door import Call
from medsilo.privacy.door.receipts import OutOfStepError, ReceiptState
from medsilo.privacy.errors import IdentityError, ReceiptError, RefusedError
from medsilo.privacy.identity.envelope import ATTESTATION, ROTATION, countersign, seal, to_json, to_message
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.checkpoint import Checkpoint, read_note
from medsilo.privacy.journal.journal import Journal, read_records
from medsilo.privacy.journal.key_rotation import rotate
from medsilo.privacy.journal.records import read
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import journal_pb2
from medsilo.protos.nonces import nonce
from tests.support.evidence.two_parties import COORDINATOR, SILO, Line, Party, check, digests, document_of, words

Change = Callable[[dict[str, Any]], object]
STRANGER = Ed25519PrivateKey.generate()


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr("os.fsync", lambda _: None)
    made = Line(tmp_path)
    yield made
    made.close()


@pytest.fixture
def joined(line: Line) -> Line:
    """A session with some messages in both directions."""
    line.join()
    assert line.task(2)
    assert line.upload(3)
    return line


def test_both_sign_for_every_message_of_a_session(line: Line) -> None:
    line.join()
    for _ in range(4):
        assert line.task(2)
        assert line.upload(3)
    line.part()
    line.assert_vouched()
    assert line.silo.refusals() == line.coordinator.refusals() == []


def test_each_side_has_the_others_cosignature_under_a_checkpoint_of_its_own(joined: Line) -> None:
    joined.part()
    for own, other in ((joined.silo, COORDINATOR), (joined.coordinator, SILO)):
        state = own.with_(other)
        assert state.acknowledged > 0
        assert state.cosignature.startswith("— medsilo/test/")


def test_many_sessions_are_one_history(joined: Line) -> None:
    for _ in range(3):
        joined.part()
        joined.restart_silo()
        joined.restart_coordinator()
        joined.join()
        assert joined.task()
        assert joined.upload()
    joined.part()
    joined.assert_vouched()


@pytest.mark.parametrize("killed", ["nobody", "hospital", "coordinator", "both"])
@pytest.mark.parametrize(("up", "down"), [(0, 0), (1, 0), (1, 1), (1, 2)])
def test_after_a_download_that_was_cut_anywhere_both_are_in_step(joined: Line, up: int, down: int, killed: str) -> None:
    assert not joined.task(2, up=up, down=down)
    kill(joined, killed)
    goes_on(joined)


@pytest.mark.parametrize("killed", ["nobody", "hospital", "coordinator", "both"])
@pytest.mark.parametrize("up", range(5))
def test_after_an_upload_that_was_cut_anywhere_both_are_in_step(joined: Line, up: int, killed: str) -> None:
    assert not joined.upload(3, up=up, answered=False)
    kill(joined, killed)
    goes_on(joined)


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("attested", [False, True])
def test_an_exchange_that_is_cut_itself_is_made_again(joined: Line, arrives: bool, attested: bool) -> None:
    assert not joined.exchange(attested=attested, arrives=arrives, answered=False)
    assert not joined.exchange(arrives=arrives, answered=False)
    goes_on(joined)


def kill(line: Line, killed: str) -> None:
    if killed in ("coordinator", "both"):
        line.restart_coordinator()
    if killed in ("hospital", "both"):
        line.restart_silo()
        line.join()


def goes_on(line: Line) -> None:
    """At once, and with the signatures for what was cut."""
    assert line.task()
    assert line.upload()
    line.part()
    line.assert_vouched()


def test_a_request_is_acknowledged_though_its_first_answer_was_lost_and_its_handler_still_runs(joined: Line) -> None:
    """The answer that was lost held the receipt; later ones go out while that call is open at the coordinator."""
    assert not joined.task(1, down=0, lingers=True)
    joined.late(0)  # the answer, with the receipt: nobody reads it
    assert joined.task()
    joined.notice_all()
    goes_on(joined)


def test_a_signature_given_before_the_last_messages_arrived_counts_for_them(joined: Line) -> None:
    """Of an upload that was cut at the hospital's end, the coordinator may still be reading."""
    assert not joined.upload(3, up=1, answered=False, lingers=True)
    assert joined.upload(3)
    joined.late(0)
    joined.late(0)
    joined.notice_all()
    goes_on(joined)


def test_what_arrives_after_its_signature_has_to_be_what_was_signed(joined: Line) -> None:
    coordinator, silo = joined.coordinator, joined.silo
    assert joined.exchange(attested=True)
    messages = [wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a")) for _ in range(4)]
    sent = Call("SubmitUpdate", COORDINATOR, "", "a test")
    data = silo.door.release(messages[:2], sent)
    silo.door.ended(sent)
    call = Call("SubmitUpdate", SILO, "", "a test")
    coordinator.door.admit(data[0], wire.SubmitUpdateRequest, call)
    assert joined.exchange(attested=True), "signed for two messages, of which one has arrived"

    def comes(message: bytes, number: int) -> None:
        call.frames["received"] = number
        coordinator.door.admit(message, wire.SubmitUpdateRequest, call)

    with pytest.raises(ReceiptError, match="not for the bytes that came after it"):
        comes(messages[2].SerializeToString(), 1)
    comes(data[1], 1)
    with pytest.raises(ReceiptError, match="has signed for no more than 2"):
        comes(messages[3].SerializeToString(), 2)
    coordinator.door.ended(call)


@pytest.mark.parametrize("repeated", ["GetPlan", "GetTask", "SubmitUpdate"])
def test_a_message_that_is_played_again_is_refused(line: Line, repeated: str) -> None:
    line.join()
    kinds = {"GetPlan": wire.GetPlanRequest, "GetTask": wire.GetTaskRequest, "SubmitUpdate": wire.SubmitUpdateRequest}
    message = (
        wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))
        if repeated == "SubmitUpdate"
        else kinds[repeated](nonce=nonce(), silo="a")
    )

    def comes() -> None:
        call = Call(repeated, SILO, "", "a test")
        line.coordinator.door.admit(message.SerializeToString(), kinds[repeated], call)
        line.coordinator.door.ended(call)

    comes()
    with pytest.raises(RefusedError, match="has been made before"):
        comes()
    line.restart_coordinator()
    with pytest.raises(RefusedError, match="has been made before"):
        comes()


# Attestations that are not believed. Each changes one thing in an honest one, and signs that with the real key.


def exchange_of(document: dict[str, Any], direction: str) -> dict[str, Any]:
    """The exchange with the most messages."""
    found: dict[str, Any] = max(
        (e for e in document["exchanges"] if e["direction"] == direction), key=lambda e: e["messages"]
    )
    return found


def note_of(document: dict[str, Any], key: Ed25519PrivateKey, **changes: Any) -> str:
    checkpoint = read_note(document["checkpoint"])
    values = {"origin": checkpoint.origin, "size": checkpoint.size, "root": checkpoint.root, **changes}
    return Checkpoint(**values).sign(key)


def forged(party: Party, envelope: journal_pb2.Envelope, change: Change) -> journal_pb2.Envelope:
    document = document_of(envelope)
    change(document)
    return to_message(party.journal.seal(document, ATTESTATION))


def hand_over(line: Line, envelope: journal_pb2.Envelope) -> None:
    """An Attest call with the hospital's word."""
    call = Call("Attest", SILO, "", "a test")
    request = wire.AttestRequest(nonce=nonce(), silo="a", attestation=envelope)
    try:
        line.coordinator.door.admit(request.SerializeToString(), wire.AttestRequest, call)
    finally:
        line.coordinator.door.ended(call)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any], Party], object], str]] = {
    "a signature for other bytes": (
        lambda d, _: exchange_of(d, "sent").update(sha256="00" * 32),
        "the signature of spiffe://test/silo/a is not for the bytes in the record",
    ),
    "a signature for another length": (
        lambda d, _: exchange_of(d, "sent").update(length=5),
        "the signature of spiffe://test/silo/a is not for the bytes in the record",
    ),
    "a signature for another RPC": (
        lambda d, _: exchange_of(d, "sent").update(rpc="GetTask"),
        "the signature of spiffe://test/silo/a is not for the bytes in the record",
    ),
    "a signature for a part": (lambda d, _: exchange_of(d, "sent").update(messages=3), "which owns up to 3"),
    "a receipt for other bytes": (
        lambda d, _: exchange_of(d, "received").update(sha256="00" * 32),
        "the receipt of spiffe://test/silo/a is not for the bytes in the record",
    ),
    "a receipt for more than was sent": (
        lambda d, _: exchange_of(d, "received").update(messages=100),
        "the receipt of spiffe://test/silo/a is not for the bytes in the record",
    ),
    "a receipt for a call that was never made": (
        lambda d, _: exchange_of(d, "received").update(call_id="ab" * 16),
        "which was not sent to it",
    ),
    "somebody else's word": (
        lambda d, _: d.update(by="spiffe://test/silo/b"),
        "an attestation by spiffe://test/silo/b",
    ),
    "a word for somebody else": (
        lambda d, _: d.update(to="spiffe://test/coordinator/d"),
        "to spiffe://test/coordinator/d came from",
    ),
    "a proof from another checkpoint": (
        lambda d, _: d["consistency"].update(size=1),
        "proves its journal from 1 records",
    ),
    "a damaged proof": (
        lambda d, _: d["consistency"]["proof"].__setitem__(0, "00" * 32),
        "does not continue the one with",
    ),
    "no proof": (lambda d, _: d["consistency"].update(proof=[]), "does not continue the one with"),
    "a proof that is no proof": (
        lambda d, _: d["consistency"]["proof"].__setitem__(0, "rubbish"),
        "an attestation cannot be used: consistency.proof.0",
    ),
    "a checkpoint with another root": (
        lambda d, party: d.update(checkpoint=note_of(d, party.key, root=bytes(32))),
        "its past was rewritten",
    ),
    "a checkpoint of a shorter journal": (
        lambda d, party: d.update(checkpoint=note_of(d, party.key, size=1)),
        "rewritten or put back to an earlier state",
    ),
    "a checkpoint of another journal": (
        lambda d, party: d.update(checkpoint=note_of(d, party.key, origin="medsilo/test/silo/b")),
        "shows the journal medsilo/test/silo/b",
    ),
    "a checkpoint that somebody else signed": (
        lambda d, _: d.update(checkpoint=note_of(d, STRANGER)),
        "it was not signed with this key",
    ),
    "a checkpoint that is none": (lambda d, _: d.update(checkpoint="rubbish"), "the checkpoint cannot be used"),
    "a witness of what was never shown": (
        lambda d, _: d["witnessed"].update(size=1),
        "witnesses a checkpoint over 1 records that it was not shown",
    ),
    "a cosignature that is none": (
        lambda d, _: d["witnessed"].update(cosignature="rubbish"),
        "the cosignature of medsilo/test/silo/a cannot be used",
    ),
    "an unknown field": (lambda d, _: d.update(more=1), "an attestation cannot be used: more"),
    "another version": (lambda d, _: d.update(v=2), "an attestation cannot be used: v"),
    "a field left out": (lambda d, _: d.pop("consistency"), "an attestation cannot be used: consistency"),
    "a call id that is none": (
        lambda d, _: exchange_of(d, "sent").update(call_id="../.."),
        r"an attestation cannot be used: exchanges\.\d\.call_id",
    ),
    "too many calls": (
        lambda d, _: d.update(exchanges=d["exchanges"] * (MOST_CALLS + 1)),
        "an attestation cannot be used: exchanges",
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_word_that_does_not_hold_is_refused_kept_as_evidence_and_changes_nothing(line: Line, what: str) -> None:
    change, reason = FORGERIES[what]
    line.join()
    assert line.task(2)
    assert not line.upload(3, answered=False)  # received by the coordinator, which has no signature for it yet
    assert line.exchange()
    seen = line.coordinator.with_(SILO).seen
    envelope = forged(line.silo, line.silo.door.attest(COORDINATOR), lambda d: change(d, line.silo))
    with pytest.raises(ReceiptError, match=reason):
        hand_over(line, envelope)
    assert line.coordinator.with_(SILO).seen == seen
    (refusal,) = line.coordinator.refusals()
    assert refusal["direction"] == "received"
    assert document_of(refusal["attestation"]) == document_of(envelope)
    goes_on(line)


def test_a_word_under_a_strangers_key_is_refused(joined: Line) -> None:
    honest = document_of(joined.silo.door.attest(COORDINATOR))
    for envelope in (
        seal(honest, ATTESTATION, STRANGER),
        seal(honest, ROTATION, joined.silo.key),
    ):
        with pytest.raises(ReceiptError, match=r"signature does not hold|is of type"):
            hand_over(joined, to_message(envelope))
    goes_on(joined)


def test_a_word_before_any_key_is_known_is_refused(line: Line) -> None:
    line.silo.door.enrol(COORDINATOR, line.coordinator.journal.public_key)
    with pytest.raises(ReceiptError, match="before its audit key is known"):
        hand_over(line, line.silo.door.attest(COORDINATOR))


def test_a_silo_that_does_not_sign_for_what_it_sent_is_asked_to_first(joined: Line) -> None:
    """It may attest, and leave out what it does not want to have sent."""

    def leave_out(document: dict[str, Any]) -> None:
        document["exchanges"] = [e for e in document["exchanges"] if e["rpc"] != "SubmitUpdate"]

    hand_over(joined, forged(joined.silo, joined.silo.door.attest(COORDINATOR), leave_out))
    unsigned = joined.coordinator.with_(SILO).unsigned()
    assert [r["rpc"] for r in joined.coordinator.records("received") if r["call_id"] in unsigned] == [
        *["SubmitUpdate"] * 4,
        "Attest",
    ]


# The hospital's side.


def answered(line: Line, attestation: journal_pb2.Envelope | None) -> None:
    """What the hospital makes of an answer with that attestation."""
    asked = Call("GetTask", COORDINATOR, "", "a test")
    there = Call("GetTask", SILO, "", "a test")
    request = wire.GetTaskRequest(nonce=nonce(), silo="a", attestation=line.silo.door.attest(COORDINATOR))
    try:
        (data,) = line.silo.door.release([request], asked)
        line.coordinator.door.admit(data, wire.GetTaskRequest, there)
        task = wire.Task(nonce=nonce(), attestation=attestation)
        line.silo.door.admit(wire.GetTaskResponse(task=task).SerializeToString(), wire.GetTaskResponse, asked)
        line.silo.door.check_receipt(asked)
    finally:
        line.silo.door.ended(asked)
        line.coordinator.door.ended(there)


def test_an_answer_without_a_word_is_no_receipt(joined: Line) -> None:
    with pytest.raises(ReceiptError, match=r"answered without a receipt for what was sent to it \(GetTask"):
        answered(joined, None)


def test_an_answer_that_speaks_of_everything_but_the_question_is_no_receipt(joined: Line) -> None:
    assert joined.exchange(attested=True)
    before = joined.coordinator.door.attest(SILO, since=joined.silo.with_(COORDINATOR).seen.size)
    with pytest.raises(ReceiptError, match=r"answered without a receipt for what was sent to it \(GetTask"):
        answered(joined, before)


def test_a_receipt_for_a_part_is_no_receipt_for_the_whole(joined: Line) -> None:
    sent = Call("SubmitUpdate", COORDINATOR, "", "a test")
    header = wire.SubmitUpdateRequest(
        update=wire.Update(nonce=nonce(), silo="a", attestation=joined.silo.door.attest(COORDINATOR))
    )
    more = wire.SubmitUpdateRequest(update=wire.Update(nonce=nonce(), silo="a"))
    data = joined.silo.door.release([header, more], sent)
    there = Call("SubmitUpdate", SILO, "", "a test")
    joined.coordinator.door.admit(data[0], wire.SubmitUpdateRequest, there)
    response = wire.SubmitUpdateResponse(nonce=nonce(), attestation=joined.coordinator.door.attest(SILO))
    joined.silo.door.admit(response.SerializeToString(), wire.SubmitUpdateResponse, sent)
    with pytest.raises(ReceiptError, match="1 of 2 messages acknowledged"):
        joined.silo.door.check_receipt(sent)


def test_a_receipt_for_other_bytes_is_refused_and_kept_as_evidence(joined: Line) -> None:
    def other_bytes(document: dict[str, Any]) -> None:
        exchange_of(document, "received")["sha256"] = "00" * 32

    assert not joined.upload(3, answered=False)
    assert not joined.exchange(answered=False)
    word = joined.coordinator.door.attest(SILO, since=joined.silo.with_(COORDINATOR).seen.size)
    envelope = forged(joined.coordinator, word, other_bytes)
    response = wire.AttestResponse(nonce=nonce(), attestation=envelope)
    with pytest.raises(ReceiptError, match="receipt of spiffe://test/coordinator/c is not for the bytes"):
        joined.silo.door.admit(response.SerializeToString(), wire.AttestResponse, Call("Attest", COORDINATOR, "", "a"))
    (refusal,) = joined.silo.refusals()
    assert document_of(refusal["attestation"]) == document_of(envelope)


# Pasts that were rewritten.


def test_a_hospital_whose_journal_was_put_back_notices_at_once(joined: Line) -> None:
    earlier = joined.silo.snapshot()
    assert joined.task()
    assert joined.upload()
    joined.restart_silo(earlier)
    with pytest.raises(ReceiptError, match="was put back to an earlier state; look for the newer one"):
        joined.join()


def test_the_coordinator_refuses_a_hospital_that_says_nothing_of_its_journals_being_put_back(joined: Line) -> None:
    earlier = joined.silo.snapshot()
    assert joined.task()
    assert joined.upload()
    seen = joined.coordinator.with_(SILO).seen
    joined.restart_silo(earlier)
    assert len(joined.silo.journal) < seen.size
    with pytest.raises(ReceiptError, match=f"{seen.size} were seen before: its past was rewritten or put back"):
        hand_over(joined, joined.silo.door.attest(COORDINATOR))


def test_the_coordinator_refuses_a_journal_that_forked(joined: Line) -> None:
    """Put back, and grown beyond what was seen: with any proof that can be made of it."""
    earlier = joined.silo.snapshot()
    assert joined.task()
    assert joined.upload()
    seen = joined.coordinator.with_(SILO).seen
    joined.restart_silo(earlier)
    while len(joined.silo.journal) <= seen.size + 20:
        joined.silo.door.note(read({"kind": "padding"}))
    honest = joined.silo.door.attest(COORDINATOR)
    with pytest.raises(OutOfStepError):
        hand_over(joined, honest)

    def from_there(document: dict[str, Any]) -> None:
        size = read_note(document["checkpoint"]).size
        proof = [node.hex() for node in joined.silo.journal.consistency(seen.size, size)]
        document["consistency"] = {"size": seen.size, "proof": proof}

    with pytest.raises(ReceiptError, match="its past was rewritten"):
        hand_over(joined, forged(joined.silo, honest, from_there))


@pytest.mark.parametrize("grown", [False, True])
def test_a_coordinator_whose_journal_was_put_back_is_found_out_by_the_first_hospital(joined: Line, grown: bool) -> None:
    earlier = joined.coordinator.snapshot()
    assert joined.task()
    assert joined.upload()
    joined.restart_coordinator(earlier)
    while grown and len(joined.coordinator.journal) < joined.silo.with_(COORDINATOR).seen.size + 20:
        joined.coordinator.door.note(read({"kind": "padding"}))
    with pytest.raises(ReceiptError, match="its past was rewritten" if grown else "was put back to an earlier state"):
        joined.task() or joined.task()


def test_the_state_after_a_restart_is_the_state_before_it(joined: Line) -> None:
    def state(party: Party, peer: str) -> object:
        it = party.with_(peer)
        return it.seen, it.seen_note, it.cosignature, it.peer_key, it.unconfirmed(), sorted(it.unsigned())

    for step in (
        lambda: joined.task(2, down=1),
        lambda: joined.upload(3, up=2, answered=False),
        lambda: joined.exchange(answered=False),
        lambda: joined.task(),
        lambda: joined.upload(),
        lambda: joined.part(),
    ):
        step()
        for party, peer in ((joined.silo, COORDINATOR), (joined.coordinator, SILO)):
            copy = Party.__new__(Party)
            copy.uri, copy.key, copy.folder, copy._copies = party.uri, party.key, party.snapshot(), 0
            copy._open()
            assert state(copy, peer) == state(party, peer)
            copy.journal.close()
            shutil.rmtree(copy.folder)


# Changes of keys.


def rotation(party: str, old: Ed25519PrivateKey, new: Ed25519PrivateKey, **changes: Any) -> journal_pb2.Envelope:
    public = [key.public_key().public_bytes_raw().hex() for key in (old, new)]
    document = {"v": 1, "party": party, "origin": "o", "old_key": public[0], "new_key": public[1], **changes}
    statement = seal(document, ROTATION, old)
    countersign(statement, new)
    return to_message(statement)


def one_handed(party: str, old: Ed25519PrivateKey, new: Ed25519PrivateKey) -> journal_pb2.Envelope:
    """Without the signature of the new key: whoever signs it need not have that key."""
    statement = rotation(party, old, new)
    del statement.signatures[1:]
    return statement


def test_a_key_is_followed_along_its_signed_changes_and_no_others(line: Line) -> None:
    door = line.coordinator.door
    first, second, third = (Ed25519PrivateKey.generate() for _ in range(3))
    one, two = rotation(SILO, first, second), rotation(SILO, second, third)
    public = third.public_key().public_bytes_raw()
    door.enrol(SILO, first.public_key().public_bytes_raw())
    for chain in (
        [],
        [two],
        [two, one],
        [one],
        [one, rotation("spiffe://test/silo/b", second, third)],
        [one, rotation(SILO, STRANGER, third)],
        [one, one_handed(SILO, second, third)],
        [one, rotation(SILO, second, third, new_key="rubbish")],
        [one, rotation(SILO, second, third, new_key="ab")],
        [one, rotation(SILO, second, third, new_key=5)],
    ):
        with pytest.raises(IdentityError, match="without a signed change of keys"):
            door.enrol(SILO, public, chain)
        assert door.receipt_state(SILO).peer_key == first.public_key().public_bytes_raw()
    door.enrol(SILO, public, [one, two])
    assert door.receipt_state(SILO).peer_key == public
    *_, record = (r for r in read_records(line.coordinator.folder) if r["kind"] == "peer-key")
    assert (record["public_key"], len(record["rotations"])) == (public.hex(), 2)
    line.restart_coordinator()
    assert line.coordinator.with_(SILO).peer_key == public
    with pytest.raises(IdentityError):
        line.coordinator.door.enrol(SILO, first.public_key().public_bytes_raw(), [one, two])


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_a_key_that_can_check_nothing_is_not_enrolled(line: Line, key: bytes) -> None:
    with pytest.raises(RefusedError, match="an Ed25519 public key has 32"):
        line.coordinator.door.enrol(SILO, key)
    assert line.coordinator.with_(SILO).peer_key is None


def test_the_key_is_changed_between_sessions_and_the_history_goes_on(tmp_path: Path) -> None:
    identity = Identity("test", "silo", "a")
    create_keys(tmp_path / "keys", identity)
    line = Line(tmp_path)
    line.silo.journal.close()
    line.silo = Party(tmp_path / "hospital", SILO, load_audit_key(tmp_path / "keys" / "audit.key"))
    line.join()
    assert line.task()
    assert not line.upload(3, up=2, answered=False)
    before = line.silo.journal.public_key
    line.silo.journal.close()
    rotate(tmp_path / "keys", line.silo.folder, origin="medsilo/test/silo/a", identity=identity)
    line.silo = Party(line.silo.folder, SILO, load_audit_key(tmp_path / "keys" / "audit.key"))
    assert line.silo.journal.public_key != before
    line.join()
    goes_on(line)
    line.close()


def test_what_is_too_much_for_one_attestation_waits_for_the_next(tmp_path: Path) -> None:
    calls = MOST_CALLS + 100
    with Journal(tmp_path / "journal", key=STRANGER, origin="o") as journal:
        state = ReceiptState(SILO, COORDINATOR)

        def take(number: int, **more: Any) -> None:
            content = {
                "kind": "message",
                "rpc": "GetPlan",
                "call_id": f"{number:032x}",
                "direction": "sent",
                "frame": 0,
                "sha256": f"{number:064x}",
                "length": 1,
            }
            index = journal.append([content], durable=False)[0]
            state.take(read({**content, **more}), index)

        for number in range(calls):
            take(number)
        first = state.attest(journal)
        told = [exchange["call_id"] for exchange in document_of(to_message(first))["exchanges"]]
        # The newest are told first: what is being answered must not wait behind what is old.
        assert told == [f"{number:032x}" for number in reversed(range(calls - MOST_CALLS, calls))]
        take(calls, attestation=to_json(first))
        # The other side has seen it: what it says need not be said again.
        seen = read_note(document_of(to_message(first))["checkpoint"]).size
        rest = document_of(to_message(state.attest(journal, since=seen)))["exchanges"]
        left = [calls, *reversed(range(calls - MOST_CALLS))]
        assert [e["call_id"] for e in rest] == [f"{number:032x}" for number in left]


def test_the_check_of_these_tests_finds_a_receipt_that_is_missing(joined: Line) -> None:
    """Without the last exchange, the upload's answer is not signed for."""
    sent, received = digests(joined.coordinator.records("sent")), words(joined.coordinator, "received")
    with pytest.raises(AssertionError, match="something is missing"):
        check(received, joined.last_call, sent[joined.last_call], 1, "something")
