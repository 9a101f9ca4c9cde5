"""What every database behind the coordinator must remember: one set of tests, run on each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.store.records import EVERYONE
from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import ConfigurationError
from tests.support.postgres_cluster import Cluster

PLAN = b'{"run":"r"}'
RECEIPT = {"call_id": "ab" * 16, "messages": 3, "log_index": 7}


@pytest.fixture
def reopen(url: str, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Opens the same database again, after closing whatever had it open."""
    opened: list[Store] = []

    def again() -> Store:
        if opened:
            opened.pop().close()
        opened.append(Store(url))
        assert serve(opened[0], tmp_path)
        return opened[0]

    yield again
    for store in opened:
        store.close()


def serve(store: Store, folder: Path) -> bool:
    return store.serve(folder=folder, seconds=60, stopped=threading.Event(), lost=print)


@pytest.fixture
def store(reopen: Callable[[], Store]) -> Store:
    opened = reopen()
    opened.open_run("r", PLAN, "aa")
    return opened


def deliver(store: Store, number: int, silo: str, **changes: Any) -> None:
    content: dict[str, Any] = {"file": f"{number}/{silo}", "receipt": RECEIPT, "accuracy": 0.5, "loss": 1.25}
    store.deliver("r", number, silo, **{**content, **changes})


def test_a_run_is_opened_once_and_continued_afterwards(store: Store, reopen: Callable[[], Store]) -> None:
    store.open_run("r", PLAN, "aa")
    again = reopen()
    again.open_run("r", PLAN, "aa")
    assert again.runs() == [("r", PLAN.decode(), None)]
    assert not again.is_finished("r")


def test_a_plan_that_nobody_has_answered_may_be_corrected(store: Store, reopen: Callable[[], Store]) -> None:
    reopen().open_run("r", b'{"run":"changed"}', "bb")
    assert reopen().runs() == [("r", '{"run":"changed"}', None)]


def test_a_changed_plan_is_refused_and_the_old_one_stays(store: Store, reopen: Callable[[], Store]) -> None:
    store.answer("r", "a", accepted=False, missing=["rounds"], audit_key="cc", certificate_sha256="dd")
    with pytest.raises(ConfigurationError, match=r"another plan.*another name"):
        reopen().open_run("r", b'{"run":"changed"}', "bb")
    again = reopen()
    assert again.runs() == [("r", PLAN.decode(), None)]
    again.open_run("other", b"{}", "bb")
    assert [name for name, _, _ in again.runs()] == ["r", "other"]


def test_answers_are_kept_and_a_later_one_counts(store: Store, reopen: Callable[[], Store]) -> None:
    store.answer("r", "b", accepted=False, missing=["PEER_DERIVED"], audit_key="k1", certificate_sha256="c1")
    store.answer("r", "a", accepted=True, missing=[], audit_key="k2", certificate_sha256="c2")
    found = reopen().members("r")
    assert list(found) == ["a", "b"]
    assert (found["b"].accepted, found["b"].missing, found["b"].audit_key) == (False, ("PEER_DERIVED",), "k1")
    reopen().answer("r", "b", accepted=True, missing=[], audit_key="k3", certificate_sha256="c3")
    found = reopen().members("r")
    assert (found["b"].accepted, found["b"].missing, found["b"].certificate_sha256) == (True, (), "c3")
    assert reopen().members("another") == {}


def test_a_delivered_update_survives(store: Store, reopen: Callable[[], Store]) -> None:
    store.open_round("r", 0, ["a", "b"])
    deliver(store, 0, "a")
    state = reopen().round("r", 0)
    assert state is not None
    assert state.closed_at is None
    a, b = state.participants["a"], state.participants["b"]
    assert (a.file, a.receipt, a.accuracy, a.loss) == ("0/a", RECEIPT, 0.5, 1.25)
    assert a.delivered_at is not None
    assert (b.delivered_at, b.file, b.receipt, b.accuracy, b.late) == (None, None, None, None, False)


def test_closing_a_round_keeps_downloads_memory_and_who_was_late(store: Store, reopen: Callable[[], Store]) -> None:
    store.open_round("r", 0, ["a", "b"])
    deliver(store, 0, "a")
    downloads = {"a": {"PEER_DERIVED": "z-a"}, EVERYONE: {"PEER_DERIVED": "z"}}
    store.close_round("r", 0, downloads=downloads, memory_file="memory-0")
    again = reopen()
    state = again.last_round("r")
    assert state is not None
    assert state.closed_at is not None
    assert {silo: p.late for silo, p in state.participants.items()} == {"a": False, "b": True}
    assert again.downloads("r") == downloads
    assert again.memory_file("r") == "memory-0"


