"""What ``audit verify`` holds for sound, what for broken, and that it survives whatever it is given."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medsilo.privacy.audit.bundle import UnreadableError, open_evidence
from medsilo.privacy.audit.findings import Verification
from medsilo.privacy.audit.reader import EvidenceReader
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import JournalError
from medsilo.privacy.exposure import SCHEMA_FILES, field_exposure
from medsilo.privacy.files.canonical import read_canonical, write_canonical
from medsilo.privacy.identity.envelope import ATTESTATION, from_json, seal, to_json
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, Journal, read_records
from medsilo.privacy.journal.records import (
    ConsentRecord,
    MessageRecord,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    WithdrawalRecord,
    read,
)
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.verify.permission import Permissions
from medsilo.privacy.verify.result import ConsentError
from tests.support.evidence.exchanging import CONSENT, COORDINATOR, SILO, Exchange, Party, key_of, meet
from tests.support.evidence.tampering import Forger, Record, changed, records_of, resigned, write_bundle

Lay = Callable[[list[Record]], Verification]


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Exchange]]:
    """A bundle of a silo's journal of two rounds, and the parties."""
    folder = tmp_path_factory.mktemp("signed")
    exchange = meet(folder)
    exchange.rounds([0, 1], chunks=1)
    exchange.silo.journal.checkpoint()
    yield exchange.silo.bundle(folder / "silo.json"), exchange
    exchange.close()


@pytest.fixture
def lay(signed: tuple[Path, Exchange], tmp_path: Path) -> Lay:
    """Verifies records that their owner has written and signed as they are."""
    bundle, exchange = signed

    def verify(records: list[Record]) -> Verification:
        forged = Forger(exchange.silo.key, SILO).rewrite(records)
        return verify_evidence(resigned(tmp_path / "laid.json", forged, bundle, exchange.silo.key))

    return verify


def beginning(signed: tuple[Path, Exchange]) -> list[Record]:
    """The records before the coordinator's first words."""
    return records_of(signed[0])[:8]


def test_a_checkpoint_that_a_crash_kept_from_its_list_is_no_tampering_and_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def killed(_journal: Journal) -> None:
        raise KilledError

    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.get_task(1)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write_checkpoints", killed)
        with pytest.raises(KilledError):
            exchange.submit(1)
    crashed = shutil.copytree(exchange.silo.folder, tmp_path / "crashed")
    exchange.silo.journal.close()
    found = verify_evidence(crashed)
    assert found.sound, found.problem
    assert any("A crash kept 1 checkpoint from the journal's list" in remark for remark in found.remarks)

    exchange.silo.folder, exchange.in_step = crashed, False
    exchange.silo.open()
    found = verify_evidence(crashed)
    assert found.sound, found.problem
    assert not any("crash" in remark for remark in found.remarks)
    exchange.submit(1)
    exchange.close()
    for party, other in ((exchange.silo, exchange.coordinator), (exchange.coordinator, exchange.silo)):
        both = verify_evidence(party.folder, peer=other.folder)
        assert both.sound, both.problem


def test_a_checkpoint_that_is_missing_under_an_answered_message_is_noticed(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0, 1])
    exchange.attest()
    exchange.close()
    folder = exchange.silo.folder
    kept = (folder / CHECKPOINTS).read_bytes().splitlines(keepends=True)
    sizes = [read_note(json.loads(line)["checkpoint"]).size for line in kept]
    sent = [r for r in read_records(folder) if r.get("direction") == "sent" and "attestation" in r]
    word = json.loads(from_json(sent[-1]["attestation"]).payload)
    (folder / CHECKPOINTS).write_bytes(b"".join(kept[: sizes.index(read_note(word["checkpoint"]).size)]))
    found = verify_evidence(folder)
    assert (found.sound, found.index) == (False, sent[-1]["index"])
    assert "that is not among the journal's checkpoints" in (found.problem or "")


