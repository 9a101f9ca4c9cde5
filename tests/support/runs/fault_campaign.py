"""Hundreds of faults in whole runs of real daemons: ``python -m tests.support.runs.fault_campaign --faults 500``.

Each run is drawn from its number: its method, and which faults its coordinator and its hospitals meet at which step.
After each all invariants are checked. The file is written after every run, and the same command goes on where it was.
Images are synthetic; nothing here says anything about accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from medsilo.algorithms.datasets import ImageDataset
from medsilo.privacy.audit.bundle import export
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.files.durable import write_atomically
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.runs.blind import ANY, BLIND, NEAR, SETTINGS, SMOOTH
from tests.support.runs.checks import (
    assert_every_round_counted_once,
    assert_journals_sound,
    assert_models_are,
    assert_models_are_nearly,
    assert_signed,
)
from tests.support.runs.faults import Fault, Kept, happened, log_of, run_through
from tests.support.runs.federation import Federation, take_ports_from
from tests.support.runs.once import KEEP, assert_charged_once, assert_released_once

MODEL = {"name": "mlp-64", "input_shape": [3, 28, 28], "classes": 9}
PLAIN = ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED", "PEER_MODELS", "LOCAL_METRICS"]
ROUNDS = 5
RUN: dict[str, Any] = {"rounds": ROUNDS, "model": MODEL, "training": {"epochs": 1, "batch_size": 32}}
PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "clipping_norm": 1.0, "sampling_rate": 0.25}
BUDGET = {"epsilon": PRIVACY["epsilon"], "delta": PRIVACY["delta"]}
"""No more than the run promises: one charge too many ends the hospital's part."""
MIXES: dict[str, dict[str, Any]] = {
    "fedavg": {"silos": 2, "run": {"method": {"name": "fedavg"}}},
    "diversifed": {"silos": 3, "run": {"method": {"name": "diversifed"}}},
    "pfedsim": {"silos": 2, "run": {"method": {"name": "pfedsim"}}},
    "fedavg, private": {
        "silos": 2,
        "run": {"method": {"name": "fedavg"}, "privacy": {**PRIVACY, "metrics_epsilon": 2.0}},
        "consent": {"privacy": {**BUDGET, "metrics_epsilon": 2.0}},
    },
    "diversifed, private": {
        "silos": 3,
        "run": {"method": {"name": "diversifed"}, "ask_for": [], "privacy": PRIVACY},
        "consent": {"privacy": BUDGET},
    },
    "feddfq, private": {
        "silos": 2,
        "exposures": [
            *("PROTOCOL", "IDENTITY", "MODEL_PARAMETERS_EXTRACTOR", "PEER_DERIVED"),
            *("CLASSIFIER_GRADIENT", "DATA_IDENTIFIER"),
        ],
        "run": {
            "method": {"name": "feddfq", "selection": "argmin", "normalisation": "softmax"},
            "ask_for": [],
            "privacy": PRIVACY,
        },
        "consent": {"privacy": BUDGET},
    },
    "fedavg, masked": {
        "silos": 3,
        "exposures": ["PROTOCOL", "IDENTITY", "MASKED_UPDATE", "PEER_DERIVED"],
        "run": {"method": {"name": "fedavg"}, "ask_for": [], "secure_aggregation": {"minimum": 3}},
        "consent": {"secure_aggregation": {"minimum": 3}},
    },
    "fedamp, blind": {
        "silos": 3,
        "exposures": BLIND,
        "run": {
            "method": {"name": "fedamp", "proximal_weight": 10.0},
            "training": {**SMOOTH, "learning_rate": 0.02},  # in large steps, units that switch off make jumps
            "ask_for": [],
            "secure_aggregation": SETTINGS,
        },
        "consent": {"secure_aggregation": {"minimum": 3, "largest_isolation": ANY, "largest_sketch": 1}},
    },
}
KINDS = {"kill": 45, "power": 15, "full": 12, "read-only": 9, "io-error": 11, "clock": 8}
"""How often each is drawn, of a hundred."""
JUMPS = (3600.0, -3600.0, 86400.0, -86400.0, 5.0, -5.0)


def draw(source: random.Random, kinds: Mapping[str, int] = KINDS) -> Fault:
    """A fault at one of the next steps: a silo takes some forty on disk until it trains, and forty for each round."""
    kind = source.choices(list(kinds), weights=list(kinds.values()))[0]
    place = source.choice(("disk", "rpc"))
    step = 1 + int(source.random() * (80 if place == "disk" else 40))
    seconds = 0.0
    if kind == "clock":
        seconds = source.choice(JUMPS)
    elif kind in ("full", "read-only", "io-error"):
        seconds = source.choice((0.0, 0.3, 1.5)) if place == "disk" else source.choice((0.3, 1.5))
    return Fault(kind, place, step, source.random() < 0.5, seconds)


