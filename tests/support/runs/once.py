"""What holds of a private run whatever happened in it: every round is one release, charged once."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING

from medsilo.privacy.budget.ledger import LASTING, ledgers
from medsilo.privacy.consent.consent import ConsentFile
from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.errors import DataError
from medsilo.privacy.journal.journal import read_records
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from tests.support.evidence.charges import told

if TYPE_CHECKING:
    from tests.support.runs.federation import Federation

KEEP = {"keep_sent_days": 1}
"""For a silo's configuration: what it sends is kept, so that ``assert_released_once`` can look at it."""


def assert_charged_once(one: Federation) -> None:
    """Each round's training and accuracy count once, within the budget; ledger and journal tell of the same charges,
    and every update names its own."""
    rounds = one.coordinator_config["run"]["rounds"]
    for name in one.silos:
        records = list(read_records(one.folder / "state" / name / "journal"))
        consent = ConsentFile.read(one.folder / f"{name}.consent.yaml").consent.privacy
        assert consent is not None
        held = set()
        for account in ledgers(one.folder / "state" / name / "ledger"):
            account.check_holds(told(records))
            entries = account.entries()
            held |= {entry.sha256 for entry in account.entries(voided=True)}
            once = [(e.purpose.round, e.purpose.phase) for e in entries if e.event.kind not in LASTING]
            assert len(once) == len(set(once)), f"{name}: charged twice: {once}"
            budget = consent.budget(account.subject.split)
            assert budget is not None
            assert account.guarantee(consent.delta).epsilon <= budget + 1e-9, f"{name}: over the budget of {budget}"
            if account.subject.split == "train":
                trained = {number for number, phase in once if phase == "training"}
                assert trained == set(range(rounds)), f"{name}: a round was not charged: {once}"
        assert {charge["sha256"] for charge in told(records)} == held, f"{name}: not every charge is told"
        for record in one.messages(name, "sent"):
            if record["rpc"] == "SubmitUpdate" and record["frame"] == 0 and record["round"] < rounds:
                assert record["ledger"], f"{name}: an update without a charge"
        assert not list((one.run_folder(name) / "sealed").glob("*")), f"{name}: a key of a round that is over"


def assert_released_once(one: Federation) -> int:
    """No round left in two ways, also where only a part of it left; returns how many were sent more than once."""
    again = 0
    for name in one.silos:
        archive = SentArchive(one.folder / "state" / name / "sent", one.keys(name) / "sent.key")
        updates: dict[int, list[dict[str, bytes]]] = defaultdict(list)
        for record in one.messages(name, "sent"):
            if record["rpc"] == "SubmitUpdate" and record["frame"] == 0:
                updates[record["round"]].append(_content(archive, record["call_id"]))
        for number, sent in updates.items():
            again += len(sent) > 1
            for field in {field for one_try in sent for field in one_try}:
                longest = max((content.get(field, b"") for content in sent), key=len)
                digests = [hashlib.sha256(content.get(field, b"")).hexdigest()[:12] for content in sent]
                same = all(longest.startswith(content.get(field, b"")) for content in sent)
                assert same, f"{name}: {field} of round {number} left in two ways: {digests}"
    return again


def _content(archive: SentArchive, call: str) -> dict[str, bytes]:
    """A call's tensors by class, as far as they were sent."""
    found: dict[str, bytes] = defaultdict(bytes)
    try:
        for data in archive.read(call):
            chunk = wire.SubmitUpdateRequest.FromString(data).chunk
            if (field := chunk.WhichOneof("data")) is not None:
                found[field] += getattr(chunk, field)
    except DataError:
        pass  # the last message that was kept is torn
    return found
