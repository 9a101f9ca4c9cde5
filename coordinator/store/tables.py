"""The tables of the coordinator's database. A change here needs a migration in ``migrations``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Double, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Base of all tables."""


class Run(Base):
    """A run and its plan."""

    __tablename__ = "run"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    plan: Mapped[str]
    plan_sha256: Mapped[str] = mapped_column(String(64))
    memory_file: Mapped[str | None]
    created_at: Mapped[str] = mapped_column(String(32))
    finished_at: Mapped[str | None] = mapped_column(String(32))
    ended_after: Mapped[int | None]
    end_reason: Mapped[str | None] = mapped_column(String(32))


class Member(Base):
    """A silo's answer to a run's plan."""

    __tablename__ = "member"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    accepted: Mapped[bool]
    missing: Mapped[list[str]] = mapped_column(JSON)
    audit_key: Mapped[str] = mapped_column(String(64))
    certificate_sha256: Mapped[str] = mapped_column(String(64))
    answered_at: Mapped[str] = mapped_column(String(32))


class Round(Base):
    """A round's times."""

    __tablename__ = "round"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    opened_at: Mapped[str] = mapped_column(String(32))
    closed_at: Mapped[str | None] = mapped_column(String(32))


class Participant(Base):
    """A silo in a round, and its update."""

    __tablename__ = "participant"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    delivered_at: Mapped[str | None] = mapped_column(String(32))
    late: Mapped[bool] = mapped_column(default=False)
    file: Mapped[str | None]
    receipt: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    accuracy: Mapped[float | None] = mapped_column(Double)
    loss: Mapped[float | None] = mapped_column(Double)
    change_norm: Mapped[float | None] = mapped_column(Double)
    change_score: Mapped[float | None] = mapped_column(Double)
    change_cosine: Mapped[float | None] = mapped_column(Double)


class Roster(Base):
    """Whose masked updates a round sums up."""

    __tablename__ = "roster"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    silos: Mapped[list[str]] = mapped_column(JSON)
    fixed_at: Mapped[str] = mapped_column(String(32))


class Download(Base):
    """Where what a silo was last given lies."""

    __tablename__ = "download"
    run: Mapped[str] = mapped_column(String(63), primary_key=True)
    silo: Mapped[str] = mapped_column(String(63), primary_key=True)
    files: Mapped[dict[str, Any]] = mapped_column(JSON)


class Withdrawal(Base):
    """A silo's withdrawal, with its own signed word."""

    __tablename__ = "withdrawal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(String(63))
    silo: Mapped[str] = mapped_column(String(63))
    at: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(String(64))
    rounds_acknowledged: Mapped[list[int]] = mapped_column("rounds_used", JSON)  # the column had its name before
    dropped_round: Mapped[int | None]
    statement: Mapped[dict[str, Any]] = mapped_column(JSON)
    renewed_at: Mapped[str | None] = mapped_column(String(32))


class Refusal(Base):
    """A request that was turned away."""

    __tablename__ = "refusal"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[str] = mapped_column(String(32))
    peer: Mapped[str] = mapped_column(String(200))
    rpc: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]


class Lease(Base):
    """Who serves with the database, one row (``id`` 1). Every coordinator reads it before it knows whether the schema
    is its own release's: columns may be added, never changed.

    ``epoch`` grows with every take-over. ``expires_at`` is by the database's clock. ``folder``: the state folder that
    the database belongs to. SQLite needs no lease and leaves the row as it is.
    """

    __tablename__ = "lease"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    holder: Mapped[str | None]
    folder: Mapped[str | None] = mapped_column(String(32))
    expires_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
