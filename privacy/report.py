"""The report of what left: what a journal's records add up to.

A report is made by one pass over a journal and holds sums by run, other party, exposure class and round, so that its
size does not grow with the number of messages. It says the same for the same journal, to the byte.

Both parties' journals tell what left the hospitals: a silo's in the messages that it sent, a coordinator's in those
that it received. ``privacy.report_document`` puts a report into words, ``privacy.report_pages`` writes it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from privacy.errors import ConfigurationError, JournalError
from privacy.exposure import Exposure, expand, field_exposure
from privacy.journal import RECORDS, read_lines, read_records, verify_records
from privacy.merkle import MerkleTree
from privacy.pki import Identity
from privacy.report_words import NO_DIFFERENTIAL_PRIVACY, RISK, TELLING, classify

BEFORE = ""
"""In place of a run's name: what is exchanged before a run is joined."""

LISTED_REFUSALS = 100
"""Refusals that differ in reason, run or party are listed up to this number, and beyond it counted."""

_LONGEST_REASON = 600
FORM = "medsilo-report"
VERSION = 1


@dataclass(frozen=True)
class Verification:
    """Whether a journal is what its owner signed, in sentences; ``first_bad_record`` is an index, where known."""

    sound: bool
    sentences: list[str]
    first_bad_record: int | None = None


def verify_journal(journal: Path, public_key: bytes) -> Verification:
    """Holds a journal's records against its own signed checkpoints."""
    try:
        total, covered = verify_records(journal, public_key)
    except JournalError as error:
        return Verification(False, [f"The record is NOT sound: {error}."])
    sentences = [f"All {total} entries of the record are in place and in order."]
    if covered == total:
        sentences.append("They are exactly those that this party signed.")
    else:
        sentences.append(f"The first {covered} are exactly those that this party signed; the rest is not signed yet.")
    return Verification(True, sentences)


@dataclass
class Tensor:
    """A tensor in a message's manifest; the rounds (from 0) in which it first and last travelled, if in any."""

    shape: list[int]
    dtype: str
    first_round: int | None = None
    last_round: int | None = None


@dataclass
class Flow:
    """Bytes of one exposure class between two parties in one run (``BEFORE`` any run: an empty name).

    ``rounds``: bytes by round, counted from 0; a round as large as the plan's number of rounds is the exchange after
    the last one. What was sent outside rounds (joining) is in ``bytes`` alone.
    """

    run: str
    peer: str
    exposure: Exposure
    bytes: int = 0
    messages: int = 0
    rounds: dict[int, int] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Flow) -> None:
        """Takes in another flow of the same class."""
        self.bytes += other.bytes
        self.messages += other.messages
        _add_counts(self.rounds, other.rounds)
        _add_counts(self.fields, other.fields)
        for name, tensor in other.tensors.items():
            for number in (tensor.first_round, tensor.last_round):
                self.note_tensor(name, tensor.shape, tensor.dtype, number)

    def note_tensor(self, name: str, shape: list[int], dtype: str, round_number: int | None) -> None:
        """Notes that a tensor travelled in a round."""
        known = self.tensors.setdefault(name, Tensor(shape, dtype))
        if round_number is not None:
            known.first_round = round_number if known.first_round is None else min(known.first_round, round_number)
            known.last_round = round_number if known.last_round is None else max(known.last_round, round_number)

    def to_json(self) -> dict[str, Any]:
        """The flow as it stands in the report's JSON; rounds count from 1 there."""
        return {
            "peer": self.peer,
            "exposure": self.exposure.value,
            "bytes": self.bytes,
            "messages": self.messages,
            "per_round": [{"round": number + 1, "bytes": count} for number, count in sorted(self.rounds.items())],
            "outside_rounds": self.bytes - sum(self.rounds.values()),
            "fields": self.fields,
            "tensors": [
                {
                    "name": name,
                    "shape": tensor.shape,
                    "dtype": tensor.dtype,
                    "first_round": None if tensor.first_round is None else tensor.first_round + 1,
                    "last_round": None if tensor.last_round is None else tensor.last_round + 1,
                }
                for name, tensor in self.tensors.items()
            ],
        }


