"""What is said of each silo's change in a round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the figures; rounds that have ended before have none."""
    for name in ("change_norm", "change_score", "change_cosine"):
        op.add_column("participant", sa.Column(name, sa.Double()))
