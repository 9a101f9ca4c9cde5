"""The report of what left: what a journal's records add up to.

A report is made by one pass over a journal and holds sums by run, other party, exposure class and round, so that its
size does not grow with the number of messages. It says the same for the same journal, to the byte.

Both parties' journals tell what left the hospitals: a silo's in the messages that it sent, a coordinator's in those
that it received. ``medsilo.privacy.report.writing`` puts a report into words and writes it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from medsilo.privacy.budget import accounting
from medsilo.privacy.budget.accounting import Guarantee
from medsilo.privacy.budget.loss import PrivacyLoss
from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.consent.consent import INVENTED_HOSPITALS
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.consent.plan import WeightsPlan
from medsilo.privacy.exposure import BLIND_UPLINK, UNDER_ROSTER, Exposure, expand
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.journal.records import ApprovalRecord, WithdrawalRecord
from medsilo.privacy.pages.wording import listed, number_of, rounds_and_end
from medsilo.privacy.report.egress import Egress
from medsilo.privacy.report.rehearsed import Rehearsed
from medsilo.privacy.report.words import (
    BLIND_MIXTURE,
    NO_DIFFERENTIAL_PRIVACY,
    NO_LIMIT_KNOWN,
    NOISED_RISK,
    NOTHING,
    RISK,
    SHARED_OUT,
    TELLING,
    classify,
    masked_sums,
)

BEFORE = ""
"""In place of a run's name: what is exchanged before a run is joined."""


@dataclass(frozen=True)
class Soundness:
    """Whether a journal is what its owner signed, in sentences; ``first_bad_record`` is an index, where known.

    ``signed``: how many records, from the first, its last signature covers, where known; ``records``: how many were
    read. ``contradicted``: where the journal is what its owner signed, and others have signed what contradicts it.
    """

    sound: bool
    sentences: list[str]
    first_bad_record: int | None = None
    signed: int | None = None
    records: int | None = None
    contradicted: list[str] = field(default_factory=list)


@dataclass
class Tensor:
    """A tensor in a message's manifest; the rounds (from 0) in which it first and last travelled, if in any."""

    shape: list[int]
    dtype: str
    first_round: int | None = None
    last_round: int | None = None

    def among(self, rounds: Iterable[int]) -> list[int]:
        """Of its class's rounds those from its first to its last one; all of them where it has none."""
        if self.first_round is None or self.last_round is None:
            return list(rounds)
        return [number for number in rounds if self.first_round <= number <= self.last_round]


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
        add_counts(self.rounds, other.rounds)
        add_counts(self.fields, other.fields)
        for name, tensor in other.tensors.items():
            for number in (tensor.first_round, tensor.last_round):
                self.note_tensor(name, tensor.shape, tensor.dtype, number)

    def note_tensor(self, name: str, shape: list[int], dtype: str, round_number: int | None) -> None:
        """Notes that a tensor travelled in a round."""
        known = self.tensors.setdefault(name, Tensor(shape, dtype))
        if round_number is not None:
            known.first_round = round_number if known.first_round is None else min(known.first_round, round_number)
            known.last_round = round_number if known.last_round is None else max(known.last_round, round_number)


