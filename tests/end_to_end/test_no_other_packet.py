"""Nothing but the coordinator is called: no other packet and no question to a name server, by any command, by the
daemons through a whole run, or by any library that they load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from medsilo.coordinator.cli import app as coordinator_app
from medsilo.silo.cli import app as silo_app
from medsilo.simulation.cli import app as simulation_app
from tests.support.network.watched_hosts import WatchedHosts
from tests.support.runs.federation import BIN, PATIENCE

ROOT = Path(__file__).parents[2]
PORTS = (7443, 7444)
NOT_RUN: dict[str, str] = {}
"""Commands that every_command.py leaves out, and why."""
BUILD_MACHINES = (
    *("CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL", "CODEBUILD_BUILD_ID"),
    *("BUILDKITE", "TEAMCITY_VERSION", "APPVEYOR", "BITBUCKET_BUILD_NUMBER"),
)
"""Where one of these is set, onnxruntime reports nothing: a hospital's machine sets none."""

pytestmark = pytest.mark.root


@dataclass(frozen=True)
class Watched:
    """``folder``: of a federation whose run has ended."""

    hosts: WatchedHosts
    folder: Path

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """A command on the hospitals' host."""
        as_in_a_hospital = {name: value for name, value in os.environ.items() if name not in BUILD_MACHINES}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.hosts.hospital, *command],
            cwd=self.folder,
            env={**as_in_a_hospital, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("watching every packet needs root and iproute2")
    try:
        hosts = WatchedHosts(PORTS)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine allows no network namespaces: {error}")
    yield Watched(hosts, tmp_path_factory.mktemp("watched"))
    hosts.close()


def commands(found: Any, name: str) -> Iterator[str]:
    if not hasattr(found, "commands"):
        yield name
        return
    for word, inner in found.commands.items():
        yield from commands(inner, f"{name} {word}")


def every_command() -> set[str]:
    apps = {
        "silo": get_command(silo_app),
        "coordinator": get_command(coordinator_app),
        "simulation": get_command(simulation_app),
    }
    return {command for name, app in apps.items() for command in commands(app, name)}


def test_no_command_and_no_daemon_calls_anybody_but_the_coordinator(watched: Watched, flower_python: Path) -> None:
    scenario = [sys.executable, "-m", "tests.support.runs.every_command"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    running = watched.start(
        *scenario, str(watched.folder), watched.hosts.coordinator, str(flower_python), PYTHONPATH=path
    )
    said, _ = running.communicate(timeout=3 * PATIENCE)
    assert running.returncode == 0, said

    ran = [json.loads(line) for line in (watched.folder / "ran.json").read_text().splitlines()]
    every = every_command()
    done = {name for name in every for words in ran if words[: len(name.split())] == name.split()}
    assert every - done == set(NOT_RUN), "neither run in every_command.py nor in NOT_RUN with a reason"
    assert watched.hosts.between > 100, "what went to the coordinator was seen"
    assert watched.hosts.others == []


PLANTED = {
    "a packet": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'planted', ('192.0.2.1', 9))",
    "a packet over IPv6": (
        "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'planted', ('2001:db8::1', 9))"
    ),
    "a question to the name server": (
        "import socket, contextlib\nwith contextlib.suppress(OSError): socket.gethostbyname('planted.example.org')"
    ),
    "a call": (
        "import socket, contextlib\nwith contextlib.suppress(OSError): "
        "socket.create_connection(('192.0.2.1', 443), timeout=0.1)"
    ),
}


@pytest.mark.parametrize("leak", PLANTED)
def test_the_recorder_sees_a_library_that_calls_elsewhere(watched: Watched, leak: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED[leak])
    watched.hosts.forget()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    running = watched.start(str(BIN / "coordinator"), "--version", PYTHONPATH=path)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said

    until(lambda: bool(watched.hosts.others))
    seen = " ".join(watched.hosts.others)
    assert {"a question to the name server": "planted.example", "a call": "192.0.2.1:443"}.get(leak, "planted") in seen


def test_public_images_are_downloaded_only_where_somebody_names_them(watched: Watched, tmp_path: Path) -> None:
    """The one thing that a command fetches: `--from pathmnist`, where the file is not there yet."""
    watched.hosts.forget()
    words = ["shard", "--from", "pathmnist", "--out", str(tmp_path / "shards")]
    running = watched.start(str(BIN / "silo"), *words, HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 3, said
    assert "zenodo.org" in " ".join(watched.hosts.others)


def test_an_export_without_the_switch_against_telemetry_is_seen(watched: Watched, tmp_path: Path) -> None:
    """As it was: onnxruntime, once loaded, looks for the host that it reports to."""
    watched.hosts.forget()
    assert (watched.folder / "model.onnx").exists(), "the run above has to have ended"
    program = (
        "import os, sys, time, medsilo; del os.environ['ORT_DISABLE_TELEMETRY']\n"
        "from medsilo.silo.cli import app; app(standalone_mode=False); time.sleep(60)"
    )
    words = ["export", "--config", "hospital1.yaml", "--out", "seen.onnx"]
    running = watched.start(sys.executable, "-c", program, *words, XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    try:
        until(lambda: bool(watched.hosts.others))
    finally:
        running.kill()
        running.wait()
    assert "events.data.microsoft.com" in " ".join(watched.hosts.others)


def until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "nothing was seen"
        time.sleep(0.05)
