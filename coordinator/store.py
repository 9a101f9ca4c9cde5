"""What the coordinator must not forget: runs, members, rounds, updates, receipts, measurements, refusals.

One database through SQLAlchemy; tensors lie beside it as files whose paths stand here. A file is named in the
database only after it is durable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Engine, String, create_engine, event, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from privacy.errors import ConfigurationError

EVERYONE = "*"
"""In place of a silo's name: a download for every silo that has none of its own."""


class _Base(DeclarativeBase):
    pass


class _Run(_Base):
    __tablename__ = "run"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    plan: Mapped[str]
    plan_sha256: Mapped[str] = mapped_column(String(64))
    memory_file: Mapped[str | None]
    created_at: Mapped[str] = mapped_column(String(32))
    finished_at: Mapped[str | None] = mapped_column(String(32))


class _Member(_Base):
    __tablename__ = "member"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    accepted: Mapped[bool]
    missing: Mapped[list[str]] = mapped_column(JSON)
    audit_key: Mapped[str] = mapped_column(String(64))
    certificate_sha256: Mapped[str] = mapped_column(String(64))
    answered_at: Mapped[str] = mapped_column(String(32))


class _Round(_Base):
    __tablename__ = "round"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    opened_at: Mapped[str] = mapped_column(String(32))
    closed_at: Mapped[str | None] = mapped_column(String(32))


class _Participant(_Base):
    __tablename__ = "participant"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    delivered_at: Mapped[str | None] = mapped_column(String(32))
    late: Mapped[bool] = mapped_column(default=False)
    file: Mapped[str | None]
    receipt: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    accuracy: Mapped[float | None]
    loss: Mapped[float | None]


class _Roster(_Base):
    __tablename__ = "roster"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    silos: Mapped[list[str]] = mapped_column(JSON)
    fixed_at: Mapped[str] = mapped_column(String(32))


class _Download(_Base):
    __tablename__ = "download"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    files: Mapped[dict[str, Any]] = mapped_column(JSON)


class _Withdrawal(_Base):
    __tablename__ = "withdrawal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(String(63))
    silo: Mapped[str] = mapped_column(String(63))
    at: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(String(64))
    rounds_used: Mapped[list[int]] = mapped_column(JSON)
    dropped_round: Mapped[int | None]
    statement: Mapped[dict[str, Any]] = mapped_column(JSON)
    renewed_at: Mapped[str | None] = mapped_column(String(32))


class _Refusal(_Base):
    __tablename__ = "refusal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(String(32))
    peer: Mapped[str] = mapped_column(String(200))
    rpc: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]


@dataclass(frozen=True)
class Member:
    """A silo's answer to the plan; ``missing`` names what its consent lacked."""

    silo: str
    accepted: bool
    missing: tuple[str, ...]
    audit_key: str
    certificate_sha256: str
    answered_at: str


@dataclass(frozen=True)
class Participation:
    """A silo in a round. ``late``: the round ended without it. ``file``: where its update lies."""

    round: int
    silo: str
    delivered_at: str | None
    late: bool
    file: str | None
    receipt: dict[str, Any] | None
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class RoundState:
    """A round's times (UTC, ISO 8601) and its participants by silo."""

    number: int
    opened_at: str
    closed_at: str | None
    participants: Mapping[str, Participation]


