"""A consent lives on while a run goes on: real daemons over mutual TLS whose hospitals change their minds."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

from medsilo.privacy.consent.withdrawal import History, SignedWithdrawal
from medsilo.privacy.identity.envelope import from_json
from medsilo.privacy.identity.keys import load_audit_key
from medsilo.silo.state.config import SiloConfig
from tests.support.daemons.forked import Forked
from tests.support.network.proxy import Proxy
from tests.support.runs.checks import assert_journals_sound
from tests.support.runs.faults import needs_faults
from tests.support.runs.federation import BIG, PATIENCE, Federation

Make = Callable[..., Federation]


def shown(one: Federation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.command("silo", "consent", "show", "--json", "--config", f"{name}.yaml"))
    return found


def of_kind(one: Federation, party: str, kind: str) -> list[dict[str, Any]]:
    return [record for record in one.records(party) if record["kind"] == kind]


def state_of(one: Federation, name: str) -> dict[str, Any]:
    (found,) = (silo for silo in one.status()["silos"] if silo["silo"] == name)
    return dict(found)


def tombstone_of(one: Federation, name: str, record: dict[str, Any]) -> SignedWithdrawal:
    key = load_audit_key(one.keys(name) / "audit.key").public_key().public_bytes_raw()
    return SignedWithdrawal.open(from_json(record["statement"]), key)


def assert_only_the_withdrawal_left_after(one: Federation, name: str, record: dict[str, Any]) -> None:
    after = [r for r in one.messages(name, "sent") if r["index"] > record["index"]]
    assert {r["rpc"] for r in after} <= {"Withdraw", "Attest"}
    assert {c for r in after for c in r["classes"]} <= {"PROTOCOL", "IDENTITY"}


def test_a_withdrawal_cuts_the_upload_under_way_and_the_others_go_on(federation: Make) -> None:
    one = federation(run={"model": BIG, "rounds": 1})
    proxy = Proxy(one.port, hold_after=3_000_000)
    one.write_silo("hospital2", port=proxy.port)
    coordinator = one.start_coordinator()
    first, second, third = (one.start_silo(name) for name in one.silos)
    one.wait_for("half an upload", proxy.held.is_set)
    command = one.start(
        "silo", "consent", "withdraw", "--yes", "--reason", "the ethics board", "--config", "hospital2.yaml"
    )
    one.processes.remove(second)
    one.wait_for("the record", lambda: bool(of_kind(one, "hospital2", "withdrawal")))
    recorded = [r for r in one.messages("hospital2", "sent") if r["rpc"] == "SubmitUpdate"]
    proxy.release()
    one.processes.append(second)
    one.ends_with(second, 4)
    one.finish(command, first, third, coordinator)
    proxy.close()

    (record,) = of_kind(one, "hospital2", "withdrawal")
    assert (record["run"], record["rounds_acknowledged"], record["reason"]) == ("test", [], "the ethics board")
    assert_only_the_withdrawal_left_after(one, "hospital2", record)
    received = [
        r
        for r in one.messages("coordinator", "received")
        if r["rpc"] == "SubmitUpdate" and r["peer"].endswith("/hospital2")
    ]
    assert len(received) < len(recorded), "the rest of the update was not sent"
    assert "the ethics board" not in json.dumps(one.records("coordinator")), "a hospital's own reasons stay with it"
    stone = tombstone_of(one, "hospital2", record)
    assert (stone.rounds_acknowledged, stone.reason.value, stone.models_unlearned) == (
        (),
        "withdrawn by the hospital",
        False,
    )
    (theirs,) = of_kind(one, "coordinator", "withdrawal")
    assert theirs["statement"] == record["statement"]
    said = one.said("hospital2")
    for words in ("no update of it had arrived", "has been told"):
        assert words in said
    assert "Traceback" not in said
    assert state_of(one, "hospital2")["state"] == "withdrawn"
    assert [s["rounds_delivered"] for s in one.status()["silos"]] == [1, 0, 1]
    assert not list((one.folder / "state/coordinator/runs").rglob("upload-hospital2-*"))
    assert_journals_sound(one)


def test_withdrawn_while_the_coordinator_is_away_told_later_and_given_anew(federation: Make) -> None:
    """A withdrawal outlives crashes on either side; only `silo consent give` undoes it."""
    one = federation(run={"rounds": 3, "training": {"epochs": 4, "batch_size": 16}})
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first, second, third = (one.start_silo(name) for name in one.silos)
    one.wait_to_say("coordinator", "round 2 of 3 is open")
    for process in (first, second, coordinator):  # without hospital 1 the round stays open
        process.kill()
        process.wait()
    said = one.command("silo", "consent", "withdraw", "--yes", "--config", "hospital2.yaml")
    for words in ("its updates of round 1 had arrived", "nothing was unlearned", "could NOT be told"):
        assert words in said.replace("\n", " ")
    found = shown(one, "hospital2")
    assert (found["state"], found["withdrawal"]["coordinator_told"]) == ("withdrawn", False)
    assert found["withdrawal"]["rounds_acknowledged"] == found["rounds_of_runs"]["test"] == [0]
    one.write_consent("hospital2", rounds=99)
    assert shown(one, "hospital2")["state"] == "withdrawn", "editing the file does not undo it"

    coordinator = one.start_coordinator()
    one.wait_for("the coordinator", lambda: one.said("coordinator").count("listening") == 2)
    again = one.command("silo", "train", "--config", "hospital2.yaml", expect=4)
    assert "has withdrawn its consent" in again
    assert "has been told" in again
    (record,) = of_kind(one, "hospital2", "withdrawal")
    assert_only_the_withdrawal_left_after(one, "hospital2", record)
    assert shown(one, "hospital2")["withdrawal"]["coordinator_told"] is True
    assert state_of(one, "hospital2")["state"] == "withdrawn"

    one.command("silo", "consent", "give", "--yes", "--config", "hospital2.yaml")
    (given,) = (r for r in of_kind(one, "hospital2", "consent") if r.get("given"))
    assert given["consent"]["rounds"] == 99
    assert shown(one, "hospital2")["state"] == "in force"
    second = one.start_silo("hospital2")
    one.wait_for("hospital 2 again", lambda: one.said("coordinator").count("hospital2 has joined") == 2)
    one.finish(one.start_silo("hospital1"), second, third, coordinator)
    assert state_of(one, "hospital2")["state"] == "done"
    assert_journals_sound(one)


def test_consent_expires_at_midnight_in_the_middle_of_a_run_and_another_is_narrowed(federation: Make) -> None:
    """Hospital 2's last day ends; hospital 1 takes back its accuracy, then what the run needs; hospital 3 goes on."""
    one = federation(run={"rounds": 6, "training": {"epochs": 8, "batch_size": 16}})
    last = date(2031, 6, 30)
    (one.folder / "today").write_text(last.isoformat())
    one.write_consent("hospital2", expires=last)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first, third = one.start_silo("hospital1"), one.start_silo("hospital3")
    second = one.start("clocked_silo", "hospital2.yaml")
    one.wait_to_say("coordinator", "round 2 of 6 is open")
    classes = [name for name in one.exposures if name != "LOCAL_METRICS"]
    one.write_consent("hospital1", exposures=classes)
    one.wait_for("the changed consent", lambda: len(of_kind(one, "hospital1", "consent")) == 2)
    (one.folder / "today").write_text((last + timedelta(days=1)).isoformat())
    one.ends_with(second, 4)
    one.wait_to_say("coordinator", "round 4 of 6 is open")
    one.write_consent("hospital1", exposures=[name for name in classes if name != "PEER_DERIVED"])
    one.ends_with(first, 4)
    one.finish(third, coordinator)

    for name, reason, words in (
        ("hospital2", "consent expired", f"ended with {last}"),
        ("hospital1", "consent narrowed", "PEER_DERIVED"),
    ):
        (record,) = of_kind(one, name, "withdrawal")
        assert record["cause"] == reason
        assert tombstone_of(one, name, record).rounds_acknowledged == tuple(record["rounds_acknowledged"])
        assert_only_the_withdrawal_left_after(one, name, record)
        assert words in one.said(name)
        assert state_of(one, name)["withdrawal"]["reason"] == reason
    narrowed = of_kind(one, "hospital1", "consent")[1]
    late = [r for r in one.messages("hospital1", "sent") if r["index"] > narrowed["index"]]
    assert not [r for r in late if "LOCAL_METRICS" in r["classes"]]
    assert [r for r in late if "MODEL_PARAMETERS_EXTRACTOR" in r["classes"]], "the rest went on without it"
    assert state_of(one, "hospital3") | {"rounds_delivered": 6, "state": "done"} == state_of(one, "hospital3")
    assert_journals_sound(one)


