"""A federation of real processes for the tests: CA, keys, shards, configurations, daemons."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from medsilo.algorithms.datasets import ImageDataset, save_npz
from medsilo.algorithms.models import plain_state
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.door import Door
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.authority import create_authority, issue
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.identity.keys import create_keys, load_audit_key
from medsilo.privacy.journal.journal import Journal
from medsilo.simulation.federation import Simulation
from tests.support.daemons.forked import Forked

Process = subprocess.Popen[bytes] | Forked
BIN = Path(sys.executable).parent
PATIENCE = 180
"""Seconds after which a state that does not come is a failure."""
BIG: dict[str, Any] = {"name": "torchvision:mobilenet_v3_small", "input_shape": [3, 28, 28], "classes": 9}
"""A model of 6 MB: seven messages."""


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(12_000 + 1_000 * (_WORKER % 20))
"""Below those that the system gives away, and for each of pytest's processes its own: a port that is free while a
daemon is being restarted is not taken by another test."""


def take_ports_from(first: int) -> None:
    """For a program that runs beside tests on the same machine."""
    global _PORTS
    _PORTS = itertools.count(first)


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("unreachable: the count does not end")


def without_signatures(record: Mapping[str, Any]) -> int:
    """A message's length without the signed word in its header on what was exchanged before."""
    return sum(
        count for field, count in record["fields"].items() if not {"attestation", "first"} & set(field.split("."))
    )


def _program_of(tree: Path, name: str) -> list[str]:
    """A release's own program, whatever the installed one would load. Version 1 had no package around its packages."""
    module = f"medsilo.{name}.cli" if (tree / "medsilo").exists() else f"{name}.cli"
    return [sys.executable, "-c", f"import sys; sys.argv[0] = {name!r}; from {module} import main; main()"]


