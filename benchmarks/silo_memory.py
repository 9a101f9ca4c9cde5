"""A hospital's memory by the size of its model: real daemons over mutual TLS, one hospital, two rounds.

The silo's peak is sampled from /proc: resident in all, and of that what belongs to no file (`RssAnon`: it cannot be
given back when memory is short; pages of mapped files can). The same run with a model
of 0.6 MB is the baseline.

    python benchmarks/silo_memory.py [--model resnet50] [--method fedavg] [--momentum 0.0] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from medsilo.algorithms.models import build
from medsilo.privacy.consent.plan import ModelPlan

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
CLASSES = 9
EXPOSURES = ("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "RUNNING_STATISTICS", "SAMPLE_COUNT", "PEER_DERIVED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet50"], help="of torchvision")
    parser.add_argument("--method", nargs="+", default=["fedavg"])
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for method in options.method:
        base = measure(method, "mlp-64", options.momentum)
        for name in options.model:
            plan = ModelPlan(name=f"torchvision:{name}", input_shape=(3, 28, 28), classes=CLASSES)
            size = sum(tensor.nbytes for tensor in build(plan, seed=1).state_dict().values())
            peak = measure(method, plan.name, options.momentum)
            found[f"{method}, {name}"] = {
                "model_mb": round(size / 1e6, 1),
                **{what: round(value / 1e6) for what, value in peak.items()},
                **{f"baseline_{what}": round(value / 1e6) for what, value in base.items()},
                **{f"models_{what}": round((peak[what] - base[what]) / size, 2) for what in peak},
            }
            print(json.dumps({f"{method}, {name}": found[f"{method}, {name}"]}, indent=2), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(method: str, model: str, momentum: float) -> dict[str, int]:
    """The silo's peaks in bytes."""
    from medsilo.silo.data.settings import PracticalGroups
    from medsilo.silo.data.sharding import cut
    from medsilo.silo.data.synthetic import generate_tissue
    from tests.support.runs.federation import Federation

    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=60, test_per_silo=20)
    shards = cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)[:1]
    run = {
        "method": {"name": method},
        "model": {"name": model, "input_shape": [3, 28, 28], "classes": CLASSES},
        "rounds": 2,
        "ask_for": [],
        "training": {"epochs": 1, "batch_size": 32, "momentum": momentum},
    }
    with tempfile.TemporaryDirectory(prefix="silo-memory-") as folder:
        one = Federation(Path(folder), shards, run=run, forked=False, exposures=EXPOSURES)
        try:
            coordinator = one.start_coordinator()
            one.wait_to_say("coordinator", "listening")
            silo = one.start_silo(one.silos[0])
            peaks: dict[str, int] = {}
            watching = threading.Thread(target=watch, args=(silo.pid, peaks))
            watching.start()
            one.finish(silo, coordinator)
            watching.join()
        finally:
            one.kill_everything()
    return peaks


def watch(pid: int, peaks: dict[str, int]) -> None:
    """Follows a process until it ends."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        fields = (line.partition(":") for line in lines)
        now = {key: int(rest.split()[0]) * 1024 for key, _, rest in fields if "kB" in rest}
        if "VmHWM" not in now:
            return  # it has ended, and waits to be asked for
        peaks["resident"] = max(peaks.get("resident", 0), now["VmHWM"])
        peaks["anonymous"] = max(peaks.get("anonymous", 0), now["RssAnon"])
        time.sleep(0.005)


if __name__ == "__main__":
    main()