def test_honest_histories_are_sound_from_either_side(tmp_path: Path) -> None:
    """Cut calls, repeated updates, restarts, plans that were asked for twice."""
    exchange = meet(tmp_path)
    exchange.rounds([0])
    for cut in ("request", "answer"):
        exchange.cutting(cut, lambda: exchange.get_task(1))
    exchange.get_task(1)
    for cut in ("request", "middle", "answer"):
        exchange.cutting(cut, lambda: exchange.submit(1))
    exchange.submit(1, repeated=True)
    exchange.silo.restart()
    exchange.in_step = False
    exchange.cutting("answer", exchange.get_plan)
    exchange.begin()
    exchange.cutting("answer", exchange.join)
    exchange.coordinator.restart()
    exchange.join()
    exchange.cutting("request", exchange.attest)
    exchange.rounds([2])
    exchange.attest()
    paths = exchange.silo.folder, exchange.coordinator.folder
    bundles = exchange.silo.bundle(tmp_path / "a.json"), exchange.coordinator.bundle(tmp_path / "b.json")
    for mine, theirs in (paths, bundles, (paths[0], bundles[1])):
        for path, peer in ((mine, theirs), (theirs, mine)):
            found = verify_evidence(path, peer=peer)
            assert found.sound, found.sentences()
            assert found.peer in (SILO, COORDINATOR)
    found = verify_evidence(paths[0])
    assert found.acknowledged < found.sent
    (said,) = [said for said in found.remarks if "without a receipt" in said]
    assert "cut or refused" in said
    assert "already" in said


def test_evidence_that_was_signed_while_an_answer_was_under_way_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator answers several hospitals at once: what it signs for one of them may stand between its word in an
    answer to another and that answer's record."""
    exchange = meet(tmp_path)
    exchange.rounds([0])
    coordinator, down = exchange.coordinator, Exchange._down

    def signed_meanwhile(self: Exchange, *arguments: Any) -> None:
        coordinator.door.note(RefusalRecord(reason="another hospital's call"))
        coordinator.journal.checkpoint()
        down(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "_down", signed_meanwhile)
        exchange.attest()
    while_serving = coordinator.bundle(tmp_path / "while-serving.json")
    exchange.silo.journal.checkpoint()
    hospital = exchange.silo.bundle(tmp_path / "hospital.json")
    for own, peer in ((hospital, while_serving), (while_serving, hospital)):
        found = verify_evidence(own, peer=peer)
        assert found.sound, found.problem
        assert any("has 1 message that spiffe://test/coordinator/" in said for said in found.remarks)

    exchange.attest()  # in which the coordinator signs for that answer, so that newer evidence must hold it
    exchange.silo.journal.checkpoint()
    hospital = exchange.silo.bundle(tmp_path / "hospital.json")
    older = verify_evidence(hospital, peer=while_serving)
    assert not older.sound
    assert "in place and unchanged" in older.sentences()[0], "nothing is said against the own evidence"
    assert "older than the other one (then export it again)" in older.peers_problem
    newer = coordinator.bundle(tmp_path / "newer.json")
    assert verify_evidence(hospital, peer=newer).sound
    exchange.close()


def test_an_answer_without_a_receipt_is_broken_and_says_which_message(tmp_path: Path) -> None:
    """A coordinator whose answers leave out what it received; its daemon would not, and the silo's would stop."""
    exchange = meet(tmp_path)
    exchange.rounds([0])
    door = exchange.coordinator.door
    state, attest = door.receipt_state(SILO), door.attest

    def forgetful(peer: str, **options: Any) -> Any:
        held = state._open
        state._open = {key: value for key, value in held.items() if key[1] != "received"}
        try:
            return attest(peer, **options)
        finally:
            state._open = held

    door.attest = forgetful  # type: ignore[method-assign]
    silo = exchange.silo.door
    silo.check_receipt = lambda call: None  # type: ignore[method-assign]
    exchange.get_task(1)
    door.attest = attest  # type: ignore[method-assign]
    unanswered = [r for r in records(exchange.silo.folder) if r["kind"] == "message" and r["direction"] == "sent"][-1]
    found = verify_evidence(exchange.silo.folder)
    assert not found.sound
    assert found.index == unanswered["index"]
    assert "has answered it (GetTask" in found.problem
    assert "no receipt" in found.problem
    # The coordinator's own journal shows that it owed the receipt.
    found = verify_evidence(exchange.coordinator.folder)
    assert "leaves out call" in found.problem


