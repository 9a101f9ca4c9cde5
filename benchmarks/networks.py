"""What bad networks do to a run: a coordinator and three silos on hosts of their own, mutual TLS, synthetic images.

Every cable between a silo's host and the coordinator's is a rough one (``tests/support/network/rough_link.py``). A
fault counts as survived if the run ends, every round has every silo's update once, each personalised model is bit for
bit that of an undisturbed run, both sides' journals are sound, and each message that arrived has its sender's signature
and its receiver's receipt. Needs root, iproute2 and /dev/net/tun. Timers are those of real use but where `timers` says
otherwise. The silence of two hours is tried only if asked for by name.

    sudo python benchmarks/networks.py [--only WORD …] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))


from medsilo.silo.data.settings import PracticalGroups  # noqa: E402
from medsilo.silo.data.sharding import cut  # noqa: E402
from medsilo.silo.data.synthetic import generate_tissue  # noqa: E402
from tests.support.network.rough_link import RoughHosts, ip  # noqa: E402
from tests.support.runs import federation as harness  # noqa: E402
from tests.support.runs.checks import (  # noqa: E402
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_signed,
)
from tests.support.runs.federation import BIG, Federation, Process  # noqa: E402

SILOS = ("hospital1", "hospital2", "hospital3")
VICTIM = "hospital1"
COMPLAINT = "does not answer"
HOST_NAME = "coordinator.test"
HOSTS = Path(tempfile.gettempdir(), f"hosts-{os.getpid()}")
CLONE_NEWNS = 0x20000
KB, MB = 1000, 1_000_000
HOURS = "silence of 2 hours"


@dataclass
class Stage:
    """A run under way, and what was measured of it."""

    one: Federation
    hosts: RoughHosts
    timers: tuple[str, str]
    measured: dict[str, float]

    def start(self, party: str) -> Process:
        command = ("coordinator", "serve", "--until-done") if party == "coordinator" else ("silo", "train")
        prefix = ("hosted", self.hosts.namespaces[party], *self.timers)
        return self.one.start(*command, "--config", f"{party}.yaml", prefix=prefix)

    def complaints(self, party: str = VICTIM) -> int:
        return self.one.said(party).count(COMPLAINT)

    def wait_for_round(self, number: int) -> None:
        self.one.wait_to_say("coordinator", f"round {number} of")

    def recovered(self, since: float) -> float:
        """Seconds from ``since`` (Unix time) to the next message that the victim received."""

        def next_one() -> list[float]:
            times = [datetime.fromisoformat(r["time"]).timestamp() for r in self.one.messages(VICTIM, "received")]
            return [at - since for at in times if at > since]

        self.one.wait_for("an answer", lambda: bool(next_one()))
        return round(min(next_one()), 1)


Fault = Callable[[Stage, Process], None]


def nothing(_stage: Stage, _coordinator: Process) -> None:
    pass


def silence(stage: Stage, _coordinator: Process, *, seconds: float, in_upload: bool = False) -> None:
    """The victim's cable drops everything for a while."""
    stage.wait_for_round(2)
    if in_upload:
        stage.one.wait_for(
            "an upload",
            lambda: any(r["rpc"] == "SubmitUpdate" and r["round"] == 1 for r in stage.one.messages(VICTIM, "sent")),
        )
    before, began = stage.complaints(), time.time()
    stage.hosts.links[VICTIM].down = True
    while time.time() < began + seconds:
        if "noticed_seconds" not in stage.measured and stage.complaints() > before:
            stage.measured["noticed_seconds"] = round(time.time() - began, 1)
        time.sleep(0.05)
    stage.hosts.links[VICTIM].down = False
    stage.measured["recovered_seconds"] = stage.recovered(time.time())


def restarts(stage: Stage, coordinator: Process, *, times: int) -> None:
    """The coordinator is killed, and starts again after 3 s."""
    found = []
    for number in range(times):
        stage.wait_for_round(number + 2)
        coordinator.kill()
        coordinator.wait()
        time.sleep(3)
        coordinator = stage.start("coordinator")
        stage.one.wait_for(
            "the coordinator", lambda at=number + 2: stage.one.said("coordinator").count("listening") == at
        )
        found.append(stage.recovered(time.time()))
    stage.measured["recovered_seconds"] = max(found)


def outage(stage: Stage, coordinator: Process, *, attempts: int) -> None:
    """The coordinator is away until the victim has tried so often to reach it."""
    stage.wait_for_round(2)
    coordinator.kill()
    coordinator.wait()
    stage.one.wait_for("attempts", lambda: stage.complaints() >= attempts)
    stage.measured["attempts"] = stage.complaints()
    stage.start("coordinator")
    stage.measured["recovered_seconds"] = stage.recovered(time.time())


def idle_nat(stage: Stage, _coordinator: Process, *, forgets: float) -> None:
    """A NAT before the victim; its connection is idle while it waits a minute for a slow hospital."""
    stage.wait_for_round(2)
    stage.hosts.links[VICTIM].forgets = forgets
    stage.hosts.links[SILOS[2]].down = True
    time.sleep(60)
    stage.hosts.links[SILOS[2]].down = False


def renamed(stage: Stage, _coordinator: Process) -> None:
    """The host name by which the victim knows the coordinator changes its address, from IPv4 to IPv6, while it waits;
    the old address is gone."""
    stage.wait_for_round(2)
    old, new = stage.hosts.addresses[VICTIM]
    HOSTS.write_text(f"{new} {HOST_NAME}\n")
    device = f"r{os.getpid() % 100_000}-0b"
    ip("-n", stage.hosts.namespaces["coordinator"], "addr", "del", f"{old}/30", "dev", device)
    time.sleep(1)  # what had arrived is in the journal by then
    stage.measured["recovered_seconds"] = stage.recovered(time.time()) + 1