@dataclass(frozen=True)
class Run:
    """One run (or what came before any), all parties together: flows by exposure class, the telling ones first.

    ``plan`` is the run's plan where the record has it.
    """

    name: str
    plan: Mapping[str, Any] | None
    plan_sha256: str | None
    peers: list[str]
    left: dict[Exposure, Flow]
    came_back: dict[Exposure, Flow]

    @property
    def method(self) -> str | None:
        """The method's name."""
        return str(self.plan["method"]["name"]) if self.plan else None

    @property
    def rounds(self) -> int | None:
        """How many rounds the plan has."""
        return int(self.plan["rounds"]) if self.plan else None

    @property
    def bytes_left(self) -> int:
        """All bytes that left hospitals in this run."""
        return sum(flow.bytes for flow in self.left.values())

    @property
    def last_layer_apart(self) -> bool:
        """Whether last layers left, but in the end were not mixed into what came back (pFedSim)."""
        classifier = self.left.get(Exposure.MODEL_PARAMETERS_CLASSIFIER)
        mixed = self.came_back.get(Exposure.PEER_DERIVED)
        if classifier is None or mixed is None:
            return False
        latest = {name: tensor.last_round for name, tensor in mixed.tensors.items() if tensor.last_round is not None}
        if not latest or not classifier.tensors:
            return False
        end = max(latest.values())
        return all(latest.get(name, -1) < end for name in classifier.tensors)

    @property
    def statement(self) -> str:
        """What left, in a few words that follow from the bytes on record, not from the method's name."""
        return classify(
            {exposure for exposure, flow in self.left.items() if flow.bytes},
            {exposure for exposure, flow in self.came_back.items() if flow.bytes},
            last_layer_apart=self.last_layer_apart,
        )


@dataclass
class Peer:
    """Another party as the record shows it."""

    identity: str
    certificates: list[str] = field(default_factory=list)
    first_time: str = ""
    last_time: str = ""
    bytes_left: int = 0
    bytes_came_back: int = 0


@dataclass
class Refusal:
    """What was refused for one reason, and how often. ``peer`` and ``rpc`` are empty where it was no message."""

    run: str
    peer: str
    rpc: str
    direction: str
    reason: str
    first_time: str
    last_time: str
    times: int = 0


@dataclass(frozen=True)
class Answer:
    """A hospital's answer to a run's plan, as the coordinator keeps it; ``missing`` is what its consent lacked."""

    run: str
    silo: str
    accepted: bool
    missing: list[str]
    time: str


@dataclass(frozen=True)
class SharedAccuracy:
    """The mean, over the hospitals that shared it, of the last accuracy on each one's own test images (0 … 1)."""

    run: str
    silos: int
    mean: float


@dataclass(frozen=True)
class Report:
    """What left, to whom, on which consent, what was refused, and whether the record is sound.

    ``outside_consent``: bytes by class that a silo sent although the consent in force then did not list the class;
    empty unless something is very wrong. ``synthetic``: whether the images were generated by a program; None where the
    record cannot tell. ``other_runs``: runs on record that a report limited to one run leaves out.
    """

    party: Identity
    key_sha256: str
    records: int
    root_sha256: str
    first_time: str | None
    last_time: str | None
    verification: Verification
    runs: list[Run]
    left: list[Flow]
    came_back: list[Flow]
    peers: dict[str, Peer]
    consents: list[Mapping[str, Any]]
    decisions: list[Mapping[str, Any]]
    outside_consent: dict[Exposure, int]
    refusals: list[Refusal]
    refusals_unlisted: int
    synthetic: bool | None
    limited_to: str | None
    other_runs: list[str]
    answers: Sequence[Answer] = ()
    accuracies: Sequence[SharedAccuracy] = ()

    @property
    def of_silo(self) -> bool:
        """Whether this is one hospital's report, not the coordinator's of all hospitals."""
        return self.party.role == "silo"

    @property
    def bytes_left(self) -> int:
        """All bytes that left hospitals."""
        return sum(flow.bytes for flow in self.left)

    def hospitals(self) -> dict[str, dict[Exposure, int]]:
        """Bytes that left, by hospital and class; of a silo's report, its own."""
        found: dict[str, dict[Exposure, int]] = {}
        for flow in self.left:
            _add_counts(
                found.setdefault(self.party.uri if self.of_silo else flow.peer, {}), {flow.exposure: flow.bytes}
            )
        return dict(sorted(found.items()))

    def methods(self) -> dict[str, dict[Exposure, int]]:
        """Bytes that left, by method and class; runs whose plan is not on record do not count."""
        found: dict[str, dict[Exposure, int]] = {}
        for run in self.runs:
            if run.method:
                _add_counts(found.setdefault(run.method, {}), {e: flow.bytes for e, flow in run.left.items()})
        return found

    def to_json(self) -> str:
        """The report for machines; ``docs/report.md`` describes its shape."""
        telling = [exposure for exposure in TELLING if any(exposure in run.left for run in self.runs)]
        content: dict[str, Any] = {
            "form": FORM,
            "version": VERSION,
            "party": {
                "identity": self.party.uri,
                "role": self.party.role,
                "federation": self.party.federation,
                "audit_key_sha256": self.key_sha256,
            },
            "record": {
                "records": self.records,
                "root_sha256": self.root_sha256,
                "first_time": self.first_time,
                "last_time": self.last_time,
            },
            "verification": asdict(self.verification),
            "synthetic": self.synthetic,
            "limited_to_run": self.limited_to,
            "other_runs": self.other_runs,
            "bytes_left": self.bytes_left,
            "runs": [
                {
                    "run": run.name,
                    "method": run.method,
                    "rounds": run.rounds,
                    "plan_sha256": run.plan_sha256,
                    "what_left": run.statement,
                    "bytes_left": run.bytes_left,
                    "left": [flow.to_json() for flow in self.left if flow.run == run.name],
                    "came_back": [flow.to_json() for flow in self.came_back if flow.run == run.name],
                }
                for run in self.runs
            ],
            "peers": [asdict(peer) for peer in self.peers.values()],
            "consents": [{"time": record["time"], **record["consent"]} for record in self.consents],
            "decisions": list(self.decisions),
            "outside_consent": {exposure.value: count for exposure, count in self.outside_consent.items()},
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "refusals_unlisted": self.refusals_unlisted,
            "privacy_loss": {"epsilon": None, "statement": NO_DIFFERENTIAL_PRIVACY},
            "risks": {exposure.value: RISK[exposure] for exposure in telling},
        }
        if not self.of_silo:
            content["hospitals"] = _by_name(self.hospitals())
            content["methods"] = _by_name(self.methods())
            content["answers"] = [asdict(answer) for answer in self.answers]
            content["accuracies"] = [asdict(accuracy) for accuracy in self.accuracies]
        return json.dumps(content, indent=2, ensure_ascii=False)