def test_a_receipt_that_comes_later_is_a_receipt(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.cutting("answer", lambda: exchange.get_task(0))
    assert verify_evidence(exchange.silo.folder).acknowledged < verify_evidence(exchange.silo.folder).sent
    exchange.attest(in_step=False)
    found = verify_evidence(exchange.silo.folder)
    assert found.acknowledged == found.sent


def test_a_client_cannot_deny_an_answer_that_it_has_cosigned(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.get_task(1)
    # The silo's next words leave the task out, though they cosign the checkpoint that came with it.
    state = exchange.silo.door.receipt_state(COORDINATOR)
    open_calls = state._open
    state._open = {key: value for key, value in open_calls.items() if key[1] != "received"}
    exchange.submit(1)
    found = verify_evidence(exchange.coordinator.folder)
    assert "does not acknowledge that answer" in found.problem
    assert "leaves out call" in verify_evidence(exchange.silo.folder).problem


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_signature_that_is_still_due_comes_later_but_not_after_a_withdrawal(tmp_path: Path, withdrawn: bool) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0])
    for party in (exchange.silo, exchange.coordinator) if withdrawn else ():
        party.door.note(WithdrawalRecord(run="run", silo=SILO, cause="withdrawn by the hospital"))
    for party in (exchange.silo, exchange.coordinator):
        party.journal.checkpoint()
    remarks = [
        remark
        for party in (exchange.silo, exchange.coordinator)
        for remark in verify_evidence(party.folder).remarks
        if "has not signed yet for what it sent" in remark
    ]
    assert remarks
    for remark in remarks:
        assert ("that stays open" in remark) == withdrawn
        assert ("comes with its next message" in remark) == (not withdrawn)


