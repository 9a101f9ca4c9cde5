"""A round's cost beyond training: a coordinator and three silos as processes, mutual TLS, journal on, loopback.

Training and testing are left out (``LocalSite.fit`` and ``measure`` do nothing in these silos), so that a round
lasts exactly as long as everything else: the download, the side's work, saving, the upload, the journal on both
sides, the coordinator's mixing. Beside it, in the same run, a bare gRPC stream over mutual TLS that moves the same
bytes up and down for three clients at once and hashes them with SHA-256 at both ends; and the same three hospitals
without the audit, and with a journal that keeps nothing (``benchmarks/party.py``), in turn with those that have it.

    python benchmarks/round_cost.py [--rounds 8] [--model small|large|demo] [--out FILE.json]

``demo`` is the run of `make demo` (configs/coordinator.yaml, 500 and 100 synthetic images a hospital, trained and
tested): what the audit adds to a real round.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
import yaml

SILOS = ("hospital1", "hospital2", "hospital3")
MODELS = {"small": ("diversifed-cnn", 9), "large": ("torchvision:resnet50", 1000), "demo": ("diversifed-cnn", 9)}
EXPOSURES = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT", "LOCAL_METRICS"]
CHUNK = (1 << 20) - 1024
BIN = Path(sys.executable).parent
PARTY = Path(__file__).with_name("party.py")
LEGS = 3
"""How often each kind of run is made; those with and without the audit take turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--method", default="diversifed")
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for size in MODELS if options.model == "all" else (options.model,):
        folder = Path(tempfile.mkdtemp(prefix="round-cost-"))
        try:
            found.append(measure(folder, size, options.rounds, options.method))
        finally:
            shutil.rmtree(folder)
        print(json.dumps(found[-1], indent=2), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(folder: Path, size: str, rounds: int, method: str) -> dict[str, object]:
    """All legs of one size."""
    legs: dict[str, list[Leg]] = {"audited": [], "unjournalled": [], "unaudited": []}
    for number in range(LEGS):
        for kind, found in legs.items():
            place = folder / f"{kind}{number}"
            place.mkdir()
            prepare(place, size, rounds, method)
            found.append(run_leg(place, trained=size == "demo", kind=kind))
    upload = legs["audited"][0].upload
    bare = [] if size == "demo" else [bare_round(folder / "audited0", upload) for _ in range(3)]
    seconds = {kind: [s for leg in found for s in leg.durations[1:]] for kind, found in legs.items()}
    cost, unjournalled, unaudited = (statistics.median(seconds[kind]) for kind in legs)
    result = {
        "model": MODELS[size][0],
        "method": method,
        "trained": size == "demo",
        "model_bytes": upload,
        "rounds": len(seconds["audited"]),
        "round_seconds_median": round(cost, 3),
        "round_seconds": {kind: [round(s, 3) for s in found] for kind, found in seconds.items()},
        "unjournalled_round_seconds_median": round(unjournalled, 3),
        "ratio_to_unjournalled": round(cost / unjournalled, 3),
        "least_ratio_to_unjournalled": round(min(seconds["audited"]) / min(seconds["unjournalled"]), 3),
        "unaudited_round_seconds_median": round(unaudited, 3),
        "ratio_to_unaudited": round(cost / unaudited, 3),
        "least_ratio_to_unaudited": round(min(seconds["audited"]) / min(seconds["unaudited"]), 3),
        "coordinator_idle_bytes": legs["audited"][0].idle,
        "coordinator_peak_above_idle_bytes": legs["audited"][0].peak - legs["audited"][0].idle,
        "coordinator_peak_above_idle_models": round((legs["audited"][0].peak - legs["audited"][0].idle) / upload, 2),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    if bare:
        plain = statistics.median(bare)
        result |= {"bare_grpc_sha256_seconds_median": round(plain, 3), "ratio_to_bare": round(cost / plain, 2)}
    return result


@dataclass(frozen=True)
class Leg:
    """One run: seconds of its rounds, the coordinator's memory, bytes of an upload."""

    durations: list[float]
    idle: int
    peak: int
    upload: int


def run_leg(folder: Path, *, trained: bool, kind: str) -> Leg:
    """A coordinator and three silos, from the first round to the last."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    flags = [*(() if trained else ("untrained",)), *(() if kind == "audited" else (kind,)), "--"]
    log = (folder / "coordinator.log").open("w")
    coordinator = subprocess.Popen(
        [sys.executable, PARTY, *flags, "coordinator", "serve", "--config", "coordinator.yaml", "--until-done"],
        cwd=folder,
        stderr=log,
        env=environment,
    )
    while "listening" not in (folder / "coordinator.log").read_text():
        time.sleep(0.2)
    time.sleep(1)
    idle = memory(coordinator.pid, "VmRSS")
    Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")  # the peak counts from here
    silos = [
        subprocess.Popen(
            [sys.executable, PARTY, *flags, "silo", "train", "--config", f"{name}.yaml"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        for name in SILOS
    ]
    peak = idle
    while coordinator.poll() is None:
        peak = max(peak, memory(coordinator.pid, "VmHWM") or peak)
        time.sleep(0.1)
    if any(process.wait() for process in silos) or coordinator.returncode:
        sys.exit((folder / "coordinator.log").read_text())
    upload = next(folder.glob("state/coordinator/runs/*/round-*/upload-hospital1-*.safetensors")).stat().st_size
    return Leg(round_durations(folder), idle, peak, upload)


def prepare(folder: Path, size: str, rounds: int, method: str) -> None:
    from medsilo.algorithms.datasets import save_npz
    from medsilo.silo.data.settings import PracticalGroups
    from medsilo.silo.data.sharding import cut
    from medsilo.silo.data.synthetic import generate_tissue

    shards = cut(
        generate_tissue(seed=1, train=2700, test=900),
        PracticalGroups(
            groups=(1, 1, 1),
            train_per_silo=500 if size == "demo" else 90,
            test_per_silo=100 if size == "demo" else 10,
        ),
        seed=1,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = run_of(size, rounds, method)
    write(
        folder / "coordinator.yaml",
        {
            "federation": "bench",
            "listen": f"127.0.0.1:{port}",
            "state": "state/coordinator",
            "silos": list(SILOS),
            "run": run,
        },
    )
    write(
        folder / "consent.yaml",
        {
            "coordinator": "spiffe://bench/coordinator/coordinator",
            "methods": [method],
            "exposures": EXPOSURES,
            "rounds": rounds,
        },
    )
    command(folder, "coordinator", "ca", "init", "--federation", "bench")
    for index, party in enumerate(("coordinator", *SILOS)):
        if index:
            save_npz(folder / f"{party}.npz", shards[index - 1])
            content = {"federation": "bench", "name": party, "coordinator": {"address": f"127.0.0.1:{port}"}}
            content |= {"state": f"state/{party}", "shard": f"{party}.npz", "consent": "consent.yaml", "threads": 1}
            write(folder / f"{party}.yaml", content)
        command(folder, "silo" if index else "coordinator", "keys", "--config", f"{party}.yaml")
        keys = folder / "state" / party / "keys"
        command(
            folder,
            "coordinator",
            "ca",
            "issue",
            party,
            *((), ("--role", "coordinator"))[index == 0],
            "--request",
            str(keys / "tls.csr"),
            "--out",
            str(keys / "tls.pem"),
        )
        shutil.copy(folder / "ca" / "ca.pem", keys / "ca.pem")


def run_of(size: str, rounds: int, method: str) -> dict[str, object]:
    """The coordinator's ``run:``."""
    if size == "demo":
        run = yaml.safe_load(Path(__file__).parent.with_name("configs").joinpath("coordinator.yaml").read_text())["run"]
        return {**run, "rounds": rounds, "method": {**run["method"], "name": method}}
    name, classes = MODELS[size]
    return {
        "name": "bench",
        "method": {"name": method},
        "model": {"name": name, "input_shape": [3, 28, 28], "classes": classes},
        "rounds": rounds,
        "training": {"epochs": 1},
    }


def round_durations(folder: Path) -> list[float]:
    import sqlite3

    with sqlite3.connect(folder / "state" / "coordinator" / "coordinator.db") as database:
        opened = [
            datetime.fromisoformat(at) for (at,) in database.execute("select opened_at from round order by number")
        ]
    return [(after - before).total_seconds() for before, after in itertools.pairwise(opened)]


def bare_round(folder: Path, size: int) -> float:
    """Three clients at once send ``size`` bytes and fetch as many, hashed at both ends; seconds for all."""
    server = subprocess.Popen(
        [sys.executable, __file__, "bare-server", str(folder), str(size)], stdout=subprocess.PIPE, text=True
    )
    port = server.stdout.readline().strip()
    clients = [
        subprocess.Popen(
            [sys.executable, __file__, "bare-client", str(folder), str(size), port, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in SILOS
    ]
    for client in clients:
        client.stdout.readline()  # connected
    started = time.perf_counter()
    for client in clients:
        client.stdin.write("go\n")
        client.stdin.flush()
    for client in clients:
        client.stdout.readline()
    seconds = time.perf_counter() - started
    for process in (*clients, server):
        process.terminate()
        process.wait()
    return seconds


def pieces(size: int):
    block = os.urandom(CHUNK)
    for start in range(0, size, CHUNK):
        data = block[: min(CHUNK, size - start)]
        hashlib.sha256(data).digest()
        yield data


def drain(messages) -> bytes:
    for data in messages:
        hashlib.sha256(data).digest()
    return b"done"


def bare_server(folder: str, size: str) -> None:
    keys = Path(folder) / "state" / "coordinator" / "keys"
    server = grpc.server(futures.ThreadPoolExecutor(8))
    handlers = {
        "Up": grpc.stream_unary_rpc_method_handler(lambda messages, _: drain(messages)),
        "Down": grpc.unary_stream_rpc_method_handler(lambda _, __: pieces(int(size))),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    pair = ((keys / "tls.key").read_bytes(), (keys / "tls.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (keys / "ca.pem").read_bytes(), require_client_auth=True)
    print(server.add_secure_port("127.0.0.1:0", credentials), flush=True)
    server.start()
    server.wait_for_termination()


def bare_client(folder: str, size: str, port: str, name: str) -> None:
    keys = Path(folder) / "state" / name / "keys"
    credentials = grpc.ssl_channel_credentials(
        (keys / "ca.pem").read_bytes(), (keys / "tls.key").read_bytes(), (keys / "tls.pem").read_bytes()
    )
    options = [("grpc.ssl_target_name_override", "coordinator.coordinator.bench")]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        grpc.channel_ready_future(channel).result(30)
        print("ready", flush=True)
        sys.stdin.readline()
        drain(channel.unary_stream("/bare/Down")(b"go"))
        channel.stream_unary("/bare/Up")(pieces(int(size)))
        print("done", flush=True)
        sys.stdin.readline()


def memory(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def write(path: Path, content: object) -> None:
    path.write_text(yaml.safe_dump(content))


def command(folder: Path, name: str, *arguments: str) -> None:
    subprocess.run([BIN / name, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare-server"]:
        bare_server(*sys.argv[2:])
    elif sys.argv[1:2] == ["bare-client"]:
        bare_client(*sys.argv[2:])
    else:
        main()
