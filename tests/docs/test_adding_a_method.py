"""The method that docs/adding-a-method.md shows runs as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from medsilo.algorithms.local import Local
from medsilo.algorithms.method import PERSONAL, Method
from medsilo.privacy.consent.plan import MethodPlan, ModelPlan, RunPlan, TrainingPlan
from medsilo.privacy.exposure import MODEL
from medsilo.silo.data.settings import Dirichlet
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.federation import Simulation

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-method.md").read_text(encoding="utf-8")


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mixed.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mixed", raising=False)
    found: type[Method] = __import__("mixed").Mixed
    return found


def test_the_pages_method_runs_and_sends_what_it_declares(mixed: type[Method]) -> None:
    """With a share of 0 it is separate training, bit for bit; with 1 everyone begins a round from the mean."""
    shards = cut(
        generate_tissue(seed=1, train=270, test=90),
        Dirichlet(silos=3, alpha=1.0, train_per_silo=30, test_per_silo=10),
        seed=1,
    )

    def after(method: Method) -> Simulation:
        plan = RunPlan(
            federation="test",
            coordinator="c",
            run="r",
            method=MethodPlan(name=method.name, parameters=method.parameters()),
            model=ModelPlan(name="mlp-64", input_shape=(3, 28, 28), classes=9),
            training=TrainingPlan(epochs=1, batch_size=10),
            rounds=3,
            seed=1,
            required=method.required,
        )
        simulation = Simulation(plan, method, shards, device=torch.device("cpu"))
        for _ in range(3):
            simulation.step()
        return simulation

    alone, none, half = after(Local()), after(mixed(share=0.0)), after(mixed())
    for name, silo in alone.silos.items():
        for key, tensor in silo.memory[PERSONAL].items():
            assert torch.equal(tensor, none.silos[name].memory[PERSONAL][key])
            assert not torch.equal(tensor, half.silos[name].memory[PERSONAL][key])
    for one in half.last:
        assert set(one.up) == set(MODEL)