def test_refused_words_are_told(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.silo.door.note(RefusalRecord(reason="no run", run="run2", plan_sha256="00" * 32, plan={}))
    word = to_json(seal({"v": 1}, ATTESTATION, key_of(9)))
    exchange.silo.door.note(
        RefusalRecord(reason="not signed", direction="received", peer=COORDINATOR, attestation=word)
    )
    exchange.silo.journal.checkpoint()
    found = verify_evidence(exchange.silo.folder)
    assert found.sound
    assert found.refused == 2
    assert any("was refused: not signed" in said for said in found.remarks)


def test_unknown_kinds_are_kept_and_named_and_show_no_sending(lay: Lay, signed: tuple[Path, Exchange]) -> None:
    first = beginning(signed)
    odd = [{**first[-1], "kind": kind} for kind in ("massage", "a" * 1000)]
    found = lay([*first, *odd])
    assert found.sound
    assert found.sent == sum(record.get("direction") == "sent" for record in first)
    (said,) = [said for said in found.remarks if "massage" in said]
    assert len(said) < 300


def test_a_clock_that_goes_back_is_told(lay: Lay, signed: tuple[Path, Exchange]) -> None:
    first = beginning(signed)
    first[5]["time"] = "2020-01-01T00:00:00.000Z"
    found = lay(first)
    assert found.sound
    assert any("clock went back at record 5" in said for said in found.remarks)
    for time in ("2020-01-01", "yesterday", "2020-01-01T00:00:00Z", 1, None, "２020-01-01T00:00:00.000Z"):
        first[5]["time"] = time
        assert lay(first).index == 5


BAD_RECORDS: list[tuple[int, dict[str, Any], str]] = [
    (0, {"origin": "medsilo/test/silo/other"}, "not one of its owner"),
    (0, {"public_key": "00"}, "64 hexadecimal digits"),
    (1, {"files": []}, "does not have the hash"),
    (1, {"files": ["AAAA"]}, "cannot be read"),
    (1, {"files": ["not base64"]}, "cannot be read"),
    (1, {"kind": "note"}, "is not in the journal"),
    (2, {"consent": {**CONSENT, "exposures": ["PROTOCOL"]}}, "IDENTITY left without consent"),
    (2, {"consent": {**CONSENT, "coordinator": COORDINATOR + "2"}}, "it left for"),
    (2, {"consent": {**CONSENT, "expires": "2020-01-01"}}, "after the consent had expired"),
    (2, {"consent": {**CONSENT, "methods": ["other"]}}, "the consent does not hold it"),
    (2, {"kind": "note"}, "before there was a consent"),
    (3, {"call_id": "00"}, "32 hexadecimal digits"),
    (3, {"direction": "away"}, "sent or received"),
    (3, {"frame": 1}, "another was due"),
    (3, {"frame": True}, "whole number"),
    (3, {"frame": -1}, "whole number"),
    (3, {"length": 10**15}, "unaccounted for"),
    (3, {"fields": {"nonce": 18, "silo": 11}}, "unaccounted for"),
    (3, {"fields": {"nonce": 18, "silo": 11, "more": 2}}, "not in the schema"),
    (3, {"fields": {"nonce": 18, "silo": 11, "protocol_version": True}}, "has True bytes"),
    (3, {"fields": {"nonce.x": 18, "silo": 11, "protocol_version": 2}}, "no message"),
    (3, {"classes": {"PROTOCOL": 31}}, "not those of its fields"),
    (3, {"message_type": "medsilo.v1.Nothing"}, "no message"),
    (3, {"peer": None}, "should be text"),
    (3, {"self": COORDINATOR}, "in a journal of"),
    (3, {"federation": "other"}, "in a journal of"),
    (3, {"v": 2}, "which this release does not know"),
    (3, {"v": True}, "which this release does not know"),
    (4, {"rpc": "Join"}, "was GetPlan before"),
    (5, {"public_key": 5}, "64 hexadecimal digits"),
    (6, {"plan_sha256": "00" * 32}, "does not have the hash"),
]


@pytest.mark.parametrize("number", range(len(BAD_RECORDS)))
def test_a_record_that_is_signed_and_wrong(lay: Lay, signed: tuple[Path, Exchange], number: int) -> None:
    at, changes, why = BAD_RECORDS[number]
    first = beginning(signed)
    first[at] |= changes
    found = lay(first)
    assert not found.sound
    assert why in found.problem, found.problem
    assert found.index is not None
    assert found.index >= at


def test_records_must_be_canonical_json(signed: tuple[Path, Exchange], tmp_path: Path) -> None:
    bundle = signed[0]
    lines = bundle.read_bytes().splitlines(keepends=True)
    good = lines[6]
    assert b'"direction":"sent"' in good
    for bad in (
        good.replace(b'{"', b'{ "', 1),
        good.replace(b'"direction":"sent"', b'"direction":"sent","direction":"sent"'),
        good.replace(b'"direction":"sent"', b'"direction":"s\\u0065nt"'),
        good.replace(b'"frame":0', b'"frame":0.0'),
        good.replace(b'"frame":0', b'"frame":-0'),
        good.replace(b'"frame":0', b'"frame":1e400'),
        good.replace(b'"frame":0', b'"frame":NaN'),
        good.replace(b'"frame":0', b'"frame":' + b"9" * 5000),
        good.replace(b'"frame":0', b'"frame":' + b"[" * 100_000),
        good.replace(b'"frame":0', b'"frame":' + b"[" * 900 + b"]" * 900),
        good.replace(b'"sent"', b'"\xff"'),
        good.replace(b'"sent"', b'"\\ud800"'),
        good.replace(b'"sent"', b'"' + b"x" * 1_000_000 + b'"'),
        b"[]" + b",\n",
        b"null,\n",
        b"\n",
        b",\n",
    ):
        assert bad != good
        path = tmp_path / "bad.json"
        path.write_bytes(b"".join([*lines[:6], bad, *lines[7:]]))
        found = verify_evidence(path)
        assert not found.sound
        assert found.index == 3 if bad != b"\n" else True


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a":"—","b":1}', True),
        ('{"b":1,"a":1}', False),
        ("[1.5,1e+21,9007199254740991]", True),
        ("[9007199254740993]", False),
        ("[10000000000000000000000]", False),
        ("[1.50]", False),
        ("[Infinity]", False),
        ('{"\U0001f600":1,"\ufb33":2}', True),  # RFC 8785, section 3.2.3: sorted by UTF-16 code units
        ('{"\ufb33":2,"\U0001f600":1}', False),
        ('["\\u001f\\b\\t\\n\\f\\r\\"\\\\"]', True),
        ('["\\u001F"]', False),
        ('["\\/"]', False),
        ("", False),
    ],
)
def test_canonical_json_is_read_as_rfc_8785_has_it(text: str, good: bool) -> None:
    if good:
        assert rfc8785.dumps(read_canonical(text.encode())) == text.encode()
    else:
        with pytest.raises(ValueError):
            read_canonical(text.encode())


DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**54), 2**54)
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.just(7), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(DOCUMENTS)
def test_canonical_json_is_written_as_rfc_8785_has_it(document: object) -> None:
    try:
        expected = rfc8785.dumps(document)
    except (ValueError, TypeError):
        with pytest.raises(ValueError):
            write_canonical(document)
    else:
        assert write_canonical(document) == expected