class Campaign:
    """Runs and what was found, kept in a file."""

    def __init__(self, out: Path, seed: int, work: Path, mixes: Sequence[str], kinds: Mapping[str, int]) -> None:
        self._mixes, self._kinds = mixes, kinds
        self._out = out
        self._seed = seed
        self._work = work
        self._lock = threading.Lock()
        self._expected: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        self._shards = {count: _shards(count) for count in (2, 3)}
        self.runs: list[dict[str, Any]] = []
        if out.exists():
            self.runs = json.loads(out.read_text())["runs"]

    @property
    def injected(self) -> int:
        return sum(len(run["faults"]) for run in self.runs)

    def next_numbers(self) -> Callable[[], int]:
        taken = {run["number"] for run in self.runs if run["seed"] == self._seed}
        numbers = iter(number for number in range(1_000_000) if number not in taken)
        return lambda: next(numbers)

    def one(self, number: int) -> dict[str, Any]:
        """One run with its faults; what was lost in it, if anything."""
        source = random.Random(f"{self._seed}-{number}")
        mix = self._mixes[number % len(self._mixes)]
        settings = MIXES[mix]
        folder = self._work / f"run-{number:04d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with self._lock:  # its port is taken from a count
            one = Federation(
                folder,
                self._shards[settings["silos"]],
                run={**RUN, **settings["run"]},
                exposures=settings.get("exposures", PLAIN),
            )
        for name in one.silos:
            one.write_silo(name, **(KEEP if "private" in mix else {}))
            one.write_consent(name, **settings.get("consent", {}))
        planned = {"coordinator": [draw(source, self._kinds) for _ in range(12)]}
        planned |= {name: [draw(source, self._kinds) for _ in range(8)] for name in one.silos}
        started = time.monotonic()
        problems: list[str] = []
        kept = Kept(one)
        try:
            run_through(one, planned, all_of_them=False, at_an_end=kept.look)
        except Exception as error:
            problems.append(f"did not come to its end: {error}"[-6000:])
        finally:
            one.kill_everything()
        seconds = time.monotonic() - started
        if not problems:
            problems = self._check(one, mix, kept)
        found = {
            "seed": self._seed,
            "number": number,
            "mix": mix,
            "silos": settings["silos"],
            "seconds": round(seconds, 1),
            "load": round(os.getloadavg()[0], 1),
            "faults": [fault for party in planned for fault in _told(one, party)],
            "problems": problems,
        }
        if not problems:
            shutil.rmtree(folder)
        return found

    def _check(self, one: Federation, mix: str, kept: Kept) -> list[str]:
        checks: dict[str, Callable[[], object]] = {
            "a round is not counted once": lambda: assert_every_round_counted_once(one),
            "a journal is not sound": lambda: assert_journals_sound(one),
            "a signature or receipt is missing": lambda: assert_signed(one),
            "audit verify --peer does not pass": lambda: assert_evidence_agrees(one),
            "what was on disk at an end is gone": kept.check,
            "a round was measured twice": lambda: assert_measured_once(one),
            "the models are not those of an undisturbed run": lambda: self._check_models(one, mix),
            "the ledger does not hold all that was released": lambda: self._check_ledgers(one, mix),
        }
        problems = []
        for what, check in checks.items():
            try:
                check()
            except Exception:
                problems.append(f"{what}: {traceback.format_exc(limit=-3)}"[-3000:])
        return problems

    @staticmethod
    def _check_ledgers(one: Federation, mix: str) -> None:
        if "private" in mix:
            assert_charged_once(one)
            assert_released_once(one)

    def _check_models(self, one: Federation, mix: str) -> None:
        if "private" in mix:
            return  # noise is drawn anew at every training
        with self._lock:
            if mix not in self._expected:
                self._expected[mix] = one.simulate()
        if "masked" in mix:
            assert_models_are_nearly(one, self._expected[mix])
        elif "blind" in mix:
            assert_models_are_nearly(one, self._expected[mix], by=NEAR)
        else:
            assert_models_are(one, self._expected[mix])

    def keep(self, run: dict[str, Any], command: str) -> None:
        self.runs.append(run)
        self.runs.sort(key=lambda run: (int(run["seed"]), int(run["number"])))
        content = {"machine": _machine(), "command": command, "summary": summary(self.runs), "runs": self.runs}
        write_atomically(self._out, json.dumps(content, indent=1).encode() + b"\n")


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by kind and place, what was lost, and recovery times."""
    faults = [fault for run in runs for fault in run["faults"]]
    table = []
    for kind in KINDS:
        for place in ("disk", "rpc"):
            own = [fault for fault in faults if (fault["kind"], fault["place"]) == (kind, place)]
            times = [fault["recovery_seconds"] for fault in own if fault["recovery_seconds"] is not None]
            table.append(
                {
                    "kind": kind,
                    "place": place,
                    "injected": len(own),
                    "at_coordinator": sum(fault["party"] == "coordinator" for fault in own),
                    "recoveries_timed": len(times),
                    "recovery_median_seconds": round(statistics.median(times), 2) if times else None,
                    "recovery_max_seconds": round(max(times), 2) if times else None,
                }
            )
    return {
        "runs": len(runs),
        "runs_by_mix": dict(Counter(run["mix"] for run in runs)),
        "faults": len(faults),
        "runs_with_a_problem": [f"{run['seed']}-{run['number']}" for run in runs if run["problems"]],
        "by_kind": table,
        "steps_hit": dict(sorted(Counter(fault["step"] for fault in faults).items())),
    }


def _told(one: Federation, party: str) -> list[dict[str, Any]]:
    """A party's faults, each with the time until a message was taken in again, where no other fault came between."""
    lines = happened(log_of(one.folder, party))
    found = []
    for line, following in zip(lines, [*lines[1:], {}], strict=True):
        if "fault" not in line:
            continue
        fault = Fault.read(line["fault"])
        path = Path(line["path"])
        name = re.sub(r"[0-9a-f]{16,}|[0-9]+", "#", path.name) if line["path"] else ""
        role = "coordinator" if party == "coordinator" else "silo"
        found.append(
            {
                "party": party,
                "fault": str(fault),
                "kind": fault.kind,
                "place": fault.place,
                "step": f"{role}: {line['step']} {name}".strip(),
                "recovery_seconds": round(following["at"] - line["at"], 3) if "recovered" in following else None,
            }
        )
    return found


