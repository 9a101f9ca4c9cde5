"""Cut connections, and journals put back to an earlier state: what was exchanged stays what it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS
from medsilo.privacy.journal.records import read
from tests.support.network.proxy import Cut, Proxy
from tests.support.runs.checks import (
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_signed,
)
from tests.support.runs.federation import PATIENCE, Federation, Process

Make = Callable[..., Federation]

CUTS = (
    Cut(down=60_000),  # in the starting model
    Cut(up=30_000),  # early in the first update
    Cut(up=180_000),  # late in it
    Cut(answer_after=182_000),  # its answer is lost
    Cut(down=40_000),  # in the next download
    Cut(up=100_000),
    Cut(answer_after=182_000),
)


def test_after_connections_that_were_cut_anywhere_all_is_counted_once_and_signed_by_both(federation: Make) -> None:
    one = federation(run={"rounds": 3})
    proxy = Proxy(one.port, cuts=CUTS)
    one.write_silo("hospital2", port=proxy.port)
    try:
        one.run_to_the_end()
    finally:
        proxy.close()
    assert tuple(proxy.made) == CUTS
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_models_are(one, one.simulate())
    assert_signed(one)
    # The answer that was lost held the receipt of an update that counted: it was given again, for the same bytes.
    answers = [r for r in one.messages("hospital2", "received") if r["rpc"] == "SubmitUpdate"]
    assert sum("first.payload" in record["fields"] for record in answers) >= 1


def backup(one: Federation, party: str) -> Path:
    """A copy of a party's journal as it is now, running or not: the checkpoints first, which must not be ahead."""
    there, copy = one.folder / "state" / party / "journal", one.folder / f"{party}.backup"
    copy.mkdir()
    for name in (CHECKPOINTS, RECORDS):
        shutil.copy(there / name, copy / name)
    return copy


def restore(one: Federation, party: str, copy: Path) -> None:
    there = one.folder / "state" / party / "journal"
    shutil.rmtree(there)
    shutil.copytree(copy, there)


def stop(process: Process) -> None:
    process.kill()
    process.wait()


def waits_for_a_task(one: Federation, name: str) -> bool:
    return any(r["rpc"] == "GetTask" and r["peer"].endswith(name) for r in one.messages("coordinator", "received"))


@pytest.mark.parametrize("grown", [False, True], ids=["shorter", "grown again"])
def test_a_coordinator_whose_journal_was_put_back_is_refused_by_its_hospitals(federation: Make, grown: bool) -> None:
    one = federation()
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    copy = backup(one, "coordinator")
    silo = one.start_silo("hospital1")
    one.wait_for("a hospital waiting for its task", lambda: waits_for_a_task(one, "hospital1"))
    stop(coordinator)
    newest = backup_of_newest(one)
    restore(one, "coordinator", copy)
    if grown:
        door = one.door("coordinator")
        for number in range(30):
            door.note(read({"kind": "padding", "number": number}))
        one.close_door("coordinator")
    again = one.start_coordinator()
    assert silo.wait(timeout=PATIENCE) == 9, one.everything_said()
    said = one.said("hospital1").replace("\n", " ")
    if grown:
        assert "its past was rewritten" in said
    else:
        assert "was put back to an earlier state; look for the newer one" in said
    assert not [r for r in one.messages("hospital1", "sent") if r["rpc"] == "SubmitUpdate"]
    # With the newest copy back in its place the hospital goes on.
    stop(again)
    one.processes.remove(silo)
    restore(one, "coordinator", newest)
    before = len(one.messages("hospital1", "received"))
    one.start_coordinator()
    one.start_silo("hospital1")
    one.wait_for(
        "a task that is waited for",
        lambda: (
            len(one.messages("hospital1", "received")) >= before + 2
            and one.messages("hospital1", "sent")[-1]["rpc"] == "GetTask"
        ),
    )


def backup_of_newest(one: Federation) -> Path:
    newest = one.folder / "newest"
    shutil.copytree(one.folder / "state" / "coordinator" / "journal", newest)
    return newest


def test_a_hospital_whose_journal_was_put_back_is_stopped_before_anything_else_leaves(federation: Make) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    silo = one.start_silo("hospital1")
    one.wait_for("a hospital waiting for its task", lambda: waits_for_a_task(one, "hospital1"))
    stop(silo)
    copy = backup(one, "hospital1")
    asked = len(one.messages("coordinator", "received"))
    silo = one.start_silo("hospital1")
    one.wait_for(
        "a second session",
        lambda: [r["rpc"] for r in one.messages("coordinator", "received")[asked:]][-1:] == ["GetTask"],
    )
    stop(silo)
    restore(one, "hospital1", copy)
    said = one.command("silo", "train", "--config", "hospital1.yaml", expect=9).replace("\n", " ")
    assert "was put back to an earlier state; look for the newer one" in said
    assert [r["rpc"] for r in one.messages("hospital1", "sent")][-1] == "Join"
    # What the coordinator said stays in the hospital's journal, as evidence of what is missing from it.
    (refusal,) = (r for r in one.records("hospital1") if r["kind"] == "refusal")
    assert json.dumps(refusal["attestation"])


def test_a_coordinator_that_shows_two_hospitals_two_journals_is_convicted_by_their_evidence(federation: Make) -> None:
    one = federation()
    first, second = one.silos[:2]

    def meet(*names: str) -> None:
        coordinator = one.start_coordinator()
        one.wait_to_say("coordinator", "listening")
        before = {name: len(one.messages(name, "sent")) for name in names}
        silos = [one.start_silo(name) for name in names]
        for name in names:
            one.wait_for(
                f"{name} waiting for its task",
                lambda name=name: (one.messages(name, "sent")[before[name] :] or [{"rpc": ""}])[-1]["rpc"] == "GetTask",
            )
        for process in (*silos, coordinator):
            stop(process)
            one.processes.remove(process)

    def verify(*words: str, expect: int) -> str:
        bundles = [f"{name}.evidence.json" for name in (first, second)]
        for name, bundle in zip((first, second), bundles, strict=True):
            one.command("silo", "audit", "export", "--config", f"{name}.yaml", "--out", bundle)
        return one.command("silo", "audit", "verify", bundles[0], "--peer", bundles[1], *words, expect=expect)

    meet(first, second)
    verify(expect=0)
    copy = backup(one, "coordinator")
    # Each has to have been given a proof from a size beyond the fork: then whatever the sizes are, it shows.
    meet(first)
    meet(first)
    restore(one, "coordinator", copy)
    meet(second)
    meet(second)  # neither has noticed anything
    for name in (first, second):
        one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
    said = verify("--proof", "proof.json", expect=1)
    assert "PROOF: spiffe://test/coordinator/coordinator has signed two histories of its journal" in said
    shutil.copy(one.keys("coordinator") / "audit.pub", one.folder / "coordinator.pub")
    shutil.rmtree(one.folder / "state")
    one.command("silo", "audit", "verify", "proof.json", "--key", "coordinator.pub")