def test_the_stored_schema_gives_the_classes_of_the_wire(signed: tuple[Path, Exchange]) -> None:
    schema = StoredSchema([base64.b64encode(file.serialized_pb).decode() for file in SCHEMA_FILES])
    for record in records_of(signed[0]):
        if record["kind"] == "message":
            assert schema.classes(record["message_type"], record["fields"]) == record["classes"]
            for path in record["fields"]:
                (name,) = schema.classes(record["message_type"], {path: 1})
                assert name == field_exposure(record["message_type"], path)
    with pytest.raises(JournalError, match="has no message"):
        schema.classes("medsilo.v1.Update", {"nonce.nonce.nonce": 1})


def withdrawal(cause: str | None) -> WithdrawalRecord:
    return WithdrawalRecord(**({} if cause is None else {"cause": cause}))


def consent(*, content: Any = CONSENT, **more: Any) -> ConsentRecord:
    return ConsentRecord(consent=content, **more)


def sending(
    *classes: str, rpc: str = "SubmitUpdate", round_number: int | None = 0, plan_sha256: str | None = None
) -> tuple[MessageRecord, tuple[str, ...]]:
    record = MessageRecord(
        index=7,
        rpc=rpc,
        peer=COORDINATOR,
        plan_sha256=plan_sha256,
        round=round_number,
        time="2026-01-01T00:00:00.000Z",
    )
    return record, classes


@pytest.mark.parametrize(
    ("cause", "again", "lifted"),
    [
        (None, {}, True),
        ("consent expired", {}, True),
        ("withdrawn by the hospital", {}, False),
        ("withdrawn by the hospital", {"given": True}, True),
    ],
)
def test_after_a_withdrawal_only_the_farewell_leaves(cause: str | None, again: dict[str, Any], lifted: bool) -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent())
    record, classes = sending("PROTOCOL", "LOCAL_METRICS")
    permissions.check(record, classes, whole=False)
    permissions.withdrawn(withdrawal(cause))
    with pytest.raises(ConsentError, match="after the consent was withdrawn"):
        permissions.check(record, classes, whole=False)
    permissions.check(*sending("PROTOCOL", "IDENTITY", rpc="Withdraw"), whole=True)
    permissions.consented(consent(**again))
    if lifted:
        permissions.check(record, classes, whole=False)
    else:
        with pytest.raises(ConsentError):
            permissions.check(record, classes, whole=False)


@pytest.mark.parametrize(
    "ended",
    [{"expires": "2025-12-30"}, {"exposures": []}, {"coordinator": "spiffe://test/coordinator/other"}],
    ids=["expired", "nothing left of it", "for another"],
)
def test_the_farewell_may_leave_however_the_consent_has_ended_and_nothing_else(ended: dict[str, Any]) -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, **ended}))
    farewell = sending("PROTOCOL", "IDENTITY", rpc="Withdraw"), sending("PROTOCOL", "IDENTITY", rpc="Attest")
    with pytest.raises(ConsentError):
        permissions.check(*farewell[1], whole=True)
    permissions.withdrawn(withdrawal("consent narrowed"))
    for record, classes in farewell:
        permissions.check(record, classes, whole=True)
        assert permissions.ends(record.rpc) is None, "whatever the other side's clock says"
    for forbidden in (sending("PROTOCOL", "IDENTITY", rpc="GetTask"), sending("LOCAL_METRICS", rpc="Attest")):
        with pytest.raises(ConsentError):
            permissions.check(*forbidden, whole=True)


def roster(*silos: str, number: int = 0, **more: Any) -> RosterRecord:
    return RosterRecord(**{"plan_sha256": None, "round": number, "silos": list(silos), **more})


def test_a_rounds_update_masked_for_two_rosters_is_found() -> None:
    permissions = Permissions(SILO)
    permissions.masked(roster("a", "b", "c", "d"))
    permissions.masked(roster("d", "c", "b", "a"))
    permissions.masked(roster("a", "b", "c", number=1))
    with pytest.raises(ConsentError, match="gives single updates away"):
        permissions.masked(roster("a", "b", "c"))


