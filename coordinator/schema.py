"""Brings a database's tables up to this release's (Alembic), and refuses those of a newer one."""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from coordinator.lease import is_taken
from privacy.errors import ConfigurationError

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 0x6D656473696C6F  # "medsilo": any number that other programs on the server do not take


def upgrade(engine: Engine, *, holding_lease: bool = False) -> bool:
    """Upgrades the schema in one transaction, which loses nothing; False if another coordinator is serving with it.

    Raises ``ConfigurationError`` for a schema that this release does not know.
    """
    with engine.connect() as connection:
        if _is_current(connection):
            return True
    with engine.connect() as connection:
        # One at a time; and on SQLite, where Python would begin no transaction for changes of tables, all or nothing.
        sqlite = engine.dialect.name == "sqlite"
        connection.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else f"SELECT pg_advisory_xact_lock({_LOCK})")
        if _is_current(connection):
            return True
        if not (sqlite or holding_lease) and inspect(connection).has_table("lease") and is_taken(connection):
            return False
        command.upgrade(_config(connection), "head")
        connection.commit()
    log.info("the database's schema is %s now", ScriptDirectory(str(MIGRATIONS)).get_current_head())
    return True


def _is_current(connection: Connection) -> bool:
    script = ScriptDirectory(str(MIGRATIONS))
    found = MigrationContext.configure(connection).get_current_revision()
    known = [revision.revision for revision in script.walk_revisions()]
    if found is not None and found not in known:
        raise ConfigurationError(
            f"store: the database's schema is {found}, and this release knows none after {known[0]}: a newer release "
            "of Medsilo has used it. Install that release; nothing was changed"
        )
    return found == known[0]


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
