"""The end of a consent: why it ended, the signed withdrawal that says so, and what the journal tells of it.

A signed withdrawal is a DSSE envelope, signed with the silo's audit key, over canonical JSON. It names the rounds whose
updates the coordinator had acknowledged. It does not claim that anything was unlearned: what was made of those updates
stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError
from securesystemslib import dsse

from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.consent.helped import Help
from medsilo.privacy.errors import ConsentError, JournalError, RefusedError
from medsilo.privacy.files.canonical import read_canonical
from medsilo.privacy.files.configuration import StrictModel, explain
from medsilo.privacy.identity.envelope import from_json, seal, unseal
from medsilo.privacy.journal.journal import read_journal, understanding
from medsilo.privacy.journal.records import (
    ApprovalRecord,
    ConsentRecord,
    MessageRecord,
    MixRecord,
    Record,
    RefusalRecord,
    RosterRecord,
    RunRecord,
    WithdrawalRecord,
)
from medsilo.privacy.journal.segments import RECORDS

WITHDRAWAL = "application/vnd.medsilo.withdrawal+json"
"""The signed withdrawal's payload type."""


class EndedError(ConsentError):
    """Nothing may leave any more: the consent has ended."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class SignedWithdrawal(StrictModel):
    """What a silo signs when its part in a run ends early.

    ``rounds_acknowledged``: rounds (from 0) whose updates the coordinator had acknowledged; one of a round that was
    still open is used for nothing all the same. ``models_unlearned``: always false; nothing takes an update out of a
    model that was made of it.
    """

    v: Literal[1] = 1
    federation: str
    silo: str
    coordinator: str
    run: str | None
    plan_sha256: str | None
    rounds_acknowledged: tuple[Annotated[int, Field(strict=True, ge=0, lt=1_000_000)], ...]
    reason: Cause
    at: Annotated[str, Field(max_length=40)]
    models_unlearned: Literal[False] = False

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        """The statement in its envelope."""
        return seal(self.model_dump(mode="json"), WITHDRAWAL, key)

    @classmethod
    def open(cls, envelope: dsse.Envelope, public_key: bytes) -> SignedWithdrawal:
        """Raises ``RefusedError`` if it is not a signed withdrawal, or not signed with that key."""
        try:
            return cls.model_validate(unseal(envelope, WITHDRAWAL, public_key))
        except JournalError as error:
            raise RefusedError(f"the withdrawal cannot be used: {error}") from None
        except ValidationError as error:
            raise RefusedError(f"the withdrawal cannot be used: {'; '.join(explain(error, cls))}") from None


@dataclass
class Part:
    """A silo's part in one run, as its journal tells it. Rounds are counted from 0.

    ``coordinator``: who leads it. ``sent``: rounds of which an update was begun to be sent.
    ``acknowledged``: those whose update the coordinator has.
    ``ended``: the run's end was taken in. ``withdrawal``: the record that ended the part early; ``told``: the
    coordinator has acknowledged it.
    """

    run: str
    plan_sha256: str
    rounds: int
    coordinator: str | None = None
    sent: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    ended: bool = False
    withdrawal: WithdrawalRecord | None = None
    told: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the coordinator counts on this silo."""
        return not self.ended and self.withdrawal is None


@dataclass(frozen=True)
class MaskedSum:
    """For whose sum a silo has masked an update: that of ``silos``, in a round (from 0) of a run with that plan.

    ``received_sha256``: of the models that all of them were given to train from.
    """

    run: str
    plan_sha256: str
    round: int
    silos: frozenset[str]
    received_sha256: str

    @classmethod
    def of(cls, record: RosterRecord) -> MaskedSum:
        """From a silo's record of it."""
        received = record.received_sha256
        if received is None:  # records of before hold it in the signed statements alone
            received = read_canonical(from_json(record.statements[0]["statement"]).payload)["received_sha256"]
        silos = frozenset(record.silos)
        return cls(record.run, str(record.plan_sha256), int(record.round), silos, str(received))