def run_record(run: str, **plan: Any) -> RunRecord:
    content = {"required": [], "optional": [], "downlink": [], "rounds": 4, "method": {"name": "fedavg"}, **plan}
    digest = hashlib.sha256(write_canonical(content)).hexdigest()
    return RunRecord(run=run, plan=content, plan_sha256=digest)


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ({"round": 1, "received_sha256": "bb"}, "a round of the run for a, b, c, d"),
        ({"run": "later", "round": 0, "received_sha256": "aa"}, "an update from the same models for a, b, c, d"),
        ({"run": "later", "round": 0, "received_sha256": "bb"}, None),
        ({"round": 1}, None),
        ({"round": 1, "received_sha256": "bb", "private": {"epsilon": 4}}, None),
        ({"round": 1, "received_sha256": "bb", "private": {"epsilon": 1000}}, "a round of the run for a, b, c, d"),
    ],
    ids=["another round", "the same models", "another run", "a record of before", "with privacy", "in name alone"],
)
def test_sums_of_different_hospitals_are_found(again: Record, said: str | None) -> None:
    promise = again.pop("private", None)
    privacy = promise and {"delta": 1e-5, "unit": "image", **promise}
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, "methods": ["fedavg"]}))
    runs = {name: run_record(name, name=name, privacy=privacy) for name in ("r", "later")}
    for record in runs.values():
        permissions.joined(record)

    def masked(*silos: str, run: str = "r", **content: Any) -> None:
        permissions.masked(roster(*silos, **{"run": run, "plan_sha256": runs[run].plan_sha256, **content}))

    masked("a", "b", "c", "d", round=0, received_sha256="aa")
    if said is None:
        masked("a", "b", "c", **again)
        return
    with pytest.raises(ConsentError, match=said):
        masked("a", "b", "c", **again)


@pytest.mark.parametrize("order", [("private", "plain"), ("plain", "private")])
def test_sums_from_the_same_models_with_and_without_privacy_are_of_the_same_hospitals(order: tuple[str, str]) -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, "methods": ["fedavg"]}))
    promise = {"epsilon": 4, "delta": 1e-5, "unit": "image"}
    runs = {"private": run_record("p", privacy=promise), "plain": run_record("q", privacy=None)}

    def masked(run: str, *silos: str) -> None:
        permissions.joined(runs[run])
        about = {"run": run, "plan_sha256": runs[run].plan_sha256, "received_sha256": "aa"}
        permissions.masked(roster(*silos, **about))

    masked(order[0], "a", "b", "c", "d")
    with pytest.raises(ConsentError, match="an update from the same models for a, b, c, d"):
        masked(order[1], "a", "b", "c")


def test_a_masked_update_leaves_for_a_roster_on_record_alone() -> None:
    permissions = Permissions(SILO)
    content = {**CONSENT, "exposures": ["PROTOCOL", "IDENTITY", "MASKED_UPDATE"]}
    permissions.consented(consent(content=content))
    record, classes = sending("PROTOCOL", "MASKED_UPDATE")
    with pytest.raises(ConsentError, match="no roster is on record"):
        permissions.check(record, classes, whole=True)
    permissions.masked(roster("a", "b", "c"))
    with pytest.raises(ConsentError, match="no run that was joined"):  # the next question
        permissions.check(record, classes, whole=True)


def test_a_withdrawal_in_a_coordinators_journal_is_another_partys() -> None:
    permissions = Permissions(COORDINATOR)
    permissions.withdrawn(withdrawal(None))
    permissions.check(*sending("PROTOCOL", "PEER_DERIVED"), whole=True)


def test_more_rounds_than_the_consent_holds(signed: tuple[Path, Exchange]) -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, "rounds": 2}))
    run = next(record for record in map(read, records_of(signed[0])) if isinstance(record, RunRecord))
    permissions.joined(run)

    def send(number: int) -> None:
        told = sending("PROTOCOL", "MODEL_PARAMETERS_EXTRACTOR", round_number=number, plan_sha256=run.plan_sha256)
        permissions.check(*told, whole=True)

    for number in (0, 0, 1, 1):
        send(number)
    with pytest.raises(ConsentError, match="2 rounds of a run"):
        send(2)


def test_more_rounds_of_all_runs_than_the_consent_holds() -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, "methods": ["fedavg"], "rounds": 4, "total_rounds": 3}))
    runs = [run_record(name, name=name) for name in ("r", "later")]
    for run in runs:
        permissions.joined(run)

    def send(run: RunRecord, number: int) -> None:
        permissions.check(*sending("PROTOCOL", round_number=number, plan_sha256=run.plan_sha256), whole=True)

    for run, number in ((runs[0], 0), (runs[0], 1), (runs[1], 0), (runs[1], 0)):
        send(run, number)
    with pytest.raises(ConsentError, match="updates of 4 rounds left; the consent holds 3 rounds of all runs"):
        send(runs[1], 1)