def own_hosts_file() -> None:
    """From now on this process and its children have a hosts file of their own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")
    HOSTS.write_text("")
    atexit.register(HOSTS.unlink)
    for words in (["--make-rprivate", "/"], ["--bind", str(HOSTS), "/etc/hosts"]):
        subprocess.run(["mount", *words], check=True)


def faults() -> dict[str, dict[str, Any]]:
    """Each fault: how the cables are, the model, the rounds, and what happens."""
    found: dict[str, dict[str, Any]] = {"good cables": {}}
    for delay in (0.05, 0.3):
        for loss in (0.0, 0.02):
            for rate in (0, 125 * KB):
                if delay > 0.05 or loss or rate:
                    name = f"round trip {2 * delay * 1000:.0f} ms, loss {loss:.0%}, "
                    name += "1 Mbit/s" if rate else "no cap"
                    found[name] = {"delay": delay, "loss": loss, "rate": rate}
    found["round trip 100 ms, loss 10 %"] = {"delay": 0.05, "loss": 0.1}
    found["64 kbit/s"] = {"delay": 0.05, "rate": 8 * KB}
    found["512 kbit/s, a model of 6 MB"] = {"delay": 0.05, "rate": 64 * KB, "model": BIG, "rounds": 1}
    for seconds in (5, 60, 300):
        found[f"silence of {seconds} s, then again"] = {"fault": partial(silence, seconds=seconds)}
    found[HOURS] = {"fault": partial(silence, seconds=7200)}
    found["silence of 60 s in mid-upload (6 MB at 8 Mbit/s)"] = {
        "rate": 1 * MB,
        "model": BIG,
        "rounds": 2,
        "fault": partial(silence, seconds=60, in_upload=True),
    }
    found["a NAT that forgets after 15 s"] = {"fault": partial(idle_nat, forgets=15)}
    found["a NAT that forgets after 60 s"] = {"fault": partial(idle_nat, forgets=60)}
    found["coordinator killed 3 times, round trip 100 ms, loss 2 %"] = {
        "delay": 0.05,
        "loss": 0.02,
        "rounds": 5,
        "fault": partial(restarts, times=3),
    }
    found["a host name that moves from an IPv4 to an IPv6 address"] = {"fault": renamed}
    found["coordinator away for 1200 attempts (10 h at pauses of 30 s)"] = {
        "timers": ("20", "0.005"),
        "fault": partial(outage, attempts=1200),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", help="faults with one of these words in the name; else all but that of hours"
    )
    parser.add_argument("--out", type=Path, help="where the results go; those of other faults there stay")
    options = parser.parse_args()
    if not RoughHosts.possible():
        sys.exit("bad networks need root, iproute2 and /dev/net/tun")
    own_hosts_file()
    harness.PATIENCE = 1800
    found: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text())
    known = faults()
    wanted = options.only or [name for name in known if name != HOURS]
    for name, fault in known.items():
        if any(word in name for word in wanted):
            result = measure(name, **fault)
            print(json.dumps(result), flush=True)
            found = [one for one in found if one["fault"] != name] + [result]
            if options.out:
                options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(
    name: str,
    *,
    delay: float = 0.0,
    loss: float = 0.0,
    rate: float = 0.0,
    model: dict[str, Any] | None = None,
    rounds: int = 3,
    timers: tuple[str, str] = ("20", "30"),
    fault: Fault = nothing,
) -> dict[str, Any]:
    """One run with one fault."""
    folder = Path(tempfile.mkdtemp(prefix="networks-"))
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=90, test_per_silo=30)
    shards = cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)
    run = {"rounds": rounds, **({} if model is None else {"model": model})}
    one = Federation(folder, shards, run=run, coordinator={"listen": "[::]:7443"})
    hosts = RoughHosts(SILOS)
    stage = Stage(one, hosts, timers, {})
    try:
        for silo, link in hosts.links.items():
            link.delay, link.loss, link.rate = delay, loss, rate
            one.write_silo(silo, coordinator={"address": f"{hosts.addresses[silo][0]}:7443"})
        if fault is renamed:
            HOSTS.write_text(f"{hosts.addresses[VICTIM][0]} {HOST_NAME}\n")
            one.write_silo(VICTIM, coordinator={"address": f"{HOST_NAME}:7443"})
        coordinator = stage.start("coordinator")
        one.wait_to_say("coordinator", "listening")
        silos = [stage.start(silo) for silo in SILOS]
        stage.wait_for_round(1)
        began = time.monotonic()
        fault(stage, coordinator)
        one.finish(*silos, one.processes[-1] if one.processes[-1] not in silos else coordinator)
        seconds = time.monotonic() - began
        problem = ""
        try:
            assert_every_round_counted_once(one)
            assert_journals_sound(one)
            assert_signed(one)
            assert_models_are(one, one.simulate())
        except AssertionError as error:
            problem = str(error)[:500] or "an assertion failed"
    finally:
        one.kill_everything()
        hosts.close()
        complaints = {silo: stage.complaints(silo) for silo in SILOS}
        shutil.rmtree(folder)
    return {
        "fault": name,
        "survived": not problem,
        **({"problem": problem} if problem else {}),
        "rounds": rounds,
        "model": "torchvision:mobilenet_v3_small" if model else "diversifed-cnn",
        "seconds": round(seconds, 1),
        "failed_attempts": complaints,
        "packets_dropped": sum(link.lost for link in hosts.links.values()),
        **stage.measured,
        "timers": {"keepalive_seconds": float(timers[0]), "longest_pause_seconds": float(timers[1])},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()