def test_a_later_download_replaces_its_own_and_leaves_the_others(store: Store, reopen: Callable[[], Store]) -> None:
    for number, downloads in enumerate(({"a": {"f": "1"}, "b": {"f": "2"}}, {"a": {"f": "3"}})):
        store.open_round("r", number, ["a"])
        store.close_round("r", number, downloads=downloads, memory_file=None)
    again = reopen()
    assert again.downloads("r") == {"a": {"f": "3"}, "b": {"f": "2"}}
    assert again.memory_file("r") is None


def test_closing_a_round_is_all_or_nothing(store: Store, reopen: Callable[[], Store]) -> None:
    store.open_round("r", 0, ["a"])
    with pytest.raises(Exception, match="JSON serializable"):
        store.close_round("r", 0, downloads={"a": {"f": "1"}, "b": {"f": object()}}, memory_file="memory")
    again = reopen()
    state = again.round("r", 0)
    assert state is not None
    assert state.closed_at is None
    assert not state.participants["a"].late
    assert again.downloads("r") == {}
    assert again.memory_file("r") is None


def test_the_latest_files_are_each_silos_last_delivered_ones(store: Store, reopen: Callable[[], Store]) -> None:
    for number, delivering in enumerate((["a", "b"], ["a"], [])):
        store.open_round("r", number, ["a", "b", "c"])
        for silo in delivering:
            deliver(store, number, silo)
    assert reopen().latest_files("r") == {"a": "1/a", "b": "0/b"}


def test_an_update_without_tensors_has_no_file(store: Store) -> None:
    store.open_round("r", 0, ["a"])
    deliver(store, 0, "a", file=None, accuracy=None, loss=None)
    assert store.latest_files("r") == {}


def test_rounds_come_in_order_and_only_their_own_runs(store: Store, reopen: Callable[[], Store]) -> None:
    store.open_run("other", PLAN, "aa")
    for number in (0, 1, 2, 10):
        store.open_round("r", number, ["a"])
    store.open_round("other", 3, ["x"])
    again = reopen()
    assert [state.number for state in again.rounds("r")] == [0, 1, 2, 10]
    last = again.last_round("r")
    assert last is not None
    assert last.number == 10
    assert again.round("r", 3) is None
    assert again.last_round("none") is None
    assert again.rounds("none") == []


def test_a_silo_is_admitted_to_a_round_once(store: Store) -> None:
    store.open_round("r", 0, ["a"])
    deliver(store, 0, "a")
    store.admit_participant("r", 0, "b")
    store.admit_participant("r", 0, "a")
    state = store.round("r", 0)
    assert state is not None
    assert list(state.participants) == ["a", "b"]
    assert state.participants["a"].file == "0/a"


def test_a_finished_run_stays_finished(store: Store, reopen: Callable[[], Store]) -> None:
    store.finish_run("r", 3, ["a"])
    again = reopen()
    assert again.is_finished("r")
    last = again.last_round("r")
    assert last is not None
    assert (last.number, list(last.participants)) == (3, ["a"]), "the run's end and where it is fetched are one step"
    again.open_run("r", PLAN, "aa")
    assert again.is_finished("r")


def test_a_roster_is_fixed_once_and_survives(store: Store, reopen: Callable[[], Store]) -> None:
    assert store.roster("r", 0) is None
    fixed_at = store.fix_roster("r", 0, ["a", "b"])
    again = reopen()
    assert again.fix_roster("r", 0, ["a", "c"]) == fixed_at
    assert again.roster("r", 0) == (("a", "b"), fixed_at)
    assert again.roster("r", 1) is None
    assert again.roster("other", 0) is None


def test_a_restarted_round_has_the_same_silos_and_nothing_delivered(store: Store, reopen: Callable[[], Store]) -> None:
    for number in (0, 1):
        store.open_round("r", number, ["a", "b"])
        deliver(store, number, "a")
    assert store.restart_round("r", 1) == ["1/a"]
    again = reopen()
    last = again.last_round("r")
    assert last is not None
    assert [(p.silo, p.delivered_at, p.file, p.receipt) for p in last.participants.values()] == [
        ("a", None, None, None),
        ("b", None, None, None),
    ]
    assert again.latest_files("r") == {"a": "0/a"}, "earlier rounds stay"
    assert again.restart_round("r", 1) == []