def test_what_the_plan_does_not_announce(signed: tuple[Path, Exchange]) -> None:
    permissions = Permissions(SILO)
    permissions.consented(consent(content={**CONSENT, "exposures": [*CONSENT["exposures"], "LABEL_COUNTS"]}))
    record, classes = sending("PROTOCOL", "LABEL_COUNTS")
    with pytest.raises(ConsentError, match="for no run that was joined"):
        permissions.check(record, classes, whole=True)
    run = next(record for record in map(read, records_of(signed[0])) if isinstance(record, RunRecord))
    permissions.joined(run)
    with pytest.raises(ConsentError, match="plan does not announce"):
        permissions.check(*sending("PROTOCOL", "LABEL_COUNTS", plan_sha256=run.plan_sha256), whole=True)


def test_evidence_that_cannot_be_compared_is_unreadable_not_broken(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    second = meet(tmp_path, silo="spiffe://test/silo/hospital2", seed=2, coordinator=exchange.coordinator)
    exchange.attest()
    second.attest()
    with pytest.raises(UnreadableError, match="is not the other side"):
        verify_evidence(exchange.silo.folder, peer=exchange.silo.folder)
    alone = Party("spiffe://test/silo/hospital3", tmp_path / "alone", key_of(3))
    alone.door.note(read({"kind": "padding"}))
    alone.journal.checkpoint()
    with pytest.raises(UnreadableError, match="nobody in common"):
        verify_evidence(exchange.silo.folder, peer=alone.folder)
    assert verify_evidence(exchange.silo.folder, peer=second.silo.folder).sound


def test_it_needs_neither_keys_nor_daemons_nor_what_they_load(signed: tuple[Path, Exchange], tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from medsilo.privacy.audit.verification import verify_evidence
assert verify_evidence(Path({str(signed[0])!r})).sound
heavy = [name for name in ("torch", "grpc", "matplotlib", "silo", "coordinator") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- whatever it is given ---

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["00" * 32, "ab" * 16, SILO, COORDINATOR, "9" * 400, "x" * 100_000, "\ud800", "a\n1\n\n— a A\n"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
ANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def survives(path: Path, **options: Any) -> None:
    with contextlib.suppress(UnreadableError):
        found = verify_evidence(path, **options)
        assert all(isinstance(line, str) for line in found.sentences())
        json.dumps(found.problem)


@ANY
@given(data=st.binary(max_size=400))
def test_any_bytes_at_all(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    path = folder / "bundle.json"
    for content in (data, b'{\n"header":' + data, b'{\n"header":{},\n"records":[\n' + data + b"\n]}\n"):
        path.write_bytes(content)
        survives(path)
    for name in (RECORDS, CHECKPOINTS):
        (folder / name).write_bytes(data)
        survives(folder)


@ANY
@given(content=JSON, name=st.sampled_from(["size", "first", "count", "checkpoint", "before", "schemas", "public_key"]))
def test_any_header(signed: tuple[Path, Exchange], tmp_path_factory: Any, content: Any, name: str) -> None:
    path = tmp_path_factory.mktemp("any") / "bundle.json"
    lines = signed[0].read_bytes().splitlines(keepends=True)
    header = {**json.loads(lines[1][9:-2]), name: content}
    lines[1] = b'"header":' + json.dumps(header).encode() + b",\n"
    path.write_bytes(b"".join(lines))
    survives(path)


@ANY
@given(content=JSON, seed=st.integers(0, 2**32))
def test_any_value_in_any_record_that_its_owner_has_signed(
    signed: tuple[Path, Exchange], tmp_path_factory: Any, content: Any, seed: int
) -> None:
    """Signatures fit, so that every check behind them is reached."""
    bundle, exchange = signed
    chance = random.Random(seed)
    path = tmp_path_factory.mktemp("any") / "bundle.json"
    records = records_of(bundle)
    record = records[chance.randrange(len(records))]
    place: Any = record
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
            break
        place = place[key]
    place[key] = content
    try:
        resigned(path, records, bundle, exchange.silo.key)
    except (ValueError, RecursionError, KeyError, AttributeError):
        return  # it cannot be written as canonical JSON
    survives(path)
    survives(path, peer=exchange.coordinator.folder)
    survives(exchange.coordinator.folder, peer=path)


@ANY
@given(content=JSON, seed=st.integers(0, 2**32), drop=st.booleans())
def test_any_word_of_the_other_side(
    signed: tuple[Path, Exchange], tmp_path_factory: Any, content: Any, seed: int, drop: bool
) -> None:
    """The other side signs whatever it likes, and the owner records it."""
    bundle, exchange = signed
    chance = random.Random(seed)
    records = records_of(bundle)
    words = [r for r in records if r.get("attestation") is not None]
    record = chance.choice(words)
    document = json.loads(from_json(record["attestation"]).payload)
    place: Any = document
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key]:
            break
        place = place[key]
    if drop:
        del place[key]
    else:
        place[key] = content
    sent = record["direction"] == "sent"
    try:
        signer: Ed25519PrivateKey = exchange.silo.key if sent else exchange.coordinator.key
        record["attestation"] = to_json(seal(document, ATTESTATION, signer))
        path = resigned(tmp_path_factory.mktemp("any") / "bundle.json", records, bundle, exchange.silo.key)
    except (ValueError, RecursionError):
        return
    survives(path)


def test_any_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.json").write_bytes(b"")
    (tmp_path / "lines").write_bytes(b"\n" * 100_000)
    (tmp_path / "long").write_bytes(b"x" * (17 << 20))
    for path in (tmp_path, tmp_path / "empty", tmp_path / "nothing.json", tmp_path / "gone", tmp_path / "lines"):
        with pytest.raises(UnreadableError):
            verify_evidence(path)
    with pytest.raises(UnreadableError, match="too long"):
        verify_evidence(tmp_path / "long")
    with pytest.raises(UnreadableError):
        verify_evidence(Path("/dev/zero"))


def test_a_journal_of_records_that_nobody_signed(signed: tuple[Path, Exchange], tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_bytes(b"".join(rfc8785.dumps(r) + b"\n" for r in records_of(signed[0])))
    found = verify_evidence(tmp_path)
    assert "not among the journal's checkpoints" in found.problem
    (tmp_path / RECORDS).write_bytes(b"".join(rfc8785.dumps(r) + b"\n" for r in records_of(signed[0])[:5]))
    assert verify_evidence(tmp_path).problem == "none of it is signed, so it proves nothing yet"
    (tmp_path / RECORDS).write_bytes(b"")
    assert verify_evidence(tmp_path).problem == "it holds no record"


def test_a_bundle_with_more_or_fewer_records_than_it_announces(signed: tuple[Path, Exchange], tmp_path: Path) -> None:
    bundle, exchange = signed
    records = records_of(bundle)
    path = tmp_path / "other.json"
    write_bundle(path, records, bundle, count=len(records) - 1, size=len(records) - 1)
    assert not verify_evidence(path).sound
    key = exchange.silo.public
    assert verify_evidence(bundle, key=key).sound
    assert "not with" in verify_evidence(bundle, key=key_of(9).public_key().public_bytes_raw()).problem


def test_changing_a_value_changes_a_record() -> None:
    record = {"a": 1, "b": {"c": ["x", True, None]}, "d": {}}
    assert all(changed(record, random.Random(seed)) != record for seed in range(50))


def records(folder: Path) -> list[Record]:
    return [json.loads(line) for line in (folder / RECORDS).read_bytes().splitlines()]


def test_the_reader_tells_whose_evidence_it_is_before_it_reads_on(signed: tuple[Path, Exchange]) -> None:
    assert EvidenceReader(open_evidence(signed[0]), "own").announced == SILO


def test_evidence_is_sound_when_the_other_side_has_changed_its_key_and_said_nothing_since(tmp_path: Path) -> None:
    """A hospital whose next run waits for a person, say, after it has asked for the plan."""
    exchange = meet(tmp_path)
    exchange.rounds([0])
    exchange.attest()
    exchange.coordinator.rotate(tmp_path / "keys")
    exchange.get_plan()
    exchange.close()
    for peer in (None, exchange.coordinator.folder):
        found = verify_evidence(exchange.silo.folder, peer=peer)
        assert found.sound, found.sentences()
