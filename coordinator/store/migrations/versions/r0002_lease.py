"""The lease: of several coordinators on one database, one serves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Makes the table and its only row, which nobody holds."""
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String()),
        sa.Column("folder", sa.String(32)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
    )
    op.bulk_insert(lease, [{"id": 1, "epoch": 0}])