def test_refusals_survive_newest_first(store: Store, reopen: Callable[[], Store]) -> None:
    for number in range(5):
        store.refuse(f"peer{number}", "SubmitUpdate", f"reason {number}")
    again = reopen()
    assert [r.reason for r in again.refusals()] == [f"reason {n}" for n in (4, 3, 2, 1, 0)]
    assert [r.peer for r in again.refusals(limit=2)] == ["peer4", "peer3"]


def test_threads_deliver_side_by_side_and_nothing_is_lost(store: Store, reopen: Callable[[], Store]) -> None:
    silos = [f"h{number}" for number in range(12)]
    store.open_round("r", 0, silos)
    failures: list[Exception] = []

    def work(silo: str) -> None:
        try:
            deliver(store, 0, silo)
            store.refuse(silo, "Join", "again")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(silo,)) for silo in silos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    again = reopen()
    assert set(again.latest_files("r")) == set(silos)
    assert len(again.refusals()) == 12


@pytest.mark.parametrize("url", ["sqlite:////no/such/folder/x.db", "nosuch://x", "mysql+nosuch://x/y"])
def test_a_database_that_cannot_be_opened_is_a_configuration_error_that_names_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match=url.replace("+", r"\+")):
        Store(url)


def test_a_server_without_an_encoding_of_its_own_keeps_names_as_they_are(postgres: Cluster, tmp_path: Path) -> None:
    store = Store(postgres.without_encoding())
    try:
        assert serve(store, tmp_path)
        store.refuse("spiffe://test/silo/a", "Join", "Köln: über der Zeit")
        assert [refusal.reason for refusal in store.refusals()] == ["Köln: über der Zeit"]
    finally:
        store.close()


def test_a_file_that_is_no_database_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigurationError, match="store"):
        Store(f"sqlite:///{tmp_path / 'store.db'}")


def test_a_withdrawal_takes_the_silos_updates_along_and_stays_until_a_new_yes(reopen: Callable[[], Store]) -> None:
    store = reopen()
    store.open_run("r", PLAN, "aa")
    assert (store.run_of_plan("aa"), store.run_of_plan("bb")) == ("r", None)
    for number in (0, 1):
        store.open_round("r", number, ["a", "b"])
        deliver(store, number, "a")
        if number == 0:
            deliver(store, number, "b")
            store.close_round("r", number, downloads={"a": {"X": "f"}, EVERYONE: {"X": "g"}}, memory_file=None)
    files = store.withdraw("r", "a", reason="why", rounds_acknowledged=[0, 1], statement={"payload": "p"}, open_round=1)
    assert sorted(files) == ["0/a", "1/a"]
    store = reopen()
    found = store.withdrawals("r")["a"]
    assert (found.reason, found.rounds_acknowledged, found.dropped_round) == ("why", (0, 1), 1)
    assert store.latest_files("r") == {"b": "0/b"}
    assert set(store.downloads("r")) == {EVERYONE}
    last, first = store.round("r", 1), store.round("r", 0)
    assert last is not None
    assert first is not None
    assert set(last.participants) == {"b"}
    assert first.participants["a"].delivered_at is not None, "what it took part in is not rewritten"
    for accepted in (False, True):
        assert set(store.withdrawals("r")) == {"a"}
        store.answer("r", "a", accepted=accepted, missing=[], audit_key="k", certificate_sha256="c")
    assert store.withdrawals("r") == {}


@pytest.mark.parametrize("place", ["medsilo:{}@db.example/medsilo", "medsilo@db.example/medsilo?password={}"])
def test_a_password_in_the_configuration_is_refused_and_not_shown(tmp_path: Path, place: str) -> None:
    shipped = Path(__file__).parents[3] / "configs" / "coordinator.yaml"
    changed = tmp_path / "coordinator.yaml"
    changed.write_text(shipped.read_text() + f"\nstore: postgresql+psycopg://{place.format('geheim')}\n")
    with pytest.raises(ConfigurationError, match=r"`store`: holds a password.*PGPASSWORD") as caught:
        CoordinatorConfig.read(changed)
    assert "geheim" not in str(caught.value)