def build_report(
    journal: Path,
    public_key: bytes,
    *,
    party: Identity,
    verification: Verification,
    run: str | None = None,
    answers: Sequence[Answer] = (),
    accuracies: Sequence[SharedAccuracy] = (),
) -> Report:
    """Reads a journal and says what it shows.

    ``public_key``: the owner's audit key, Ed25519, 32 bytes. ``run`` limits the report to one run. ``answers`` and
    ``accuracies`` are what a coordinator keeps beside its journal.

    Raises ``JournalError`` if there is no journal or a record cannot be read, ``ConfigurationError`` for a run that is
    not on record.
    """
    if not (journal / RECORDS).exists():
        begins = "silo train" if party.role == "silo" else "coordinator serve"
        raise JournalError(f"{journal}: there is no journal yet; `{begins}` begins one")
    sums = _Sums(party, run)
    for record in read_records(journal):
        try:
            sums.add(record)
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise JournalError(
                f"{journal / RECORDS}: record {record['index']} is not of a form that this release knows ({error!r}); "
                "read it with the release that wrote it, or check it with `audit verify`"
            ) from None
    if run is not None and run not in sums.plans:
        raise ConfigurationError(f"run {run} is not on record; the runs are {', '.join(sums.plans) or 'none'}")
    tree = MerkleTree()
    for index, line in enumerate(read_lines(journal)):
        if index == sums.count:
            break  # a daemon has gone on writing meanwhile
        tree.append(line)
    return Report(
        party=party,
        key_sha256=hashlib.sha256(public_key).hexdigest(),
        records=sums.count,
        root_sha256=tree.root().hex(),
        first_time=sums.first_time,
        last_time=sums.last_time,
        verification=verification,
        runs=sums.runs(),
        left=sorted(sums.left.values(), key=_order),
        came_back=sorted(sums.came_back.values(), key=_order),
        peers=dict(sorted(sums.peers.items())),
        consents=sums.consents,
        decisions=sums.decisions,
        outside_consent=sums.outside_consent,
        refusals=list(sums.refusals.values()),
        refusals_unlisted=sums.refusals_unlisted,
        synthetic=sums.synthetic,
        limited_to=run,
        other_runs=[name for name in sums.plans if run is not None and name != run],
        answers=[answer for answer in answers if run in (None, answer.run)],
        accuracies=[accuracy for accuracy in accuracies if run in (None, accuracy.run)],
    )


