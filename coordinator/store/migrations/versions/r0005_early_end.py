"""Why a run has ended before its plan's last round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the reason; of runs that have ended before nobody knows it."""
    op.add_column("run", sa.Column("ended_after", sa.Integer()))
    op.add_column("run", sa.Column("end_reason", sa.String(32)))
