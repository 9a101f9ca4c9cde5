"""Commands that somebody waits for, a withdrawal first of all, do not load PyTorch, nor what only others need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from medsilo.algorithms.datasets import ImageDataset
from tests.support.runs.federation import Federation

_HEAVY = ("torch", "numpy", "matplotlib", "opacus", "alembic", "jinja2")
_CALLS = ("grpc", "tenacity", "sqlalchemy")
_SIGNS = ("securesystemslib",)
_RUN = f"""
import importlib, sys
program = sys.argv[0] = sys.argv.pop(1)
try:
    importlib.import_module(f"medsilo.{{program}}.cli").main()
finally:
    print("LOADED", *sorted(set({(*_HEAVY, *_CALLS, *_SIGNS)}) & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, shards: list[ImageDataset]) -> Iterator[Federation]:
    """A run that has ended at its hospitals, with a coordinator that still answers."""
    one = Federation(
        tmp_path_factory.mktemp("light"),
        shards,
        run={"method": {"name": "fedavg"}, "rounds": 1},
        exposures=["PROTOCOL", "IDENTITY", "MODEL_PARAMETERS", "SAMPLE_COUNT", "PEER_DERIVED"],
    )
    one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos])
    yield one
    one.kill_everything()


@pytest.mark.parametrize(
    ("command", "said", "needed"),
    [
        ("silo consent show --config hospital1.yaml", "in force", _SIGNS),
        ("coordinator status --config coordinator.yaml", "hospital1", ("sqlalchemy",)),
        ("silo consent withdraw --yes --config hospital1.yaml", "has been told", (*_SIGNS, "grpc", "tenacity")),
    ],
)
def test_a_command_that_is_waited_for_loads_nothing_that_it_can_do_without(
    ended: Federation, command: str, said: str, needed: tuple[str, ...]
) -> None:
    program, *words = command.split()
    outcome = subprocess.run(
        [sys.executable, "-c", _RUN, program, *words],
        cwd=ended.folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert said in " ".join(outcome.stdout.split())
    assert outcome.stdout.splitlines()[-1].split()[1:] == sorted(needed)
