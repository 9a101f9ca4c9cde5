"""Makes a report from a journal, in the pass that verifies it; it keeps sums and no messages."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.budget.loss import Losses
from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.exposure import Exposure, expand
from medsilo.privacy.identity.cosignature import read_key
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import load_audit_public
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.journal import read_journal, read_lines
from medsilo.privacy.journal.merkle import MerkleTree
from medsilo.privacy.journal.records import (
    WITNESS_PEER,
    ApprovalRecord,
    ConsentRecord,
    CosignedRecord,
    EgressRecord,
    ForeignPeerRecord,
    LedgerRecord,
    MessageRecord,
    MixRecord,
    Record,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    SchemaRecord,
    VoidRecord,
    WithdrawalRecord,
    charges_of,
    run_of,
)
from medsilo.privacy.journal.segments import RECORDS
from medsilo.privacy.journal.stored_schema import StoredSchema
from medsilo.privacy.report.egress import EgressSums
from medsilo.privacy.report.model import (
    BEFORE,
    Answer,
    Attendance,
    Flow,
    Peer,
    RefusalCount,
    Report,
    Run,
    SharedAccuracy,
    Soundness,
    add_counts,
)
from medsilo.privacy.report.rehearsed import Rehearsed, read_rehearsals
from medsilo.privacy.report.words import TELLING
from medsilo.privacy.verify.permission import is_farewell
from medsilo.protos.medsilo.v1 import coordinator_pb2

_Flows = dict[tuple[str, str, Exposure], Flow]

LISTED_REFUSALS = 100
"""Refusals that differ in reason, run or party are listed up to this number, and beyond it counted."""

_LONGEST_REASON = 600
_JOINING = coordinator_pb2.JoinRequest.DESCRIPTOR.full_name
_MEETING = ("Enrol", "GetPlan")
_exposure = cache(Exposure)  # whose own look-up takes several times as long, and is made a dozen times a record
_OPEN_CALLS = 1024  # more than can be open at once; calls that belong to no round are let go


def make_report(
    journal: str | Path,
    *,
    key: bytes | None = None,
    party: Identity | None = None,
    run: str | None = None,
    answers: Sequence[Answer] = (),
    accuracies: Sequence[SharedAccuracy] = (),
    attendance: Sequence[Attendance] = (),
) -> Report:
    """Verifies a party's journal and says what left, by it and by the rehearsals that stand beside it.

    Args:
        journal: its folder, as it stands in the party's state folder.
        key: the owner's public audit key (Ed25519, 32 bytes); by default ``keys/audit.pub`` beside the journal.
        party: its owner; by default whom the journal names.
        run: limits the report to one run.
        answers, accuracies, attendance: what a coordinator keeps beside its journal.

    Raises ``JournalError`` if there is no journal or a record cannot be read, ``IdentityError`` for a missing key,
    ``ConfigurationError`` for a run that is not on record. A journal that is not sound is no error: the report says so.

    >>> from medsilo import make_report
    >>> make_report("demo/state/hospital1/journal").outside_consent
    {}
    """
    journal = Path(journal)
    if party is None:
        first = next(read_journal(journal), None)
        if first is None:
            raise JournalError(f"{journal}: there is no journal there; give the folder that holds {RECORDS}")
        party = Identity.parse(str(first.self))
    if key is None:
        key = load_audit_public(journal.parent / "keys" / "audit.pub")
    return build_report(
        journal,
        key,
        party=party,
        run=run,
        answers=answers,
        accuracies=accuracies,
        attendance=attendance,
        rehearsals=read_rehearsals(journal.parent / "rehearsal"),
    )


def build_report(
    journal: Path,
    public_key: bytes,
    *,
    party: Identity,
    run: str | None = None,
    answers: Sequence[Answer] = (),
    accuracies: Sequence[SharedAccuracy] = (),
    attendance: Sequence[Attendance] = (),
    rehearsals: Sequence[Rehearsed] = (),
) -> Report:
    """Reads and verifies a journal, and says what it shows.

    ``public_key``: the owner's audit key, Ed25519, 32 bytes. ``run`` limits the report to one run. ``answers``,
    ``accuracies`` and ``attendance`` are what a coordinator keeps beside its journal, ``rehearsals`` what a silo keeps.

    Of a journal that is sound it takes the records that are verified, as they are; of one that is not, all.

    Raises ``JournalError`` if there is no journal or a record cannot be read, ``ConfigurationError`` for a run that is
    not on record.
    """
    if not (journal / RECORDS).exists():
        begins = "silo train" if party.role == "silo" else "coordinator serve"
        raise JournalError(f"{journal}: there is no journal yet; `{begins}` begins one")
    found, sums = _read(journal, public_key, party, run)
    if run is not None and run not in sums.plans:
        raise ConfigurationError(f"run {run} is not on record; the runs are {', '.join(sums.plans) or 'none'}")
    return Report(
        party=party,
        key_sha256=hashlib.sha256(public_key).hexdigest(),
        records=sums.count,
        root_sha256=sums.tree.root().hex(),
        first_time=sums.first_time,
        last_time=sums.last_time,
        verification=found,
        runs=sums.runs(),
        left=sorted(sums.left.values(), key=_order),
        came_back=sorted(sums.came_back.values(), key=_order),
        peers=dict(sorted(sums.peers.items())),
        witnesses=dict(sorted(sums.witnesses.items())),
        foreign=sums.foreign,
        consents=list(sums.consents),
        decisions=sums.decisions,
        outside_consent=sums.outside_consent,
        withdrawn=sums.withdrawn,
        refusals=list(sums.refusals.values()),
        refusals_unlisted=sums.refusals_unlisted,
        synthetic=sorted(sums.synthetic),
        limited_to=run,
        other_runs=[name for name in sums.plans if run is not None and name != run],
        plain_elsewhere=sums.plain_elsewhere(),
        answers=[answer for answer in answers if run in (None, answer.run)],
        accuracies=[accuracy for accuracy in accuracies if run in (None, accuracy.run)],
        attendance=[one for one in attendance if run in (None, one.run)],
        privacy=sums.losses.by_account(entry["consent"] for entry in sums.consents),
        egress=sums.egress.all,
        uncounted=sums.egress.outside,
        rehearsals=[rehearsal for rehearsal in rehearsals if run in (None, rehearsal.run)],
    )


def _read(journal: Path, public_key: bytes, party: Identity, run: str | None) -> tuple[Soundness, _Sums]:
    """What verifying a journal finds, and its records' sums, from one reading."""
    sums = _Sums(party, run, MerkleTree())

    def begin(tree: MerkleTree) -> Callable[[Record], None]:
        nonlocal sums
        sums = _Sums(party, run, tree)
        return sums.take

    found = verify_evidence(journal, key=public_key, along=begin)
    if found.problem:
        take = begin(tree := MerkleTree())
        for line, record in zip(read_lines(journal), read_journal(journal), strict=False):
            tree.append(line)
            take(record)
            if sums.unknown is not None:
                break
    if sums.unknown is not None:
        index, error = sums.unknown
        raise JournalError(
            f"{journal / RECORDS}: record {index} is not of a form that this release knows ({error!r}); read it with "
            "the release that wrote it, or check it with `audit verify`"
        )
    contradicted = [finding.sentence() for finding in found.findings]
    sentences = found.sentences()
    return Soundness(not found.problem, sentences, found.index, found.signed, found.records, contradicted), sums


