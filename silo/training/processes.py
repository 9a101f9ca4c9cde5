"""Several processes that train one silo's model, started and told what to do by the one that is the silo.

Only the silo has keys, journal, door, ledger, run folder and a connection to the coordinator. The others
(``medsilo.silo.training.helper``) read the same images and run the same method's side on what the silo was given, so
that each comes to the same trainings (``medsilo.silo.training.data_parallel``). What they are told travels through a
socket pair that nobody else holds; they open nothing but the process group's connections on the loopback interface, and
end when the silo does, however it ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch
from safetensors.torch import load, save

from medsilo.algorithms.datasets import ImageDataset
from medsilo.algorithms.method import Memory, SiloSide
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Part, Payload
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import TrainingError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.state.config import SiloConfig
from medsilo.silo.training.data_parallel import Alone, DataParallel, LostProcessError, check_divisible
from medsilo.silo.training.optimizers import OPTIMIZER
from medsilo.silo.training.site import LocalSite

READY = b"ready"
FROZEN = "frozen"
"""The group that holds what of the model is frozen; it is the site's."""
_PATIENCE_SECONDS = 30.0
"""So long after a process's end the silo may take to notice it by itself."""
_WORDS_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """What the other processes are to do: ``what`` with these groups of tensors."""

    what: str
    round: int
    groups: Memory

    def send(self, connections: Sequence[Connection]) -> None:
        """Writes it."""
        names = {group: list(tensors) for group, tensors in self.groups.items()}
        head = json.dumps({"what": self.what, "round": self.round, "groups": names}).encode()
        for connection in connections:
            connection.send_bytes(head)
        for tensors in self.groups.values():
            content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
            for connection in connections:
                connection.send_bytes(content)

    @classmethod
    def receive(cls, connection: Connection) -> Order:
        """Reads one; raises ``EOFError`` where the other side is gone."""
        head = json.loads(connection.recv_bytes())
        groups: Memory = {}
        for group, names in head["groups"].items():
            tensors = load(connection.recv_bytes())
            groups[group] = {name: tensors[name] for name in names}
        return cls(head["what"], head["round"], groups)

    @property
    def payload(self) -> Payload:
        """Its tensors as what came from the coordinator."""
        return {Exposure(exposure): Part.of(tensors) for exposure, tensors in self.groups.items()}


def take_up(memory: Memory, side: SiloSide, site: LocalSite) -> None:
    """Gives a fresh side and its site what a run folder kept of them."""
    for group, tensors in memory.items():
        if group == FROZEN:
            site.load(tensors)
            continue
        kept = site.optimizers if group.startswith(OPTIMIZER) else side.memory
        kept[group] = tensors


class Processes:
    """The other processes of a silo's training; none where there is one device.

    ``place``: the silo's own place among them; ``device``: its device. Inside ``with``, they run. Raises
    ``ConfigurationError`` for a run that cannot be divided, ``TrainingError`` if one cannot begin.
    """

    def __init__(
        self, config: SiloConfig, devices: Sequence[torch.device], plan: RunPlan, dataset: ImageDataset
    ) -> None:
        if len(devices) > 1:
            check_divisible(plan, make(plan.method.name, plan.method.parameters))
        self.place = Alone()
        self.device = devices[0]
        self._devices = devices
        self._plan = plan
        self._folder = config.state / "processes"
        self._start = {
            "devices": [str(device) for device in devices],
            "meeting": str(self._folder / "meeting"),
            "plan": plan.model_dump_json(),
            "name": config.name,
            "shard": str(config.shard.absolute()),
            "data_sha256": dataset.fingerprint,
            "trusted_models": config.trusted_models,
            "weights": [str(place.absolute()) for place in config.weights],
            "precision": config.precision,
            "threads": config.threads,
        }
        self._helpers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._waiting = False
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        if len(self._devices) == 1:
            return self
        shutil.rmtree(self._folder, ignore_errors=True)  # a crash leaves it
        self._folder.mkdir(mode=0o700)
        try:
            for rank in range(1, len(self._devices)):
                self._helpers.append(self._begin(rank))
            for _, connection in self._helpers:
                if (said := _words(connection, None)) != READY.decode():
                    raise self._failure(said)
            threading.Thread(target=self._watch, name="processes", daemon=True).start()
            with self._at_work():
                self.place = DataParallel(0, self._devices, self._folder / "meeting")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and isinstance(self.place, DataParallel):
            self.place.close()  # after an error NCCL would wait for those that do not come
        self._close()

    @contextmanager
    def together(self, what: str, given: Memory | Payload, *, round_number: int = 0) -> Iterator[None]:
        """The others do what is named ("resume", "begin", "train" or "finish") with the same tensors while the silo
        does it inside.

        Raises ``TrainingError`` that says which process has ended, and how.
        """
        if not self._helpers:
            yield
            return
        groups = {str(group): held.tensors() if isinstance(held, Part) else held for group, held in given.items()}
        order = Order(what, round_number, groups)
        with self._at_work():
            try:
                order.send([connection for _, connection in self._helpers])
            except OSError as error:
                raise LostProcessError(str(error)) from error
            yield

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Inside, the silo may wait for the others."""
        self._waiting = True
        try:
            yield
        except LostProcessError:
            raise self._failure() from None
        finally:
            self._waiting = False

    def _begin(self, rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
        own, other = multiprocessing.Pipe()
        with other:
            process = subprocess.Popen(  # noqa: S603 this project's own program
                [sys.executable, "-P", "-m", "medsilo.silo.training.helper", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        with suppress(OSError):  # if it is gone already, what it does not say tells
            own.send_bytes(json.dumps({**self._start, "rank": rank}).encode())
        return process, own

    def _failure(self, said: str = "") -> TrainingError:
        """Which process has ended, and what it said; one that ends only because another did ends with 0."""
        deadline = time.monotonic() + _WORDS_SECONDS
        while time.monotonic() < deadline:
            for rank, (process, connection) in enumerate(self._helpers, start=1):
                if code := process.poll():
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    said = said or _words(connection, 0) or how
                    return self._error(f"process {rank + 1} of {len(self._devices)} ({self._devices[rank]}): {said}")
            time.sleep(0.05)
        return self._error("one of its processes does not answer")

    def _error(self, what: str) -> TrainingError:
        return TrainingError(
            f"run {self._plan.run} was being trained on {len(self._devices)} devices, and {what}. Nothing of this "
            "round was sent; the same command goes on from here"
        )

    def _watch(self) -> None:
        """NCCL does not notice a process's end, nor does a group that is still gathering; neither can be cut short."""
        while not self._closed.wait(1):
            if not self._waiting or not any(process.poll() for process, _ in self._helpers):
                continue
            if not self._closed.wait(_PATIENCE_SECONDS) and self._waiting:
                error = self._failure()
                os.write(2, f"error: {error}\n".encode())
                os._exit(error.exit_code)

    def _close(self) -> None:
        self._closed.set()
        for _, connection in self._helpers:
            connection.close()  # which they take for an order to end
        for process, _ in self._helpers:
            process.kill()
            process.wait()
        self._helpers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _words(connection: Connection, seconds: float | None) -> str:
    """What a process says next; nothing if it is gone, or silent for so long (None: as long as it takes)."""
    with suppress(EOFError, OSError):
        if connection.poll(seconds):
            return connection.recv_bytes().decode(errors="replace")
    return ""
