"""Of the coordinators on one database one serves: whoever has lost the lease can change nothing more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import ConfigurationError, LeaseLostError, StoreError
from tests.support.postgres_cluster import PASSWORD, Cluster

WRITES: dict[str, Callable[[Store], object]] = {
    "settle": lambda store: store.settle(),
    "open_run": lambda store: store.open_run("other", b"{}", "bb"),
    "finish_run": lambda store: store.finish_run("r", 2, ["a"]),
    "answer": lambda store: store.answer(
        "r", "a", accepted=True, missing=[], audit_key="k", certificate_sha256="c"
    ),
    "withdraw": lambda store: store.withdraw(
        "r", "a", reason="why", rounds_acknowledged=[0], statement={}, open_round=None
    ),
    "forget_downloads": lambda store: store.forget_downloads("r"),
    "open_round": lambda store: store.open_round("r", 1, ["a"]),
    "deliver": lambda store: store.deliver("r", 0, "a", file=None, receipt={}, accuracy=None, loss=None),
    "fix_roster": lambda store: store.fix_roster("r", 0, ["a", "b"]),
    "restart_round": lambda store: store.restart_round("r", 0),
    "admit_participant": lambda store: store.admit_participant("r", 0, "c"),
    "close_round": lambda store: store.close_round("r", 0, downloads={"a": {"X": "f"}}, memory_file="m"),
    "refuse": lambda store: store.refuse("a", "Join", "why"),
}  # fmt: skip
READS = {
    "close", "serve", "is_shared", "check_serving", "runs", "is_finished", "members", "run_of_plan", "withdrawals",
    "last_round", "round", "rounds", "downloads", "memory_file", "latest_files", "refusals", "roster",
    "early_end", "first_roster",
}  # fmt: skip


class Coordinators:
    """Coordinators' hands on one database and one state folder."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.lost: list[LeaseLostError] = []
        self._opened: list[Store] = []

    def open(self) -> Store:
        self._opened.append(Store(self.url))
        return self._opened[-1]

    def serve(self, store: Store, *, folder: Path | None = None, stopped: threading.Event | None = None) -> bool:
        return store.serve(
            folder=folder or self.folder, seconds=60, stopped=stopped or threading.Event(), lost=self.lost.append
        )

    def serving(self) -> Store:
        store = self.open()
        assert self.serve(store)
        return store

    def expire(self) -> None:
        """As if the holder had not renewed the lease for its whole time."""
        engine = create_engine(self.url)
        with engine.begin() as connection:
            connection.execute(text("UPDATE lease SET expires_at = clock_timestamp()"))
        engine.dispose()

    def close(self) -> None:
        for store in self._opened:
            store.close()


@pytest.fixture
def coordinators(postgres: Cluster, tmp_path: Path) -> Iterator[Coordinators]:
    made = Coordinators(postgres.new_database(), tmp_path)
    yield made
    made.close()


def everything(store: Store) -> object:
    return (
        store.runs(),
        store.members("r"),
        store.rounds("r"),
        store.roster("r", 0),
        store.downloads("r"),
        store.refusals(),
    )


def until_it_waits(session: Session, thread: threading.Thread, otherwise: str) -> None:
    """Returns once somebody waits for a lock in the database; the thread must not have come through."""
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    while session.scalar(waits) == 0:
        assert thread.is_alive(), otherwise
        session.execute(text("SELECT pg_stat_clear_snapshot()"))


def test_every_change_is_refused_to_a_coordinator_that_has_lost_the_lease(coordinators: Coordinators) -> None:
    assert set(WRITES) | READS == {name for name in dir(Store) if not name.startswith("_")}, "which one is the new?"
    first = coordinators.serving()
    first.open_run("r", b"{}", "aa")
    first.open_round("r", 0, ["a", "b"])
    coordinators.expire()
    second = coordinators.serving()
    before = everything(second)
    for name, write in WRITES.items():
        with pytest.raises(LeaseLostError, match="another coordinator has taken over"):
            write(first)
        assert everything(second) == before, name
    for write in WRITES.values():
        write(second)
    assert everything(second) != before


def test_a_lease_that_has_expired_and_that_nobody_took_still_serves(coordinators: Coordinators) -> None:
    first = coordinators.serving()
    coordinators.expire()
    first.open_run("r", b"{}", "aa")
    assert first.runs() == [("r", "{}", None)]


