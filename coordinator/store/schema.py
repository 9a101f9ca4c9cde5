"""Brings a database's tables up to this release's (Alembic), and refuses those of a newer one."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from medsilo.coordinator.store.lease import is_taken
from medsilo.privacy.errors import ConfigurationError

if TYPE_CHECKING:
    from alembic.config import Config

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
        from alembic import command  # a while to load, and most databases are up to date

        command.upgrade(_config(connection), "head")
        connection.commit()
    log.info("the database's schema is %s now", revisions()[-1])
    return True


def revisions() -> list[str]:
    """The schemas that this release knows, oldest first, by the names of their files."""
    names = (re.match(r"r(\d{4})", path.name) for path in (MIGRATIONS / "versions").glob("r*.py"))
    return sorted(name[1] for name in names if name is not None)


def _is_current(connection: Connection) -> bool:
    named = inspect(connection).has_table("alembic_version")
    found = connection.scalar(text("SELECT version_num FROM alembic_version")) if named else None
    known = revisions()
    if found is not None and found not in known:
        raise ConfigurationError(
            f"store: the database's schema is {found}, and this release knows none after {known[-1]}: a newer release "
            "of Medsilo has used it. Install that release; nothing was changed"
        )
    return bool(found == known[-1])


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
