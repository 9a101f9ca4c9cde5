"""With many hospitals the coordinator needs more open files than a process has unless it asks."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from coordinator.daemon import _allow_open_files


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
