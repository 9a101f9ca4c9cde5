"""What a journal's own consents and plans allowed to leave, message by message: ``audit verify``'s view of the gate."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

import rfc8785

from .result import ConsentError

WITNESS_PEER = "witness:"
"""How the name of a witness begins where a record names whom something was sent to."""
_CHECKPOINT = "CHECKPOINT"
_LARGEST_QUESTION = 32_768
"""What a witness is asked is shorter, in bytes."""
_ALWAYS = frozenset({"PROTOCOL", "IDENTITY"})
UNDER_ROSTER = frozenset({"MASKED_UPDATE", "SEALED_MODEL"})
"""What is sent for a roster of silos, which is on record before."""
_MODEL = frozenset({"MODEL_PARAMETERS_EXTRACTOR", "MODEL_PARAMETERS_CLASSIFIER"})
_STARTS_FROM_HOSPITALS = frozenset({"PEER_INITIAL_MODEL"})
WEAK_EPSILON, WEAK_DELTA = 8.0, 1e-3
"""A promise of differential privacy beyond these rules hardly anything out about single images or patients."""
_WITHDRAWN_BY_HOSPITAL = "withdrawn by the hospital"
_FAREWELL = "Withdraw"
"""The call that tells the coordinator of a consent's end: it may leave when nothing else may,"""
_SIGNATURE = "Attest"
"""but the signature for its answer."""
_UPDATES = ("SubmitUpdate", "PushMessages")
"""The calls that begin a round's update: Medsilo's own and Flower's."""
_DIFFERENCE = ": the difference of the two sums gives single updates away"
_MIDNIGHT = timedelta(minutes=1)
"""The gate is passed a moment before the record is written."""
_SILO = re.compile(r"spiffe://[^/]+/silo/[^/]+")
_Trust = tuple[int, int]
"""That of so many (the second) hospitals whose updates are summed so many at least are honest."""


def is_farewell(rpc: str, *, ended: bool) -> bool:
    """Whether what a call sends of PROTOCOL and IDENTITY may leave without a consent to it. ``ended``: the journal says
    that the consent has ended."""
    return rpc == _FAREWELL or (ended and rpc == _SIGNATURE)


@dataclass
class _Consent:
    classes: frozenset[str]
    coordinator: str | None
    methods: frozenset[str]
    rounds: int
    total_rounds: int | None
    trusts: _Trust | None
    witnesses: frozenset[str]
    last_moment: datetime | None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> _Consent:
        expires = content["expires"]
        end = date.max if expires is None else date.fromisoformat(expires)
        names = content["exposures"]
        return cls(
            classes=frozenset(names) | (_MODEL if "MODEL_PARAMETERS" in names else frozenset()),
            coordinator=content["coordinator"],
            methods=frozenset(content["methods"]),
            rounds=int(content["rounds"]),
            total_rounds=content.get("total_rounds"),
            trusts=_trust(content["trusts"]["honest"]) if content.get("trusts") else None,
            witnesses=frozenset(
                WITNESS_PEER + str(key).partition("+")[0] for key in (content.get("witnesses") or {}).get("keys", ())
            ),
            # Nothing can be written after the last day that there is.
            last_moment=None if end == date.max else datetime.combine(end, datetime.max.time(), UTC) + _MIDNIGHT,
        )


@dataclass
class _Plan:
    up: frozenset[str]
    down: frozenset[str]
    rounds: int | None
    bounded: bool = False
    last_round: int = -1
    rounds_begun: int = 0