def assert_evidence_agrees(one: Federation) -> None:
    """``audit verify --peer`` with either side's evidence."""
    bundles = {}
    for party in ("coordinator", *one.silos):
        bundles[party] = one.folder / f"{party}-evidence.json"
        export(one.folder / "state" / party / "journal", bundles[party])
    for name in one.silos:
        for own, other in ((name, "coordinator"), ("coordinator", name)):
            found = verify_evidence(bundles[own], peer=bundles[other])
            assert found.sound, f"{own} with {other}: {found.problem}"


def assert_measured_once(one: Federation) -> None:
    """A round is trained once, or again from the same start: never measured twice."""
    for name in one.silos:
        measured = json.loads((one.run_folder(name) / "results.json").read_text())["measured"]
        rounds = [m["rounds"] for m in measured]
        last = one.coordinator_config["run"]["rounds"]
        once = list(range(last + 1))
        assert rounds in (once, [*once, last]), f"{name}: {rounds}"  # what is handed out last is measured too


def _shards(count: int) -> list[ImageDataset]:
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=60, test_per_silo=20)
    return cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)[:count]


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{cores} cores of {cpu}, shared with other work"


def main() -> int:
    """0 if nothing was lost in any run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="go on until so many have happened")
    parser.add_argument("--out", type=Path, default=Path("docs/results/faults.json"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", type=int, default=2, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "medsilo-faults")
    parser.add_argument("--mixes", default="", help="only those with this text in their name, such as private")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="only these faults")
    given = parser.parse_args()
    mixes = [mix for mix in MIXES if given.mixes in mix]
    campaign = Campaign(given.out, given.seed, given.work, mixes, {kind: KINDS[kind] for kind in given.kinds})
    command = f"python {' '.join(sys.argv)}"
    numbers = campaign.next_numbers()
    torch.set_num_threads(1)
    take_ports_from(20_000 + os.getpid() % 10_000)
    with ThreadPoolExecutor(given.together) as pool:
        under_way = {pool.submit(campaign.one, numbers()) for _ in range(given.together)}
        while under_way:
            done = next(as_completed(under_way))
            under_way.remove(done)
            run = done.result()
            campaign.keep(run, command)
            bad = f"; PROBLEM: {run['problems'][0].splitlines()[0]}" if run["problems"] else ""
            print(
                f"run {run['number']:4d} ({run['mix']}): {len(run['faults'])} faults in {run['seconds']:.0f} s; "
                f"{campaign.injected} of {given.faults}{bad}",
                flush=True,
            )
            if campaign.injected < given.faults:
                under_way.add(pool.submit(campaign.one, numbers()))
    return int(any(run["problems"] for run in campaign.runs))


if __name__ == "__main__":
    sys.exit(main())