class _Sums:
    """What has been read so far. ``tree``: over these records, grown by who reads them."""

    def __init__(self, party: Identity, only: str | None, tree: MerkleTree) -> None:
        self.tree = tree
        self.unknown: tuple[int, Exception] | None = None
        """The first record that is not in form; of what follows it nothing is taken."""
        self.of_silo = party.role == "silo"
        self.party = party.uri
        self.only = only
        self.count = 0
        self.first_time: str | None = None
        self.last_time: str | None = None
        self.left: _Flows = {}
        self.came_back: _Flows = {}
        self.plans: dict[str, tuple[Mapping[str, Any] | None, str | None]] = {}
        self.peers: dict[str, Peer] = {}
        self.witnesses: dict[str, tuple[int, str]] = {}
        self.foreign: dict[str, str] = {}
        self.schemas: dict[str, StoredSchema] = {}
        self.consents: list[dict[str, Any]] = []
        self.decisions: list[ApprovalRecord | WithdrawalRecord] = []
        self.allowed: frozenset[Exposure] = frozenset()
        self.data = ""
        self.told: dict[str, set[str]] = {}
        self.parted = False
        """Whether the consent that was told of last has ended."""
        self.outside_consent: dict[Exposure, int] = {}
        self.in_force_from: str | None = None
        self.withdrawn: tuple[str, str] | None = None
        self.refusals: dict[tuple[str, ...], RefusalCount] = {}
        self.refusals_unlisted = 0
        self.open_calls: OrderedDict[str, list[tuple[_Flows, str, MessageRecord]]] = OrderedDict()
        self.synthetic: list[str] = []
        self.losses = Losses()
        self.egress = EgressSums()
        self.masked_sums: dict[str, dict[int, int]] = {}
        self.helped: dict[str, Help] = {}

    def take(self, record: Record) -> None:
        if self.unknown is None:
            try:
                self._add(record)
            except (KeyError, TypeError, ValueError, AttributeError, JournalError) as error:
                self.unknown = record.index, error

    def _add(self, record: Record) -> None:
        self.count += 1
        self.first_time = self.first_time or record.time
        self.last_time = record.time
        for charge in charges_of(record):
            self.losses.charged(charge)
        match record:
            case MessageRecord():
                self._message(record)
            case LedgerRecord() if record.spent is not None:
                self.losses.spent(record.charge, record.unit_spent)
            case VoidRecord():
                self.losses.voided(record.charge, record.index)
            case RunRecord():
                self.plans[record.run] = record.plan, record.plan_sha256
            case ConsentRecord():
                self._consent(record)
            case WithdrawalRecord():
                self._withdrawal(record)
            case ApprovalRecord() if self._wanted(record):
                self.decisions.append(record)
            case RosterRecord() if self._wanted(record):
                self.masked_sums.setdefault(record.run, {})[record.round] = len(record.silos)
            case MixRecord() if self._wanted(record):
                self.helped.setdefault(record.run, Help()).take(record)
            case RefusalRecord():
                self._refusal(record)
            case SchemaRecord():
                self.schemas[record.schema_sha256] = StoredSchema(record.files)
            case EgressRecord():
                self.egress.counted(record)
            case CosignedRecord():
                for key in record.witnesses:
                    self.witnesses[read_key(key).name] = read_note(record.checkpoint).size, record.time
                for name in record.away:
                    self.witnesses.setdefault(name, (0, ""))
            case ForeignPeerRecord():
                self.foreign[record.peer] = record.protocol

    def _withdrawal(self, record: WithdrawalRecord) -> None:
        self.parted = True
        if record.cause == Cause.WITHDRAWN and self.in_force_from:
            self.withdrawn, self.in_force_from = (self.in_force_from, record.time), None
            self.consents[-1].setdefault("until", record.time)
        if self._wanted(record):
            self.decisions.append(record)

    def _wanted(self, record: Record) -> bool:
        return self.only is None or run_of(record) == self.only

    def _consent(self, record: ConsentRecord) -> None:
        if record.synthetic:
            self._note_synthetic(self.party)
        self.allowed = expand(record.consent.get("exposures") or ())
        self.parted = False
        self.data = str(record.data_sha256 or "")
        anew = {"given_anew_after": self.withdrawn[1]} if record.given and self.withdrawn else {}
        if not self.consents or self.consents[-1]["consent"] != record.consent or anew:
            purpose = {"purpose": record.purpose} if record.purpose else {}
            entry = {"time": record.time, "consent": record.consent, "runs": [], **purpose, **anew}
            if self.consents:
                self.consents[-1].setdefault("until", record.time)
            self.consents.append(entry)
        if record.given:
            self.withdrawn = None
        if self.withdrawn is None and self.in_force_from is None and record.purpose != "enrolment":
            self.in_force_from = record.time

    def _note_synthetic(self, identity: str) -> None:
        if identity not in self.synthetic:
            self.synthetic.append(identity)

    def _refusal(self, record: RefusalRecord) -> None:
        if not self._wanted(record):
            return
        if record.run is not None:
            self.helped.setdefault(record.run, Help()).take(record)
        run, peer, rpc, direction = (
            str(value or "") for value in (record.run, record.peer, record.rpc, record.direction)
        )
        reason = str(record.reason)[:_LONGEST_REASON]
        key = (run, peer, rpc, direction, reason)
        if key not in self.refusals and len(self.refusals) >= LISTED_REFUSALS:
            self.refusals_unlisted += 1
            return
        time = str(record.time)
        refusal = self.refusals.setdefault(key, RefusalCount(run, peer, rpc, direction, reason, time, time))
        refusal.times += 1
        refusal.last_time = record.time

    def _message(self, record: MessageRecord) -> None:
        run = record.run or BEFORE
        if run != BEFORE:
            self.plans.setdefault(run, (None, record.plan_sha256))
        leaving = (record.direction == "sent") == self.of_silo
        if record.direction == "sent":
            self.egress.sent(record)
        if leaving and any(_exposure(name) in TELLING for name in record.classes):
            self.told.setdefault(run, set()).add(self.data)
        if leaving and self.of_silo and self.consents and run != BEFORE and run not in self.consents[-1]["runs"]:
            self.consents[-1]["runs"].append(run)
        if not self._wanted(record):
            return
        if record.peer.startswith(WITNESS_PEER):
            if self.of_silo:
                self._flows(self.left, run, record)
            return
        # Protobuf leaves out what is false: where the field has bytes, it says yes.
        if not self.of_silo and record.message_type == _JOINING and "synthetic" in record.fields:
            self._note_synthetic(record.peer)
        self._flows(self.left if leaving else self.came_back, run, record)
        peer = self.peers.setdefault(record.peer, Peer(record.peer, first_time=record.time))
        peer.last_time = record.time
        if (digest := record.peer_certificate_sha256) and digest not in peer.certificates:
            peer.certificates.append(digest)
        peer.only_met = peer.only_met and record.rpc in _MEETING
        if leaving:
            peer.bytes_left += record.length
        else:
            peer.bytes_came_back += record.length
        if leaving and self.of_silo:
            allowed = self.allowed
            if is_farewell(record.rpc, ended=self.parted):
                allowed |= {Exposure.PROTOCOL, Exposure.IDENTITY}
            for name, count in record.classes.items():
                if _exposure(name) not in allowed:
                    add_counts(self.outside_consent, {_exposure(name): count})

    def _flows(self, flows: _Flows, run: str, record: MessageRecord) -> None:
        peer = record.peer
        for name, count in record.classes.items():
            exposure = _exposure(name)
            flow = flows.setdefault((run, peer, exposure), Flow(run, peer, exposure))
            flow.bytes += count
            flow.messages += 1
        for path, count in record.fields.items():
            exposure = self.schemas[record.schema_sha256].exposure(record.message_type, path)
            fields = flows[(run, peer, exposure)].fields
            fields[path] = fields.get(path, 0) + count
        for tensor in record.tensors:
            exposure = _exposure(tensor["class"])
            # A manifest may come whose bytes never did.
            flow = flows.setdefault((run, peer, exposure), Flow(run, peer, exposure))
            flow.note_tensor(tensor["name"], tensor["shape"], tensor["dtype"], None)
        # The receiver of a call learns its round from the first message, after that was recorded.
        waiting = self.open_calls.setdefault(record.call_id, [])
        waiting.append((flows, run, record))
        if record.round is not None:
            for place in waiting:
                _place(*place, record.round)
            del self.open_calls[record.call_id]
        elif len(self.open_calls) > _OPEN_CALLS:
            self.open_calls.popitem(last=False)

    def plain_elsewhere(self) -> dict[str, bool]:
        """Runs that the report leaves out, of which something about patients left without differential privacy; whether
        on a version of the data set that a run of the report used, or that is in use now."""
        if self.only is None:
            return {}
        versions = self.told.get(self.only, set()) | {self.data}
        return {
            run: bool(used & versions)
            for run, used in self.told.items()
            if run != self.only and not (self.plans.get(run, (None, None))[0] or {}).get("privacy")
        }

    def runs(self) -> list[Run]:
        """The runs in the order in which they came; what was before any comes last."""
        merged: dict[str, tuple[dict[Exposure, Flow], dict[Exposure, Flow]]] = {}
        peers: dict[str, list[str]] = {}
        for place, flows in enumerate((self.left, self.came_back)):
            for flow in sorted(flows.values(), key=_order):
                into = merged.setdefault(flow.run, ({}, {}))[place]
                into.setdefault(flow.exposure, Flow(flow.run, "", flow.exposure)).add(flow)
                if flow.peer not in peers.setdefault(flow.run, []):
                    peers[flow.run].append(flow.peer)
        names = [name for name in self.plans if name in merged] + ([BEFORE] if BEFORE in merged else [])
        return [
            Run(
                name,
                *self.plans.get(name, (None, None)),
                peers[name],
                *merged[name],
                self.masked_sums.get(name, {}),
                self.helped.get(name, Help()),
            )
            for name in names
        ]


def _order(flow: Flow) -> tuple[bool, str, bool, int, str]:
    return (
        flow.run == BEFORE,
        flow.run,
        flow.exposure not in TELLING,
        list(Exposure).index(flow.exposure),
        flow.peer,
    )


def _place(flows: _Flows, run: str, record: MessageRecord, number: int) -> None:
    """Puts a message's bytes and tensors into a round."""
    for name, count in record.classes.items():
        add_counts(flows[(run, record.peer, _exposure(name))].rounds, {number: count})
    for tensor in record.tensors:
        flow = flows[(run, record.peer, _exposure(tensor["class"]))]
        flow.note_tensor(tensor["name"], tensor["shape"], tensor["dtype"], number)
