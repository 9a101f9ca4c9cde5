"""``make demo``: a coordinator and three hospitals as real processes on this machine, over mutual TLS.

Uses the shipped configurations (``configs/``) as they stand, but for the port. Everything it makes is in ``demo/``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from rich.table import Table

from medsilo.algorithms.datasets import ImageDataset, load_pathmnist, save_npz
from medsilo.privacy.errors import DataError, MedsiloError
from medsilo.privacy.party.console import out
from medsilo.silo.data.label_distribution import draw_label_distribution
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.sources import open_dataset

ROOT = Path(__file__).resolve().parents[1]  # medsilo/simulation is a link
HOSPITALS = ("hospital1", "hospital2", "hospital3")
COLOURS = dict(zip(("coordinator", *HOSPITALS), ("white", "cyan", "magenta", "green"), strict=True))
_MARK = ".made-by-make-demo"


def main() -> None:
    """Runs the demo; exits with the first failing process's code."""
    folder = Path.cwd() / "demo"
    try:
        _fresh(folder)
        dataset = _data()
        _shards(dataset, folder)
        _parties(folder)
        _run(folder)
        _show(folder)
    except MedsiloError as error:
        sys.exit(f"error: {error}")


def _fresh(folder: Path) -> None:
    if folder.exists():
        if not (folder / _MARK).exists():
            raise MedsiloError(f"{folder} exists and was not made by `make demo`; move it away")
        shutil.rmtree(folder)
    folder.mkdir()
    (folder / _MARK).touch()


def _data() -> ImageDataset:
    out.print("Looking for PathMNIST (in ~/.medmnist, else downloading 206 MB) …")
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    try:
        dataset = load_pathmnist()
        out.print("Using PathMNIST.")
    except DataError:
        dataset = open_dataset("synthetic", seed=1)
        out.print(
            "PathMNIST is not here and cannot be downloaded: using the SYNTHETIC tissue set that ships with the "
            "package. Its images are generated; the accuracies below say nothing about real tissue.",
            style="bold yellow",
        )
    finally:
        socket.setdefaulttimeout(previous)
    return dataset


def _shards(dataset: ImageDataset, folder: Path) -> None:
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=500, test_per_silo=100)
    shards = cut(dataset, setting, seed=1)
    (folder / "shards").mkdir()
    for shard in shards:
        save_npz(folder / "shards" / f"{shard.name}.npz", shard)
    draw_label_distribution(shards, folder / "shards" / "label_distribution.png")


def _parties(folder: Path) -> None:
    """Configurations, the CA, and every party's own keys and certificate."""
    port = _free_port()
    for path in (ROOT / "configs").glob("*.yaml"):
        text = path.read_text().replace("localhost:7443", f"localhost:{port}")
        text = text.replace("0.0.0.0:7443", f"localhost:{port}")
        if path.stem in HOSPITALS:
            text += "threads: 1   # four processes share this machine\n"
        (folder / path.name).write_text(text)
    _command(folder, "coordinator", "ca", "init", "--federation", "tissue")
    for party in ("coordinator", *HOSPITALS):
        command = "coordinator" if party == "coordinator" else "silo"
        _command(folder, command, "keys", "--config", f"{party}.yaml")
        keys = folder / "state" / party / "keys"
        request, certificate = str(keys / "tls.csr"), str(keys / "tls.pem")
        role = ("--role", "coordinator") if party == "coordinator" else ()
        _command(folder, "coordinator", "ca", "issue", party, *role, "--request", request, "--out", certificate)
        shutil.copy(folder / "ca" / "ca.pem", keys / "ca.pem")
    out.print("Made a CA, four sets of keys and four certificates. Starting four processes …")


def _run(folder: Path) -> None:
    arguments = {party: ["silo", "train", "--config", f"{party}.yaml"] for party in HOSPITALS}
    arguments["coordinator"] = ["coordinator", "serve", "--config", "coordinator.yaml", "--until-done"]
    processes = {
        party: subprocess.Popen(
            [str(Path(sys.executable).parent / words[0]), *words[1:]],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for party, words in arguments.items()
    }
    readers = [threading.Thread(target=_echo, args=item, daemon=True) for item in processes.items()]
    for reader in readers:
        reader.start()
    try:
        failed = [party for party in HOSPITALS if processes[party].wait() != 0]
        if not failed and processes["coordinator"].wait(timeout=60) != 0:
            failed = ["coordinator"]
        for reader in readers:
            reader.join(timeout=5)
        if failed:
            raise MedsiloError(f"{', '.join(failed)} failed; what they said stands above")
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                process.terminate()


def _show(folder: Path) -> None:
    table = Table(title="Accuracy on each hospital's own test images", title_justify="left")
    for column in ("hospital", "before any training", "after its first own training", "after the last round"):
        table.add_column(column, justify="left" if column == "hospital" else "right")
    synthetic = False
    for hospital in HOSPITALS:
        (results,) = (folder / "state" / hospital / "runs").glob("*/results.json")
        content = json.loads(results.read_text())
        synthetic = content["synthetic"]
        measured = [m["accuracy"] for m in content["measured"]]
        table.add_row(hospital, *(f"{100 * value:.1f} %" for value in (measured[0], measured[1], measured[-1])))
    if synthetic:
        table.caption = "synthetic data: generated images, not tissue"
    out.print(table)
    _command(folder, "coordinator", "results", "--config", "coordinator.yaml", show=True)
    for hospital in HOSPITALS:
        _command(folder, "silo", "report", "--config", f"{hospital}.yaml", show=True)
    _command(folder, "coordinator", "report", "--config", "coordinator.yaml")
    for command, party in (*(("silo", hospital) for hospital in HOSPITALS), ("coordinator", "coordinator")):
        _command(folder, command, "audit", "export", "--config", f"{party}.yaml", "--out", f"{party}-evidence.json")
    out.print("The evidence of hospital1, held against the coordinator's:")
    words = ("audit", "verify", "hospital1-evidence.json", "--peer", "coordinator-evidence.json")
    _command(folder, "silo", *words, show=True)
    out.print("The reports of what left each hospital, and the coordinator's of all (report.pdf beside each):")
    for party in (*HOSPITALS, "coordinator"):
        out.print(f"  {folder / 'state' / party / 'report' / 'report.html'}", soft_wrap=True)
    out.print(f"Who holds which images: {folder / 'shards' / 'label_distribution.png'}", soft_wrap=True)


def _command(folder: Path, name: str, *arguments: str, show: bool = False) -> None:
    program = Path(sys.executable).parent / name
    outcome = subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise MedsiloError(f"{name} {' '.join(arguments)} failed: {outcome.stdout}{outcome.stderr}")
    if show:
        out.print(outcome.stdout.rstrip(), markup=False, soft_wrap=True)


def _echo(party: str, process: subprocess.Popen[str]) -> None:
    for line in process.stdout or ():
        out.print(f"[{COLOURS[party]}]{party:<11}[/] ", end="")
        out.print(line.rstrip(), markup=False, soft_wrap=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