@dataclass
class Permissions:
    """Follows the consents, withdrawals and plans of one party's journal. ``party``: its identity."""

    party: str
    _consent: _Consent | None = None
    _withdrawn: bool = False
    _only_anew: bool = False
    _plans: dict[str, _Plan] = field(default_factory=dict)
    _rosters: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    _sums: dict[str, frozenset[str]] = field(default_factory=dict)
    _bounded_sums: dict[str, frozenset[str]] = field(default_factory=dict)
    _rounds_with: dict[str, int] = field(default_factory=dict)

    def ends(self, rpc: str) -> datetime | None:
        """The last moment at which a call may send by the consent in force; None if it may at any time."""
        farewell = is_farewell(rpc, ended=self._withdrawn)
        return None if self._consent is None or not self._is_silo or farewell else self._consent.last_moment

    @property
    def _is_silo(self) -> bool:
        return _SILO.fullmatch(self.party) is not None

    def consented(self, record: Any) -> None:
        """Takes a consent."""
        self._consent = _Consent.of(record.consent)
        if record.given or not self._only_anew:
            self._withdrawn = self._only_anew = False

    def withdrawn(self, record: Any) -> None:
        """Takes a withdrawal; at a coordinator it is about another party."""
        if self._is_silo:
            self._withdrawn = True
            self._only_anew = record.cause == _WITHDRAWN_BY_HOSPITAL

    def joined(self, record: Any) -> None:
        """Takes a run that was joined or begun; raises ``ConsentError`` if the consent does not hold the run."""
        plan, digest = record.plan, record.plan_sha256
        if hashlib.sha256(rfc8785.dumps(plan)).hexdigest() != digest:
            raise ConsentError("its plan does not have the hash that it is named by")
        required = frozenset(plan["required"])
        up, down = required.union(_ALWAYS, plan["optional"]), _ALWAYS.union(plan["downlink"])
        rounds = plan["rounds"]
        self._plans.setdefault(
            digest, _Plan(up, down, None if rounds is None else int(rounds), _bounds(plan.get("privacy")))
        )
        if not self._is_silo:
            return
        consent = self._consent
        if consent is None or self._withdrawn:
            raise ConsentError(f"run {record.run} was joined without a consent that is in force")
        method = plan["method"]["name"]
        if method not in consent.methods or not (required | _of_start(plan)) <= consent.classes:
            raise ConsentError(f"run {record.run} (method {method}) was joined, and the consent does not hold it")
        honest = (plan.get("privacy") or {}).get("honest")
        if honest is not None:
            of = plan["secure_aggregation"]["minimum"]
            trusts = consent.trusts
            if trusts is None or not (trusts[1] <= of and trusts[0] >= honest):
                what = f"relies on {honest} of {of} hospitals to be honest, and the consent trusts in no such thing"
                raise ConsentError(f"run {record.run}, whose noise is shared out, {what}")

    def masked(self, record: Any) -> None:
        """Takes a roster; raises ``ConsentError`` if a round's update was masked for other silos before.

        So was, in a run without privacy worth the name, what began with the same models, or any round of the run. In
        one with it silos may change, but not for models with which a run without it began. Silos of before did not hold
        to that, and their records do not name the models.
        """
        silos = frozenset(record.silos)
        before = self._rosters.setdefault((record.plan_sha256, record.round), silos)
        if before != silos:
            what = f"was masked for {_named(silos)}, and before for {_named(before)}{_DIFFERENCE}"
            raise ConsentError(f"round {record.round} {what}")
        received, plan = record.received_sha256, self._plans.get(record.plan_sha256 or "")
        if received is None or plan is None:
            return
        same_run, same_models = "a round of the run", "an update from the same models"
        found = [(self._sums.get(received), same_models)]
        if plan.bounded:
            self._bounded_sums.setdefault(received, silos)
        else:
            self._sums.setdefault(received, silos)
            found += [
                (self._bounded_sums.get(received), same_models),
                (self._sums.setdefault(f"run {record.run}", silos), same_run),
            ]
        for earlier, what in reversed(found):
            if earlier is not None and earlier != silos:
                said = f"was masked for {_named(silos)}, and {what} for {_named(earlier)}{_DIFFERENCE}"
                raise ConsentError(f"round {record.round} of run {record.run} {said}")

    def check(self, record: Any, classes: Iterable[str], *, whole: bool) -> None:
        """Raises ``ConsentError`` if a sent message's classes were not allowed to leave.

        ``whole``: the journal was read from its beginning, so that nothing allowed stands before.
        """
        if record.peer.startswith(WITNESS_PEER):
            self._check_witness(record, classes, whole=whole)
            return
        telling = [name for name in classes if name not in _ALWAYS]
        plan = self._plans.get(record.plan_sha256 or "")
        if self._is_silo:
            self._check_consent(record, classes, telling, whole=whole)
            if plan is not None:
                self._count_round(record, plan)
            if UNDER_ROSTER.intersection(telling) and whole and (record.plan_sha256, record.round) not in self._rosters:
                raise ConsentError("a masked update left, and no roster is on record that it was masked for")
        if not telling:
            return
        if plan is None:
            # A coordinator answers from the moment that it listens, a little before its record of the run.
            if whole and self._is_silo:
                raise ConsentError(f"{', '.join(telling)} left, for no run that was joined")
            return
        extra = [name for name in telling if name not in (plan.up if self._is_silo else plan.down)]
        if extra:
            raise ConsentError(f"{', '.join(extra)} left, which the run's plan does not announce")

    def _check_consent(self, record: Any, classes: Iterable[str], telling: list[str], *, whole: bool) -> None:
        consent = self._consent
        if self._withdrawn and telling:
            raise ConsentError(f"{', '.join(telling)} left after the consent was withdrawn")
        if consent is None:
            if whole:
                raise ConsentError("it left before there was a consent")
            return
        if is_farewell(record.rpc, ended=self._withdrawn) and not telling:
            return
        extra = [name for name in classes if name not in consent.classes]
        if extra:
            raise ConsentError(f"{', '.join(extra)} left without consent")
        if record.peer != consent.coordinator:
            raise ConsentError(f"it left for {record.peer}; the consent is for {consent.coordinator}")
        if consent.last_moment is not None and datetime.fromisoformat(record.time) > consent.last_moment:
            raise ConsentError("it left after the consent had expired")

    def _check_witness(self, record: Any, classes: Iterable[str], *, whole: bool) -> None:
        if set(classes) != {_CHECKPOINT} or record.length > _LARGEST_QUESTION:
            raise ConsentError(f"what left for {record.peer:.200} is not a checkpoint and its proof")
        consent = self._consent
        if not self._is_silo or (consent is None and not whole):
            return
        if consent is None or self._withdrawn:
            raise ConsentError(f"a checkpoint left for {record.peer:.200} without a consent that is in force")
        if record.peer not in consent.witnesses or _CHECKPOINT not in consent.classes:
            raise ConsentError(f"a checkpoint left for {record.peer:.200}, and the consent does not hold that")
        if consent.last_moment is not None and datetime.fromisoformat(record.time) > consent.last_moment:
            raise ConsentError("it left after the consent had expired")

    def _count_round(self, record: Any, plan: _Plan) -> None:
        number = record.round
        if record.rpc not in _UPDATES or number is None or number <= plan.last_round:
            return
        if plan.rounds is not None and number >= plan.rounds:
            return
        plan.last_round = number
        plan.rounds_begun += 1
        if self._consent is not None and plan.rounds_begun > self._consent.rounds:
            what = f"the consent holds {self._consent.rounds} rounds of a run"
            raise ConsentError(f"updates of {plan.rounds_begun} rounds left; {what}")
        self._rounds_with[record.peer] = taken = self._rounds_with.get(record.peer, 0) + 1
        total = None if self._consent is None else self._consent.total_rounds
        if total is not None and taken > total:
            raise ConsentError(f"updates of {taken} rounds left; the consent holds {total} rounds of all runs together")


def _bounds(privacy: Mapping[str, Any] | None) -> bool:
    """Whether a plan's promise of differential privacy bounds what single updates tell."""
    if privacy is None:
        return False
    return float(privacy["epsilon"]) <= WEAK_EPSILON and float(privacy["delta"]) <= WEAK_DELTA


def _of_start(plan: Mapping[str, Any]) -> frozenset[str]:
    """What a run's starting model needs of a consent, whatever the plan asks for."""
    weights = (plan.get("model") or {}).get("weights")
    public = weights is None or weights.get("public") is True or weights.get("brought") is True
    return frozenset() if public else _STARTS_FROM_HOSPITALS


def _named(silos: Iterable[str]) -> str:
    return ", ".join(sorted(silos))


def _trust(words: str) -> _Trust:
    honest, of = words.split(" of ")
    return int(honest), int(of)
