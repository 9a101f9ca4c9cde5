"""Every command there is, and both daemons through a whole private run of two hospitals, on two watched hosts:
``python every_command.py FOLDER COORDINATORS-NAMESPACE FLOWERS-PYTHON``, started on the hospitals' host.

What ran stands in FOLDER/ran.json afterwards, one command's words a line.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from medsilo.algorithms.datasets import save_npz
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.daemons.forked import Forked
from tests.support.network.watched_hosts import COORDINATOR
from tests.support.runs.federation import BIN, PATIENCE
from tests.support.runs.flower import CONSENT, RECORDS_OF_THE_APP, make_certificate

ROOT = Path(__file__).parents[3]
HOSPITALS = ("hospital1", "hospital2")
RUN = {
    "rounds": 2,
    "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.001},
    "privacy": {"epsilon": 4, "delta": 1e-5, "sampling_rate": 0.25},
}
CONSENTS = {
    "methods": ["fedavg"],
    "exposures": ["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "PEER_DERIVED", "SAMPLE_COUNT"],
    "rounds": 10,
    "privacy": {"epsilon": 9, "delta": 1e-5},
}
EXPERIMENT = {
    "name": "few",
    "data": "few.npz",
    "setting": {"kind": "practical", "groups": [1, 1, 1], "train_per_silo": 40, "test_per_silo": 10},
    "methods": [{"name": "fedavg"}],
    "model": "mlp-64",
    "rounds": 1,
    "seeds": [1],
}


class Commands:
    """Starts them, waits for them, and writes down what ran."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self._namespaces = {"coordinator": coordinator}
        self._numbers = itertools.count(1)
        self._started: list[tuple[Forked | subprocess.Popen[bytes], list[str]]] = []
        self.ran: list[list[str]] = []

    def silo(self, *words: object, **more: Any) -> str:
        return self.types("silo", *words, **more)

    def coordinator(self, *words: object, **more: Any) -> str:
        return self.types("coordinator", *words, **more)

    def types(self, *words: object, answers: str = "", namespace: str = "") -> str:
        """Runs a command to its end, which must be good; what it said. Its process stays for a while."""
        command, ended = self._begin(words, answers, namespace)
        deadline = time.monotonic() + PATIENCE
        while not ended.exists() or not ended.read_text():
            assert time.monotonic() < deadline, f"{command} does not end: {self.said(ended)}"
            assert self._started[-1][0].poll() is None, f"{command} broke off: {self.said(ended)}"
            time.sleep(0.02)
        assert ended.read_text() == "0", f"{command}: {ended.read_text()}\n{self.said(ended)}"
        return self.said(ended)

    def starts(self, *words: object, until: str) -> Path:
        """Starts a daemon, and returns when it has said so."""
        command, ended = self._begin(words, "", "")
        deadline = time.monotonic() + PATIENCE
        while until not in self.said(ended):
            assert time.monotonic() < deadline, f"{command} does not say {until!r}: {self.said(ended)}"
            assert not ended.exists(), f"{command} ended: {self.said(ended)}"
            time.sleep(0.02)
        return ended

    def starts_apart(self, *words: object) -> None:
        """A command in a process of its own, which has children."""
        said = self.folder / f"{words[0]}-apart.said"
        self.ran.append([str(word) for word in words])
        with said.open("wb") as file:
            program = [str(BIN / str(words[0])), *map(str, words[1:])]
            process = subprocess.Popen(program, cwd=self.folder, stdout=file, stderr=file)
        self._started.append((process, self.ran[-1]))

    def waits(self) -> None:
        """For all that will end, and for what the libraries of the others have in mind."""
        for process, words in self._started:
            if isinstance(process, subprocess.Popen):
                code = process.wait(2 * PATIENCE)
                assert code == 0, f"{words}: {code}\n{(self.folder / f'{words[0]}-apart.said').read_text()[-3000:]}"
        for process, words in self._started:
            if (process.poll() is None) and not {"serve", "page", "flower"} & set(words):
                assert process.wait(PATIENCE) == 0, words
        for process, _ in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()

    def said(self, ended: Path) -> str:
        return ended.with_suffix(".said").read_text() if ended.with_suffix(".said").exists() else ""

    def _begin(self, words: tuple[object, ...], answers: str, namespace: str) -> tuple[list[str], Path]:
        command = [str(word) for word in words]
        self.ran.append(command)
        ended = self.folder / f"{next(self._numbers)}.ended"
        prefix = ["lingering", namespace or self._namespaces.get(command[0], "-"), str(ended)]
        asked = ["answering", answers] if answers else []
        self._started.append((Forked([*prefix, *asked, *command], self.folder, ended.with_suffix(".said")), command))
        return command, ended


