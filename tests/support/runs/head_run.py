"""A private head in daemons, by the README's commands: what six hospitals get, and what their ledgers say that it cost.

    python -m tests.support.runs.head_run --data FILE.npz [--seed 1] [--epsilon 1] [--shared] [--out FILE]

On this machine, over mutual TLS: patients are dealt (`silo shard`), the federation is begun (`coordinator init`,
`serve`) with the model, rounds and privacy of ``configs/experiments/coloncells-private-head.yaml``, each hospital
enrols and trains (`silo init`, `silo train`), rates its model on its own test images (`silo evaluate`), and tells what
was spent (`silo budget`) and whether the evidence is sound (`silo audit verify`). With ``--shared`` the unit is the
patient and the noise is shared out under masks among five of six, as in ``coloncells-shared-noise.yaml``. ε is worked
out again from the plan's noise and number of steps, without the project's code: by dp-accounting's Rényi and privacy-
loss accountants, and in closed form.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from tests.support.hospital.gaussian_audit import epsilon_of
from tests.support.runs.federation import BIN, free_port

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "configs/experiments"
HOURS = 3600.0


class Machine:
    """A folder, the commands that are typed in it, and the daemons that run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def types(self, *words: object) -> str:
        """Runs a command to its end, which must be good."""
        print("$", *words, flush=True)
        program, *rest = map(str, words)
        done = subprocess.run(
            [str(BIN / program), *rest], cwd=self.folder, env=self._environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{words}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def starts(self, name: str, *words: object) -> None:
        print("$", *words, "&", flush=True)
        program, *rest = map(str, words)
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons[name] = subprocess.Popen(
                [str(BIN / program), *rest], cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )

    def waits(self, name: str) -> None:
        if code := self.daemons[name].wait(HOURS):
            raise SystemExit(f"{name} ended with {code}:\n{self.said(name)}")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def ends(self) -> None:
        for daemon in self.daemons.values():
            if daemon.poll() is None:
                daemon.terminate()
                daemon.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        try:
            found = run(machine, options.data.resolve(), options.seed, options.epsilon, shared=options.shared)
        finally:
            machine.ends()
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def run(machine: Machine, data: Path, seed: int, epsilon: float, *, shared: bool) -> dict[str, Any]:
    began = time.monotonic()
    name = "coloncells-shared-noise" if shared else "coloncells-private-head"
    experiment = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())
    silos = [f"hospital{number}" for number in range(1, experiment["setting"]["silos"] + 1)]
    cut = ["--setting", experiment["setting"]["kind"], "--silos", len(silos), "--seed", seed]
    machine.types("silo", "shard", "--from", data, "--out", "shards", *cut)
    ports = ["--port", free_port(), "--enrolment-port", free_port()]
    what = ["--model", experiment["model"], "--classes", 4, "--rounds", experiment["rounds"]]
    invited = [word for name in silos for word in ("--invite", name)]
    said = machine.types(
        "coordinator", "init", "--federation", "tissue", "--host", "localhost", *invited, *what, *ports
    )
    lines = [word for word in said.split() if word.startswith("medsilo:1/")]
    privacy = {**experiment["privacy"], "epsilon": epsilon}
    if shared:
        privacy |= experiment["methods"][0]["privacy"]
    trust = f"{privacy['honest']} of {len(silos)}" if shared else ""
    settle(machine.folder / "coordinator.yaml", privacy, seed, minimum=len(silos) if shared else 0)
    plan = json.loads(machine.types("coordinator", "plan", "--config", "coordinator.yaml"))
    machine.starts("coordinator", "coordinator", "serve", "--until-done", "--config", "coordinator.yaml")
    while "listening on" not in machine.said("coordinator"):
        if machine.daemons["coordinator"].poll() is not None:
            raise SystemExit(machine.said("coordinator"))
        time.sleep(0.2)
    for name, line in zip(silos, lines, strict=True):
        machine.types("silo", "init", line, "--data", f"shards/{name}.npz", "--yes-to", "fedavg")
        if trust:
            agree(machine.folder / f"{name}.consent.yaml", trust, len(silos))
    for name in silos:
        machine.starts(name, "silo", "train", "--config", f"{name}.yaml")
    for name in [*silos, "coordinator"]:
        machine.waits(name)
    hospitals = {name: told(machine, name) for name in silos}
    return {
        "seed": seed,
        "claimed": plan["privacy"]["epsilon"],
        "noise_multiplier": plan["privacy"]["noise_multiplier"],
        "steps": plan["privacy"]["steps"],
        "accuracy": mean([one["accuracy"] for one in hospitals.values()]),
        "classes": mean([one["classes"] for one in hospitals.values()]),
        "ledger": sorted({one["spent"] for one in hospitals.values()}),
        "worked_out_apart": apart(plan["privacy"]),
        "hospitals": hospitals,
        "seconds": round(time.monotonic() - began),
    }


def settle(path: Path, privacy: dict[str, Any], seed: int, *, minimum: int) -> None:
    """What the page on privacy says that the operator puts into ``coordinator.yaml``."""
    settings = yaml.safe_load(path.read_text())
    settings["run"].update(privacy=privacy, seed=seed)
    settings["run"].pop("training", None)
    settings["run"].pop("ask_for", None)
    if minimum:
        settings["run"]["secure_aggregation"] = {"minimum": minimum}
    path.write_text(yaml.safe_dump(settings))


def agree(path: Path, honest: str, minimum: int) -> None:
    """What a hospital says that takes part with others' noise."""
    settings = yaml.safe_load(path.read_text())
    settings |= {"trusts": {"honest": honest}, "secure_aggregation": {"minimum": minimum}}
    settings["privacy"] = {"epsilon": 8.0, "delta": 1e-5, "unit": "patient", "least_units": 5}
    settings["exposures"] = ["MASKED_UPDATE", *settings["exposures"]]
    path.write_text(yaml.safe_dump(settings))


def told(machine: Machine, name: str) -> dict[str, Any]:
    """What a hospital finds out of its own model and its own ledger."""
    rated = json.loads(machine.types("silo", "evaluate", "--config", f"{name}.yaml", "--json"))
    budget = json.loads(machine.types("silo", "budget", "--config", f"{name}.yaml", "--json"))
    machine.types("silo", "audit", "verify", "--config", f"{name}.yaml")
    (account,) = [one for one in budget if one["spent"]["epsilon"]]
    return {
        "accuracy": rated["accuracy"]["value"],
        "classes": mean([row[label] / sum(row) for label, row in enumerate(rated["confusion"]) if sum(row)]),
        "test_images": rated["images"],
        "model": rated["which"],
        "spent": account["spent"]["epsilon"],
    }


def apart(privacy: dict[str, Any]) -> dict[str, float]:
    """ε of the plan's Gaussian releases: by two accountants of dp-accounting, of which Rényi's is a bound from above,
    and by Balle and Wang's formula for one Gaussian release."""
    if privacy["sampling_rate"] != 1 or privacy["releases"]:
        raise SystemExit("the plan has more than full-batch steps")
    steps, noise, delta = privacy["steps"], privacy["noise_multiplier"], privacy["delta"]
    event = SelfComposedDpEvent(GaussianDpEvent(noise), steps)
    losses = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-5)
    renyi = RdpAccountant(orders=[1 + number / 10 for number in range(1, 1000)])
    return {
        "privacy_loss_distribution": losses.compose(event).get_epsilon(delta),
        "renyi": renyi.compose(event).get_epsilon(delta),
        "closed_form": epsilon_of(math.sqrt(steps) / noise, delta),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