@dataclass(frozen=True)
class Withdrawal:
    """The end of a silo's part before the run's: ``statement`` is its own signed word (a DSSE envelope).

    ``rounds_used``: rounds whose updates had been acknowledged to it. ``dropped_round``: the one among them that was
    still open, so that its update is used for nothing.
    """

    silo: str
    at: str
    reason: str
    rounds_used: tuple[int, ...]
    dropped_round: int | None
    statement: Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A request that was turned away."""

    at: str
    peer: str
    rpc: str
    reason: str


def now() -> str:
    """The time, UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Store:
    """The database. Raises ``ConfigurationError`` for one that cannot be opened."""

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        try:
            self._engine: Engine = create_engine(url)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _sqlite_pragmas)
            _Base.metadata.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            raise ConfigurationError(f"store: the database {url} cannot be opened: {error}") from None

    def close(self) -> None:
        """Lets go of all connections."""
        self._engine.dispose()

    def open_run(self, run: str, plan: bytes, plan_sha256: str) -> None:
        """Begins a run, or continues it; raises ``ConfigurationError`` if the stored plan is another one."""
        with self._session() as session:
            found = session.get(_Run, run)
            if found is None:
                session.add(_Run(name=run, plan=plan.decode(), plan_sha256=plan_sha256, created_at=now()))
            elif found.plan_sha256 != plan_sha256:
                raise ConfigurationError(
                    f"run {run} was started with another plan, and silos have joined that one; give the changed "
                    "run another name (`run: name:`), or restore the configuration"
                )

    def runs(self) -> list[tuple[str, str, str | None]]:
        """(name, plan as JSON, time it finished), oldest first."""
        with self._session() as session:
            return [(r.name, r.plan, r.finished_at) for r in session.scalars(select(_Run).order_by(_Run.created_at))]

    def finish_run(self, run: str) -> None:
        """Notes that the run's last round has ended."""
        with self._session() as session:
            session.get_one(_Run, run).finished_at = now()

    def is_finished(self, run: str) -> bool:
        """Whether the run's last round has ended."""
        with self._session() as session:
            return session.get_one(_Run, run).finished_at is not None

    def answer(
        self,
        run: str,
        silo: str,
        *,
        accepted: bool,
        missing: Sequence[str],
        audit_key: str,
        certificate_sha256: str,
    ) -> None:
        """Keeps a silo's answer to the plan; a later answer replaces an earlier one, and a yes a withdrawal."""
        with self._session() as session:
            if accepted and (earlier := _withdrawal_in_force(session, run, silo)) is not None:
                earlier.renewed_at = now()
            session.merge(
                _Member(
                    run=run,
                    silo=silo,
                    accepted=accepted,
                    missing=list(missing),
                    audit_key=audit_key,
                    certificate_sha256=certificate_sha256,
                    answered_at=now(),
                )
            )

    def members(self, run: str) -> dict[str, Member]:
        """The silos that have answered, by name."""
        with self._session() as session:
            rows = session.scalars(select(_Member).where(_Member.run == run).order_by(_Member.silo))
            return {
                m.silo: Member(m.silo, m.accepted, tuple(m.missing), m.audit_key, m.certificate_sha256, m.answered_at)
                for m in rows
            }

    def run_of_plan(self, plan_sha256: str) -> str | None:
        """The run with this plan."""
        with self._session() as session:
            return session.scalar(select(_Run.name).where(_Run.plan_sha256 == plan_sha256))

    def withdraw(
        self,
        run: str,
        silo: str,
        *,
        reason: str,
        rounds_used: Sequence[int],
        statement: Mapping[str, Any],
        open_round: int | None,
    ) -> list[str]:
        """Ends a silo's part: its tombstone stays, ``open_round`` goes on without it, and none of its updates is named
        any more. Returns the files that are to be deleted.
        """
        with self._session() as session:
            rows = session.scalars(select(_Participant).where(_Participant.run == run, _Participant.silo == silo)).all()
            files = [row.file for row in rows if row.file is not None]
            dropped = None
            for row in rows:
                row.file = None
                if row.round == open_round:
                    dropped = open_round if row.delivered_at is not None else None
                    session.delete(row)
            if (download := session.get(_Download, (run, silo))) is not None:
                session.delete(download)
            session.add(
                _Withdrawal(
                    run=run,
                    silo=silo,
                    at=now(),
                    reason=reason,
                    rounds_used=list(rounds_used),
                    dropped_round=dropped,
                    statement=dict(statement),
                )
            )
            return files

    def withdrawals(self, run: str) -> dict[str, Withdrawal]:
        """The withdrawals in force, by silo."""
        with self._session() as session:
            rows = session.scalars(select(_Withdrawal).where(_Withdrawal.run == run, _Withdrawal.renewed_at.is_(None)))
            return {
                w.silo: Withdrawal(w.silo, w.at, w.reason, tuple(w.rounds_used), w.dropped_round, w.statement)
                for w in rows
            }

    def forget_downloads(self, run: str) -> None:
        """Forgets what all silos were last given."""
        with self._session() as session:
            for row in session.scalars(select(_Download).where(_Download.run == run)):
                session.delete(row)

    def open_round(self, run: str, number: int, silos: Sequence[str]) -> None:
        """Opens a round for its participants."""
        with self._session() as session:
            session.add(_Round(run=run, number=number, opened_at=now()))
            session.add_all(_Participant(run=run, round=number, silo=silo) for silo in silos)

    def last_round(self, run: str) -> RoundState | None:
        """The round that was opened last."""
        with self._session() as session:
            number = session.scalar(select(_Round.number).where(_Round.run == run).order_by(_Round.number.desc()))
            return None if number is None else self._round(session, run, number)

    def round(self, run: str, number: int) -> RoundState | None:
        """One round."""
        with self._session() as session:
            return self._round(session, run, number)

    def rounds(self, run: str) -> list[RoundState]:
        """All rounds of a run, in order."""
        with self._session() as session:
            numbers = session.scalars(select(_Round.number).where(_Round.run == run).order_by(_Round.number)).all()
            found = (self._round(session, run, number) for number in numbers)
            return [state for state in found if state is not None]

    def deliver(
        self,
        run: str,
        number: int,
        silo: str,
        *,
        file: str | None,
        receipt: Mapping[str, Any],
        accuracy: float | None,
        loss: float | None,
    ) -> None:
        """Notes an accepted update; ``file`` must be durable."""
        with self._session() as session:
            row = session.get_one(_Participant, (run, number, silo))
            row.delivered_at = now()
            row.file = file
            row.receipt = dict(receipt)
            row.accuracy = accuracy
            row.loss = loss

    def admit_participant(self, run: str, number: int, silo: str) -> None:
        """Adds a silo to a round that it was not yet part of."""
        with self._session() as session:
            if session.get(_Participant, (run, number, silo)) is None:
                session.add(_Participant(run=run, round=number, silo=silo))

    def fix_roster(self, run: str, number: int, silos: Sequence[str]) -> str:
        """Notes whose masked updates a round is to sum up, once and for all; returns since when."""
        with self._session() as session:
            found = session.get(_Roster, (run, number))
            if found is None:
                found = _Roster(run=run, round=number, silos=list(silos), fixed_at=now())
                session.add(found)
            return found.fixed_at

    def roster(self, run: str, number: int) -> tuple[tuple[str, ...], str] | None:
        """Whose masked updates a round is to sum up, and since when; None until that is fixed."""
        with self._session() as session:
            found = session.get(_Roster, (run, number))
            return None if found is None else (tuple(found.silos), found.fixed_at)

    def restart_round(self, run: str, number: int) -> list[str]:
        """Forgets what was delivered in a round; returns the files that are to be deleted."""
        with self._session() as session:
            rows = session.scalars(
                select(_Participant).where(_Participant.run == run, _Participant.round == number)
            ).all()
            files = [row.file for row in rows if row.file is not None]
            for row in rows:
                row.delivered_at = row.file = row.receipt = row.accuracy = row.loss = None
            return files

    def close_round(
        self, run: str, number: int, *, downloads: Mapping[str, Mapping[str, Any]], memory_file: str | None
    ) -> None:
        """Ends a round, in one transaction with what it gave: silos' downloads and the method's memory."""
        with self._session() as session:
            session.get_one(_Round, (run, number)).closed_at = now()
            for row in session.scalars(
                select(_Participant).where(_Participant.run == run, _Participant.round == number)
            ):
                row.late = row.delivered_at is None
            for silo, files in downloads.items():
                session.merge(_Download(run=run, silo=silo, files=dict(files)))
            session.get_one(_Run, run).memory_file = memory_file

    def downloads(self, run: str) -> dict[str, dict[str, Any]]:
        """What silos were last given, by silo (or ``EVERYONE``)."""
        with self._session() as session:
            return {d.silo: d.files for d in session.scalars(select(_Download).where(_Download.run == run))}

    def memory_file(self, run: str) -> str | None:
        """Where the method's memory lies."""
        with self._session() as session:
            return session.get_one(_Run, run).memory_file

    def latest_files(self, run: str) -> dict[str, str]:
        """The file of each silo's last accepted update."""
        with self._session() as session:
            rows = session.scalars(
                select(_Participant)
                .where(_Participant.run == run, _Participant.file.is_not(None))
                .order_by(_Participant.round)
            )
            return dict(sorted((row.silo, row.file) for row in rows if row.file is not None))

    def refuse(self, peer: str, rpc: str, reason: str) -> None:
        """Notes a request that was turned away."""
        with self._session() as session:
            session.add(_Refusal(at=now(), peer=peer, rpc=rpc, reason=reason))

    def refusals(self, limit: int = 100) -> list[Refusal]:
        """The latest refusals, newest first."""
        with self._session() as session:
            rows = session.scalars(select(_Refusal).order_by(_Refusal.id.desc()).limit(limit))
            return [Refusal(r.at, r.peer, r.rpc, r.reason) for r in rows]

    def _round(self, session: Session, run: str, number: int) -> RoundState | None:
        found = session.get(_Round, (run, number))
        if found is None:
            return None
        rows = session.scalars(
            select(_Participant)
            .where(_Participant.run == run, _Participant.round == number)
            .order_by(_Participant.silo)
        )
        participants = {
            p.silo: Participation(p.round, p.silo, p.delivered_at, p.late, p.file, p.receipt, p.accuracy, p.loss)
            for p in rows
        }
        return RoundState(number, found.opened_at, found.closed_at, participants)

    @contextmanager
    def _session(self) -> Iterator[Session]:
        # SQLite has one writer; waiting here is fair and cannot end in "database is locked".
        serial = self._lock if self._engine.dialect.name == "sqlite" else nullcontext()
        try:
            with serial, Session(self._engine) as session, session.begin():
                yield session
        except OperationalError as error:
            raise ConfigurationError(f"store: the database does not answer: {error.orig}") from error


def _withdrawal_in_force(session: Session, run: str, silo: str) -> _Withdrawal | None:
    return session.scalar(
        select(_Withdrawal).where(_Withdrawal.run == run, _Withdrawal.silo == silo, _Withdrawal.renewed_at.is_(None))
    )


def _sqlite_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()