def main() -> None:
    folder, namespace, flower_python = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.chdir(folder)
    run = Commands(folder, namespace)
    save_npz(folder / "few.npz", generate_tissue(seed=3, train=900, test=270))
    (folder / "few.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    run.starts_apart("mkdocs", "build", "--config-file", ROOT / "mkdocs.yml", "--site-dir", folder / "site")
    by_hand(run, folder)
    invitations = begin_federation(run, folder)
    serving = run.starts("coordinator", "serve", "--config", "coordinator.yaml", until="listening on")
    train(run, folder, invitations)
    look_at_everything(run, folder)
    experiments(run)
    door_for_flower(run, folder, flower_python)
    # Last: Ray's processes give up where they get no processor for a while.
    run.starts_apart("simulation", "run", "--config", "few.yaml", "--ray", "local", "--runs", "runs-on-ray")
    run.waits()
    assert "error" not in run.said(serving).lower(), run.said(serving)
    (folder / "ran.json").write_text("\n".join(json.dumps(words) for words in run.ran))


def by_hand(run: Commands, folder: Path) -> None:
    """Certificates by hand; images from pictures."""
    (folder / "ca-kept-apart").mkdir()
    base = {"federation": "apart", "state": "apart"}
    silo = {"name": "h", "coordinator": {"address": "127.0.0.1:1"}, "shard": "few.npz", "consent": "none.yaml"}
    model = {"name": "mlp-64", "input_shape": [3, 28, 28], "classes": 9}
    plan = {"name": "r", "method": {"name": "fedavg"}, "model": model, "rounds": 1}
    (folder / "h.yaml").write_text(yaml.safe_dump({**base, **silo}))
    (folder / "c.yaml").write_text(
        yaml.safe_dump({**base, "state": "c", "listen": "127.0.0.1:1", "silos": ["h"], "run": plan})
    )
    ca = ["--authority", "apart-ca"]
    run.coordinator("ca", "init", "--federation", "apart", "--directory", "apart-ca")
    run.coordinator("keys", "--config", "c.yaml")
    run.silo("keys", "--config", "h.yaml")
    run.coordinator("ca", "issue", "h", "--request", "apart/keys/tls.csr", *ca)
    run.coordinator("ca", "operator", "anna", *ca, answers="a password,a password")
    run.coordinator("ca", "revoke", "h", *ca)
    images = generate_tissue(seed=5, train=20, test=9).train.images
    for number, image in enumerate(images):
        (folder / "pictures" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "pictures" / "ab"[number % 2] / f"{number}.png")
    run.silo("prepare", "--images", "pictures", "--size", 28, "--out", "prepared.npz")
    for words, party in ((run.silo, "h.yaml"), (run.coordinator, "c.yaml")):
        log = words("witness", "journal-key", "--config", party).strip()
        listen = f"127.0.0.1:{8601 + (party == 'c.yaml')}"
        settings = {"name": party, "listen": listen, "state": f"witness-of-{party}", "logs": [log]}
        (folder / f"w-{party}").write_text(yaml.safe_dump(settings))
        words("witness", "key", "--config", f"w-{party}")
        run.starts(words.__name__, "witness", "serve", "--config", f"w-{party}", until="listening on")
    run.silo("shard", "--from", "few.npz", "--setting", "practical", "--groups", "1,1,1", "--train", 60, "--test", 20)


def begin_federation(run: Commands, folder: Path) -> dict[str, str]:
    words = ["--federation", "tissue", "--host", COORDINATOR, "--rounds", "2"]
    run.coordinator("init", *words, *(word for name in HOSPITALS for word in ("--invite", name)))
    settings = yaml.safe_load((folder / "coordinator.yaml").read_text())
    settings["run"] = {**settings["run"], **RUN}
    settings["run"].pop("ask_for", None)
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(settings))
    run.coordinator("doctor", "--config", "coordinator.yaml")
    (folder / "plan.json").write_text(run.coordinator("plan", "--config", "coordinator.yaml"))
    said = {name: run.coordinator("invite", name, "--config", "coordinator.yaml") for name in HOSPITALS}
    return {name: line for name in said for line in said[name].split() if line.startswith("medsilo:1/")}