def test_with_approval_nothing_of_a_run_leaves_before_a_person_says_so(federation: Make) -> None:
    one = federation(run={"rounds": 2})
    one.write_consent("hospital2", approval="required")
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    others = [one.start_silo(name) for name in ("hospital1", "hospital3")]
    waiting = one.start_silo("hospital2")
    one.wait_to_say("hospital2", "waits for approval")
    waiting.kill()
    waiting.wait()
    waiting = one.start_silo("hospital2")
    one.wait_for("waiting again", lambda: one.said("hospital2").count("waits for approval") == 2)
    digest = json.loads(one.command("silo", "inspect", "--json", "--config", "hospital2.yaml"))["plan_sha256"]
    words = ("silo", "approve", "--yes", "--config", "hospital2.yaml")
    assert digest in one.command(*words, "--plan-sha256", "0" * 64, expect=2)
    assert {r["rpc"] for r in one.messages("hospital2", "sent")} == {"GetPlan"}
    assert state_of(one, "hospital2")["state"] == "not joined yet"
    assert "MODEL_PARAMETERS_EXTRACTOR" in one.command(*words, "--plan-sha256", digest), "what would leave"
    one.wait_to_say("hospital2", "joined run")
    waiting.kill()
    waiting.wait()
    one.finish(one.start_silo("hospital2"), *others, coordinator)

    (record,) = of_kind(one, "hospital2", "approval")
    assert (record["run"], record["plan_sha256"]) == ("test", digest)
    first = next(r for r in one.messages("hospital2", "sent") if r["rpc"] != "GetPlan")
    assert (first["rpc"], first["index"] > record["index"]) == ("Join", True)
    assert [s["rounds_delivered"] for s in one.status()["silos"]] == [2, 2, 2]
    assert_journals_sound(one)


