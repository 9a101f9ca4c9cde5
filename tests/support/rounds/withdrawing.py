"""Rounds from which hospitals withdraw."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medsilo.algorithms.datasets import ImageDataset, ImageSplit, save_npz
from medsilo.algorithms.models import build
from medsilo.algorithms.registry import make
from medsilo.algorithms.tensors import Payload
from medsilo.algorithms.tensors.files import write_payload
from medsilo.algorithms.tensors.transfer import check_parts
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.coordinator.store.store import Store
from medsilo.privacy.exposure import Exposure
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.silo.training.site import LocalSite
from tests.support.methods.fitting import fitting

NAMES = ("a", "a-b", "c")


RECEIPT = {"call_id": "ab" * 16}


REASON = "withdrawn by the hospital"


ROUNDS = 5


def shard(name: str, seed: int) -> ImageDataset:
    rng = np.random.default_rng(seed)

    def split(count: int) -> ImageSplit:
        labels = rng.integers(0, 3, count)
        images = np.clip(rng.normal(60 + 60 * labels[:, None, None, None], 30, (count, 28, 28, 1)), 0, 255)
        return ImageSplit(images.astype(np.uint8), labels.astype(np.int64), None)

    return ImageDataset(name, "random images", True, ("x", "y", "z"), split(8), None, split(4))


class Run:
    """A coordinator's rounds with three hospitals in one process."""

    def __init__(self, folder: Path, method: Mapping[str, Any], *, start: bool = True) -> None:
        public = folder / "public.npz"
        if not public.exists():
            save_npz(public, shard("public", 9))
        self.config = CoordinatorConfig.model_validate(
            {
                "federation": "test",
                "listen": "127.0.0.1:1",
                "state": folder / "state",
                "silos": NAMES,
                "public_data": public,
                "run": {
                    "name": "r",
                    "method": method,
                    "model": {
                        "name": fitting(make(method["name"], {}), "mlp-64", "lenet5"),
                        "input_shape": (1, 28, 28),
                        "classes": 3,
                    },
                    "training": {"epochs": 1, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05},
                    "rounds": ROUNDS,
                },
            }
        )
        (folder / "state").mkdir(exist_ok=True)
        self.plan = self.config.plan()
        self.method = self.config.make_method()
        self.store = Store(self.config.database)
        self.rounds = Rounds(self.config, self.plan, self.method, self.store)
        self.sides = {}
        for number, name in enumerate(NAMES):
            model = build(self.plan.model, seed=1)
            site = LocalSite(name, shard(name, number), model, self.plan, device=torch.device("cpu"))
            self.sides[name] = self.method.silo_side(site)
        self.uploads: dict[tuple[int, str], Payload] = {}
        if start:
            self.rounds.start()

    def join(self, *names: str) -> None:
        for name in names:
            self.store.answer("r", name, accepted=True, missing=[], audit_key="00" * 32, certificate_sha256="")
            self.rounds.joined(name)

    def restarted(self) -> Run:
        """The same after a crash of the coordinator; the hospitals keep what they have."""
        self.close()
        again = Run(self.config.state.parent, self.config.run.method, start=False)
        again.sides, again.uploads = self.sides, self.uploads
        again.rounds.start()
        return again

    def close(self) -> None:
        self.rounds.stop()
        self.store.close()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if self.rounds.failure is not None:
                raise self.rounds.failure
            assert time.monotonic() < deadline, f"stuck in round {self.rounds.round_number}"
            time.sleep(0.002)

    def work(self, *names: str) -> None:
        """One task each, from asking to delivering."""
        for name in names:
            side = self.sides[name]
            with self.rounds.task(name, 60, lambda: True, holds_model=bool(side.memory)) as (order, payload):
                assert order.kind in (wire.TASK_KIND_TRAIN, wire.TASK_KIND_FINISH), f"{name} got nothing to do"
                given = dict(payload)
                initial = given.pop(Exposure.INITIAL_MODEL, None)
                if initial is not None:
                    side.begin(initial.tensors())
                if order.kind == wire.TASK_KIND_FINISH:
                    side.finish(given)
                    upload: Payload = {}
                else:
                    side.train(order.round, given)
                    upload = side.upload()
                    expected = self.rounds.expected_parts(name, order.round)
                    check_parts({exposure: part.specs for exposure, part in upload.items()}, expected)
            self.deliver(name, order.round, upload)

    def deliver(self, name: str, number: int, upload: Payload) -> None:
        path = self.rounds.new_upload_path(name, number) if upload else None
        if path is not None:
            write_payload(path, upload)
        self.rounds.accept(name, number, file=path, receipt=RECEIPT, metrics={})
        self.uploads[number, name] = upload

    def withdraw(self, name: str) -> Any:
        return self.rounds.withdraw("r", name, reason=REASON, rounds_acknowledged=[0, 1], statement={"payload": "…"})

    def opened(self, number: int) -> None:
        self.until(lambda: self.rounds.round_number == number)

    def files_of(self, name: str) -> list[str]:
        found = self.config.state.rglob("upload-*.safetensors")
        return [path.name for path in found if path.name.removeprefix("upload-").rpartition("-")[0] == name]
