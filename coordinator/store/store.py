"""What the coordinator must not forget: runs, members, rounds, updates, receipts, measurements, refusals.

One database through SQLAlchemy; tensors lie beside it as files whose paths stand here. A file is named in the
database only after it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from medsilo.coordinator.store import tables
from medsilo.coordinator.store.database import Database
from medsilo.coordinator.store.records import Change, Member, Participation, Refusal, RoundState, Withdrawal, now
from medsilo.privacy.consent.early_end import EarlyEnd, EndReason
from medsilo.privacy.errors import ConfigurationError


class Store(Database):
    """What the database holds, by run.

    Raises ``ConfigurationError`` for one that cannot be opened, ``StoreError`` for a server that does not answer.
    """

    def open_run(self, run: str, plan: bytes, plan_sha256: str) -> None:
        """Begins a run, or continues it; raises ``ConfigurationError`` if the stored plan is another one."""
        with self._writing() as session:
            found = session.get(tables.Run, run)
            if found is None:
                session.add(tables.Run(name=run, plan=plan.decode(), plan_sha256=plan_sha256, created_at=now()))
            elif found.plan_sha256 != plan_sha256:
                if session.scalar(select(tables.Member.silo).where(tables.Member.run == run).limit(1)) is None:
                    found.plan, found.plan_sha256 = plan.decode(), plan_sha256  # no silo has answered it
                    return
                raise ConfigurationError(
                    f"run {run} was started with another plan, and silos have answered that one; give the changed "
                    "run another name (`run: name:`), or restore the configuration"
                )

    def runs(self) -> list[tuple[str, str, str | None]]:
        """(name, plan as JSON, time it finished), oldest first."""
        with self._reading() as session:
            return [
                (r.name, r.plan, r.finished_at)
                for r in session.scalars(select(tables.Run).order_by(tables.Run.created_at))
            ]

    def finish_run(
        self, run: str, number: int, silos: Sequence[str], *, early: EarlyEnd | None = None, closes: int | None = None
    ) -> None:
        """Notes that the run has ended, and opens round ``number`` for fetching the end. ``early``: why it did before
        its plan's last round; ``closes``: the round that was open then, which ends in the same transaction."""
        with self._writing() as session:
            if closes is not None:
                _close_round(session, run, closes)
            row = session.get_one(tables.Run, run)
            row.finished_at = now()
            if early is not None:
                row.ended_after, row.end_reason = early.rounds, early.reason.name
            _open_round(session, run, number, silos)

    def early_end(self, run: str) -> EarlyEnd | None:
        """Why the run has ended before its plan's last round; None where it has not, or nobody knows it."""
        with self._reading() as session:
            row = session.get_one(tables.Run, run)
            if row.ended_after is None or row.end_reason is None:
                return None
            return EarlyEnd(row.ended_after, EndReason[row.end_reason])

    def is_finished(self, run: str) -> bool:
        """Whether the run's last round has ended."""
        with self._reading() as session:
            return session.get_one(tables.Run, run).finished_at is not None

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
        with self._writing() as session:
            if accepted and (earlier := _withdrawal_in_force(session, run, silo)) is not None:
                earlier.renewed_at = now()
            session.merge(
                tables.Member(
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
        with self._reading() as session:
            rows = session.scalars(select(tables.Member).where(tables.Member.run == run).order_by(tables.Member.silo))
            return {
                m.silo: Member(m.silo, m.accepted, tuple(m.missing), m.audit_key, m.certificate_sha256, m.answered_at)
                for m in rows
            }

    def run_of_plan(self, plan_sha256: str) -> str | None:
        """The run with this plan."""
        with self._reading() as session:
            return session.scalar(select(tables.Run.name).where(tables.Run.plan_sha256 == plan_sha256))

    def withdraw(
        self,
        run: str,
        silo: str,
        *,
        reason: str,
        rounds_acknowledged: Sequence[int],
        statement: Mapping[str, Any],
        open_round: int | None,
    ) -> list[str]:
        """Ends a silo's part: its signed withdrawal stays, ``open_round`` goes on without it, and none of its updates
        is named any more. Returns the files that are to be deleted.
        """
        with self._writing() as session:
            rows = session.scalars(
                select(tables.Participant).where(tables.Participant.run == run, tables.Participant.silo == silo)
            ).all()
            files = [row.file for row in rows if row.file is not None]
            dropped = None
            for row in rows:
                row.file = None
                if row.round == open_round:
                    dropped = open_round if row.delivered_at is not None else None
                    session.delete(row)
            if (download := session.get(tables.Download, (run, silo))) is not None:
                session.delete(download)
            session.add(
                tables.Withdrawal(
                    run=run,
                    silo=silo,
                    at=now(),
                    reason=reason,
                    rounds_acknowledged=list(rounds_acknowledged),
                    dropped_round=dropped,
                    statement=dict(statement),
                )
            )
            return files

    def withdrawals(self, run: str) -> dict[str, Withdrawal]:
        """The withdrawals in force, by silo."""
        with self._reading() as session:
            rows = session.scalars(
                select(tables.Withdrawal).where(tables.Withdrawal.run == run, tables.Withdrawal.renewed_at.is_(None))
            )
            return {
                w.silo: Withdrawal(w.silo, w.at, w.reason, tuple(w.rounds_acknowledged), w.dropped_round, w.statement)
                for w in rows
            }

    def forget_downloads(self, run: str) -> None:
        """Forgets what all silos were last given."""
        with self._writing() as session:
            for row in session.scalars(select(tables.Download).where(tables.Download.run == run)):
                session.delete(row)

    def open_round(self, run: str, number: int, silos: Sequence[str]) -> None:
        """Opens a round for its participants."""
        with self._writing() as session:
            _open_round(session, run, number, silos)

    def last_round(self, run: str) -> RoundState | None:
        """The round that was opened last."""
        with self._reading() as session:
            number = session.scalar(
                select(tables.Round.number).where(tables.Round.run == run).order_by(tables.Round.number.desc())
            )
            return None if number is None else self._round(session, run, number)

    def round(self, run: str, number: int) -> RoundState | None:
        """One round."""
        with self._reading() as session:
            return self._round(session, run, number)

    def rounds(self, run: str) -> list[RoundState]:
        """All rounds of a run, in order."""
        with self._reading() as session:
            numbers = session.scalars(
                select(tables.Round.number).where(tables.Round.run == run).order_by(tables.Round.number)
            ).all()
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
    ) -> Participation:
        """Notes an accepted update; ``file`` must be durable."""
        with self._writing() as session:
            row = session.get_one(tables.Participant, (run, number, silo))
            row.delivered_at = now()
            row.file = file
            row.receipt = dict(receipt)
            row.accuracy = accuracy
            row.loss = loss
            return _participation(row)

    def admit_participant(self, run: str, number: int, silo: str) -> None:
        """Adds a silo to a round that it was not yet part of."""
        with self._writing() as session:
            if session.get(tables.Participant, (run, number, silo)) is None:
                session.add(tables.Participant(run=run, round=number, silo=silo))

    def fix_roster(self, run: str, number: int, silos: Sequence[str]) -> str:
        """Notes whose masked updates a round is to sum up, once and for all; returns since when."""
        with self._writing() as session:
            found = session.get(tables.Roster, (run, number))
            if found is None:
                found = tables.Roster(run=run, round=number, silos=list(silos), fixed_at=now())
                session.add(found)
            return found.fixed_at

    def roster(self, run: str, number: int) -> tuple[tuple[str, ...], str] | None:
        """Whose masked updates a round is to sum up, and since when; None until that is fixed."""
        with self._reading() as session:
            found = session.get(tables.Roster, (run, number))
            return None if found is None else (tuple(found.silos), found.fixed_at)

    def first_roster(self, run: str) -> tuple[str, ...] | None:
        """Whose masked updates the run's first masked sum was, or is to be, of; None until that is fixed."""
        with self._reading() as session:
            found = session.scalars(
                select(tables.Roster).where(tables.Roster.run == run).order_by(tables.Roster.round).limit(1)
            ).first()
            return None if found is None else tuple(found.silos)

    def restart_round(self, run: str, number: int) -> list[str]:
        """Forgets what was delivered in a round; returns the files that are to be deleted."""
        with self._writing() as session:
            rows = session.scalars(
                select(tables.Participant).where(tables.Participant.run == run, tables.Participant.round == number)
            ).all()
            files = [row.file for row in rows if row.file is not None]
            for row in rows:
                row.delivered_at = row.file = row.receipt = row.accuracy = row.loss = None
            return files

    def close_round(
        self,
        run: str,
        number: int,
        *,
        downloads: Mapping[str, Mapping[str, Any]],
        memory_file: str | None,
        changes: Mapping[str, Change] | None = None,
    ) -> None:
        """Ends a round, in one transaction with what it gave: silos' downloads, the method's memory, and what is said
        of each silo's change."""
        with self._writing() as session:
            for row in _close_round(session, run, number):
                if (change := (changes or {}).get(row.silo)) is not None:
                    row.change_norm, row.change_score, row.change_cosine = change.norm, change.score, change.cosine
            for silo, files in downloads.items():
                session.merge(tables.Download(run=run, silo=silo, files=dict(files)))
            session.get_one(tables.Run, run).memory_file = memory_file

    def downloads(self, run: str) -> dict[str, dict[str, Any]]:
        """What silos were last given, by silo (or ``EVERYONE``)."""
        with self._reading() as session:
            return {d.silo: d.files for d in session.scalars(select(tables.Download).where(tables.Download.run == run))}

    def memory_file(self, run: str) -> str | None:
        """Where the method's memory lies."""
        with self._reading() as session:
            return session.get_one(tables.Run, run).memory_file

    def latest_files(self, run: str, *, before: int | None = None) -> dict[str, str]:
        """The file of each silo's last accepted update; the last one of a round before ``before``."""
        row = tables.Participant
        known = select(row.silo).where(row.run == run).distinct().subquery()
        chosen = [row.run == run, row.silo == known.c.silo, row.file.is_not(None)]
        if before is not None:
            chosen.append(row.round < before)
        # The primary key leads to each silo's last one: of a long run, with its receipts, nothing else is read.
        last = select(row.file).where(*chosen).order_by(row.round.desc()).limit(1).scalar_subquery()
        with self._reading() as session:
            found = session.execute(select(known.c.silo, last).order_by(known.c.silo))
            return {silo: file for silo, file in found if file is not None}

    def refuse(self, peer: str, rpc: str, reason: str) -> None:
        """Notes a request that was turned away."""
        with self._writing() as session:
            session.add(tables.Refusal(at=now(), peer=peer, rpc=rpc, reason=reason))

    def refusals(self, limit: int = 100) -> list[Refusal]:
        """The latest refusals, newest first."""
        with self._reading() as session:
            rows = session.scalars(select(tables.Refusal).order_by(tables.Refusal.id.desc()).limit(limit))
            return [Refusal(r.at, r.peer, r.rpc, r.reason) for r in rows]

    def _round(self, session: Session, run: str, number: int) -> RoundState | None:
        found = session.get(tables.Round, (run, number))
        if found is None:
            return None
        rows = session.scalars(
            select(tables.Participant)
            .where(tables.Participant.run == run, tables.Participant.round == number)
            .order_by(tables.Participant.silo)
        )
        participants = {row.silo: _participation(row) for row in rows}
        return RoundState(number, found.opened_at, found.closed_at, participants)


def _participation(row: tables.Participant) -> Participation:
    return Participation(
        row.round,
        row.silo,
        row.delivered_at,
        row.late,
        row.file,
        row.receipt,
        row.accuracy,
        row.loss,
        None if row.change_norm is None else Change(row.change_norm, row.change_score, row.change_cosine),
    )


def _open_round(session: Session, run: str, number: int, silos: Sequence[str]) -> None:
    session.add(tables.Round(run=run, number=number, opened_at=now()))
    session.add_all(tables.Participant(run=run, round=number, silo=silo) for silo in silos)


def _close_round(session: Session, run: str, number: int) -> Sequence[tables.Participant]:
    session.get_one(tables.Round, (run, number)).closed_at = now()
    rows = session.scalars(
        select(tables.Participant).where(tables.Participant.run == run, tables.Participant.round == number)
    ).all()
    for row in rows:
        row.late = row.delivered_at is None
    return rows


def _withdrawal_in_force(session: Session, run: str, silo: str) -> tables.Withdrawal | None:
    return session.scalar(
        select(tables.Withdrawal).where(
            tables.Withdrawal.run == run, tables.Withdrawal.silo == silo, tables.Withdrawal.renewed_at.is_(None)
        )
    )