def test_a_consent_that_expired_while_the_daemon_was_down_ends_its_part_at_the_next_start(federation: Make) -> None:
    one = federation()
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    hospital = one.start_silo("hospital1")
    one.wait_to_say("coordinator", "hospital1 has joined")
    hospital.kill()
    hospital.wait()
    one.write_consent("hospital1", expires="2020-01-01")
    for _ in range(2):
        said = one.command("silo", "train", "--config", "hospital1.yaml", expect=4)
        assert "ended with 2020-01-01" in said
    assert len(of_kind(one, "hospital1", "withdrawal")) == 1
    assert shown(one, "hospital1")["state"] == "expired"
    assert state_of(one, "hospital1")["withdrawal"]["reason"] == "consent expired"
    one.write_consent("hospital1")
    one.start_silo("hospital1")
    one.wait_for("hospital 1 again", lambda: one.said("coordinator").count("hospital1 has joined") == 2)
    assert state_of(one, "hospital1")["state"] == "joined", "a new date is consent enough"


def test_withdrawing_before_any_run_is_recorded_and_nobody_is_told(federation: Make) -> None:
    one = federation()
    assert "nobody to tell" in one.command("silo", "consent", "withdraw", "--yes", "--config", "hospital1.yaml")
    (record,) = of_kind(one, "hospital1", "withdrawal")
    assert (record["run"], record["rounds_acknowledged"]) == (None, [])
    assert "withdrawn its consent" in one.command("silo", "train", "--config", "hospital1.yaml", expect=4)
    assert one.messages("hospital1", "sent") == []


