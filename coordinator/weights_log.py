"""Who was given how much of whose model, round by round, where a method has such weights: to be looked at.

A line a round in ``weights.jsonl`` of the run's folder. Nothing depends on it: it is written after the round has ended,
and a line that a crash cut off is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = "weights.jsonl"


def add(folder: Path, number: int, silos: Sequence[str], weights: Sequence[Sequence[float]]) -> None:
    """Keeps a round's weights: ``weights[i][j]`` of silo j's model for silo i."""
    line = {"round": number, "silos": list(silos), "weights": [[float(f"{w:.6g}") for w in row] for row in weights]}
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
