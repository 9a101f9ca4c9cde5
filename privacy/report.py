"""The report of what left: from a journal to plain words, a page, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from privacy.errors import JournalError
from privacy.exposure import MEANING, Exposure, field_exposure
from privacy.journal import RECORDS, read_records, verify_records
from privacy.loss import PrivacyLoss, privacy_losses


@dataclass
class Flow:
    """What went to, or came from, one party in one run, in one exposure class (``BEFORE`` any run: an empty name).

    ``rounds``: the first and last round with such bytes. ``tensors``: names with shapes and dtypes.
    """

    run: str
    peer: str
    exposure: Exposure
    bytes: int = 0
    messages: int = 0
    fields: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What a party sent and received, on which consent, what was refused, and whether the record is sound."""

    party: str
    federation: str
    journal: str
    records: int
    first_time: str | None
    last_time: str | None
    sent: list[Flow]
    received: list[Flow]
    bytes_sent: int
    bytes_per_round: dict[str, dict[int, int]]
    consents: list[Mapping[str, Any]]
    refusals: list[Mapping[str, Any]]
    peers: dict[str, list[str]]
    plans: dict[str, Mapping[str, Any]]
    verified: str
    sound: bool
    synthetic: bool
    privacy: list[PrivacyLoss] = field(default_factory=list)

    def to_json(self) -> str:
        """The report for machines."""
        return json.dumps(asdict(self), indent=2, default=str)

    def to_html(self) -> str:
        """The report as one page that needs nothing else."""
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["bytes"] = readable_bytes
        template = (files("privacy") / "templates" / "report.html").read_text(encoding="utf-8")
        return environment.from_string(template).render(
            report=self, summary=self.summary(), meaning=MEANING, telling=TELLING
        )

    def summary(self) -> list[str]:
        """What left, in sentences for someone who does not know what a gradient is; one a run and receiver."""
        lines = []
        for group in self.groups():
            telling = [_PLAIN[flow.exposure] for flow in group.flows if flow.exposure in TELLING]
            what = " and ".join([", ".join(telling[:-1]), telling[-1]] if len(telling) > 1 else telling)
            lines.append(
                f"{group.when}, {readable_bytes(group.bytes)} went to {group.peer}: {what or NOTHING}. "
                "No image, no label of an image and no patient's name left the building."
            )
        lines += [str(loss) for loss in self.privacy]
        bare = [plan["run"] for plan in self.plans.values() if not plan.get("privacy")]
        if bare and lines:
            lines.append(
                f"Run{'s' if len(bare) > 1 else ''} {', '.join(bare)}: without differential privacy; what left then "
                "has no bound on what it tells about a patient."
            )
        return lines or ["Nothing has left the building."]

    def groups(self, *, received: bool = False) -> list[Group]:
        """What left (or came back), a group for each run and other party."""
        flows = self.received if received else self.sent
        keys = dict.fromkeys((flow.run, flow.peer) for flow in flows)
        return [
            Group(run, peer, self.plans.get(run), [flow for flow in flows if (flow.run, flow.peer) == (run, peer)])
            for run, peer in keys
        ]


NOTHING = "nothing about patients"
BEFORE = ""
"""In place of a run's name: what is exchanged before a run is joined."""


@dataclass(frozen=True)
class Group:
    """All flows between two parties in one run; ``plan`` is the run's plan where it was joined."""

    run: str
    peer: str
    plan: Mapping[str, Any] | None
    flows: list[Flow]

    @property
    def bytes(self) -> int:
        """Bytes of all flows."""
        return sum(flow.bytes for flow in self.flows)

    @property
    def when(self) -> str:
        """The occasion, at the beginning of a sentence."""
        if self.run == BEFORE:
            return "Before any run, to ask for its plan"
        return f"In run {self.run}" + (f" (method {self.plan['method']['name']})" if self.plan else "")

    def rounds(self, flow: Flow) -> str:
        """The rounds of a flow, counted from 1; the exchange after the last round is ``end``."""
        if not flow.rounds:
            return "joining"
        first, last = flow.rounds[0] + 1, flow.rounds[-1] + 1
        if self.plan and last > self.plan["rounds"]:
            return f"{first}–{self.plan['rounds']}, end" if first <= self.plan["rounds"] else "end"
        return f"{first}–{last}" if first != last else str(first)


TELLING = tuple(
    exposure for exposure in Exposure if exposure not in (Exposure.PROTOCOL, Exposure.IDENTITY, Exposure.INITIAL_MODEL)
)
"""The classes that say something about patients."""

