"""Rounds that wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from typer.testing import CliRunner

from medsilo.algorithms.families.sharing import count_part
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.tensors import Part
from medsilo.algorithms.tensors.files import write_payload
from medsilo.coordinator.cli import app
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds.rounds import Rounds
from medsilo.coordinator.store.store import Store
from medsilo.privacy.exposure import Exposure

NAMES = ["a", "b", "c"]


class Run:
    """A coordinator's rounds with three hospitals in one process."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.path = folder / "coordinator.yaml"
        run = {
            "name": "r",
            "method": {"name": "fedavg"},
            "model": {"name": "mlp-64", "input_shape": [1, 16, 16], "classes": 3},
            "rounds": 2,
            **settings,
        }
        content = {"federation": "test", "listen": "127.0.0.1:1", "state": "state", "silos": NAMES, "run": run}
        self.path.write_text(yaml.safe_dump(content))
        (folder / "state").mkdir()
        config = CoordinatorConfig.read(self.path)
        plan = config.plan()
        self.parts = Layout.of(build(plan.model, seed=1)).model_parts()
        self.store = Store(config.database)
        self.rounds = Rounds(config, plan, config.make_method(), self.store)
        self.rounds.start()

    def join(self, *names: str) -> None:
        for name in names:
            self.store.answer("r", name, accepted=True, missing=[], audit_key="00" * 32, certificate_sha256="")
            self.rounds.joined(name)

    def deliver(self, *names: str, number: int) -> None:
        for name in names:
            parts = {e: Part.of({s.name: torch.ones(s.shape) for s in specs}) for e, specs in self.parts.items()}
            path = self.rounds.new_upload_path(name, number)
            write_payload(path, {**parts, Exposure.SAMPLE_COUNT: count_part(10)})
            self.rounds.accept(name, number, file=path, receipt={"of": name}, metrics={})

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.rounds.failure is None
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            CliRunner().invoke(app, ["status", "--config", str(self.path), "--json"]).stdout
        )
        return found

    def told(self) -> str:
        return " ".join(CliRunner().invoke(app, ["status", "--config", str(self.path)]).stdout.split())
