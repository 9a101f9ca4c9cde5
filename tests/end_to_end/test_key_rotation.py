"""A change of audit keys, with real daemons: followed by the other side where it is signed, refused where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml

from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys
from tests.support.runs.federation import Federation

Make = Callable[..., Federation]


def another_run(one: Federation, name: str) -> None:
    path = one.folder / "coordinator.yaml"
    config = yaml.safe_load(path.read_text())
    config["run"]["name"] = name
    path.write_text(yaml.safe_dump(config))
    one.coordinator_config["run"]["name"] = name


def test_a_signed_change_of_keys_is_followed_by_the_other_side_and_by_audit_verify(federation: Make) -> None:
    one = federation()
    one.run_to_the_end()
    for party in ("hospital1", "coordinator"):
        told = one.command(
            "coordinator" if party == "coordinator" else "silo", "keys", "--config", f"{party}.yaml", "--rotate"
        )
        assert "signed with both keys" in told.replace("\n", " ")
    another_run(one, "second")
    one.run_to_the_end()
    bundles: dict[str, Path] = {}
    for party in ("hospital1", "coordinator"):
        bundles[party] = one.folder / f"{party}.json"
        command = "coordinator" if party == "coordinator" else "silo"
        one.command(command, "audit", "export", "--config", f"{party}.yaml", "--out", str(bundles[party]))
    told = one.command(
        "silo", "audit", "verify", str(bundles["hospital1"]), "--peer", str(bundles["coordinator"]), "--json"
    )
    assert json.loads(told)["sound"]


def test_another_audit_key_without_a_signed_change_is_refused(federation: Make) -> None:
    one = federation()
    one.run_to_the_end()
    another_run(one, "second")
    # Key and journal are lost together: a new pair cannot pass for the old one.
    state = one.folder / "state" / "hospital1"
    (state / "journal").rename(state / "journal.lost")
    made = create_keys(one.folder / "new", Identity("test", "silo", "hospital1"))
    made.audit_key.replace(state / "keys" / "audit.key")
    one.start_coordinator()
    silo = one.start_silo("hospital1")
    assert silo.wait(timeout=60) == 5
    assert "without a signed change of keys" in one.said("hospital1").replace("\n", " ")
