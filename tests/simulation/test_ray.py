"""``simulation run --ray`` on a real cluster: two nodes of one core each, both on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from medsilo.algorithms.datasets import save_npz
from medsilo.privacy.errors import ConfigurationError
from medsilo.silo.data.synthetic import generate_tissue

BIN = Path(sys.executable).parent
PATIENCE = 480


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for(what: str, ready: object) -> None:
    assert callable(ready)
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module", autouse=True)
def no_token() -> Iterator[None]:
    """Whatever other clusters have left in this user's home."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address. Not under pytest's own folder: the path of a Unix socket is short."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    address = f"127.0.0.1:{free_port()}"
    # Ray's workers give way to everything else on a machine; beside other tests they would not get to anything.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    size = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
    head = [f"--port={address.rpartition(':')[2]}", "--head", "--include-dashboard=false", f"--temp-dir={folder}"]
    nodes: list[subprocess.Popen[bytes]] = []
    said = Path(folder, "nodes.log")

    def ended() -> bool:
        return any(node.poll() is not None for node in nodes)

    try:
        with said.open("a") as log:
            for words in (head, [f"--address={address}"]):
                command = [str(BIN / "ray"), "start", "--node-ip-address=127.0.0.1", *words, *size]
                nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                wait_for("the cluster", lambda: said.read_text().count("Ray runtime started") == len(nodes) or ended())
                assert not ended(), said.read_text()
        yield address
    finally:
        everyone = [one for node in nodes for one in [*psutil.Process(node.pid).children(recursive=True)]]
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(PATIENCE)
        for one in everyone:
            if one.is_running():
                one.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two runs, long enough to be caught at work."""
    save_npz(tmp_path / "tissue.npz", generate_tissue(seed=1, train=540, test=270))
    content = {
        "name": "tiny",
        "data": str(tmp_path / "tissue.npz"),
        "setting": {"kind": "dirichlet", "silos": 4, "alpha": 1.0, "train_per_silo": 30, "test_per_silo": 10},
        "model": "mlp-64",
        "training": {"epochs": 2, "batch_size": 10},
        "rounds": 100,
        "seeds": [1, 2],
        "checkpoint_seconds": 0,
        "methods": [{"name": "diversifed"}],
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(experiment: Path, runs: str, *words: str) -> list[str]:
    return [
        str(BIN / "simulation"),
        "run",
        "--config",
        str(experiment),
        "--runs",
        str(experiment.parent / runs),
        *words,
    ]


def test_a_cluster_gives_the_bits_of_one_machine_also_after_a_worker_was_killed(experiment: Path, cluster: str) -> None:
    here = subprocess.run(command(experiment, "here"), capture_output=True, text=True, timeout=PATIENCE)
    assert here.returncode == 0, here.stdout + here.stderr

    there = command(experiment, "there", "--ray", cluster)
    first = subprocess.Popen(there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folders = experiment.parent / "there" / "tiny" / "tissue" / "dirichlet" / "diversifed"

    def begun() -> bool:
        return first.poll() is not None or any(folders.glob("seed-*/checkpoint.safetensors"))

    # The nodes do not begin at one time; on a busy machine one has ended its run before the other begins.
    wait_for("a run's checkpoint", begun)
    working = [one for one in psutil.process_iter() if one.name().startswith("ray::execute")]
    working[0].send_signal(signal.SIGKILL)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1, said
    assert "1 of 2 runs failed, the others are done" in said
    assert "its process died" in said
    assert "Traceback" not in said

    again = subprocess.run(there, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 of 2 runs are done" in again.stdout
    for seed in ("seed-1", "seed-2"):
        one = pq.read_table(
            experiment.parent / "here" / folders.relative_to(experiment.parent / "there") / seed / "rounds.parquet"
        )
        assert one.num_rows == 4 * 101
        other = pq.read_table(folders / seed / "rounds.parquet")
        assert one.equals(other)


def test_a_cluster_of_this_machine_alone_leaves_nothing_in_the_home(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token there would be asked for by every cluster that is begun later."""
    monkeypatch.delenv("RAY_AUTH_MODE")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fewer = yaml.safe_load(experiment.read_text()) | {"rounds": 1, "seeds": [1]}
    experiment.write_text(yaml.safe_dump(fewer))
    done = subprocess.run(
        command(experiment, "runs", "--ray", "local"), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "home" / ".ray").exists()


def test_an_address_at_which_nothing_answers_is_said_at_once(experiment: Path) -> None:
    done = subprocess.run(
        command(experiment, "runs", "--ray", f"127.0.0.1:{free_port()}"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ConfigurationError.exit_code
    assert "cannot be reached" in done.stderr
    assert "`ray start --head`" in " ".join(done.stderr.split())
