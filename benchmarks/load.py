"""A coordinator under load: many silos, a large model, many hours.

    python benchmarks/load.py silos  [--silos 200] [--rounds 5]                     # who waits for whom, and how long
    python benchmarks/load.py model  [--model torchvision:vit_l_16] [--silos 3]     # memory beside one large model
    python benchmarks/load.py soak   [--minutes 62] [--silos 10]                    # does anything grow?

All of them: one coordinator as its own process (`coordinator serve`), mutual TLS on loopback, journals on, and silos
that are the daemon's own code (``medsilo.silo.run.daemon.train``) with their own certificate, journal and door; only
training and testing are left out, in whose place a silo sleeps. Several silos share a process, each in its own thread.
Images are synthetic, and there are few of them. At the end evidence is exported on both sides and held against each
other (`audit verify --peer`) for a sample of silos.

``--out FILE.json`` keeps each command's result under its name, beside the others'. ``--folder`` is where the parties
live and what is sampled is kept (``samples.jsonl``); without it, that is deleted at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import yaml

BIN = Path(sys.executable).parent
PARTY = Path(__file__).with_name("party.py")
EXPOSURES = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT", "LOCAL_METRICS"]
SETTLED_SECONDS = 600
"""Growth is judged by what is sampled later than this."""
_TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    commands = parser.add_subparsers(dest="command", required=True)
    many = commands.add_parser("silos")
    many.add_argument("--silos", type=int, default=200)
    many.add_argument("--rounds", type=int, default=5)
    many.add_argument("--processes", type=int, default=4)
    large = commands.add_parser("model")
    large.add_argument("--model", default="torchvision:vit_l_16")
    large.add_argument("--size", type=int, default=224, help="images' height and width")
    large.add_argument("--silos", type=int, default=3)
    large.add_argument("--rounds", type=int, default=2)
    soak = commands.add_parser("soak")
    soak.add_argument("--minutes", type=float, default=62)
    soak.add_argument("--silos", type=int, default=10)
    soak.add_argument("--pause", type=float, default=1.0, help="seconds that a silo sleeps in place of a training")
    soak.add_argument("--every", type=float, default=30, help="seconds between two samples")
    soak.add_argument("--cut", type=float, default=120, help="seconds that a connection lasts on average")
    for one in (many, large, soak):
        one.add_argument("--method", default="diversifed")
    options = parser.parse_args()
    with place(options.folder) as folder:
        found = {"silos": many_silos, "model": large_model, "soak": soaked}[options.command](folder, options)
    found |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"}
    print(json.dumps(found, indent=2), flush=True)
    if options.out:
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**kept, options.command: found}, indent=2) + "\n")


def many_silos(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Rounds of many silos with a small model."""
    names = prepare(folder, options.silos, rounds=options.rounds, method=options.method)
    coordinator = start_coordinator(folder)
    idle = state_of(coordinator.pid)
    Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")  # the peak counts from here
    crowds = [start_crowd(folder, names[first :: options.processes]) for first in range(options.processes)]
    watched = watch(coordinator, crowds, folder, options.rounds)
    durations = round_durations(folder)
    return {
        **options_of(options),
        **watched,
        "idle": idle,
        "joining_seconds": round(joining_seconds(folder), 1),
        "round_seconds": [round(seconds, 2) for seconds in durations],
        "round_seconds_median": round(statistics.median(durations), 2),
        "evidence": evidence(folder, [names[0], names[len(names) // 2], names[-1]]),
    }


def watch(
    coordinator: subprocess.Popen[bytes], crowds: Sequence[subprocess.Popen[bytes]], folder: Path, rounds: int
) -> dict[str, object]:
    """Waits for a run's end, which must be good; the most that the coordinator had of everything."""
    most: dict[str, float] = {}
    loads = []
    began = last = time.monotonic()
    cpu_of_rounds: dict[int, float] = {}
    while coordinator.poll() is None:
        try:
            found = state_of(coordinator.pid)
        except (OSError, KeyError):
            break  # it is just ending
        most = {what: max(value, most.get(what, 0)) for what, value in found.items()}
        loads.append(os.getloadavg()[0])
        cpu_of_rounds.setdefault(rounds_opened(folder), found["cpu"])
        if any(process.poll() for process in crowds):
            sys.exit("\n".join(log.read_text()[-3000:] for log in folder.glob("*.log")))
        if time.monotonic() - last > 5:
            last = time.monotonic()
            progress(f"{last - began:.0f} s, round {rounds_opened(folder)} of {rounds}: {found}")
        time.sleep(0.2)
    if any(process.wait() for process in (*crowds, coordinator)):
        sys.exit("\n".join(log.read_text()[-3000:] for log in folder.glob("*.log")))
    whole = [after - before for before, after in itertools.pairwise(cpu_of_rounds[n] for n in sorted(cpu_of_rounds))]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "most": most,
        "cpu_seconds_of_rounds": [round(seconds, 2) for seconds in whole[1:]],
        "load": [round(min(loads), 1), round(max(loads), 1)],
    }


def round_durations(folder: Path) -> list[float]:
    """Seconds from each round's opening to the next one's, or to the run's end."""
    with sqlite3.connect(folder / "state" / "coordinator" / "coordinator.db") as database:
        found = database.execute("select opened_at from round order by number").fetchall()
    database.close()
    opened = [datetime.fromisoformat(at) for (at,) in found]
    return [(after - before).total_seconds() for before, after in itertools.pairwise(opened)]


def joining_seconds(folder: Path) -> float:
    """From the first silo's answer to the plan until the first round."""
    with sqlite3.connect(folder / "state" / "coordinator" / "coordinator.db") as database:
        found = database.execute("select min(answered_at), max(answered_at) from member").fetchone()
    database.close()
    first, last = (datetime.fromisoformat(at) for at in found)
    return (last - first).total_seconds()


def large_model(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """The coordinator's memory with a large model, above what it has with a small one before anyone calls."""
    small = folder / "small"
    small.mkdir()
    prepare(small, options.silos, rounds=1, method=options.method)
    coordinator = start_coordinator(small)
    constant = state_of(coordinator.pid)
    coordinator.terminate()
    coordinator.wait()
    model = {"name": options.model, "input_shape": [3, options.size, options.size], "classes": 9}
    names = prepare(folder, options.silos, rounds=options.rounds, method=options.method, model=model)
    coordinator = start_coordinator(folder)
    idle = state_of(coordinator.pid)
    Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")  # the peak counts from here
    crowds = [start_crowd(folder, names, kind="thin")]
    watched = watch(coordinator, crowds, folder, options.rounds)
    (initial,) = folder.glob("state/coordinator/runs/*/initial.safetensors")
    one = initial.stat().st_size
    most: Any = watched["most"]
    return {
        **options_of(options),
        "model_bytes": one,
        **watched,
        "with_small_model": constant,
        "idle": idle,
        "peak_above_small_models": {
            "until_listening": round((idle["peak"] - constant["rss"]) / one, 2),
            "in_rounds": round((most["peak"] - constant["rss"]) / one, 2),
        },
        "round_seconds": [round(seconds, 1) for seconds in round_durations(folder)],
        "evidence": evidence(folder, names[:1]),
    }


def soaked(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Short rounds for long, with connections that are cut now and then."""
    names = prepare(folder, options.silos, rounds=1_000_000, method=options.method)
    coordinator = start_coordinator(folder)
    port = int(yaml.safe_load((folder / "coordinator.yaml").read_text())["listen"].rpartition(":")[2])
    cutter = Cutter(port, mean=options.cut)
    for name in names:
        settings = yaml.safe_load((folder / f"{name}.yaml").read_text())
        write(folder / f"{name}.yaml", {**settings, "coordinator": {"address": f"127.0.0.1:{cutter.port}"}})
    first, rest = [start_crowd(folder, group, pause=options.pause) for group in (names[:1], names[1:])]
    begun = time.monotonic()
    with (folder / "samples.jsonl").open("a") as file:
        while (at := time.monotonic() - begun) < 60 * options.minutes:
            sample: dict[str, Any] = {"seconds": round(at, 1), "load": os.getloadavg()[0], "cuts": cutter.cuts}
            sample |= {"rounds": rounds_opened(folder)}
            sample |= {"coordinator": state_of(coordinator.pid), "silo": state_of(first.pid)}
            file.write(json.dumps(sample) + "\n")
            file.flush()
            progress(f"{at / 60:.1f} of {options.minutes:g} min: {sample}")
            if any(process.poll() is not None for process in (coordinator, first, rest)):
                sys.exit(f"a process has ended; see the logs in {folder}")
            time.sleep(options.every)
    for process in (first, rest, coordinator):
        process.send_signal(signal.SIGTERM)
        process.wait()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {**options_of(options), **growth(samples), "evidence": evidence(folder, names[:2])}


def growth(samples: Sequence[dict[str, Any]]) -> dict[str, object]:
    """What a soak's samples say."""
    settled = [sample for sample in samples if sample["seconds"] >= SETTLED_SECONDS] or samples
    found: dict[str, object] = {
        "seconds": samples[-1]["seconds"],
        "rounds_begun": samples[-1]["rounds"],
        "connections_cut": samples[-1]["cuts"],
        "load": [min(s["load"] for s in samples), max(s["load"] for s in samples)],
    }
    hours = [sample["seconds"] / 3600 for sample in settled]
    for party, what in itertools.product(("coordinator", "silo"), ("rss", "anonymous", "descriptors", "threads")):
        values = [sample[party][what] for sample in settled]
        slope = statistics.linear_regression(hours, values).slope if len(values) > 1 else 0.0
        found[f"{party}_{what}"] = {
            "first": values[0],
            "last": values[-1],
            "least": min(values),
            "most": max(values),
            "slope_per_hour": round(slope, 2),
        }
    return found


class Cutter:
    """A TCP proxy to ``target`` on loopback whose connections end after random times, ``mean`` seconds on average."""

    def __init__(self, target: int, *, mean: float) -> None:
        self.cuts = 0
        self._target, self._mean = target, mean
        self._random = random.Random(1)
        listening: list[int] = []
        ready = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
            listening.append(server.sockets[0].getsockname()[1])
            ready.set()
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        ready.wait()
        self.port = listening[0]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pumps = [asyncio.create_task(pump(*ends)) for ends in ((reader, other_writer), (other_reader, writer))]
        done, _ = await asyncio.wait(
            pumps, timeout=self._random.expovariate(1 / self._mean), return_when=asyncio.FIRST_COMPLETED
        )
        self.cuts += not done
        for task in pumps:
            task.cancel()
        for end in (writer, other_writer):
            end.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        return


def prepare(folder: Path, count: int, *, rounds: int, method: str, **run: Any) -> list[str]:
    """Keys, certificates, shards and configurations of a coordinator and ``count`` silos; the silos' names."""
    from medsilo.algorithms.datasets import save_npz
    from medsilo.privacy.identity.authority import create_authority, issue
    from medsilo.privacy.identity.identity import Identity
    from medsilo.privacy.identity.keys import create_keys
    from medsilo.silo.data.settings import PracticalGroups
    from medsilo.silo.data.sharding import cut
    from medsilo.silo.data.synthetic import generate_tissue

    names = [f"hospital{number}" for number in range(1, count + 1)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = {"name": "diversifed-cnn", "input_shape": [3, 28, 28], "classes": 9}
    settings = {"name": "load", "method": {"name": method}, "model": model, "rounds": rounds}
    settings |= {"training": {"epochs": 1}, **run}
    write(
        folder / "coordinator.yaml",
        {
            "federation": "load",
            "listen": f"127.0.0.1:{port}",
            "state": "state/coordinator",
            "silos": names,
            "run": settings,
        },
    )
    write(
        folder / "consent.yaml",
        {
            "coordinator": "spiffe://load/coordinator/coordinator",
            "methods": [method],
            "exposures": EXPOSURES,
            "rounds": rounds,
        },
    )
    size = settings["model"]["input_shape"][1]
    setting = PracticalGroups(groups=(1,), dominant=((0, 1, 2),), train_per_silo=4, test_per_silo=2)
    (shard,) = cut(generate_tissue(seed=1, train=90, test=90, size=size), setting, seed=1)
    save_npz(folder / "shard.npz", shard)
    create_authority(folder / "ca", "load")
    for index, party in enumerate(["coordinator", *names]):
        progress(f"keys {index} of {count}")
        identity = Identity("load", "silo" if index else "coordinator", party)
        keys = folder / "state" / party / "keys"
        paths = create_keys(keys, identity)
        issue(folder / "ca", party, paths.request, keys / "tls.pem", role=identity.role)
        shutil.copy(folder / "ca" / "ca.pem", keys / "ca.pem")
        if index:
            content = {"federation": "load", "name": party, "coordinator": {"address": f"127.0.0.1:{port}"}}
            content |= {"state": f"state/{party}", "shard": "shard.npz", "consent": "consent.yaml", "threads": 1}
            write(folder / f"{party}.yaml", content)
    return names


def start_coordinator(folder: Path) -> subprocess.Popen[bytes]:
    """The coordinator, listening."""
    with (folder / "coordinator.log").open("w") as log:
        process = subprocess.Popen(
            [BIN / "coordinator", "serve", "--config", "coordinator.yaml", "--until-done"],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    while "listening" not in (folder / "coordinator.log").read_text():
        if process.poll() is not None:
            sys.exit((folder / "coordinator.log").read_text())
        time.sleep(0.2)
    time.sleep(1)
    return process


def start_crowd(
    folder: Path, names: Sequence[str], *, pause: float = 0, kind: str = "crowd"
) -> subprocess.Popen[bytes]:
    """A process in which these silos live."""
    with (folder / f"{names[0]}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, __file__, kind, *((str(pause),) if kind == "crowd" else ()), *names],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def crowd(pause: float, names: Sequence[str]) -> None:
    """Silos as the daemon is, a thread each."""
    from rich.console import Console

    from medsilo.silo.run import daemon
    from medsilo.silo.run.display import Display
    from medsilo.silo.state.config import SiloConfig
    from medsilo.silo.training import site as training

    def rest(*_: object, **__: object) -> None:
        time.sleep(pause)

    training.LocalSite.fit = rest  # type: ignore[assignment, method-assign]
    training.LocalSite.measure = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    in_threads(
        lambda name: daemon.train(SiloConfig.read(Path(f"{name}.yaml")), Display(Console(), as_json=True)), names
    )


def thin(names: Sequence[str]) -> None:
    """Silos, a thread each, that hold no model: what they are sent is dropped as it comes, in place of an update they
    send the starting model from the coordinator's file. Door, journal, receipts and connection are as ever."""
    import torch

    from medsilo.algorithms.models import Layout, build
    from medsilo.algorithms.tensors import FileSource, MemorySource, Part, transfer
    from medsilo.algorithms.tensors.files import read_payload
    from medsilo.privacy.consent.consent import ConsentFile
    from medsilo.privacy.consent.gate import PlanGate
    from medsilo.privacy.door.door import Door
    from medsilo.privacy.exposure import Exposure
    from medsilo.privacy.identity.keys import load_audit_key
    from medsilo.privacy.journal.journal import Journal
    from medsilo.privacy.journal.records import ConsentRecord, RunRecord
    from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
    from medsilo.silo.state.config import SiloConfig
    from medsilo.silo.uplink.uplink import Uplink

    class Dropping:
        def __init__(self, parts: Any) -> None:
            self._parts = parts

        def write(self, data: bytes) -> None:
            pass

        def payload(self) -> dict[Exposure, Part]:
            return {exposure: Part((), MemorySource([])) for exposure in self._parts}

    transfer.MemorySink = Dropping  # type: ignore[assignment, misc]

    def take_part(name: str) -> None:
        config = SiloConfig.read(Path(f"{name}.yaml"))
        key = load_audit_key(config.keys / "audit.key")
        with Journal(config.journal, key=key, origin=config.journal_origin) as journal:
            door = Door(journal, identity=config.identity.uri, federation="load", gate=PlanGate(Exposure))
            consent = ConsentFile.read(config.consent)
            door.note(ConsentRecord(consent=consent.describe(), synthetic=True))
            line = Uplink(config, config.open_credentials(), door, notice=lambda text: print(name, text, flush=True))
            plan = line.get_plan()
            line.use(door, plan)
            line.answer(plan, None, synthetic=True)
            door.note(RunRecord(run=plan.run, plan_sha256=plan.sha256.hex(), plan=plan.model_dump(mode="json")))
            with torch.device("meta"):
                layout = Layout.of(build(plan.model, seed=plan.seed))
            whole = read_payload(Path(f"state/coordinator/runs/{plan.run}/initial.safetensors"))[Exposure.INITIAL_MODEL]
            if whole.specs != layout.parameters or not isinstance(whole.source, FileSource):
                sys.exit(
                    f"{plan.model.name} has buffers, or its classifier is not its last layer: choose another model"
                )
            update, start = {}, whole.source.offset
            for exposure, specs in layout.model_parts().items():
                update[exposure] = Part(specs, FileSource(whole.source.path, start))
                start += update[exposure].nbytes
            last = False
            for asked in itertools.count():
                task, _ = line.next_task(plan, holds_model=asked > 0, trained_rounds=0)
                last = task.kind == wire.TASK_KIND_FINISH
                line.submit(plan, task.round, {} if last else update, before_last=lambda: None)
                if last:
                    break
            line.part(plan)
            line.close()

    in_threads(take_part, names)


def in_threads(take_part: Callable[[str], None], names: Sequence[str]) -> NoReturn:
    """Ends when all have ended, with 1 if one of them failed."""
    failed: list[str] = []

    def guarded(name: str) -> None:
        try:
            take_part(name)
        except BaseException as error:
            failed.append(name)
            print(f"{name}: {error!r}", flush=True)
            raise

    threads = [threading.Thread(target=guarded, args=[name], name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.exit(1 if failed else 0)


def evidence(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Both sides' evidence for each of these silos, held against each other."""
    bundles = {}
    for party in ("coordinator", *names):
        bundles[party] = folder / f"{party}.json"
        role = "coordinator" if party == "coordinator" else "silo"
        command = [BIN / role, "audit", "export", "--config", f"{party}.yaml", "--out", bundles[party]]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, object] = {}
    for name in names:
        for own, other in ((name, "coordinator"), ("coordinator", name)):
            command = [BIN / "silo", "audit", "verify", bundles[own], "--peer", bundles[other], "--json"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            said = json.loads(done.stdout)
            found[f"{own}, with {other}'s"] = {key: said[key] for key in ("sound", "sent", "acknowledged", "problem")}
    return found


@contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="load-") as scratch:
        yield Path(scratch)


def state_of(pid: int) -> dict[str, float]:
    """A process's memory (bytes), descriptors, threads and CPU time (s)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "rss": 1024 * int(fields["VmRSS"][0]),
        "anonymous": 1024 * int(fields["RssAnon"][0]),
        "peak": 1024 * int(fields["VmHWM"][0]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(fields["Threads"][0]),
        "cpu": (int(times[11]) + int(times[12])) / _TICK,
    }


def rounds_opened(folder: Path) -> int:
    with sqlite3.connect(folder / "state" / "coordinator" / "coordinator.db") as database:
        (count,) = database.execute("select count(*) from round").fetchone()
    database.close()
    return int(count)


def options_of(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name not in ("out", "folder", "command")}


def progress(text: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"{datetime.now():%H:%M:%S} {text}", end=end, file=sys.stderr, flush=True)


def write(path: Path, content: object) -> None:
    path.write_text(yaml.safe_dump(content))


if __name__ == "__main__":
    if sys.argv[1:2] == ["crowd"]:
        crowd(float(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["thin"]:
        thin(sys.argv[2:])
    else:
        main()
