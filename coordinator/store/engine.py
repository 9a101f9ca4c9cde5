"""Connections to the store's database: SQLite, or PostgreSQL; and what its failures mean."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import SQLAlchemyError

from medsilo.privacy.errors import ConfigurationError, DiskError
from medsilo.privacy.files.durable import disk_error

_FAILED = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


def database_disk_error(engine: Engine, error: SQLAlchemyError) -> DiskError | None:
    """What SQLite says of a disk that is full, read-only or failing, or of too many open files."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF  # the rest tells kinds of it apart
    if code not in (*_FAILED, sqlite3.SQLITE_CANTOPEN) or engine.url.database is None:
        return None
    folder = Path(engine.url.database).absolute().parent
    # SQLite calls many things an input/output error, or says only that a file cannot be opened.
    found = None if code == sqlite3.SQLITE_FULL else _refusal(folder)
    if found is None and code in _FAILED:
        found = OSError(_FAILED[code], "")
    return None if found is None else disk_error(found, folder)


def has_password(url: str) -> bool:
    """Whether a database's URL holds a password, whose place is not in a configuration file."""
    try:
        location = make_url(url)
    except SQLAlchemyError:
        return False
    return location.password is not None or "password" in location.query


def make_engine(url: URL) -> Engine:
    """What connects to a store's database; raises ``ConfigurationError`` for one of another kind."""
    name = url.get_backend_name()
    if name == "sqlite":
        engine = create_engine(url)
        event.listen(engine, "connect", _sqlite_pragmas)
        return engine
    if name != "postgresql":
        raise ConfigurationError(f"store: {url.render_as_string()} is neither SQLite nor PostgreSQL")
    # A server whose machine or network is gone must not hold a call for hours. And a server that was set up without a
    # locale, as in a bare container, has no encoding of its own.
    settings = {
        "client_encoding": "utf8",
        "connect_timeout": 5,
        "keepalives_idle": 5,
        "keepalives_interval": 5,
        "keepalives_count": 2,
        "tcp_user_timeout": 10_000,
    }
    given = {key: value for key, value in settings.items() if key not in url.query}
    engine = create_engine(url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, connect_args=given)
    event.listen(engine, "connect", _postgres_settings)
    return engine


def _postgres_settings(connection: Any, _: Any) -> None:
    # A coordinator that is stopped in mid-transaction must not keep another from taking over.
    connection.execute("SET idle_in_transaction_session_timeout = '10s'")
    connection.execute("SET lock_timeout = '10s'")
    connection.commit()


def _sqlite_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()


def _refusal(folder: Path) -> OSError | None:
    """What the system says to a file that is to be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None
