"""What SQLite says of a disk that is full or read-only is told as that, and nothing of the change is kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import DiskError


def grow(store: Store) -> None:
    for number in range(2000):
        store.refuse("spiffe://test/silo/a", "Join", f"{number}" * 500)


def test_a_full_disk_is_told_as_one_and_what_was_kept_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    Store(url).close()
    pages = sqlite3.connect(tmp_path / "store.db").execute("PRAGMA page_count").fetchone()[0]

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages + 4}")

    event.listen(Engine, "connect", limit)
    try:
        store = Store(url)
        with pytest.raises(DiskError, match=f"{tmp_path}: the disk is full"):
            grow(store)
        kept = len(store.refusals(2000))
        store.close()
    finally:
        event.remove(Engine, "connect", limit)
    again = Store(url)
    assert len(again.refusals(2000)) == kept > 0
    again.refuse("spiffe://test/silo/a", "Join", "there is room again")
    again.close()


def test_a_read_only_database_is_told_as_a_read_only_disk(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    event.listen(store._engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA query_only = 1"))
    with pytest.raises(DiskError, match="the disk is read-only"):
        store.refuse("spiffe://test/silo/a", "Join", "no")
    store.close()