def test_the_second_waits_until_the_first_gives_the_lease_back(coordinators: Coordinators) -> None:
    first, second = coordinators.serving(), coordinators.open()
    waiting = threading.Thread(target=coordinators.serve, args=(second,))
    waiting.start()
    with pytest.raises(StoreError, match="only the coordinator that serves"):
        second.open_run("r", b"{}", "aa")
    first.open_run("r", b"{}", "aa")
    first.close()
    waiting.join(timeout=60)
    second.open_round("r", 0, ["a"])


def test_a_waiting_coordinator_can_be_stopped(coordinators: Coordinators) -> None:
    coordinators.serving()
    stopped = threading.Event()
    waiting = threading.Timer(0.1, stopped.set)
    waiting.start()
    assert not coordinators.serve(coordinators.open(), stopped=stopped)


def test_a_standby_is_ready_for_systemd_while_it_waits_and_says_for_what(
    coordinators: Coordinators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators.serving()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        stopped = threading.Event()
        waiting = threading.Thread(target=coordinators.serve, args=(coordinators.open(),), kwargs={"stopped": stopped})
        waiting.start()
        told = manager.recv(1000).decode().split("\n")
        stopped.set()
        waiting.join()
    assert told[0] == "READY=1"
    assert told[1].startswith("STATUS=waiting to take over: another coordinator is serving")


def test_a_change_under_way_is_finished_before_another_takes_over(coordinators: Coordinators) -> None:
    first, second = coordinators.serving(), coordinators.open()
    first.open_run("r", b"{}", "aa")
    coordinators.expire()
    taking = threading.Thread(target=coordinators.serve, args=(second,))
    with first._writing() as session:
        session.execute(text("UPDATE run SET finished_at = 'now'"))
        taking.start()
        until_it_waits(session, taking, "it took over in the middle of a change")
    taking.join(timeout=60)
    assert second.runs() == [("r", "{}", "now")]
    second.refuse("a", "Join", "why")
    with pytest.raises(LeaseLostError):
        first.refuse("a", "Join", "why")


def test_what_is_read_after_settling_cannot_be_changed_by_an_earlier_change_that_nobody_waits_for(
    coordinators: Coordinators,
) -> None:
    store = coordinators.serving()
    store.open_run("r", b"{}", "aa")
    read: list[object] = []

    def settle() -> None:
        store.settle()
        read.extend(store.runs())

    settling = threading.Thread(target=settle)
    with store._writing() as session:
        session.execute(text("UPDATE run SET finished_at = 'now'"))
        settling.start()
        until_it_waits(session, settling, "it did not wait for the change under way")
    settling.join(timeout=60)
    assert read == [("r", "{}", "now")]


def test_the_holder_hears_of_a_take_over(coordinators: Coordinators) -> None:
    first = coordinators.serving()
    coordinators.expire()
    coordinators.serving()
    assert first._lease is not None
    with pytest.raises(LeaseLostError):
        first._lease._renew()


def test_commands_that_only_look_can_change_nothing(coordinators: Coordinators) -> None:
    coordinators.serving().open_run("r", b"{}", "aa")
    looking = coordinators.open()
    assert looking.runs() == [("r", "{}", None)]
    with pytest.raises(StoreError, match="read-only"), looking._reading() as session:
        session.execute(text("DELETE FROM run"))
    assert looking.runs() == [("r", "{}", None)]


def test_a_database_serves_one_state_folder_only(coordinators: Coordinators, tmp_path: Path) -> None:
    coordinators.serving().close()
    with pytest.raises(ConfigurationError, match="belongs to another state folder"):
        coordinators.serve(coordinators.open(), folder=tmp_path / "another")
    coordinators.serving()


def test_a_server_that_is_away_or_a_wrong_password_says_what_to_do_and_tells_no_password(
    postgres: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database()
    away = url.replace(f"host={postgres.folder}", f"host={tmp_path}").replace("medsilo@", f"medsilo:{PASSWORD}@")
    with pytest.raises(StoreError, match="If the server is away, start it") as caught:
        Store(away)
    assert PASSWORD not in str(caught.value)
    without = url.replace(f"&passfile={postgres.passfile}", "")
    monkeypatch.setenv("PGPASSWORD", "wrong")
    with pytest.raises(StoreError, match=r"password authentication failed(.|\n)*PGPASSWORD"):
        Store(without)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    Store(without).close()