@dataclass(frozen=True)
class Run:
    """One run (or what came before any), all parties together: flows by exposure class, the telling ones first.

    ``plan`` is the run's plan where the record has it. ``masked_sums``: how many silos' updates were masked together,
    by round from 0. ``helped``: with which mixtures the hospital has helped.
    """

    name: str
    plan: Mapping[str, Any] | None
    plan_sha256: str | None
    peers: list[str]
    left: dict[Exposure, Flow]
    came_back: dict[Exposure, Flow]
    masked_sums: Mapping[int, int] = field(default_factory=dict)
    helped: Help = field(default_factory=Help)

    @property
    def method(self) -> str | None:
        """The method's name."""
        return str(self.plan["method"]["name"]) if self.plan else None

    @property
    def rounds(self) -> int | None:
        """How many rounds the plan has; None where another system decides that on the way."""
        return int(self.plan["rounds"]) if self.plan and self.plan["rounds"] is not None else None

    @property
    def start(self) -> str | None:
        """What given weights the run started from, in sentences; None where it started from random numbers, or where
        that is not on record."""
        try:
            given = WeightsPlan.model_validate(self.plan["model"]["weights"]) if self.plan else None
        except (KeyError, TypeError, ValidationError):
            return None
        if given is None:
            return None
        alone = (
            " What the run promises of privacy is of the run alone." if self.plan and self.plan.get("privacy") else ""
        )
        return given.words + ("" if given.public else alone)

    @property
    def ways(self) -> tuple[dict[Exposure, Flow], dict[Exposure, Flow]]:
        """What left, and what came back."""
        return self.left, self.came_back

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
        left = {exposure for exposure, flow in self.left.items() if flow.bytes}
        masked = Exposure.MASKED_UPDATE in left and bool(self.masked_sums)
        blind = Exposure.SEALED_MODEL in left
        hidden = ({Exposure.MASKED_UPDATE} if masked else set()) | (BLIND_UPLINK if blind else set())
        plain = classify(
            left - hidden,
            {exposure for exposure, flow in self.came_back.items() if flow.bytes},
            last_layer_apart=self.last_layer_apart,
        )
        if not hidden:
            return plain
        kept = BLIND_MIXTURE if blind else masked_sums(self.masked_sums.values())
        return kept + ("" if plain == NOTHING else f"; without masks: {plain}")

    def limit(self, exposure: Exposure) -> str | None:
        """What the plan promises of a class of content, with all that it takes to read the number; None where it has no
        noise: without privacy, and for numbers of images, which zero-out adjacency leaves as they are."""
        promised = (self.plan or {}).get("privacy")
        if not promised or exposure not in NOISED_RISK:
            return None
        try:
            privacy = PrivacyPlan.model_validate(promised)
        except ValidationError:
            return None
        if exposure == Exposure.LOCAL_METRICS:
            if (metrics := privacy.metrics) is None:
                return None
            cost = accounting.epsilon([metrics.event(metrics.releases)], delta=privacy.delta)
            return str(Guarantee(cost, privacy.delta, privacy.unit)) + ", apart from training"
        if exposure == Exposure.DATA_IDENTIFIER:
            if (release := privacy.release("identifier")) is None:
                return None
            alone = accounting.epsilon([release.event(release.times)], delta=privacy.delta)
            return f"{Guarantee(alone, privacy.delta, privacy.unit)}, and with all else of the run {privacy.epsilon:g}"
        return str(privacy)

    @property
    def occasion(self) -> str:
        """What it was, at a sentence's beginning."""
        if self.name == BEFORE:
            return "Before any run, to ask for its plan"
        return f"Run {self.name}" + (f" (method {self.method})" if self.method else "")

    @property
    def in_words(self) -> str:
        """The same, short, within a sentence."""
        return "before any run" if self.name == BEFORE else f"run {self.name}"

    @property
    def during(self) -> str:
        """`` in 8 of 10 rounds``: those in which something about patients left, or else anything; may be empty."""
        numbers = {number for e, flow in self.left.items() if e in TELLING for number in flow.rounds}
        numbers = numbers or {number for flow in self.left.values() for number in flow.rounds}
        trained = sum(1 for number in numbers if self.rounds is None or number < self.rounds)
        if not trained:
            return ""
        if self.rounds is None or trained >= self.rounds:
            return f" in {number_of(trained, 'round')}"
        return f" in {trained} of {number_of(self.rounds, 'round')}"

    def spoken_rounds(self, numbers: Iterable[int]) -> str:
        """``1–8, 10, end``: some rounds, counted from 1; "end" is after the last one."""
        return rounds_and_end(numbers, self.rounds) or "joining"


@dataclass
class Peer:
    """Another party as the record shows it. ``only_met``: it was asked for a certificate or the plan, and for nothing
    else: of that, records do not tell the certificate that it showed."""

    identity: str
    certificates: list[str] = field(default_factory=list)
    only_met: bool = True
    first_time: str = ""
    last_time: str = ""
    bytes_left: int = 0
    bytes_came_back: int = 0


@dataclass
class RefusalCount:
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
class Attendance:
    """A hospital in a run as the coordinator keeps it. ``late``: rounds, from 1, that ended without its update,
    though it was asked for one."""

    run: str
    silo: str
    rounds_delivered: int
    late: list[int]


