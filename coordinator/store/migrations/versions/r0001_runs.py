"""Runs, members, rounds, updates, downloads, withdrawals, refusals.

Databases from before migrations have these tables already, or some of them; what is there stays as it is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables that are not there yet."""
    op.create_table(
        "run",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("plan", sa.String(), nullable=False),
        sa.Column("plan_sha256", sa.String(64), nullable=False),
        sa.Column("memory_file", sa.String()),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("finished_at", sa.String(32)),
        if_not_exists=True,
    )
    op.create_table(
        "member",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("silo", sa.String(63), primary_key=True),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("missing", sa.JSON(), nullable=False),
        sa.Column("audit_key", sa.String(64), nullable=False),
        sa.Column("certificate_sha256", sa.String(64), nullable=False),
        sa.Column("answered_at", sa.String(32), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "round",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("opened_at", sa.String(32), nullable=False),
        sa.Column("closed_at", sa.String(32)),
        if_not_exists=True,
    )
    op.create_table(
        "participant",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("round", sa.Integer(), primary_key=True),
        sa.Column("silo", sa.String(63), primary_key=True),
        sa.Column("delivered_at", sa.String(32)),
        sa.Column("late", sa.Boolean(), nullable=False),
        sa.Column("file", sa.String()),
        sa.Column("receipt", sa.JSON()),
        sa.Column("accuracy", sa.Double()),
        sa.Column("loss", sa.Double()),
        if_not_exists=True,
    )
    op.create_table(
        "download",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("silo", sa.String(63), primary_key=True),
        sa.Column("files", sa.JSON(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "withdrawal",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run", sa.String(63), nullable=False),
        sa.Column("silo", sa.String(63), nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("rounds_used", sa.JSON(), nullable=False),
        sa.Column("dropped_round", sa.Integer()),
        sa.Column("statement", sa.JSON(), nullable=False),
        sa.Column("renewed_at", sa.String(32)),
        if_not_exists=True,
    )
    op.create_table(
        "refusal",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("peer", sa.String(200), nullable=False),
        sa.Column("rpc", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        if_not_exists=True,
    )
