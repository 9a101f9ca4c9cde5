"""What `coordinator status` says of silos' changes: figures from hand-worked numbers, and where a change begins."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from medsilo.algorithms.tensors import BLOCK, Part, Payload
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.rounds.changes import compare
from medsilo.coordinator.rounds.comparing import Beginning, norm_of_change, products_of_changes
from medsilo.coordinator.store.records import Change
from medsilo.coordinator.store.store import Store
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure

EXTRACTOR, CLASSIFIER = Exposure.MODEL_PARAMETERS_EXTRACTOR, Exposure.MODEL_PARAMETERS_CLASSIFIER
FLOAT32_MAX = float(np.finfo(np.float32).max)


def figures(changes: list[list[float]]) -> list[Change]:
    rows = np.array(changes)
    return compare((rows @ rows.T).tolist())


def test_the_score_is_the_modified_z_score() -> None:
    """Iglewicz and Hoaglin: 0.6745 (x − median) / MAD; of 1, 2, 3, 4, 100 the median is 3 and the MAD 1."""
    found = figures([[1.0], [2.0], [3.0], [4.0], [100.0]])
    assert [c.score for c in found] == pytest.approx([-1.349, -0.6745, 0.0, 0.6745, 65.4], rel=1e-3)
    assert [c.unusual for c in found] == [[], [], [], [], ["much larger than others'"]]
    assert [c.norm for c in found] == pytest.approx([1, 2, 3, 4, 100])


def test_silos_that_agree_closely_do_not_make_a_small_difference_unusual() -> None:
    found = figures([[1.0], [1.01], [1.2]])
    assert found[2].score == pytest.approx(1.88, abs=0.01)
    assert [c.unusual for c in found] == [[], [], []]


def test_the_one_that_points_away_is_named_and_not_those_it_points_away_from() -> None:
    """Also where it is so large that it would turn any mean round."""
    found = figures([[1.0, 0.1], [1.0, 0.0], [1.0, -0.1], [-1e6, 0.0]])
    assert [round(c.cosine or 0, 2) for c in found] == [0.98, 1.0, 0.98, -1.0]
    assert [bool(c.unusual) for c in found] == [False, False, False, True]


def test_nothing_is_said_where_there_is_nothing_to_compare() -> None:
    assert compare([]) == []
    assert figures([[2.0]]) == [Change(2.0, None, None)]
    assert [c.unusual for c in figures([[2.0], [-200.0]])] == [[], []]
    assert figures([[0.0], [0.0], [1.0]]) == [Change(0, None, None), Change(0, None, None), Change(1, None, None)]


def model(extractor: float, classifier: float, size: int = BLOCK + 7) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((size,), extractor),
        "b": torch.full((3, 1), extractor),
        "head": torch.full((4,), classifier),
    }


def update(extractor: float, classifier: float) -> Payload:
    tensors = model(extractor, classifier)
    head = tensors.pop("head")
    return {EXTRACTOR: Part.of(tensors), CLASSIFIER: Part.of({"head": head})}


def test_a_change_is_measured_from_what_the_silo_was_sent_then_its_last_update_then_the_start() -> None:
    """pFedSim sends extractors down, and classifiers stay: they have changed since the silo's last update."""
    size = BLOCK + 7 + 3
    initial: Payload = {Exposure.INITIAL_MODEL: Part.of({**model(0.0, 0.0), "buffer": torch.tensor(1)})}
    mixed: Payload = {Exposure.PEER_DERIVED: Part.of({k: t for k, t in model(2.0, 0.0).items() if k != "head"})}
    now = update(2.5, 8.0)
    assert norm_of_change(now, Beginning((initial,))) == pytest.approx((size * 6.25 + 4 * 64) ** 0.5, rel=1e-4)
    assert norm_of_change(now, Beginning((mixed, initial))) == pytest.approx((size * 0.25 + 4 * 64) ** 0.5, rel=1e-4)
    last = update(-9.0, 7.0)
    assert norm_of_change(now, Beginning((mixed, last, initial))) == pytest.approx((size * 0.25 + 4) ** 0.5, rel=1e-4)
    assert norm_of_change({Exposure.PROTOTYPES: Part.of({"p": torch.ones(3)})}, Beginning((initial,))) == 0


def test_products_are_those_of_the_whole_changes_however_large_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(3 * BLOCK // 2, generator=generator)
    rows = [start + torch.randn(len(start), generator=generator) for _ in range(4)]
    rows.append(torch.full_like(start, FLOAT32_MAX))
    beginnings = {str(n): Beginning(({Exposure.INITIAL_MODEL: Part.of({"w": start})},)) for n in range(5)}
    found = products_of_changes({str(n): {EXTRACTOR: Part.of({"w": row})} for n, row in enumerate(rows)}, beginnings)
    changes = torch.stack(rows).to(torch.float64) - start.to(torch.float64)
    scale = changes.norm(dim=1)
    cosines = (changes @ changes.T) / scale / scale[:, None]
    np.testing.assert_allclose(torch.tensor(found, dtype=torch.float64) / scale / scale[:, None], cosines, atol=1e-4)
    assert compare(found)[4].unusual


def test_the_figures_are_stored_with_the_round(url: str, tmp_path: Path) -> None:
    store = Store(url)
    assert store.serve(folder=tmp_path, seconds=60, stopped=threading.Event(), lost=print)
    store.open_run("r", b"{}", "aa")
    for number in (0, 1):
        store.open_round("r", number, ["a", "b", "c"])
        for silo in ("a", "b"):
            store.deliver("r", number, silo, file=f"{number}/{silo}", receipt={}, accuracy=None, loss=None)
    assert store.latest_files("r", before=1) == {"a": "0/a", "b": "0/b"}
    said = {"a": Change(1.5, -0.25, 0.125), "b": Change(2.5, None, None)}
    store.close_round("r", 1, downloads={}, memory_file=None, changes=said)
    store.close()
    state = Store(url).round("r", 1)
    assert state is not None
    assert {name: p.change for name, p in state.participants.items()} == {**said, "c": None}


CONFIG = """
federation: test
listen: 127.0.0.1:7443
state: state
silos: [a, b, c]
run:
  name: r
  rounds: 2
  model: {name: mlp-64, input_shape: [1, 16, 16], classes: 3}
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("method: {name: fedavg}\n  secure_aggregation: {minimum: 3}", "hides"),
        ("method: {name: fedproto}", "fedproto sends none"),
        ("method: {name: local}", "local sends none"),
    ],
)
def test_a_limit_that_could_not_be_held_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text(CONFIG + f"  {lines}\n  max_update_norm: 3\n")
    with pytest.raises(ConfigurationError, match=words):
        CoordinatorConfig.read(path).plan()


def test_asking_for_the_status_does_not_load_pytorch() -> None:
    """It takes seconds; operators ask often."""
    loaded = "import medsilo.coordinator.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
