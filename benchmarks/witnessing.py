"""What witnesses cost a round: rounds without training (``benchmarks/round_cost.py``) of a coordinator and three silos.

Their checkpoints are cosigned by nobody; by a witness on the same machine; by one that is away (nobody listens); or by
one that takes connections and never answers. Each kind of run in turn.

    python benchmarks/witnessing.py [--rounds 20] [--legs 3] [--out docs/results/witness-cost.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from round_cost import BIN, SILOS, prepare, run_leg

KINDS = ("none", "here", "away", "silent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--legs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    asked: dict[str, int] = dict.fromkeys(options.kinds, 0)
    processor: dict[str, float] = dict.fromkeys(options.kinds, 0.0)
    answers: list[float] = []
    folder = Path(tempfile.mkdtemp(prefix="witnessing-"))
    try:
        for number in range(options.legs):
            for kind in options.kinds:
                place = folder / f"{kind}{number}"
                place.mkdir()
                prepare(place, "small", options.rounds, "diversifed")
                witness = begin(place, kind)
                try:
                    before = used()
                    seconds[kind] += run_leg(place, trained=False, kind="audited").durations[1:]
                    processor[kind] += used() - before
                finally:
                    if isinstance(witness, subprocess.Popen):
                        witness.terminate()
                        witness.wait()
                    elif witness is not None:
                        witness.close()
                asked[kind] += cosigned(place, answers)
    finally:
        shutil.rmtree(folder)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    result = {
        "rounds_of_each": len(seconds["none"]),
        "round_seconds_median": {kind: round(found, 4) for kind, found in medians.items()},
        "added_milliseconds": {kind: round(1000 * (medians[kind] - medians["none"]), 1) for kind in options.kinds[1:]},
        "processor_milliseconds_a_round_of_all_four_parties": {
            kind: round(1000 * found / (options.rounds * options.legs), 1) for kind, found in processor.items()
        },
        "least_round_seconds": {kind: round(min(found), 4) for kind, found in seconds.items()},
        "records_of_cosigned_checkpoints": asked,
        "milliseconds_from_question_to_record_median": round(1000 * statistics.median(answers), 1),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


def used() -> float:
    """Processor time, in seconds, of all processes that have ended: their start included, the witness's not."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def begin(folder: Path, kind: str) -> subprocess.Popen[bytes] | socket.socket | None:
    """Names a witness in all configurations, and starts it, or what stands in its place."""
    if kind == "none":
        return None
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    parties = [("coordinator", "coordinator"), *(("silo", name) for name in SILOS)]
    logs = [run(folder, program, "witness", "journal-key", "--config", f"{name}.yaml") for program, name in parties]
    settings = {"name": "witness.example.org", "listen": f"127.0.0.1:{port}", "state": "witness", "logs": logs}
    (folder / "witness.yaml").write_text(yaml.safe_dump(settings))
    key = run(folder, "silo", "witness", "key", "--config", "witness.yaml")
    for _, name in parties:
        path = folder / f"{name}.yaml"
        content = yaml.safe_load(path.read_text())
        content["witnesses"] = [{"url": f"http://127.0.0.1:{port}", "key": key}]
        path.write_text(yaml.safe_dump(content))
    consent = yaml.safe_load((folder / "consent.yaml").read_text())
    consent["exposures"] += ["CHECKPOINT"]
    consent["witnesses"] = {"keys": [key]}
    (folder / "consent.yaml").write_text(yaml.safe_dump(consent))
    if kind == "silent":
        listening.listen(128)
        return listening
    listening.close()
    if kind == "away":
        return None
    log = folder / "witness.log"
    with log.open("wb") as file:
        words = [str(BIN / "silo"), "witness", "serve", "--config", "witness.yaml"]
        process = subprocess.Popen(words, cwd=folder, stderr=file)
    while "listening on" not in log.read_text():
        time.sleep(0.1)
    return process


def cosigned(folder: Path, answers: list[float]) -> int:
    """How many checkpoints were cosigned, in all journals; how long each took, from the record of the question to that
    of the answer, goes into ``answers``."""
    from datetime import datetime

    count = 0
    for journal in folder.glob("state/*/journal/records.jsonl"):
        question = None
        for line in journal.read_bytes().splitlines():
            record = json.loads(line)
            if str(record.get("peer", "")).startswith("witness:"):
                question = datetime.fromisoformat(record["time"])
            elif record["kind"] == "cosigned" and record["witnesses"]:
                count += 1
                if question is not None:
                    answers.append((datetime.fromisoformat(record["time"]) - question).total_seconds())
    return count


def run(folder: Path, *words: str) -> str:
    command = [str(BIN / words[0]), *words[1:]]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
