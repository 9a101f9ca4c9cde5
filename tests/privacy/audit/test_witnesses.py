"""What witnesses saw stands against whoever has the keys of both parties; without them it passes, today."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.audit.witnesses import Asked
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.identity.cosignature import COSIGNATURE, NoteKey, Policy
from medsilo.privacy.journal.records import CosignedRecord
from medsilo.privacy.witness.config import read_policy
from medsilo.silo.cli import app
from tests.support.evidence.exchanging import key_of
from tests.support.evidence.tampering import records_of
from tests.support.evidence.witnessed import WITNESS, Clocks, World
from tests.support.runs.witness_campaign import ATTACKS, WAYS, attack

OTHER = NoteKey("other.example.org", COSIGNATURE, key_of(98).public_key().public_bytes_raw())


@pytest.mark.parametrize("name", ATTACKS)
def test_with_every_partys_keys_nothing_passes_one_honest_witness(name: str) -> None:
    found = [attack(name, seed) for seed in range(4)]
    assert not any(one[WAYS[2]] for one in found)
    assert any(one[WAYS[0]] for one in found), "without the witness it is not seen"


def test_what_happened_is_sound_whoever_is_asked() -> None:
    assert all(all(attack("nothing", seed).values()) for seed in range(3))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Three rounds that the witness has seen; the journals are open, and the clocks set."""
    clocks = Clocks()
    with clocks.set():
        made = World(tmp_path / "world", clocks).begin()
        for number in range(3):
            made.round(number)
        yield made


def shown(world: World, folder: Path) -> Path:
    for exchange in world.exchanges:
        exchange.attest()
    world.close()
    return world.bundles(folder)["hospital1"]


def kinds(path: Path, asked: Asked | None) -> list[str]:
    found = verify_evidence(path, witnesses=asked)
    assert not found.problem, found.problem
    return [finding.kind for finding in found.findings]


def test_so_many_witnesses_as_a_policy_asks_for_have_to_have_seen_it(world: World, tmp_path: Path) -> None:
    path = shown(world, tmp_path / "shown")
    assert kinds(path, None) == []
    assert kinds(path, Asked(Policy((WITNESS,), 1))) == []
    assert kinds(path, Asked(Policy((WITNESS, OTHER), 1))) == []
    assert kinds(path, Asked(Policy((WITNESS, OTHER), 2))) == ["witness"]
    assert kinds(path, Asked(Policy((OTHER,), 1))) == ["witness"]


def test_records_that_no_witness_saw_in_time_are_named(world: World, tmp_path: Path) -> None:
    world.interval = 10_000.0
    world.round(3)
    path = shown(world, tmp_path / "shown")
    found = verify_evidence(path, witnesses=Asked(Policy((WITNESS,), 1, 3600)))
    (finding,) = found.findings
    assert "were away" in finding.what
    assert kinds(path, Asked(Policy((WITNESS,), 1, 20_000))) == []


def test_the_result_says_what_existed_before_when(world: World, tmp_path: Path) -> None:
    path = shown(world, tmp_path / "shown")
    found = verify_evidence(path, witnesses=Asked(Policy((WITNESS,), 1)))
    assert found.witnessed is not None
    covered = found.witnessed["covered"]
    last = [json.loads(json.dumps(r)) for r in records_of(path) if r["kind"] == "cosigned"][-1]
    assert covered == int(last["checkpoint"].split("\n")[1])
    assert found.witnessed["time"] == int(world.clocks.true)
    sentence = next(remark for remark in found.remarks if "existed before" in remark)
    assert f"first {covered} records" in sentence
    assert WITNESS.name in sentence


def test_a_record_that_names_a_witness_who_did_not_cosign_is_broken(world: World, tmp_path: Path) -> None:
    party = world.exchanges[0].silo
    note = party.journal.checkpoint()
    party.door.note(CosignedRecord(checkpoint=note, witnesses=[WITNESS.text], away={}))
    found = verify_evidence(shown(world, tmp_path / "shown"))
    assert "who has not cosigned it" in found.problem


def test_what_left_for_a_witness_without_consent_is_found(tmp_path: Path) -> None:
    clocks = Clocks()
    with clocks.set():
        world = World(tmp_path / "world", clocks).begin()
        exchange = world.exchanges[0]
        exchange.consent = {**exchange.consent, "witnesses": None}
        exchange.begin()
        world.round(0)
        found = verify_evidence(shown(world, tmp_path / "shown"))
    assert "the consent does not hold that" in found.problem


def test_the_command_takes_a_key_a_policy_and_a_witnesss_own_word(world: World, tmp_path: Path) -> None:
    assert world.witness is not None
    path = shown(world, tmp_path / "shown")
    (tmp_path / "seen").write_text(world.witness.last("medsilo/test/silo/hospital1"))
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"keys": [WITNESS.text, OTHER.text], "needed": 1, "fresh_hours": 24}))
    for given in (WITNESS.text, str(policy)):
        words = ["audit", "verify", str(path), "--witness", given, "--seen", str(tmp_path / "seen"), "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["witnessed"]["needed"] == 1
    policy.write_text(yaml.safe_dump({"keys": [WITNESS.text, OTHER.text], "needed": 3}))
    with pytest.raises(ConfigurationError, match="3 of 2"):
        read_policy(str(policy))


def test_a_journal_s_own_view_of_its_witness_is_what_the_witness_says(world: World) -> None:
    """What stands in the records is what the witness keeps: nobody has to believe the journal."""
    assert world.witness is not None
    chance = random.Random(1)
    party = chance.choice(world.parties())
    records = [r for r in party.journal.records() if r["kind"] == "cosigned"]
    origin = party.journal.origin
    assert world.witness.last(origin).split("\n")[1:3] == records[-1]["checkpoint"].split("\n")[1:3]