class Federation:
    """Parties below one folder, each with its own configuration, keys and state.

    ``forked``: daemons and commands are forked from a process that has PyTorch loaded, which saves seconds each; else
    they are the console scripts themselves.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[ImageDataset],
        *,
        run: Mapping[str, Any] | None = None,
        exposures: Sequence[str] = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "LOCAL_METRICS"),
        insecure: bool = False,
        coordinator: Mapping[str, Any] | None = None,
        forked: bool = True,
    ) -> None:
        self.forked = forked
        self.folder = folder
        self.port = free_port()
        self.shards = list(shards)
        self.silos = [shard.name for shard in shards]
        self.insecure = insecure
        self.exposures = list(exposures)
        self.processes: list[Process] = []
        self.trees: dict[str, Path] = {}
        """Parties whose daemon is of another release: the folder that has its packages."""
        self._doors: dict[str, Door] = {}
        first = self.shards[0]
        settings: dict[str, Any] = {
            "name": "test",
            "method": {"name": "diversifed"},
            "model": {
                "name": "diversifed-cnn",
                "input_shape": list(first.image_shape),
                "classes": first.num_classes,
            },
            "training": {"epochs": 1, "batch_size": 32},
            "rounds": 3,
            "ask_for": ["LOCAL_METRICS"],
        }
        settings.update(run or {})
        self.coordinator_config: dict[str, Any] = {
            "federation": "test",
            "listen": f"127.0.0.1:{self.port}",
            "state": "state/coordinator",
            "silos": self.silos,
            "insecure": insecure,
            "run": settings,
            **(coordinator or {}),
        }
        create_authority(folder / "ca", "test")
        self.write("coordinator.yaml", self.coordinator_config)
        self.enrol(Identity("test", "coordinator", "coordinator"))
        for shard in self.shards:
            self.add_silo(shard)

    def add_silo(self, shard: ImageDataset) -> None:
        save_npz(self.folder / f"{shard.name}.npz", shard)
        self.write_silo(shard.name)
        self.write_consent(shard.name)
        self.enrol(Identity("test", "silo", shard.name))

    def write_silo(self, name: str, *, port: int | None = None, **changes: Any) -> None:
        content = {
            "federation": "test",
            "name": name,
            "coordinator": {"address": f"127.0.0.1:{port or self.port}"},
            "state": f"state/{name}",
            "shard": f"{name}.npz",
            "consent": f"{name}.consent.yaml",
            "device": "cpu",
            "threads": 1,
            "insecure": self.insecure,
        }
        self.write(f"{name}.yaml", {**content, **changes})

    def write_consent(self, name: str, **changes: Any) -> None:
        content = {
            "coordinator": "spiffe://test/coordinator/coordinator",
            "methods": [self.coordinator_config["run"]["method"]["name"]],
            "exposures": self.exposures,
            "rounds": 100,
            "approval": "none",  # several runs follow each other, and nobody is there
        }
        self.write(f"{name}.consent.yaml", {**content, **changes})

    def enrol(self, identity: Identity) -> None:
        keys = self.keys(identity.name)
        paths = create_keys(keys, identity)
        issue(self.folder / "ca", identity.name, paths.request, keys / "tls.pem", role=identity.role)
        shutil.copy(self.folder / "ca" / "ca.pem", keys / "ca.pem")

    def keys(self, name: str) -> Path:
        return self.folder / "state" / name / "keys"

    def write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content))

    def door(self, name: str) -> Door:
        """The door of a party that the test plays itself: its own journal and audit key, and nothing is held back."""
        if name not in self._doors:
            identity = Identity("test", "coordinator" if name == "coordinator" else "silo", name)
            journal = Journal(
                self.folder / "state" / name / "journal",
                key=load_audit_key(self.keys(name) / "audit.key"),
                origin=f"medsilo/test/{identity.role}/{name}",
            )
            self._doors[name] = Door(journal, identity=identity.uri, federation="test", gate=PlanGate(Exposure))
        return self._doors[name]

    def close_door(self, name: str) -> None:
        """The test no longer plays this party."""
        if (door := self._doors.pop(name, None)) is not None:
            door.journal.close()

    def start(self, *command: str, prefix: Sequence[str] = ()) -> Process:
        """Starts a console script, which speaks into its configuration's log. ``prefix``: a command that runs it."""
        log = self.log(command[-1])
        tree = self.trees.get(Path(command[-1]).stem)
        if self.forked and tree is None and (not prefix or prefix[0] in ("deadly", "hosted", "leaking")):
            self.processes.append(Forked([*prefix, *command], self.folder, log))
            return self.processes[-1]
        program = [str(BIN / command[0])] if tree is None else _program_of(tree, command[0])
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*prefix, *program, *command[1:]],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **({} if tree is None else {"PYTHONPATH": str(tree)})},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def start_coordinator(self, config: str = "coordinator.yaml", *, prefix: Sequence[str] = ()) -> Process:
        return self.start("coordinator", "serve", "--until-done", "--config", config, prefix=prefix)

    def start_silo(self, name: str, *, prefix: Sequence[str] = ()) -> Process:
        return self.start("silo", "train", "--config", f"{name}.yaml", prefix=prefix)

    def log(self, config: str) -> Path:
        return self.folder / f"{Path(config).stem}.log"

    def said(self, party: str) -> str:
        path = self.folder / f"{party}.log"
        return path.read_text() if path.exists() else ""

    def command(self, *words: str, expect: int = 0) -> str:
        """Runs a console script to its end; returns what it said on both streams."""
        if self.forked:
            said = self.folder / "command.out"
            said.unlink(missing_ok=True)
            code = Forked(words, self.folder, said).wait(PATIENCE)
            assert code == expect, f"{words}: {code}\n{said.read_text()}"
            return said.read_text()
        outcome = subprocess.run(
            [str(BIN / words[0]), *words[1:]], cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE
        )
        assert outcome.returncode == expect, f"{words}: {outcome.returncode}\n{outcome.stdout}{outcome.stderr}"
        return outcome.stdout + outcome.stderr

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.command("coordinator", "status", "--config", "coordinator.yaml", "--json")
        )
        return found

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            for process in self.processes:
                code = process.poll()
                assert code in (None, 0, -signal.SIGKILL), (
                    f"waiting for {what}: a process ended\n{self.everything_said()}"
                )
            assert time.monotonic() < deadline, f"{what} did not come\n{self.everything_said()}"
            time.sleep(0.02)

    def wait_to_say(self, party: str, text: str) -> None:
        self.wait_for(f"{party} saying {text!r}", lambda: text in self.said(party))

    def finish(self, *processes: Process) -> None:
        """Waits for the ends of processes, which must be good."""
        for process in processes:
            code = process.wait(timeout=PATIENCE)
            assert code == 0, self.everything_said()

    def ends_with(self, process: Process, code: int) -> None:
        """Waits for the end of a process that is meant to end early."""
        found = process.wait(timeout=PATIENCE)
        assert found == code, f"{found} instead of {code}\n{self.everything_said()}"
        self.processes.remove(process)

    def run_to_the_end(self) -> None:
        coordinator = self.start_coordinator()
        # Recording comes before sending: with nobody listening there would be records of messages that never left.
        self.wait_to_say("coordinator", "listening")
        self.finish(*[self.start_silo(name) for name in self.silos], coordinator)

    def everything_said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def kill_everything(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in list(self._doors):
            self.close_door(name)

    def run_folder(self, name: str) -> Path:
        return self.folder / "state" / name / "runs" / str(self.coordinator_config["run"]["name"])

    def records(self, party: str) -> list[dict[str, Any]]:
        path = self.folder / "state" / party / "journal" / "records.jsonl"
        written = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]  # not one half written

    def messages(self, party: str, direction: str) -> list[dict[str, Any]]:
        return [r for r in self.records(party) if r["kind"] == "message" and r["direction"] == direction]

    def simulate(self) -> dict[str, dict[str, torch.Tensor]]:
        """The personalised models that an undisturbed run gives, by simulation with the same plan and shards."""
        torch.set_num_threads(1)
        config = CoordinatorConfig.read(self.folder / "coordinator.yaml")
        plan = config.plan()
        method = make(plan.method.name, plan.method.parameters)
        public = config.open_public(config.build_model())
        cpu = torch.device("cpu")
        simulation = Simulation(plan, method, self.shards, device=cpu, public=public, weights=config.weights)
        for _ in range(plan.training_rounds):
            simulation.step()
        simulation.finish()
        sides = simulation.silos.items()
        return {name: plain_state(side.site.model, side.personal()) for name, side in sides}
