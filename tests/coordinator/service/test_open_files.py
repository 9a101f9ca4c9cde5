"""With many hospitals the coordinator needs more open files than a process has unless it asks."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from medsilo.coordinator.daemon import _allow_open_files
from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import DiskError


@pytest.fixture
def most() -> Iterator[int]:
    """What this process may have at most; it begins with few, and gets back what it had."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def allowed() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_it_asks_for_as_many_as_its_hospitals_need(most: int, caplog: pytest.LogCaptureFixture) -> None:
    _allow_open_files(100)
    assert 1000 < allowed() < most, "twice what a round's end was seen to take: five a hospital"
    assert not caplog.records


def test_it_never_asks_for_less_than_it_has(most: int) -> None:
    _allow_open_files(1)
    assert allowed() == 300


def test_it_takes_what_it_may_have_and_warns_where_that_is_not_enough(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    _allow_open_files(most)
    assert allowed() == most
    assert f"may have {most} files" in caplog.text
    assert "LimitNOFILE=" in caplog.text


def test_a_database_that_too_many_open_files_keep_shut_is_told_with_the_way_out(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    Store(f"sqlite:///{tmp_path / 'coordinator.db'}").close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())), before[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(DiskError, match="ulimit -n") as caught:
            Store(f"sqlite:///{tmp_path / 'coordinator.db'}").runs()
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert caught.value.exit_code == 13


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY])
def test_sqlites_files_on_a_read_only_disk_are_not_called_a_broken_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def read_only(**_: object) -> object:
        raise OSError(errno.EROFS, "Read-only file system")

    store = Store(f"sqlite:///{tmp_path / 'coordinator.db'}")
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    said = sqlite3.OperationalError("disk I/O error")
    said.sqlite_errorcode = code
    with pytest.raises(DiskError, match="the disk is read-only"), store._reading():
        raise OperationalError("SELECT", None, said)
    store.close()
