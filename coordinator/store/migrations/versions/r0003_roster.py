"""The rosters of masked rounds.

Databases from before migrations may have this table already; what is there stays as it is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Makes the table if it is not there yet."""
    op.create_table(
        "roster",
        sa.Column("run", sa.String(63), primary_key=True),
        sa.Column("round", sa.Integer(), primary_key=True),
        sa.Column("silos", sa.JSON(), nullable=False),
        sa.Column("fixed_at", sa.String(32), nullable=False),
        if_not_exists=True,
    )