def test_withdrawing_asks_and_without_a_yes_nothing_happens(federation: Make) -> None:
    one = federation()
    said = one.command("silo", "consent", "withdraw", "--config", "hospital1.yaml", expect=1)
    assert "nothing is unlearned" in said.replace("\n", " ")
    assert shown(one, "hospital1")["state"] == "in force"


@needs_faults
def test_killed_at_any_step_on_disk_a_consent_is_withdrawn_or_it_is_not(federation: Make) -> None:
    """Withdrawn and given anew, killed at each step in turn; the same command again finishes what was begun."""
    one = federation()
    state, kept = one.folder / "state" / "hospital1", one.folder / "kept"
    for word, before, after in (("withdraw", "in force", "withdrawn"), ("give", "withdrawn", "in force")):
        shutil.copytree(state, kept)
        found = []
        for step in itertools.count(1):
            shutil.rmtree(state)
            shutil.copytree(kept, state)
            words = ("consent", word, "--yes", "--config", "hospital1.yaml")
            code = Forked(("deadly", f"kill:disk:{step}:before", "silo", *words), one.folder, one.folder / "said").wait(
                PATIENCE
            )
            settings = SiloConfig.read(one.folder / "hospital1.yaml")
            withdrawn = settings.withdrawal.exists() or History.read(settings.journal).withdrawal is not None
            found.append("withdrawn" if withdrawn else "in force")
            if code == 0:
                break
            assert code == -signal.SIGKILL, (one.folder / "said").read_text()
        assert len(found) > 4
        assert found[-1] == after
        assert found == sorted(found, key=[before, after].index), f"{word}: not one moment, but back and forth"
        shutil.rmtree(kept)
    shutil.rmtree(state / "journal")
    words = ("consent", "withdraw", "--yes", "--config", "hospital1.yaml")
    Forked(("deadly", "kill:disk:5:before", "silo", *words), one.folder, one.folder / "said").wait(PATIENCE)
    for _ in range(2):
        one.command("silo", *words)
    assert len(of_kind(one, "hospital1", "withdrawal")) == 1
    assert_journals_sound(one, "hospital1")


def test_a_file_that_is_narrowed_while_the_coordinator_is_awaited_lets_no_run_begin(federation: Make) -> None:
    """What the hospital joined would else stand in its journal beside a consent that does not hold it."""
    one = federation(run={"rounds": 1})
    silo = one.start_silo("hospital1")
    one.wait_to_say("hospital1", "does not answer")
    one.write_consent("hospital1", methods=[])
    one.wait_for("the changed file", lambda: len(of_kind(one, "hospital1", "consent")) > 1)
    one.start_coordinator()
    one.ends_with(silo, 4)
    assert of_kind(one, "hospital1", "run") == []
    assert {r["rpc"] for r in one.messages("hospital1", "sent")} == {"GetPlan"}
    one.command("silo", "audit", "verify", "--config", "hospital1.yaml")


def test_evidence_is_sound_when_the_consent_file_has_gone_in_the_middle_of_a_run(federation: Make) -> None:
    """What leaves after that is the withdrawal and the signature for its answer, to whom the consent was for."""
    one = federation(run={"rounds": 30, "training": {"epochs": 8, "batch_size": 16}})
    one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    first, second = one.start_silo("hospital1"), one.start_silo("hospital2")
    one.start_silo("hospital3")
    one.wait_to_say("coordinator", "round 2 of 30 is open")
    (one.folder / "hospital1.consent.yaml").unlink()
    one.write_consent("hospital2", coordinator="spiffe://test/coordinator/other")
    for name, silo in (("hospital1", first), ("hospital2", second)):
        one.ends_with(silo, 4)
        (record,) = of_kind(one, name, "withdrawal")
        assert_only_the_withdrawal_left_after(one, name, record)
        one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
