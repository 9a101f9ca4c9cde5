"""From nothing to the first round: the README's four commands as a hospital and a coordinator type them, timed.

Both machines are folders of this one; 90 synthetic images, the defaults of `coordinator init`, real console scripts,
mutual TLS. Each command's elapsed time is also given as a multiple of what `import torch` alone takes in the same run.

    python benchmarks/joining.py [--repeats 3] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from medsilo.algorithms.datasets import save_npz
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue

BIN = Path(sys.executable).parent
PORT, ENROLMENT = 17443, 17444
PATIENCE = 600.0
COMMANDS = (
    "coordinator init",
    "coordinator serve, until it listens",
    "silo init",
    "silo train, until round 1 has ended",
)


class Party:
    """A folder that stands for a machine, and what its commands said."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.log = folder / "said.log"

    def start(self, *words: str) -> psutil.Popen:
        with self.log.open("ab") as log:
            return psutil.Popen([BIN / words[0], *words[1:]], cwd=self.folder, stdout=log, stderr=log)

    def said(self) -> str:
        return self.log.read_text()


def spent(process: psutil.Popen) -> float:
    """Seconds of the processor, a living process's."""
    times = process.cpu_times()
    return float(times.user + times.system)


def timed(process: psutil.Popen, done: Callable[[], bool] | None = None) -> tuple[float, float]:
    """Elapsed and processor seconds until it has ended well, or until ``done``."""
    begun, cpu = time.perf_counter(), 0.0
    while True:
        with contextlib.suppress(psutil.Error):  # it has ended
            cpu = spent(process)
        code = process.poll()
        if code is not None and (code or done is not None):
            raise SystemExit(f"{process.args}: ended with {code}")
        if code == 0 or (done is not None and done()):
            return time.perf_counter() - begun, cpu
        if time.perf_counter() - begun > PATIENCE:
            raise SystemExit(f"{process.args}: not done in {PATIENCE:.0f} s")
        time.sleep(0.01)


def join(folder: Path) -> dict[str, tuple[float, float]]:
    """The four commands, each with its times."""
    coordinator, hospital = Party(folder / "coordinator"), Party(folder / "hospital")
    shard, *_ = cut(
        generate_tissue(seed=1, train=900, test=270),
        PracticalGroups(groups=(1, 1, 1), train_per_silo=90, test_per_silo=30),
        seed=1,
    )
    save_npz(hospital.folder / "images.npz", shard)
    found = {}
    ports = ("--port", str(PORT), "--enrolment-port", str(ENROLMENT))
    names = ("--federation", "tissue", "--host", "127.0.0.1", "--invite", "hospital1")
    found[COMMANDS[0]] = timed(coordinator.start("coordinator", "init", *names, *ports))
    line = re.search(r"medsilo:1/\S+", coordinator.said())
    if line is None:
        raise SystemExit(f"no invitation in what it said:\n{coordinator.said()}")
    served = coordinator.start("coordinator", "serve", "--config", "coordinator.yaml")
    try:
        found[COMMANDS[1]] = timed(served, lambda: "listening on" in coordinator.said())
        init = ("silo", "init", line[0], "--data", "images.npz", "--yes-to", "fedavg")
        found[COMMANDS[2]] = timed(hospital.start(*init))
        training = hospital.start("silo", "train", "--config", "hospital1.yaml")
        try:
            found[COMMANDS[3]] = timed(training, lambda: "round 1 of 10 has ended" in coordinator.said())
        finally:
            training.kill()
    finally:
        served.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("import torch", *COMMANDS)}
    for _ in range(options.repeats):
        folder = Path(tempfile.mkdtemp(prefix="joining-"))
        try:
            taken["import torch"].append(timed(psutil.Popen([sys.executable, "-c", "import torch"])))
            for name, times in join(folder).items():
                taken[name].append(times)
        finally:
            shutil.rmtree(folder)
    taken["all four"] = [
        (sum(one[0] for one in four), sum(one[1] for one in four))
        for four in zip(*(taken[name] for name in COMMANDS), strict=True)
    ]

    def median(name: str, which: int) -> float:
        return statistics.median(one[which] for one in taken[name])

    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": {"before": round(load, 1), "after": round(os.getloadavg()[0], 1)},
        "repeats": options.repeats,
        "commands": {
            name: {
                "elapsed_s": round(median(name, 0), 2),
                "processor_s": round(median(name, 1), 2),
                "elapsed_beside_import_torch": round(median(name, 0) / median("import torch", 0), 2),
                "all_elapsed_s": [round(one[0], 2) for one in times],
            }
            for name, times in taken.items()
        },
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
