"""Every party on a host of its own: network namespaces with their own addresses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from medsilo.algorithms.datasets import ImageDataset, load_npz
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from tests.support.runs.federation import Federation

REAL_IMAGES = Path(__file__).parents[2].parent / "shared" / "data" / "coloncells.npz"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, tuple[str, str]]]:
    """Party to (namespace, address): a bridge in a namespace of its own, and a cable to each party's."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    prefix = f"medsilo{os.getpid()}"
    hub = f"{prefix}-hub"
    made = {}
    parties = ("coordinator", "hospital1", "hospital2", "hospital3")
    try:
        try:
            ip("netns", "add", hub)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode()}")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, party in enumerate(parties):
            space, address = f"{prefix}-{number}", f"10.77.0.{number + 10}"
            ip("netns", "add", space)
            made[party] = (space, address)
            ip("-n", hub, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield made
    finally:
        for space in (hub, *(space for space, _ in made.values())):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.mark.root
def test_three_hospitals_on_their_own_hosts_train_with_keys_that_they_made(
    federation: Callable[..., Federation], shards: list[ImageDataset], hosts: dict[str, tuple[str, str]]
) -> None:
    if REAL_IMAGES.exists():
        groups = PracticalGroups(groups=(2, 1), dominant=((0, 1), (2, 3)), train_per_silo=160, test_per_silo=36)
        shards = cut(load_npz(REAL_IMAGES), groups, seed=1)
    _, coordinator_address = hosts["coordinator"]
    one = federation(shards=shards, coordinator={"listen": f"{coordinator_address}:7443"})
    for name in one.silos:
        # The walk-through's own commands, on the hospital's host.
        shutil.rmtree(one.keys(name))
        one.write_silo(name, coordinator={"address": f"{coordinator_address}:7443"})
        subprocess.run(
            ["ip", "netns", "exec", hosts[name][0], *silo_keys(name)], cwd=one.folder, check=True, capture_output=True
        )
        request, out = one.keys(name) / "tls.csr", one.keys(name) / "tls.pem"
        one.command("coordinator", "ca", "issue", name, "--request", str(request), "--out", str(out))
        shutil.copy(one.folder / "ca" / "ca.pem", one.keys(name) / "ca.pem")
    coordinator = one.start_coordinator(prefix=("ip", "netns", "exec", hosts["coordinator"][0]))
    silos = [one.start_silo(name, prefix=("ip", "netns", "exec", hosts[name][0])) for name in one.silos]
    one.finish(*silos, coordinator)

    status = one.status()
    assert status["finished"]
    assert [silo["rounds_delivered"] for silo in status["silos"]] == [3, 3, 3]
    for name in one.silos:
        assert yaml.safe_load((one.folder / f"{name}.yaml").read_text())["coordinator"]["address"] == "10.77.0.10:7443"
        received = {r["sha256"] for r in one.messages("coordinator", "received") if r["peer"].endswith(f"/{name}")}
        # A silo that called before the coordinator listened has records of messages that never left.
        assert received <= {record["sha256"] for record in one.messages(name, "sent")}
        assert "Model: last layer" in one.command("silo", "report", "--config", f"{name}.yaml")


def silo_keys(name: str) -> list[str]:
    from tests.support.runs.federation import BIN

    return [str(BIN / "silo"), "keys", "--config", f"{name}.yaml"]
