"""Coordinators on PostgreSQL: one dies or is stopped, another takes over; the database goes away and comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from medsilo.coordinator.store.records import Participation
from medsilo.coordinator.store.store import Store
from tests.support.network.proxy import Proxy
from tests.support.postgres_cluster import PASSWORD, Cluster
from tests.support.runs.checks import (
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_models_are_nearly,
    assert_signed,
)
from tests.support.runs.federation import Federation, free_port
from tests.support.runs.masked import masked

Make = Callable[..., Federation]


def on_postgres(federation: Make, postgres: Cluster, *, rounds: int = 1) -> Federation:
    """A federation of which ``standby.yaml`` starts another coordinator: same database, state folder and address."""
    one = federation(coordinator={"store": postgres.new_database(), "lease_seconds": 3}, run={"rounds": rounds})
    one.write("standby.yaml", one.coordinator_config)
    return one


def first_round(store: Store) -> Mapping[str, Participation]:
    state = store.round("test", 0)
    return state.participants if state is not None else {}


def assert_nothing_lost(one: Federation) -> None:
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
    assert PASSWORD not in "".join(path.read_text() for path in one.folder.glob("*.log"))


def test_when_the_coordinator_dies_in_mid_round_another_takes_over_and_counts_every_round_once(
    federation: Make, postgres: Cluster
) -> None:
    one = on_postgres(federation, postgres, rounds=2)
    first = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    second = one.start_coordinator("standby.yaml")
    one.wait_to_say("standby", "waiting to take over: another coordinator is serving")
    proxy = Proxy(one.port, hold_after=100_000)  # half of hospital3's first update
    one.write_silo("hospital3", port=proxy.port)
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_for("half an update", proxy.held.is_set)
    looking = Store(one.coordinator_config["store"])
    one.wait_for("two updates", lambda: sum(p.delivered_at is not None for p in first_round(looking).values()) == 2)
    accepted = first_round(looking)
    first.kill()
    first.wait()
    proxy.release()
    one.finish(*silos, second)
    proxy.close()

    found = first_round(looking)
    looking.close()
    # What the round's end adds: how each update compares with the others'.
    assert [replace(found[name], change=None) for name in one.silos[:2]] == [accepted[name] for name in one.silos[:2]]
    assert_nothing_lost(one)
    assert "round 1 of 2 has ended" in one.said("standby")
    for party in ("silo audit verify --config hospital1.yaml", "coordinator audit verify --config standby.yaml"):
        one.command(*party.split())


def test_when_the_coordinator_dies_in_a_masked_round_all_mask_again_for_another_which_adds_up_one_roster(
    federation: Make, postgres: Cluster
) -> None:
    one = masked(federation, coordinator={"store": postgres.new_database(), "lease_seconds": 3})
    one.write("standby.yaml", one.coordinator_config)
    first = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    second = one.start_coordinator("standby.yaml")
    one.wait_to_say("standby", "waiting to take over: another coordinator is serving")
    proxy = Proxy(one.port, hold_after=100_000)  # a quarter of hospital3's first update
    one.write_silo("hospital3", port=proxy.port)
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_for("part of an update", proxy.held.is_set)
    looking = Store(one.coordinator_config["store"])
    one.wait_for("two updates", lambda: sum(p.delivered_at is not None for p in first_round(looking).values()) == 2)
    delivered = {p.file for p in first_round(looking).values() if p.file is not None}
    first.kill()
    first.wait()
    proxy.release()
    one.finish(*silos, second)
    proxy.close()

    used = {p.file for p in first_round(looking).values()}
    looking.close()
    assert len(delivered) == 2
    assert not delivered & used, "what was masked for the first roster is not in the sum"
    assert not any((one.folder / "state" / "coordinator" / name).exists() for name in delivered)
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_signed(one)
    fixed = [r["roster_sha256"] for r in one.records("coordinator") if r["kind"] == "roster" and r["round"] == 0]
    assert len(set(fixed)) == len(fixed) == 2
    for name in one.silos:
        rosters = [r for r in one.records(name) if r["kind"] == "roster" and r["round"] == 0]
        assert [r["roster_sha256"] for r in rosters] == fixed
        assert all(r["silos"] == one.silos for r in rosters)
    # Masks of two rosters would not cancel: the models would be noise.
    assert_models_are_nearly(one, one.simulate())
    for party in ("silo audit verify --config hospital1.yaml", "coordinator audit verify --config standby.yaml"):
        one.command(*party.split())


def test_a_coordinator_that_hangs_is_replaced_and_when_it_wakes_up_it_writes_nothing_and_ends(
    federation: Make, postgres: Cluster
) -> None:
    one = on_postgres(federation, postgres)
    first = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    proxy = Proxy(one.port, hold_after=100_000)  # half of hospital3's first update
    one.write_silo("hospital3", port=proxy.port)
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_for("half an update", proxy.held.is_set)
    looking = Store(one.coordinator_config["store"])
    one.wait_for("two updates", lambda: sum(p.delivered_at is not None for p in first_round(looking).values()) == 2)
    os.kill(first.pid, signal.SIGSTOP)
    said = one.said("coordinator")
    # Stopped, it keeps its lock on the journal and its port; the next one needs neither.
    one.write("standby.yaml", {**one.coordinator_config, "listen": f"127.0.0.1:{(port := free_port())}"})
    second = one.start_coordinator("standby.yaml")
    one.wait_to_say("standby", "listening")
    for name in one.silos:
        one.write_silo(name, port=port)
    for silo in silos:
        silo.kill()
        silo.wait()
    proxy.close()
    one.finish(*[one.start_silo(name) for name in one.silos], second)
    kept, stored = files_of(one), everything_in(looking)
    os.kill(first.pid, signal.SIGCONT)
    one.ends_with(first, 12)
    assert "another coordinator has taken over" in one.said("coordinator").removeprefix(said)
    assert "has ended with" not in one.said("coordinator").removeprefix(said)
    assert files_of(one) == kept
    assert everything_in(looking) == stored
    looking.close()

    assert_nothing_lost(one)
    one.command("coordinator", "audit", "verify", "--config", "standby.yaml")


def files_of(one: Federation) -> dict[str, bytes]:
    """The journal and what was made of updates."""
    state = one.folder / "state" / "coordinator"
    return {str(path): path.read_bytes() for path in state.rglob("*") if path.is_file() and "keys" not in path.parts}


def everything_in(store: Store) -> object:
    return store.runs(), store.members("test"), store.rounds("test"), store.downloads("test"), store.refusals()


def test_while_the_database_is_away_silos_wait_and_then_the_run_goes_on(federation: Make, postgres: Cluster) -> None:
    one = on_postgres(federation, postgres)
    coordinator = one.start_coordinator()
    silos = [one.start_silo(name) for name in one.silos]
    one.wait_to_say("coordinator", "round 1 of 1 is open")
    postgres.stop()
    try:
        one.wait_to_say("coordinator", "run test waits for the database")
        one.wait_to_say("hospital1", "the coordinator cannot answer now")
        said = one.command("coordinator", "serve", "--config", "standby.yaml", expect=12)
        assert "If the server is away, start it" in said
        assert PASSWORD not in said
    finally:
        postgres.start()
    one.finish(*silos, coordinator)

    assert_nothing_lost(one)
    assert "run test goes on" in one.said("coordinator")
