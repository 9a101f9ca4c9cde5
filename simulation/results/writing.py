"""An experiment's page, tables and pictures as files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.durable import write_atomically
from medsilo.simulation.execution import DIRECTIONS, WEIGHTS
from medsilo.simulation.experiment import ExperimentConfig, folder_name
from medsilo.simulation.results.page import commands, markdown
from medsilo.simulation.results.runs import Floats, read_runs
from medsilo.simulation.results.table import (
    EXPOSURE_COLUMNS,
    Section,
    Spread,
    accuracy_columns,
    accuracy_rows,
    at_the_end,
    exposure_rows,
    tabulate,
)


def write_results(
    config: ExperimentConfig, config_path: Path, runs: Path, to: Path, *, everything: bool = False
) -> Path:
    """Writes an experiment's page, its tables (CSV) and one picture a section; returns the page's path.

    The picture is accuracy against exposed bytes, or, where a run has differential privacy, accuracy against ε.
    ``everything`` adds the other one, learning curves, silo-to-silo weights, and all figures (curves too) as JSON.
    """
    # Drawing into files would take a notebook's own display away from it.
    from medsilo.simulation.results.figures import draw_curves, draw_exposure, draw_privacy, draw_weights

    sections = tabulate(read_runs(runs / config.name), config)
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{to}: cannot be made ({error}); name another folder with --out") from None
    pictures: dict[str, list[tuple[str, str]]] = {}
    for section in sections:
        stem = f"{config.name}-{section.file_stem}"
        drawn = pictures[section.file_stem] = []
        private = any(row.privacy for row in section.rows)
        if private:
            drawn.append(("accuracy against ε", f"{stem}-privacy.png"))
            draw_privacy(section.title, _by_epsilon(section), at_the_end(config), to / drawn[-1][1])
        if everything or not private:
            drawn.append(("accuracy against exposed bytes", f"{stem}-exposure.png"))
            points = {row.label: (row.last, row.megabytes) for row in section.rows}
            draw_exposure(section.title, points, at_the_end(config), to / drawn[-1][1])
        if not everything:
            continue
        drawn.append(("learning curves", f"{stem}-curves.png"))
        draw_curves(section.title, {row.label: row.curve for row in section.rows}, to / drawn[-1][1])
        for row in section.rows:
            if weights := _weights(section, row.label):
                drawn.append((f"{row.label}: silo-to-silo weights", f"{stem}-{folder_name(row.label)}-weights.png"))
                draw_weights(f"{row.label}: {section.title}, seed {row.seeds[0]}", weights, to / drawn[-1][1])
    tables = {
        f"{config.name}.csv": _csv(accuracy_columns(sections), accuracy_rows(sections)),
        f"{config.name}-exposure.csv": _csv(EXPOSURE_COLUMNS, exposure_rows(sections)),
    }
    if everything:
        tables[f"{config.name}.json"] = json.dumps(_as_json(config, sections), indent=1) + "\n"
    for name, text in tables.items():
        _write(to / name, text)
    page = to / f"{config.name}.md"
    again = commands(config, config_path, runs, to, sections, everything=everything)
    _write(page, markdown(config, sections, pictures, again, list(tables)))
    return page


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode())


def _weights(section: Section, label: str) -> list[tuple[int, list[str], Floats]]:
    """The silo-to-silo weights of a method's first seed: (round, silos, matrix)."""
    run = min((r for r in section.runs if r.info["label"] == label), key=lambda r: int(r.info["seed"]))
    path = run.folder / WEIGHTS
    if not path.exists():
        return []
    table = pq.read_table(path).to_pydict()
    found: dict[int, dict[tuple[str, str], float]] = {}
    for number, silo, other, weight in zip(*(table[c] for c in ("round", "silo", "other", "weight")), strict=True):
        found.setdefault(number, {})[silo, other] = weight
    result = []
    for number, weights in sorted(found.items()):
        silos = list(dict.fromkeys(silo for silo, _ in weights))
        silos.sort(key=_natural)
        result.append((number, silos, np.array([[weights[a, b] for b in silos] for a in silos])))
    return result


def _natural(name: str) -> tuple[str, int]:
    """Sorts hospital2 before hospital10."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name[: len(name) - len(digits)], int(digits or 0)


def _by_epsilon(section: Section) -> dict[str, list[tuple[float, Spread]]]:
    """For each method, accuracy by ε, ∞ last."""
    found: dict[str, list[tuple[float, Spread]]] = {}
    for row in section.rows:
        found.setdefault(row.base, []).append((row.privacy.epsilon if row.privacy else math.inf, row.last))
    return {base: sorted(points) for base, points in found.items()}


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def _as_json(config: ExperimentConfig, sections: Sequence[Section]) -> dict[str, Any]:
    return {
        "experiment": config.name,
        "rounds": config.rounds,
        "sections": [
            {
                "data": section.data,
                "data_sha256": section.runs[0].info["data_sha256"],
                "synthetic": section.synthetic,
                "setting": section.setting,
                "parameters": section.runs[0].info["setting"],
                "methods": [
                    {
                        "label": row.label,
                        "method": row.method,
                        "seeds": list(row.seeds),
                        "best": {"mean": row.best[0], "std": row.best[1]},
                        "last10": {"mean": row.last[0], "std": row.last[1]},
                        "final": {"mean": row.final[0], "std": row.final[1]},
                        "of_classes": row.of_classes and {"mean": row.of_classes[0], "std": row.of_classes[1]},
                        "curve": [None if np.isnan(value) else value for value in row.curve.tolist()],
                        "mb_per_silo": {d: {str(e): v for e, v in row.megabytes[d].items()} for d in DIRECTIONS},
                        "published": row.published.model_dump() if row.published else None,
                        "privacy": row.privacy.model_dump() if row.privacy else None,
                    }
                    for row in section.rows
                ],
            }
            for section in sections
        ],
    }
