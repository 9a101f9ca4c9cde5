"""Who was given how much of whose model, round by round, where a method has such weights: to be looked at.

A line a round in ``weights.jsonl`` of the run's folder. Nothing depends on it: it is written after the round has ended,
and a line that a crash cut off is passed over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medsilo.algorithms.method import SiloWeights

FILE = "weights.jsonl"


def add(folder: Path, number: int, given: SiloWeights) -> None:
    """Keeps a round's weights."""
    weights = [[float(f"{weight:.6g}") for weight in row] for row in given.weights.tolist()]
    line = {"round": number, "silos": given.silos, "weights": weights}
    with (folder / FILE).open("ab") as file:
        file.write(b"\n" * (file.tell() > 0) + json.dumps(line).encode())


def rounds(folder: Path) -> dict[int, dict[str, Any]]:
    """What was kept, by round."""
    found: dict[int, dict[str, Any]] = {}
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        found[content["round"]] = content
    return dict(sorted(found.items()))