@dataclass(frozen=True)
class Report:
    """What left, to whom, on which consent, what was refused, and whether the record is sound.

    ``outside_consent``: bytes by class that a silo sent although the consent in force then did not list the class;
    empty unless something is very wrong. ``foreign``: parties that sign no receipts, with the protocol that they speak
    instead of Medsilo's. ``witnesses``: who was asked to cosign checkpoints, by name, with the most records that it has
    cosigned and when (0 and empty if it never has). ``synthetic``: the hospitals whose images were
    generated by a program, as they told when they
    joined. ``consents``: each with the ``runs`` in which something left under it, ``until`` when it was in force, and
    after which withdrawal it was ``given_anew_after``. ``other_runs``: runs on record that a report limited to one run
    leaves out. ``plain_elsewhere``: those of them of which something about patients left without differential privacy,
    and whether on the same version of the images. ``rehearsals``: their last results, which stand beside the record,
    not in it. ``egress``: what the kernel counted, of each confined process of **all** runs; ``uncounted``: bytes of
    messages that left while it did not. ``withdrawn``: from when to when (UTC) the consent was in force that the
    hospital has withdrawn and not given anew.

    >>> from medsilo import make_report
    >>> report = make_report("demo/state/hospital1/journal")
    >>> report.verification.sound, report.runs[0].name
    (True, 'tissue-1')
    """

    party: Identity
    key_sha256: str
    records: int
    root_sha256: str
    first_time: str | None
    last_time: str | None
    verification: Soundness
    runs: list[Run]
    left: list[Flow]
    came_back: list[Flow]
    peers: dict[str, Peer]
    witnesses: Mapping[str, tuple[int, str]]
    foreign: Mapping[str, str]
    consents: list[Mapping[str, Any]]
    decisions: list[ApprovalRecord | WithdrawalRecord]
    outside_consent: dict[Exposure, int]
    withdrawn: tuple[str, str] | None
    refusals: list[RefusalCount]
    refusals_unlisted: int
    synthetic: list[str]
    limited_to: str | None
    other_runs: list[str]
    plain_elsewhere: Mapping[str, bool] = field(default_factory=dict)
    answers: Sequence[Answer] = ()
    accuracies: Sequence[SharedAccuracy] = ()
    attendance: Sequence[Attendance] = ()
    privacy: Sequence[PrivacyLoss] = ()
    egress: Sequence[Egress] = ()
    uncounted: int = 0
    rehearsals: Sequence[Rehearsed] = ()

    @property
    def of_silo(self) -> bool:
        """Whether this is one hospital's report, not the coordinator's of all hospitals."""
        return self.party.role == "silo"

    @property
    def in_plain_text(self) -> bool:
        """Whether anything was exchanged with a party of which no certificate is on record, though it would be."""
        return any(not peer.certificates and not peer.only_met for peer in self.peers.values())

    @property
    def bytes_left(self) -> int:
        """All bytes that left hospitals."""
        return sum(flow.bytes for flow in self.left)

    def telling(self) -> set[Exposure]:
        """The classes about patients of which something left, or was measured on what left."""
        left = {flow.exposure for flow in self.left if flow.bytes}
        measured = {flow.exposure for flow in self.came_back} & {Exposure.DERIVED_ACCURACY}
        return (left | measured) & set(TELLING)

    def risk(self, exposure: Exposure) -> str:
        """What someone who holds content of a class could still do with it, plain or noised as it was sent."""
        if exposure in UNDER_ROSTER and self._masked_with_anyone():
            return f"{self._risk(exposure)} Here {INVENTED_HOSPITALS}."
        return self._risk(exposure)

    def _masked_with_anyone(self) -> bool:
        """Whether a consent of this record let updates leave under masks, and named no audit keys."""
        return any(
            UNDER_ROSTER & expand(record["consent"].get("exposures") or ())
            and not (record["consent"].get("secure_aggregation") or {}).get("audit_keys")
            for record in self.consents
        )

    def _risk(self, exposure: Exposure) -> str:
        runs = [run for run in self.runs if any(exposure in way and way[exposure].bytes for way in run.ways)]
        limits = {run.name: limit for run in runs if (limit := run.limit(exposure)) is not None}
        plain = [run.name for run in runs if run.name not in limits]
        noised = [
            f"With noise (run {listed(names)}: {limit}): "
            + self._noised(exposure, names).format(unit="patient" if "unit patient" in limit else "image")
            for limit, names in _turned(limits).items()
        ]
        if not noised:
            return RISK[exposure]
        return " ".join([*noised, *([f"Without noise (run {listed(plain)}): {RISK[exposure]}"] if plain else [])])

    def _noised(self, exposure: Exposure, runs: Collection[str]) -> str:
        shared_out = any(_shared_out(run.plan) for run in self.runs if run.name in runs)
        return SHARED_OUT if shared_out and exposure == Exposure.MASKED_UPDATE else NOISED_RISK[exposure]

    def plain(self) -> set[Exposure]:
        """The classes about patients of which something left, in some run, without noise."""
        return {
            exposure
            for exposure in self.telling()
            for run in self.runs
            if any(exposure in way and way[exposure].bytes for way in run.ways) and run.limit(exposure) is None
        }

    def without_privacy(self) -> list[str]:
        """Runs of which something about patients left without differential privacy."""
        return [
            run.name
            for run in self.runs
            if not (run.plan or {}).get("privacy") and any(e in TELLING and f.bytes for e, f in run.left.items())
        ]

    def privacy_statements(self) -> list[str]:
        """What is known of the privacy loss, in sentences, each with all that it takes to read its number."""
        found = [str(loss) for loss in self.privacy]
        if not self.of_silo:
            found += [
                f"Run {run.name} promises each hospital ε = {plan['epsilon']:g} at δ = {plan['delta']:g} (unit "
                f"{plan['unit']}, adjacency {plan['adjacency']}, accountant {plan['accountant']}){_presumes(plan)}; "
                "each hospital's own report says what it has spent."
                for run in self.runs
                if (plan := (run.plan or {}).get("privacy"))
            ]
        if not found:
            return [NO_LIMIT_KNOWN if self.foreign else NO_DIFFERENTIAL_PRIVACY]
        if bare := self.without_privacy():
            found.append(
                f"That does not cover {number_of(len(bare), 'run')} without differential privacy ({', '.join(bare)}): "
                "no limit can be stated to what could be worked out from what left there (ε = ∞)."
            )
        if elsewhere := self.plain_elsewhere_in_words():
            found.append(elsewhere)
        return found

    def plain_elsewhere_in_words(self) -> str:
        """Of the runs that this report leaves out; empty where none has left anything without differential privacy."""
        alike = [run for run, same in self.plain_elsewhere.items() if same or not self.of_silo]
        others = [run for run in self.plain_elsewhere if run not in alike]
        found = []
        if alike:
            whose = "about the same images " if self.of_silo else ""
            found.append(f"content {whose}left without noise in run{'s' * (len(alike) > 1)} {listed(alike)}")
        if others:
            found.append(
                f"content about another version of the images, which may share images with this one, left without "
                f"noise in run{'s' * (len(others) > 1)} {listed(others)}"
            )
        if not found:
            return ""
        return (
            f"Outside this report {listed(found)}: no limit can be stated to what could be worked out from all that "
            "left (ε = ∞)."
        )

    @property
    def consents_of_runs(self) -> list[Mapping[str, Any]]:
        """The consents under which something left in this report's runs, oldest first."""
        wanted = {run.name for run in self.runs}
        return [one for one in self.consents if wanted & set(one["runs"])]

    @property
    def largest(self) -> Guarantee | None:
        """The largest ε that is known of the images: spent by training over all runs on record, at a coordinator
        promised. None where nothing was noised."""
        spent = [loss.most for loss in self.privacy if loss.split == "train"]
        if not self.of_silo:
            for run in self.runs:
                with contextlib.suppress(ValidationError):
                    if promised := (run.plan or {}).get("privacy"):
                        spent.append(PrivacyPlan.model_validate(promised).guarantee)
        return max(spent, key=lambda one: one.epsilon, default=None)

    def hospitals(self) -> dict[str, dict[Exposure, int]]:
        """Bytes that left, by hospital and class; of a silo's report, its own."""
        found: dict[str, dict[Exposure, int]] = {}
        for flow in self.left:
            add_counts(found.setdefault(self.party.uri if self.of_silo else flow.peer, {}), {flow.exposure: flow.bytes})
        return dict(sorted(found.items()))

    def methods(self) -> dict[str, dict[Exposure, int]]:
        """Bytes that left, by method and class; runs whose plan is not on record do not count."""
        found: dict[str, dict[Exposure, int]] = {}
        for run in self.runs:
            if run.method:
                add_counts(found.setdefault(run.method, {}), {e: flow.bytes for e, flow in run.left.items()})
        return found


def _turned(limits: Mapping[str, str]) -> dict[str, list[str]]:
    turned: dict[str, list[str]] = {}
    for name, limit in limits.items():
        turned.setdefault(limit, []).append(name)
    return turned


def in_order(exposures: Iterable[Exposure]) -> list[Exposure]:
    """Exposure classes, the telling ones first, each kind in the schema's order."""
    found = set(exposures)
    return [e for e in Exposure if e in found and e in TELLING] + [
        e for e in Exposure if e in found and e not in TELLING
    ]


def add_counts(into: dict[Any, int], counts: Mapping[Any, int]) -> None:
    """Adds counts to those that are there."""
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count


def _shared_out(plan: Mapping[str, Any] | None) -> int | None:
    """How many hospitals of each sum a run's plan presumes to be honest; None where each adds all of its noise."""
    return ((plan or {}).get("privacy") or {}).get("honest")


def _presumes(privacy: Mapping[str, Any]) -> str:
    honest = privacy.get("honest")
    return f", if {honest} hospitals of each sum are honest, as noise is shared out" if honest else ""