@dataclass
class History:
    """What a silo's journal tells of its consent.

    ``parts``: by plan hash, the run that was joined last at the end. ``withdrawal``: the record of a withdrawal that is
    in force. ``approved``: hashes of approved plans. ``first_plans``: by a consent file's hash, the hash of the plan
    that was joined first with it. ``masked``: every sum, of all runs, that an update was masked for. ``helped``: by
    plan hash, with which mixtures the silo has helped, or not.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    withdrawal: WithdrawalRecord | None = None
    approved: set[str] = field(default_factory=set)
    let_in: set[str] = field(default_factory=set)
    first_plans: dict[str, str] = field(default_factory=dict)
    masked: dict[MaskedSum, None] = field(default_factory=dict)
    helped: dict[str, Help] = field(default_factory=dict)
    _consent: str | None = None

    @classmethod
    def read(cls, journal: Path) -> History:
        """From a journal's folder; there may be none yet."""
        with understanding(journal):
            return cls.of(read_journal(journal) if (journal / RECORDS).exists() else ())

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """From a silo's records, in their order."""
        history = cls()
        for record in records:
            history._take(record)
        return history

    @property
    def last(self) -> Part | None:
        """The part in the run that was joined last."""
        return next(reversed(self.parts.values()), None)

    def rounds_with(self, coordinator: str, *, beside: str) -> int:
        """In how many rounds of runs that a coordinator led the silo has taken part, those of a plan's run apart."""
        parts = (part for plan, part in self.parts.items() if plan != beside)
        return sum(len(part.sent) for part in parts if part.coordinator == coordinator)

    def _take(self, record: Record) -> None:
        match record:
            case MessageRecord():
                if record.plan_sha256 in self.parts:  # None outside runs
                    self._take_message(self.parts[record.plan_sha256], record)
            case RunRecord():
                plan = record.plan_sha256
                part = self.parts.pop(plan, None) or Part(
                    record.run, plan, record.plan["rounds"], _coordinator_of(record.plan)
                )
                if self._consent is not None:
                    self.first_plans.setdefault(self._consent, plan)
                part.withdrawal, part.told = None, False
                self.parts[plan] = part
                self.let_in.add(plan)
            case RosterRecord():
                self.masked[MaskedSum.of(record)] = None
            case MixRecord() | RefusalRecord() if record.plan_sha256:
                self.helped.setdefault(record.plan_sha256, Help()).take(record)
            case ApprovalRecord():
                self.approved.add(record.plan_sha256)
            case WithdrawalRecord():
                if record.plan_sha256 in self.parts:
                    part = self.parts[record.plan_sha256]
                    part.withdrawal, part.told = record, False
                self.let_in.discard(record.plan_sha256 or "")
                if record.cause == Cause.WITHDRAWN:
                    self.withdrawal = record
                    self.approved.clear()
                    self.let_in.clear()
            case ConsentRecord():
                self._consent = record.consent.get("sha256")
                if record.given:
                    self.withdrawal = None

    @staticmethod
    def _take_message(part: Part, record: MessageRecord) -> None:
        rpc, number, received = record.rpc, record.round, record.direction == "received"
        if rpc == "SubmitUpdate" and number is not None:
            if number < part.rounds:
                (part.acknowledged if received else part.sent).add(number)
            elif received:
                part.ended = True
        elif rpc == "Withdraw" and received:
            part.told = True


def _coordinator_of(plan: Mapping[str, Any]) -> str | None:
    """The identity of who leads a run, by its plan as it stands in a record; None for a plan that names nobody."""
    federation, name = plan.get("federation"), plan.get("coordinator")
    return None if federation is None or name is None else f"spiffe://{federation}/coordinator/{name}"


def timestamp() -> str:
    """The time as it stands in records: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
