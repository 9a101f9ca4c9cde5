"""Journals of earlier releases are read as they were written, and records are what their types say.

``earlier/`` holds bundles of both sides of one exchange that two earlier commits wrote, with their own code: the first
that exported bundles (7fea91b), and one before common content, failed charges and the third protocol version (1235ea7).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from medsilo.privacy.audit.bundle import open_evidence
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.withdrawal import History
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.journal.records import (
    TYPES,
    Kind,
    LedgerRecord,
    MessageRecord,
    OtherRecord,
    RosterRecord,
    WithdrawalRecord,
    content,
    read,
)

EARLIER = Path(__file__).parent / "earlier"
COMMITS = ("7fea91b", "1235ea7")
SCHEMA = Path(__file__).parents[3] / "docs" / "bundle.schema.json"


def bundle(side: str, commit: str) -> Path:
    return EARLIER / f"{side}_of_{commit}.json"


@pytest.mark.parametrize("commit", COMMITS)
def test_what_earlier_releases_wrote_verifies_and_has_the_published_form(commit: str) -> None:
    found = verify_evidence(bundle("silo", commit), peer=bundle("coordinator", commit))
    assert found.sound, found.problem or found.peers_problem
    assert not [remark for remark in found.remarks if "does not know" in remark]
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    for side in ("silo", "coordinator"):
        validator.validate(json.loads(bundle(side, commit).read_text()))


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("side", ["silo", "coordinator"])
def test_a_record_that_was_read_gives_its_bytes_back(side: str, commit: str) -> None:
    lines = list(open_evidence(bundle(side, commit)).lines)
    records = [read(json.loads(line)) for line in lines]
    assert [write_canonical(content(record)) for record in records] == lines
    assert not any(isinstance(record, OtherRecord) for record in records)


def test_what_earlier_releases_did_not_write_is_left_out_and_no_error() -> None:
    records = [read(json.loads(line)) for line in open_evidence(bundle("silo", "7fea91b")).lines]
    records += [read(json.loads(line)) for line in open_evidence(bundle("coordinator", "7fea91b")).lines]
    messages = [record for record in records if isinstance(record, MessageRecord)]
    assert messages
    assert all(record.content is None and record.head_sha256 is None for record in messages)
    (charge,) = (record for record in records if isinstance(record, LedgerRecord))
    assert (charge.spent, charge.unit_spent, charge.failed) == (None, None, False)
    (roster,) = (record for record in records if isinstance(record, RosterRecord))
    assert (roster.received_sha256, roster.statements) == (None, ())
    assert [r.rounds_acknowledged for r in records if isinstance(r, WithdrawalRecord)] == [(), ()]


def test_a_withdrawal_that_an_earlier_release_wrote_is_in_force() -> None:
    for commit in COMMITS:
        history = History.of(read(json.loads(line)) for line in open_evidence(bundle("silo", commit)).lines)
        assert history.withdrawal is not None
        assert history.withdrawal.cause == Cause.WITHDRAWN
        assert not history.approved


def test_every_kind_has_a_type_of_its_own() -> None:
    assert set(TYPES) == set(Kind)
    assert len(set(TYPES.values())) == len(Kind)


def test_a_kind_of_a_later_release_is_read_with_all_that_it_holds() -> None:
    later = {"kind": "vote", "index": 3, "self": "spiffe://test/silo/a", "more": [1]}
    record = read(dict(later))
    assert isinstance(record, OtherRecord)
    assert (record.kind, record.index, content(record)) == ("vote", 3, later)


def test_a_record_is_not_changed() -> None:
    record = MessageRecord(rpc="Join", round=None)
    with pytest.raises(AttributeError):
        record.rpc = "Enrol"
    assert content(record) == {"kind": "message", "rpc": "Join", "round": None}, "what was not given is not written"


def test_a_field_that_a_record_lacks_is_an_error_where_it_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="sha256"):
        read({"kind": "message"}).sha256  # noqa: B018


@pytest.mark.parametrize("held", [{}, {"kind": ["message"]}, {"kind": None, "index": 0}])
def test_what_has_no_kind_is_no_known_record(held: dict[str, object]) -> None:
    try:
        record = read(dict(held))
    except (KeyError, TypeError):
        return
    assert isinstance(record, OtherRecord)


@pytest.mark.parametrize("name", ["__class__", "__dict__", "__setattr__", "kind_of", "read"])
def test_a_name_in_a_record_is_nothing_but_a_field(name: str) -> None:
    record = read({"kind": "message", name: "x"})
    assert type(record) is MessageRecord
    assert isinstance(record, MessageRecord)
    assert content(record)[name] == "x"
