"""Today's daemons with those of the last release, over mutual TLS, to the end of a run.

The last release's code comes out of this repository's history. Where that is not at hand (a shallow clone, an
unpacked archive), ``tests/protos/test_versions.py`` still holds every message against the last release's schemas.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION
from tests.support.runs.checks import assert_both_sides_agree, assert_every_round_counted_once, assert_journals_sound
from tests.support.runs.federation import Federation

ROOT = Path(__file__).parents[2]
RELEASES = {1: "1235ea76427442622d442debdc496a6f03762d22"}
"""By protocol version, the commit of the last release that spoke it: one for every older version that is supported."""
PACKAGES = ("protos", "privacy", "algorithms", "silo", "coordinator", "simulation")
EXPOSURES = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "MASKED_UPDATE", "PEER_DERIVED", "LOCAL_METRICS")
MASKED = {"method": {"name": "fedavg"}, "ask_for": [], "secure_aggregation": {"minimum": 3}}

Make = Callable[..., Federation]


@pytest.fixture(scope="module", params=sorted(RELEASES))
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of an earlier release."""
    commit = RELEASES[request.param]
    if subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"the history at hand does not hold commit {commit}; `git fetch --unshallow` brings it")
    archive = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True, check=True)
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def run_to_the_end(one: Federation) -> None:
    one.run_to_the_end()
    for name in one.silos:
        assert (one.run_folder(name) / "model.safetensors").exists(), one.everything_said()
    assert_both_sides_agree(one)
    assert_journals_sound(one)
    one.command("coordinator", "audit", "export", "--config", "coordinator.yaml", "--out", "c.json")
    for name in one.silos:
        one.command("silo", "audit", "export", "--config", f"{name}.yaml", "--out", f"{name}.json")
        one.command("silo", "audit", "verify", f"{name}.json", "--peer", "c.json")


def spoken(one: Federation, party: str) -> set[bool]:
    """Whether a party's requests after the first name their protocol version: those of version 1 do not."""
    sent = [record for record in one.messages(party, "sent") if record["rpc"] in ("Join", "GetTask", "Attest")]
    return {"protocol_version" in record["fields"] for record in sent}


def test_there_is_a_release_to_try_for_every_older_version_that_is_supported() -> None:
    assert sorted(RELEASES) == list(range(OLDEST_VERSION, PROTOCOL_VERSION))


@pytest.mark.parametrize("run", [{"rounds": 2}, {"rounds": 2, **MASKED}], ids=["plain", "masked"])
def test_todays_coordinator_leads_the_last_releases_silos(federation: Make, release: Path, run: dict[str, Any]) -> None:
    one = federation(run=run, exposures=EXPOSURES)
    one.trees = {"hospital2": release, "hospital3": release}
    run_to_the_end(one)
    assert (spoken(one, "hospital1"), spoken(one, "hospital2"), spoken(one, "hospital3")) == ({True}, {False}, {False})


def test_todays_silos_take_part_under_the_last_releases_coordinator(federation: Make, release: Path) -> None:
    one = federation(run={"rounds": 2})
    one.trees = {"coordinator": release}
    run_to_the_end(one)
    for name in one.silos:
        assert spoken(one, name) == {False}
        assert "the coordinator speaks protocol version" in one.said(name)


def test_a_run_goes_on_while_first_the_coordinator_and_then_the_silos_are_upgraded(
    federation: Make, release: Path
) -> None:
    one = federation(run={"rounds": 6})
    one.trees = dict.fromkeys(["coordinator", *one.silos], release)
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "listening")
    silos = {name: one.start_silo(name) for name in one.silos}
    one.wait_to_say("coordinator", "round 2 of 6 is open")
    coordinator.kill()
    coordinator.wait()
    del one.trees["coordinator"]
    coordinator = one.start_coordinator()
    one.wait_to_say("coordinator", "round 4 of 6 is open")
    silos["hospital1"].kill()
    silos["hospital1"].wait()
    del one.trees["hospital1"]
    silos["hospital1"] = one.start_silo("hospital1")
    one.finish(*silos.values(), coordinator)
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert (spoken(one, "hospital1"), spoken(one, "hospital2")) == ({False, True}, {False})
