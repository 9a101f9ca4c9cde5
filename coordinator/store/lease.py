"""The lease on a PostgreSQL database: of several coordinators one serves, and the next takes over when it dies.

The holder renews the lease's one row; when it has expired, by the database's clock, another may take it and counts its
``epoch`` up. Whoever wants to change anything proves, in the same transaction, that the epoch is still its own: a
coordinator that was only stopped and wakes up after a take-over can change nothing more.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import ColumnElement, Connection, DateTime, Engine, func, or_, select, update
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError
from sqlalchemy.orm import Session

from medsilo.coordinator.store.tables import Lease as Row
from medsilo.privacy.errors import ConfigurationError, LeaseLostError
from medsilo.privacy.party import systemd as service_manager

log = logging.getLogger(__name__)

AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
"""What a server that is away, restarting, or tired of waiting for us makes SQLAlchemy raise."""
_PAUSE = 1.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps, unlike that of ``time.monotonic``."""


def is_taken(connection: Connection) -> bool:
    """Whether some coordinator's lease is in force."""
    return connection.scalar(select(Row.id).where(Row.expires_at > _clock())) is not None


def folder_id(state: Path) -> str:
    """What tells a state folder from others, wherever it is mounted; made once."""
    path = state / "folder-id"
    if not path.exists():
        state.mkdir(parents=True, exist_ok=True)
        draft = state / f".folder-id-{secrets.token_hex(8)}"
        draft.write_text(secrets.token_hex(16))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another coordinator on the same folder was first
        finally:
            draft.unlink()
    return path.read_text()


class Lease:
    """One coordinator's hold on a database. ``seconds``: how long it lasts without being renewed; a third of that
    lies between two renewals. ``folder``: the state folder's ``folder_id``.
    """

    def __init__(self, engine: Engine, *, folder: str, seconds: float) -> None:
        self._engine = engine
        self._folder = folder
        self._seconds = seconds
        self._epoch = -1
        self._sure_until = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, stopped: threading.Event) -> bool:
        """Waits until the lease is ours; False if ``stopped`` came first.

        Raises ``ConfigurationError`` if the database belongs to another state folder.
        """
        said = ""
        while not stopped.is_set():
            try:
                if (waiting_for := self._take()) is None:
                    return True
            except AWAY as error:
                waiting_for = f"the database does not answer ({error})"
            if waiting_for != said:
                said = waiting_for
                log.info("waiting to take over: %s", waiting_for)
                # To wait is what a standby is for: it has started, and no time limit of a start is for it.
                service_manager.notify(f"READY=1\nSTATUS=waiting to take over: {waiting_for.splitlines()[0]}")
            stopped.wait(_PAUSE)
        return False

    def keep(self, lost: Callable[[LeaseLostError], None]) -> None:
        """Begins to renew the lease, until ``release``; calls ``lost`` when another coordinator has it."""
        self._thread = threading.Thread(target=self._renew_for_ever, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    def check(self, session: Session) -> None:
        """Makes sure that the lease stays ours until this transaction ends; raises ``LeaseLostError`` if it is not.

        The row is locked, so that a take-over waits for the transaction, and transactions for each other.
        """
        if session.scalar(select(Row.epoch).with_for_update()) != self._epoch:
            raise _lost()

    @property
    def is_sure(self) -> bool:
        """Whether nobody else can have taken the lease yet, by this machine's clock alone."""
        return time.clock_gettime(_CLOCK) < self._sure_until

    def release(self) -> None:
        """Gives the lease back, so that the next coordinator need not wait for its end."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._sure_until = 0.0
        try:
            with self._engine.begin() as connection:
                connection.execute(update(Row).where(Row.epoch == self._epoch).values(expires_at=None))
        except AWAY:
            log.warning("the lease could not be given back; another coordinator has to wait for its end")

    def _take(self) -> str | None:
        """Takes the lease if it is free; else what there is to wait for."""
        started = time.clock_gettime(_CLOCK)
        with self._engine.begin() as connection:
            row = connection.execute(select(Row.holder, Row.folder)).one()
            if row.folder not in (None, self._folder):
                raise ConfigurationError(
                    "store: the database belongs to another state folder than `state:` names, and what it says is of "
                    "the files there. Coordinators on one database need one state folder on shared storage; for a "
                    "new federation, make a new database"
                )
            epoch = connection.scalar(
                update(Row)
                .where(or_(Row.expires_at.is_(None), Row.expires_at <= _clock()))
                .values(
                    epoch=Row.epoch + 1,
                    holder=f"{socket.gethostname()}, process {os.getpid()}",
                    folder=self._folder,
                    expires_at=self._expiry(),
                )
                .returning(Row.epoch)
            )
        if epoch is None:
            return f"another coordinator is serving ({row.holder})"
        self._epoch = epoch
        self._sure_until = started + self._seconds
        return None

    def _renew_for_ever(self, lost: Callable[[LeaseLostError], None]) -> None:
        away = False
        while not self._ended.wait(_PAUSE if away else self._seconds / 3):
            try:
                self._renew()
            except LeaseLostError as error:
                self._sure_until = 0.0
                lost(error)
                return
            except AWAY as error:
                if not away:
                    log.error("the database does not answer; silos wait until it does, and nothing is lost: %s", error)
                away = True
            else:
                if away:
                    log.info("the database answers again")
                away = False

    def _renew(self) -> None:
        started = time.clock_gettime(_CLOCK)
        with self._engine.begin() as connection:
            renewed = connection.execute(
                update(Row).where(Row.epoch == self._epoch).values(expires_at=self._expiry()).returning(Row.id)
            )
            if renewed.first() is None:
                raise _lost()
        self._sure_until = started + self._seconds

    def _expiry(self) -> object:
        return _clock() + timedelta(seconds=self._seconds)


def _lost() -> LeaseLostError:
    return LeaseLostError(
        "another coordinator has taken over the run, as this one did not answer for too long; this one changes nothing "
        "more. Started again, it waits to take over in its turn"
    )


def _clock() -> ColumnElement[datetime]:
    # Unlike now(), it goes on while the transaction waits.
    return func.clock_timestamp(type_=DateTime(timezone=True))
