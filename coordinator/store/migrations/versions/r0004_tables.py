"""The tables of the first release: runs and their rounds, the rosters of masked ones, and the lease."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Makes the tables, and the lease's only row, which nobody holds."""
    op.create_table(
        "run",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("plan", sa.String(), nullable=False),
        sa.Column("plan_sha256", sa.String(64), nullable=False),
        sa.Column("memory_file", sa.String()),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("finished_at", sa.String(32)),
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
    )
    op.create_table(
        "round",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("opened_at", sa.String(32), nullable=False),
        sa.Column("closed_at", sa.String(32)),
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
        sa.Column("change_norm", sa.Double()),
        sa.Column("change_score", sa.Double()),
        sa.Column("change_cosine", sa.Double()),
    )
    op.create_table(
        "roster",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("round", sa.Integer(), primary_key=True),
        sa.Column("silos", sa.JSON(), nullable=False),
        sa.Column("fixed_at", sa.String(32), nullable=False),
    )
    op.create_table(
        "download",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("silo", sa.String(63), primary_key=True),
        sa.Column("files", sa.JSON(), nullable=False),
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
    )
    op.create_table(
        "refusal",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("peer", sa.String(200), nullable=False),
        sa.Column("rpc", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
    )
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String()),
        sa.Column("folder", sa.String(32)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
    )
    op.bulk_insert(lease, [{"id": 1, "epoch": 0}])
