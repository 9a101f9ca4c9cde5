"""The database of a coordinator: SQLite, or PostgreSQL, where only the one that has the lease may change anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from medsilo.coordinator.store import schema
from medsilo.coordinator.store.engine import database_disk_error, make_engine
from medsilo.coordinator.store.lease import AWAY, Lease, folder_id
from medsilo.privacy.errors import ConfigurationError, LeaseLostError, StoreError


class Database:
    """Connections, the lease, and transactions.

    Raises ``ConfigurationError`` for one that cannot be opened, ``StoreError`` for a server that does not answer.
    """

    def __init__(self, url: str) -> None:
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        named = "whose URL stands there"  # not the URL: one that is mistyped may hold a password
        try:
            location = make_url(url)
            named = location.render_as_string()  # without a password
            self._engine = make_engine(location)
            self._sqlite = self._engine.dialect.name == "sqlite"
            self._upgraded = schema.upgrade(self._engine)
        except OperationalError as error:
            if (failed := database_disk_error(self._engine, error)) is not None:
                raise failed from None
            if self._sqlite:
                raise ConfigurationError(f"store: the database {named} cannot be opened: {error.orig}") from None
            raise StoreError(
                f"store: the database {named} does not let us in: {error.orig}\nIf the server is away, start it and "
                "try again; if the name or the user is wrong, mend `store:`; a password is read from PGPASSWORD or "
                "from the file that PGPASSFILE names (docs/postgresql.md)"
            ) from None
        except (SQLAlchemyError, ImportError) as error:
            raise ConfigurationError(f"store: the database {named} cannot be opened: {error}") from None

    def close(self) -> None:
        """Gives back the lease and lets go of all connections."""
        if self._lease is not None:
            self._lease.release()
        self._engine.dispose()

    def serve(
        self,
        *,
        folder: Path,
        seconds: float,
        stopped: threading.Event,
        lost: Callable[[LeaseLostError], None],
    ) -> bool:
        """Gets leave to change what is stored: at once with SQLite, whose journal lock is enough; with PostgreSQL when
        no other coordinator serves any more. False if ``stopped`` came first. ``lost`` is called from another thread
        when another coordinator has taken over.

        ``folder``: the state folder, which the database belongs to from now on. ``seconds``: how long after this
        coordinator's death another may take over.
        """
        if self._sqlite:
            return True
        lease = Lease(self._engine, folder=folder_id(folder), seconds=seconds)
        if not lease.acquire(stopped):
            return False
        self._lease = lease
        lease.keep(lost)
        self._upgraded = schema.upgrade(self._engine, holding_lease=True)
        return True

    @property
    def is_shared(self) -> bool:
        """Whether several coordinators may have it open."""
        return not self._sqlite

    def check_serving(self) -> None:
        """Raises ``StoreError`` while another coordinator may have taken over."""
        if self._lease is not None and not self._lease.is_sure:
            raise StoreError(
                "the database has not answered for so long that another coordinator may have taken over; nothing is "
                "answered until it does"
            )

    def settle(self) -> None:
        """Waits for a change that the database may still be keeping although nobody hears of it any more, the
        connection being lost: what is read after this stays so."""
        with self._writing():
            pass  # every change holds the lease's row until it is kept or dropped, and so did that one

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        """A look at one moment's state."""
        with self._session() as session:
            if not self._sqlite:
                session.connection(
                    execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                )
            yield session

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """A change, in one transaction with the proof that nobody else has taken over."""
        with self._session() as session:
            if self._lease is not None:
                self._lease.check(session)
            elif not self._sqlite:
                raise StoreError("only the coordinator that serves may change its database")
            yield session

    @contextmanager
    def _session(self) -> Iterator[Session]:
        if not self._upgraded:
            raise StoreError(
                "store: a coordinator of an earlier release is serving with this database; use that release's commands "
                "until it has been replaced, or stop it: this release's `coordinator serve` upgrades the database"
            )
        # SQLite has one writer; waiting here is fair and cannot end in "database is locked".
        serial = self._lock if self._sqlite else nullcontext()
        try:
            with serial, Session(self._engine) as session, session.begin():
                yield session
        except AWAY as error:
            if (failed := database_disk_error(self._engine, error)) is not None:
                raise failed from error
            said = f"store: the database does not answer: {getattr(error, 'orig', error)}"
            if self._sqlite:
                raise ConfigurationError(said) from error
            raise StoreError(said) from error
