"""``python -m medsilo.silo.training.helper``: a process that computes a part of a silo's training; started by
``medsilo.silo.training.processes`` alone.

It has no keys, journal or connection to the coordinator, and writes no file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from medsilo.algorithms.datasets import load_npz
from medsilo.algorithms.models import build
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors.memory import reuse_freed_memory
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import DataError, MedsiloError
from medsilo.silo.training.data_parallel import DataParallel, LostProcessError
from medsilo.silo.training.device import set_threads
from medsilo.silo.training.processes import READY, Order, take_up
from medsilo.silo.training.site import LocalSite


def main() -> None:
    """Does what it is told, until the silo ends."""
    # Ctrl-C and the service manager's SIGTERM reach all processes; the silo says what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        _work(connection)
    except LostProcessError:
        os._exit(0)  # the process that was lost is the one to say why
    except Exception as error:
        words = str(error) if isinstance(error, MedsiloError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, MedsiloError):
            traceback.print_exc()
        connection.send_bytes(words.encode())
        os._exit(1)


def _work(connection: Connection) -> None:
    start = json.loads(connection.recv_bytes())
    reuse_freed_memory()
    devices = [torch.device(name) for name in start["devices"]]
    set_threads(start["threads"], len(devices))
    plan = RunPlan.model_validate_json(start["plan"])
    dataset = load_npz(Path(start["shard"]))
    if dataset.fingerprint != start["data_sha256"]:
        raise DataError(f"{start['shard']}: the file was changed while the silo started; give the command again")
    weights = [Path(place) for place in start["weights"]]
    model = build(plan.model, seed=plan.seed, trusted=tuple(start["trusted_models"]), weights=weights)
    connection.send_bytes(READY)
    # Before it waits for the others, which may be for minutes: the silo may end meanwhile.
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, orders), daemon=True).start()
    rank = start["rank"]
    place = DataParallel(rank, devices, Path(start["meeting"]))
    site = LocalSite(
        start["name"], dataset, model, plan, device=devices[rank], precision=start["precision"], place=place
    )
    side = make(plan.method.name, plan.method.parameters).silo_side(site)
    while True:
        order = orders.get()
        match order.what:
            case "resume":
                take_up(order.groups, side, site)
            case "begin":
                side.begin(site.start(order.groups["initial"]))
            case "train":
                side.train(order.round, order.payload)
            case "finish":
                side.finish(order.payload)


def _listen(connection: Connection, orders: queue.SimpleQueue[Order]) -> None:
    try:
        while True:
            orders.put(Order.receive(connection))
    except (EOFError, OSError):
        os._exit(0)  # the silo has ended, whatever is under way here


if __name__ == "__main__":
    main()