class _Sums:
    """What has been read so far."""

    def __init__(self, party: Identity, only: str | None) -> None:
        self.of_silo = party.role == "silo"
        self.only = only
        self.count = 0
        self.first_time: str | None = None
        self.last_time: str | None = None
        self.left: dict[tuple[str, str, Exposure], Flow] = {}
        self.came_back: dict[tuple[str, str, Exposure], Flow] = {}
        self.plans: dict[str, tuple[Mapping[str, Any] | None, str | None]] = {}
        self.peers: dict[str, Peer] = {}
        self.consents: list[Mapping[str, Any]] = []
        self.decisions: list[Mapping[str, Any]] = []
        self.allowed: frozenset[Exposure] = frozenset()
        self.outside_consent: dict[Exposure, int] = {}
        self.refusals: dict[tuple[str, ...], Refusal] = {}
        self.refusals_unlisted = 0
        # A coordinator learns of no hospital's images, not even whether they show patients.
        self.synthetic: bool | None = False if self.of_silo else None

    def add(self, record: Mapping[str, Any]) -> None:
        self.count += 1
        self.first_time = self.first_time or record["time"]
        self.last_time = record["time"]
        kind = record["kind"]
        if kind == "run":
            self.plans[record["run"]] = record["plan"], record["plan_sha256"]
        elif kind == "consent":
            self._consent(record)
        elif kind in ("approval", "withdrawal"):
            if self._wanted(record):
                self.decisions.append(
                    {key: value for key, value in record.items() if key not in ("v", "index", "federation", "self")}
                )
        elif kind == "refusal":
            self._refusal(record)
        elif kind == "message":
            self._message(record)

    def _wanted(self, record: Mapping[str, Any]) -> bool:
        return self.only is None or record.get("run") == self.only

    def _consent(self, record: Mapping[str, Any]) -> None:
        self.synthetic = bool(self.synthetic or record.get("synthetic"))
        self.allowed = expand(record["consent"].get("exposures") or ())
        if not self.consents or self.consents[-1]["consent"] != record["consent"]:
            self.consents.append({"time": record["time"], "consent": record["consent"]})

    def _refusal(self, record: Mapping[str, Any]) -> None:
        if not self._wanted(record):
            return
        run, peer, rpc, direction = (str(record.get(name) or "") for name in ("run", "peer", "rpc", "direction"))
        reason = str(record["reason"])[:_LONGEST_REASON]
        key = (run, peer, rpc, direction, reason)
        if key not in self.refusals and len(self.refusals) >= LISTED_REFUSALS:
            self.refusals_unlisted += 1
            return
        time = str(record["time"])
        refusal = self.refusals.setdefault(key, Refusal(run, peer, rpc, direction, reason, time, time))
        refusal.times += 1
        refusal.last_time = record["time"]

    def _message(self, record: Mapping[str, Any]) -> None:
        run = record["run"] or BEFORE
        if run != BEFORE:
            self.plans.setdefault(run, (None, record["plan_sha256"]))
        if not self._wanted(record):
            return
        leaving = (record["direction"] == "sent") == self.of_silo
        self._flows(self.left if leaving else self.came_back, run, record)
        peer = self.peers.setdefault(record["peer"], Peer(record["peer"], first_time=record["time"]))
        peer.last_time = record["time"]
        if (digest := record["peer_certificate_sha256"]) and digest not in peer.certificates:
            peer.certificates.append(digest)
        if leaving:
            peer.bytes_left += record["length"]
        else:
            peer.bytes_came_back += record["length"]
        if leaving and self.of_silo:
            for name, count in record["classes"].items():
                if Exposure(name) not in self.allowed:
                    _add_counts(self.outside_consent, {Exposure(name): count})

    def _flows(self, flows: dict[tuple[str, str, Exposure], Flow], run: str, record: Mapping[str, Any]) -> None:
        peer, number = record["peer"], record["round"]
        for name, count in record["classes"].items():
            exposure = Exposure(name)
            flow = flows.setdefault((run, peer, exposure), Flow(run, peer, exposure))
            flow.bytes += count
            flow.messages += 1
            if number is not None:
                _add_counts(flow.rounds, {number: count})
        for path, count in record["fields"].items():
            exposure = field_exposure(record["message_type"], path)
            _add_counts(flows[(run, peer, exposure)].fields, {path: count})
        for tensor in record.get("tensors", ()):
            exposure = Exposure(tensor["class"])
            # A manifest may come whose bytes never did.
            flow = flows.setdefault((run, peer, exposure), Flow(run, peer, exposure))
            flow.note_tensor(tensor["name"], tensor["shape"], tensor["dtype"], number)

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
        return [Run(name, *self.plans.get(name, (None, None)), peers[name], *merged[name]) for name in names]


def _order(flow: Flow) -> tuple[bool, str, bool, int, str]:
    return (
        flow.run == BEFORE,
        flow.run,
        flow.exposure not in TELLING,
        list(Exposure).index(flow.exposure),
        flow.peer,
    )


def _add_counts(into: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count


def _by_name(table: Mapping[str, Mapping[Exposure, int]]) -> dict[str, dict[str, int]]:
    return {name: {exposure.value: count for exposure, count in row.items()} for name, row in table.items()}


def in_order(exposures: Iterable[Exposure]) -> list[Exposure]:
    """Exposure classes, the telling ones first, each kind in the schema's order."""
    found = set(exposures)
    return [e for e in Exposure if e in found and e in TELLING] + [
        e for e in Exposure if e in found and e not in TELLING
    ]
