"""What a silo keeps of earlier rounds' mixtures: that others cannot make it think that its models are new ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.secure_aggregation.blind_mixing import Mix
from medsilo.privacy.secure_aggregation.mixing_rules import MixingRules
from medsilo.silo.run.mixing_history import MixingHistory

NAMES = tuple(f"silo-{place:02}" for place in range(12))
SIZE = 20_000
START = np.random.default_rng(2).normal(0, 1, SIZE)
MOVED = np.random.default_rng(3).normal(0, 0.05, SIZE)


def sealed(history: MixingHistory, number: int, moved: NDArray[np.float64]) -> None:
    """In two tensors."""
    values = torch.from_numpy((START + moved).astype(np.float32))
    history.seal(number, {"w": values[:15_000].reshape(150, 100), "v": values[15_000:]})


def begun(path: Path) -> MixingHistory:
    history = MixingHistory(path, b"plan")
    start = torch.from_numpy(START.astype(np.float32))
    history.begin({"w": start[:15_000].reshape(150, 100), "v": start[15_000:], "batches": torch.tensor(3)})
    return history


def weights_of(own: int) -> NDArray[np.int64]:
    """Even ones, but the last silo gets so much of the first one's model."""
    weights = np.full((12, 12), 85)
    weights[11] = 100
    weights[11, 0] = own
    np.fill_diagonal(weights, 0)
    np.fill_diagonal(weights, 1024 - weights.sum(axis=1))
    return weights


def cosine(history: MixingHistory, number: int) -> float:
    """Of how far the model has moved by a round and by the one before, as the silo sees it."""
    moves = history.seen(number, weights_of(100), ()).moves
    return float(moves[-1, -2] / np.sqrt(moves[-1, -1] * moves[-2, -2]))


@pytest.mark.parametrize("junk", [0.0, 0.5, 1000.0])
def test_a_few_numbers_do_not_make_a_model_that_stays_look_like_a_new_one(tmp_path: Path, junk: float) -> None:
    """One number of a hundred does not train, and is whatever a hospital that works with the coordinator makes of it:
    after the first round other numbers. All else moves by a twentieth a round."""
    generator = np.random.default_rng(1)
    history = begun(tmp_path / "mixes.json")
    for number in range(2):
        moved = MOVED + generator.normal(0, 0.05 * 0.05, SIZE)
        moved[:200] = generator.normal(0, 1, 200) * junk * number
        sealed(history, number, moved)
        weights = weights_of(100 - 200 * number)
        mix = Mix.of(NAMES, weights, [b""] * 12, b"roster")
        seen = history.seen(number, weights, range(number))
        if number:
            with pytest.raises(RefusedError, match="largest_isolation_over_rounds: silo-00's model would stand out"):
                MixingRules(over_rounds=3.0).check(mix, NAMES[0], seen)
        else:
            MixingRules(over_rounds=3.0).check(mix, NAMES[0], seen)
            history.help(number, weights)


@pytest.mark.parametrize(("new", "expected"), [(0.0, 1.0), (0.5, 0.894), (1.0, 0.707), (3.0, 0.316)])
def test_models_that_do_change_count_as_new_by_as_much(tmp_path: Path, new: float, expected: float) -> None:
    history = begun(tmp_path / "mixes.json")
    sealed(history, 0, MOVED)
    history.help(0, weights_of(100))
    sealed(history, 1, MOVED + new * np.random.default_rng(4).normal(0, 0.05, SIZE))
    assert cosine(history, 1) == pytest.approx(expected, abs=0.1)


def test_where_the_starting_model_is_lost_all_of_a_model_counts_as_unknown(tmp_path: Path) -> None:
    """Then it seems to have moved less."""
    history = begun(tmp_path / "mixes.json")
    sealed(history, 0, MOVED)
    history.help(0, weights_of(100))
    sealed(history, 1, -MOVED)
    assert cosine(history, 1) == pytest.approx(-1)
    (tmp_path / "mixes.safetensors").unlink()
    for number, moved in ((0, MOVED), (1, -MOVED)):
        sealed(history, number, moved)
        history.help(number, weights_of(100))
    assert cosine(history, 1) > 0.9