def train(run: Commands, folder: Path, invitations: dict[str, str]) -> None:
    """Both hospitals enrol and train; the second lets a person agree first."""
    groups = PracticalGroups(groups=(1, 1), dominant=((0, 1), (2, 3)), train_per_silo=90, test_per_silo=30)
    shards = cut(generate_tissue(seed=1, train=900, test=270), groups, seed=1)
    for name, shard in zip(HOSPITALS, shards, strict=True):
        save_npz(folder / f"{name}.npz", shard)
        run.silo("init", invitations[name], "--data", f"{name}.npz", "--yes-to", "fedavg")
        consent = {**CONSENTS, "coordinator": "spiffe://tissue/coordinator/coordinator"}
        if name == "hospital2":
            consent["approval"] = "required"
        (folder / f"{name}.consent.yaml").write_text(yaml.safe_dump(consent))
        settings = yaml.safe_load((folder / f"{name}.yaml").read_text())
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**settings, "keep_sent_days": 9, "device": "cpu"}))
        run.silo("doctor", "--config", f"{name}.yaml")
    run.silo("inspect", "--config", "hospital1.yaml")
    run.silo("rehearse", "--config", "hospital1.yaml", "--canaries", 20)
    run.silo("rehearse", "--config", "hospital1.yaml", "--canaries", 20, "--run", "--hospitals", 2)
    first = run.starts("silo", "train", "--config", "hospital1.yaml", until="joined run")
    second = run.starts("silo", "train", "--config", "hospital2.yaml", until="silo approve")
    run.silo("approve", "--config", "hospital2.yaml", "--yes")
    deadline = time.monotonic() + PATIENCE
    for ended in (first, second):
        while not ended.exists() or not ended.read_text():
            assert time.monotonic() < deadline, run.said(ended)
            time.sleep(0.05)
        assert ended.read_text() == "0", run.said(ended)


def look_at_everything(run: Commands, folder: Path) -> None:
    """What can be done after a run; the pages are asked for once."""
    own, theirs = ["--config", "hospital1.yaml"], ["--config", "coordinator.yaml"]
    for words in (
        ["budget", *own, "--html", "budget.html"],
        ["budget", *own, "--patients"],
        ["models", *own],
        ["predict", *own, "--images", "pictures/a"],
        ["evaluate", *own],
        ["export", *own, "--out", "model.onnx"],
        ["export", *own, "--out", "model.pt2", "--format", "pt2"],
        ["report", *own],
        ["dossier", *own, "--bom", "bom.json"],
        ["audit", "show", *own, "--cited", "state/hospital1/dossier/dossier.json"],
        ["audit", "export", *own, "--out", "evidence.json"],
        ["audit", "open", *own],
        ["audit", "verifier", "verifier.html"],
        ["consent", "show", *own],
    ):
        run.silo(*words)
    for words in (["status", *theirs], ["results", *theirs], ["report", *theirs]):
        run.coordinator(*words)
    run.coordinator("audit", "export", *theirs, "--out", "coordinators.json")
    run.coordinator("audit", "verify", *theirs)
    run.coordinator("audit", "verifier", "verifier.html")
    run.coordinator("audit", "show", *theirs, "1")
    run.silo("audit", "verify", *own, "--peer", "coordinators.json")
    run.starts("silo", "page", *own, "--port", 8600, until="token is in")
    token = (folder / "state" / "hospital1" / "keys" / "page.token").read_text().strip()
    asked = urllib.request.Request("http://127.0.0.1:8600", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        assert b"hospital1" in answer.read()
    run.starts("coordinator", "page", *theirs, until="The page is at")
    run.silo("consent", "withdraw", *own, "--yes")
    run.silo("consent", "give", *own, "--yes")


def experiments(run: Commands) -> None:
    run.types("one_process", "simulation", "run", "--config", "few.yaml")
    run.ran.append(run.ran.pop()[1:])
    run.types("simulation", "results", "--config", "few.yaml", "--out", "results")


def door_for_flower(run: Commands, folder: Path, python: str) -> None:
    """The door is open; which calls go through it, tests/end_to_end/test_flower.py shows."""
    make_certificate(folder)
    settings = {
        "federation": "test",
        "name": "flowering",
        "state": "flowering",
        "coordinator": {"address": f"{COORDINATOR}:9", "name": "superlink"},
        "ca": "server.pem",
        "consent": "flower-consent.yaml",
        "flower": {"python": python, "listen": "127.0.0.1:9092", "records": RECORDS_OF_THE_APP},
    }
    (folder / "flower.yaml").write_text(yaml.safe_dump(settings))
    (folder / "flower-consent.yaml").write_text(yaml.safe_dump(CONSENT))
    run.silo("keys", "--config", "flower.yaml")
    run.starts("silo", "flower", "--config", "flower.yaml", until="The door is open")


if __name__ == "__main__":
    main()
