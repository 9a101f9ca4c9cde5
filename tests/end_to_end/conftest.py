from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from medsilo.algorithms.datasets import ImageDataset, save_npz
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from tests.support.runs.federation import Federation


@pytest.fixture(scope="session")
def shards() -> list[ImageDataset]:
    """Three small synthetic shards."""
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=90, test_per_silo=30)
    return cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)


@pytest.fixture(scope="session")
def public_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic images that a coordinator has."""
    path = tmp_path_factory.mktemp("public") / "public.npz"
    save_npz(path, generate_tissue(seed=99, train=90, test=9))
    return path


@pytest.fixture
def federation(tmp_path: Path, shards: list[ImageDataset]) -> Iterator[Callable[..., Federation]]:
    """Makes federations whose processes end with the test."""
    made: list[Federation] = []

    def make(**options: Any) -> Federation:
        folder = tmp_path / f"federation{len(made)}"
        folder.mkdir()
        made.append(Federation(folder, options.pop("shards", shards), **options))
        return made[-1]

    yield make
    for one in made:
        one.kill_everything()
