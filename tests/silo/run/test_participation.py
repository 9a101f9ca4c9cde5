"""What a silo does with the coordinator's tasks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medsilo.algorithms.datasets import load_npz
from medsilo.privacy.errors import RefusedError
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.silo.run.participation import Participation
from medsilo.silo.training.data_parallel import Alone
from tests.support.hospital.local_training import dataset
from tests.support.hospital.trained_hospital import configured, planned, train


def quiet(*names: str) -> Any:
    return SimpleNamespace(**{name: lambda *_, **__: None for name in names})


class Uplink:
    """A coordinator that gives one task and writes down what is sent."""

    bytes_sent = 0

    def __init__(self, task: wire.Task) -> None:
        self.task = task
        self.sent: list[int] = []

    def answer(self, *_: Any, **__: Any) -> None:
        """That it joins."""

    def part(self, *_: Any) -> None:
        """That the run is over."""

    def next_task(self, *_: Any, **__: Any) -> tuple[wire.Task, dict[Any, Any]]:
        return self.task, {}

    def submit(self, _: Any, round_number: int, *__: Any, before_last: Any, **___: Any) -> None:
        before_last()
        self.sent.append(round_number)


@pytest.mark.parametrize(
    ("kind", "number"), [("TRAIN", 1), ("TRAIN", 0), ("MASK", 0)], ids=["further round", "last round again", "its mask"]
)
def test_once_a_run_has_ended_a_hospital_that_starts_again_sends_no_model(
    tmp_path: Path, kind: str, number: int
) -> None:
    """With ``mrmtl``'s ``choice: home``, its model is then one that validation images have chosen, without noise."""
    config = configured(tmp_path, dataset(40, 1))
    plan = planned("r", "mrmtl")
    train(config, plan)
    processes: Any = SimpleNamespace(device=torch.device("cpu"), place=Alone(), together=lambda *_, **__: nullcontext())
    gate = quiet("begin_steps", "begin_round", "check")
    gate.allowed = frozenset
    uplink: Any = Uplink(wire.Task(kind=wire.TaskKind.Value(f"TASK_KIND_{kind}"), round=number))
    display = quiet("joined", "waiting", "notice", "sent", "training")

    def started_again() -> Participation:
        data = load_npz(config.shard)
        return Participation(config, plan, gate, data, processes, uplink, display, None, None, None, quiet("remember"))

    with pytest.raises(RefusedError, match="of a run that it has ended"):
        started_again().run()
    assert uplink.sent == []
    uplink.task = wire.Task(kind=wire.TASK_KIND_FINISH, round=plan.rounds)
    started_again().run()
    assert uplink.sent == [plan.rounds], "what ends the run, which has no model"