_PLAIN = {
    Exposure.MODEL_PARAMETERS_EXTRACTOR: "the trained model's feature part",
    Exposure.MODEL_PARAMETERS_CLASSIFIER: "the trained model's last layer",
    Exposure.RUNNING_STATISTICS: "average features of the images (running statistics)",
    Exposure.CLASSIFIER_GRADIENT: "gradients of the last layer",
    Exposure.DATA_IDENTIFIER: "an average brightness profile of the images",
    Exposure.PROTOTYPES: "average features of each class",
    Exposure.SAMPLE_COUNT: "the number of training images",
    Exposure.LABEL_COUNTS: "the number of training images of each class",
    Exposure.LOCAL_METRICS: "the accuracy on the hospital's own test images",
    Exposure.DERIVED_ACCURACY: "an accuracy measured on public images",
    Exposure.PEER_DERIVED: "mixtures of several hospitals' contributions",
}


def build_report(journal: Path, public_key: bytes, *, party: str, federation: str) -> Report:
    """Reads a journal and says what it shows. Raises ``JournalError`` if there is none or it cannot be read."""
    if not (journal / RECORDS).exists():
        raise JournalError(f"{journal}: there is no journal yet; `silo train` begins one")
    sent: dict[tuple[str, str, Exposure], Flow] = {}
    received: dict[tuple[str, str, Exposure], Flow] = {}
    plans: dict[str, Mapping[str, Any]] = {}
    consents: list[Mapping[str, Any]] = []
    refusals: list[Mapping[str, Any]] = []
    peers: dict[str, list[str]] = {}
    per_round: dict[str, dict[int, int]] = {}
    count, bytes_sent = 0, 0
    times: list[str] = []
    synthetic = False
    for record in read_records(journal):
        count += 1
        times = [times[0] if times else record["time"], record["time"]]
        if record["kind"] == "run":
            plans[record["run"]] = record["plan"]
        elif record["kind"] == "consent":
            synthetic = synthetic or bool(record.get("synthetic"))
            if not consents or consents[-1]["consent"] != record["consent"]:
                consents.append(record)
        elif record["kind"] == "refusal":
            refusals.append(record)
        elif record["kind"] == "message":
            outward = record["direction"] == "sent"
            _add(sent if outward else received, record)
            certificates = peers.setdefault(record["peer"], [])
            if (digest := record["peer_certificate_sha256"]) and digest not in certificates:
                certificates.append(digest)
            if outward:
                bytes_sent += record["length"]
                if record["round"] is not None:
                    rounds = per_round.setdefault(record["run"], {})
                    rounds[record["round"]] = rounds.get(record["round"], 0) + record["length"]
    try:
        total, covered = verify_records(journal, public_key)
        sound = True
        verified = (
            f"All {total} records are in place, and the {covered} covered by this party's signed checkpoints are "
            "exactly those that were signed."
        )
    except JournalError as error:
        sound, verified = False, f"The record is NOT sound: {error}"
    return Report(
        party=party,
        federation=federation,
        journal=str(journal),
        records=count,
        first_time=times[0] if times else None,
        last_time=times[1] if times else None,
        sent=sorted(sent.values(), key=_by_telling),
        received=sorted(received.values(), key=_by_telling),
        bytes_sent=bytes_sent,
        bytes_per_round=per_round,
        consents=consents,
        refusals=refusals,
        peers=peers,
        plans=plans,
        verified=verified,
        sound=sound,
        synthetic=synthetic,
        privacy=privacy_losses(read_records(journal), consents),
    )


def _add(flows: dict[tuple[str, str, Exposure], Flow], record: Mapping[str, Any]) -> None:
    run = record["run"] or BEFORE
    peer = record["peer"]
    for name, count in record["classes"].items():
        exposure = Exposure(name)
        flow = flows.setdefault((run, peer, exposure), Flow(run, peer, exposure))
        flow.bytes += count
        flow.messages += 1
        if record["round"] is not None:
            flow.rounds = [min([record["round"], *flow.rounds]), max([record["round"], *flow.rounds])]
    for path, count in record["fields"].items():
        exposure = field_exposure(record["message_type"], path)
        flow = flows[(run, peer, exposure)]
        flow.fields[path] = flow.fields.get(path, 0) + count
    for tensor in record.get("tensors", ()):
        exposure = Exposure(tensor["class"])
        key = (run, peer, exposure)
        # A manifest may come whose bytes never did.
        flow = flows.setdefault(key, Flow(run, peer, exposure))
        flow.tensors[tensor["name"]] = f"{'×'.join(map(str, tensor['shape'])) or 'one number'} {tensor['dtype']}"


def _by_telling(flow: Flow) -> tuple[bool, str, str, bool, int]:
    return (flow.run == BEFORE, flow.run, flow.peer, flow.exposure not in TELLING, list(Exposure).index(flow.exposure))


def readable_bytes(count: int) -> str:
    """``178.6 kB`` and the like."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable: every size has a unit")
