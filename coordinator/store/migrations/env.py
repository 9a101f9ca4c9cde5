"""What Alembic runs to change a database; the connection is the caller's, and so is the transaction."""

from __future__ import annotations

from alembic import context

from medsilo.coordinator.store.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
