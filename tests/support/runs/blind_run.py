"""Blind mixtures among many hospitals, in daemons over mutual TLS, against the plain run of the same plan.

    python -m tests.support.runs.blind_run [--silos 20] [--methods diversifed bounded fedamp pfedsim] [--out FILE]

Sketches are exact and images generated, so that what is left between the two runs' models is the fixed point, the
errors that seal models, and what training makes of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from medsilo.algorithms.datasets import ImageDataset
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.runs.blind import SMOOTH, blind
from tests.support.runs.federation import Federation, take_ports_from

BOUNDED = {"name": "diversifed", "variant": "bounded"}


def run(folder: Path, method: str, shards: list[ImageDataset]) -> dict[str, Any]:
    """One run of the method, and how far its models are from the plain one's."""
    made: list[Federation] = []

    def make(**options: Any) -> Federation:
        made.append(Federation(folder, shards, **options))
        return made[-1]

    one = blind(
        make, run={"method": BOUNDED if method == "bounded" else {"name": method}, "training": SMOOTH, "rounds": 4}
    )
    try:
        began = time.monotonic()
        coordinator = one.start("coordinator", "serve", "--config", "coordinator.yaml")
        one.wait_to_say("coordinator", "listening")
        for process in [one.start_silo(name) for name in one.silos]:
            if code := process.wait(3600):
                raise SystemExit(f"{method}: a silo ended with {code}; its words are in {folder}")
        seconds = time.monotonic() - began
        coordinator.terminate()
        coordinator.wait(60)
        plain = one.simulate()
        models = {name: load_file(one.run_folder(name) / "model.safetensors") for name in one.silos}
        apart = [float((models[n][key] - plain[n][key]).abs().max()) for n in models for key in models[n]]
        first = plain[one.silos[0]]
        others = [float((plain[n][key] - first[key]).abs().max()) for n in one.silos[1:] for key in first]
        for name in one.silos:
            one.command("silo", "audit", "verify", "--config", f"{name}.yaml")
        found = {"method": method, "silos": len(one.silos), "rounds_of_training": 2, "seconds": round(seconds)}
        return {**found, "furthest_from_plain": max(apart), "plain_models_apart": max(others)}
    finally:
        for federation in made:
            federation.kill_everything()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=["diversifed", "bounded", "fedamp", "pfedsim"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    take_ports_from(31_000)
    half = options.silos // 2
    groups = PracticalGroups(
        groups=(half, options.silos - half),
        dominant=((0, 1, 2, 3), (4, 5, 6, 7)),
        train_per_silo=60,
        test_per_silo=20,
    )
    shards = cut(generate_tissue(train=9 * 400, test=9 * 100), groups, seed=1)
    rows = []
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(Path(folder), method, shards))
            print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
