"""A hospital that trains in several processes, among real daemons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from medsilo.algorithms.datasets import ImageDataset
from tests.support.network.proxy import Proxy
from tests.support.runs.checks import assert_every_round_counted_once, assert_journals_sound, assert_signed
from tests.support.runs.federation import Federation, Process

Make = Callable[..., Federation]


def helper_of(one: Federation, silo: Process) -> psutil.Process:
    """The second process of a silo that has begun to train."""
    assert silo.pid is not None
    watched = psutil.Process(silo.pid)

    def speaking() -> list[psutil.Process]:
        return [c for c in watched.children() if "medsilo.silo.training.helper" in c.cmdline() and c.net_connections()]

    one.wait_for("a second process", lambda: bool(speaking()))
    (found,) = speaking()
    return found


def trained_rounds(progress: Path) -> int:
    found: int = json.loads(progress.read_text())["trained_rounds"]
    return found


def test_a_hospital_trains_in_two_processes_and_the_death_of_one_loses_nothing(
    federation: Make, shards: list[ImageDataset]
) -> None:
    # Few and small steps: in many, a difference in the last bit grows to anything.
    training = {"epochs": 2, "batch_size": 16, "optimizer": "sgd", "learning_rate": 0.01}
    one = federation(shards=shards[:2], run={"training": training})
    one.write_silo("hospital1", device=["cpu", "cpu"])
    proxy = Proxy(one.port, hold_after=100_000)  # half of the first update
    one.write_silo("hospital2", port=proxy.port)
    coordinator = one.start_coordinator()
    first, second = (one.start_silo(name) for name in one.silos)
    helper = helper_of(one, first)
    # The second process speaks with the first alone.
    for connection in helper.net_connections("all"):
        for address in (connection.laddr, connection.raddr):
            assert not address or isinstance(address, str) or address.ip == "127.0.0.1", connection
            assert not address or isinstance(address, str) or address.port != one.port, connection
    assert not [file for file in helper.open_files() if "keys" in file.path or "journal" in file.path]

    progress = one.run_folder("hospital1") / "progress.json"
    one.wait_for("hospital1's first round", lambda: progress.exists() and trained_rounds(progress) == 1)
    one.wait_for("half of hospital2's", proxy.held.is_set)
    helper.kill()
    proxy.release()
    one.ends_with(first, 8)
    assert "process 2 of 2 (cpu): was killed by signal 9. Nothing of this round was sent" in one.said("hospital1")
    assert "Traceback" not in one.said("hospital1")
    assert trained_rounds(progress) == 1
    assert {r["round"] for r in one.messages("hospital1", "sent") if r["rpc"] == "SubmitUpdate"} == {0}

    one.finish(one.start_silo("hospital1"), second, coordinator)
    proxy.close()
    assert_every_round_counted_once(one)
    assert_journals_sound(one)
    assert_signed(one)
    assert not (one.folder / "state" / "hospital1" / "processes").exists()
    for name, expected in one.simulate().items():
        for key, tensor in load_file(one.run_folder(name) / "model.safetensors").items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-4)
