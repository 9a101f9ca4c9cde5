"""From an experiment's runs to a page: accuracy, learning curves, and accuracy against exposed bytes."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import write_atomically
from medsilo.simulation.execution import DIRECTIONS, ROUNDS, RUN, WEIGHTS, Recorded, check_same, read_run
from medsilo.simulation.experiment import (
    ExperimentConfig,
    Published,
    Run,
    Variant,
    data_name,
    folder_name,
    section_name,
)

LAST = 10
MEGABYTE = 1e6

EXPOSURE_COLUMNS = ("data", "synthetic", "setting", "method", "last10_mean", "direction", "exposure", "mb_per_silo")

Floats = npt.NDArray[np.float64]
Spread = tuple[float, float | None]
"""Mean and (population) standard deviation over seeds; None for one seed, which says nothing of others."""


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, read.

    ``info`` is its ``run.json``; ``columns`` the columns of its ``rounds.parquet``.
    """

    folder: Path
    info: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]

    @property
    def section(self) -> tuple[str, str]:
        """Data set (as the experiment's folder has it), and setting with its participation."""
        return data_name(self.info["data_spec"]), section_name(self.info["setting_name"], self.info["participation"])

    @cached_property
    def curve(self) -> Floats:
        """Percent, by round: the uniform mean over silos of their accuracy after it; NaN where none has test images."""
        rounds = int(self.info["plan"]["rounds"])
        number = np.asarray(self.columns["round"])
        accuracy = np.asarray([np.nan if a is None else a for a in self.columns["accuracy"]], dtype=np.float64)
        curve = np.full(rounds, np.nan)
        for one in range(rounds):
            measured = accuracy[number == one]
            measured = measured[~np.isnan(measured)]
            if len(measured):
                curve[one] = 100 * measured.mean()
        return curve

    @property
    def final(self) -> float:
        """Percent: the same mean of the models that the silos keep, after ``finish``."""
        rounds = int(self.info["plan"]["rounds"])
        kept = zip(self.columns["round"], self.columns["accuracy"], strict=True)
        measured = [accuracy for number, accuracy in kept if number == rounds and accuracy is not None]
        return 100 * float(np.mean(measured)) if measured else math.nan

    @property
    def last(self) -> float:
        """Percent: the mean of the curve's last ten rounds; ``final`` of a method whose models are made at the end."""
        return self.final if self.made_at_end else float(self.curve[-LAST:].mean())

    @property
    def best(self) -> float:
        """Percent: the curve's best round; ``final`` of a method whose models are made at the end."""
        return self.final if self.made_at_end else float(self.curve.max())

    @property
    def made_at_end(self) -> bool:
        """See ``Method.made_at_end``."""
        return bool(self.info.get("made_at_end", False))

    @cached_property
    def megabytes(self) -> dict[str, dict[Exposure, float]]:
        """By direction and exposure class: MB (10^6 bytes) for the whole run, the mean over silos."""
        silos = len(set(self.columns["silo"]))
        found: dict[str, dict[Exposure, float]] = {direction: {} for direction in DIRECTIONS}
        for name, sizes in self.columns.items():
            direction, _, exposure = name.partition("_")
            if direction in found and exposure in Exposure.__members__:
                found[direction][Exposure(exposure)] = sum(sizes) / silos / MEGABYTE
        return found


@dataclass(frozen=True)
class Row:
    """One method in one section.

    ``best`` is the best round's accuracy (as papers report it; optimistic, a maximum over noisy measurements), ``last``
    the mean of the last ten rounds, or of all where there are not more, ``final`` that of the models that the silos
    keep after the run's end, which stands for both others where a method's models are made there; ``wins`` on how many
    seeds ``last`` is above separate training's (``_separate``), of ``compared``.
    ``megabytes`` is the mean over seeds of ``FinishedRun.megabytes``. ``base`` is the label without what of its privacy
    is swept over, ``privacy`` what the runs' plan promised each silo.
    """

    label: str
    method: str
    seeds: tuple[int, ...]
    best: Spread
    last: Spread
    final: Spread
    curve: Floats
    wins: int | None
    compared: int
    megabytes: Mapping[str, Mapping[Exposure, float]]
    published: Published | None = None
    base: str = ""
    privacy: PrivacyPlan | None = None

    def total(self, direction: str) -> float:
        """MB per silo for the whole run, all classes together."""
        return sum(self.megabytes[direction].values())


@dataclass(frozen=True)
class Section:
    """All methods on one data set in one setting."""

    data: str
    setting: str
    runs: tuple[FinishedRun, ...]
    rows: tuple[Row, ...]
    unmeasured: Mapping[str, Published]

    @property
    def synthetic(self) -> bool:
        """Whether the images were generated."""
        return any(run.info["synthetic"] for run in self.runs)

    @property
    def title(self) -> str:
        """Its heading: the data set as it calls itself, and its file where that is called otherwise."""
        name = str(self.runs[0].info["data"])
        known_as = name if name == self.data else f"{name} ({self.data})"
        return f"{known_as}, {self.setting}" + (" – SYNTHETIC DATA" if self.synthetic else "")

    @property
    def file_stem(self) -> str:
        """The start of its pictures' names."""
        return f"{folder_name(self.data)}-{folder_name(self.setting)}"


def read_runs(folder: Path) -> list[FinishedRun]:
    """The finished runs of an experiment; raises ``DataError`` if there are none."""
    found = []
    for path in sorted(folder.glob(f"*/*/*/seed-*/{RUN}")):
        info = read_run(path.parent)
        if info is None or not info["finished"]:
            continue
        try:
            columns = pq.read_table(path.parent / ROUNDS).to_pydict()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path.parent / ROUNDS}: cannot be read ({error}); delete {path.parent} and run it again"
            ) from None
        found.append(FinishedRun(path.parent, info, columns))
    if not found:
        raise DataError(f"{folder}: holds no finished runs; start them with `simulation run`")
    return found


def tabulate(found: Sequence[FinishedRun], config: ExperimentConfig) -> list[Section]:
    """One section a data set and setting, one row a method, in the experiment's order.

    Runs of methods or settings that the experiment no longer names are left out; raises ``ConfigurationError`` for runs
    that were not run as it says, whose numbers would stand under its words.
    """
    variants = {variant.label: variant for variant in config.variants()}
    order = list(variants)
    made = config.make_settings()
    settings = [section_name(name, share) for name in made for share in config.participation]
    kept = [
        run
        for run in found
        if run.info["label"] in order and run.section[1] in settings and run.info["seed"] in config.seeds
    ]
    for run in kept:
        info = run.info
        name, share = info["setting_name"], info["participation"]
        is_this = Run(
            config, info["data_spec"], name, made[name], share, variants[info["label"]], info["seed"], run.folder
        )
        check_same(info, is_this, Recorded.of(info))
    names = sorted({run.section for run in kept}, key=lambda section: (section[0], settings.index(section[1])))
    sections = []
    for name in names:
        runs = tuple(run for run in kept if run.section == name)
        if len({run.info["data_sha256"] for run in runs}) > 1:
            raise ConfigurationError(
                f"the runs on {name[0]} are not all on the same images; delete those on other images, and run again"
            )
        published = dict(config.published.get(name[1], {})) if runs[0].info["data"] == config.published_on else {}
        labels = sorted({run.info["label"] for run in runs}, key=order.index)
        rows = tuple(_row(variants[label], runs, published.pop(label, None), config) for label in labels)
        sections.append(Section(*name, runs, rows, published))
    if not sections:
        raise DataError("no finished run belongs to this experiment as it stands; start them with `simulation run`")
    return sections


def _separate(run: FinishedRun, runs: Sequence[FinishedRun], config: ExperimentConfig) -> FinishedRun | None:
    """What a run is held against: separate training on the same seed, of the same model, with the same training and
    privacy. Failing that with the experiment's own training, or without noise: a hospital alone needs none."""
    mine = run.info["plan"]

    def distance(other: FinishedRun) -> tuple[bool, bool] | None:
        plan = other.info["plan"]
        noise, training = plan.get("privacy") != mine.get("privacy"), plan["training"] != mine["training"]
        if plan["model"] != mine["model"] or (noise and plan.get("privacy") is not None):
            return None
        return None if training and plan["training"] != config.training.model_dump(mode="json") else (noise, training)

    found = [
        (far, other)
        for other in runs
        if other.info["method"] == "local"
        and other.info["seed"] == run.info["seed"]
        and (far := distance(other)) is not None
    ]
    return min(found, key=lambda one: one[0])[1] if found else None


def _row(variant: Variant, runs: Sequence[FinishedRun], published: Published | None, config: ExperimentConfig) -> Row:
    label = variant.label
    mine = {run.info["seed"]: run for run in runs if run.info["label"] == label}
    separate = {seed: _separate(run, runs, config) for seed, run in mine.items()}
    alone = {seed: run for seed, run in separate.items() if run is not None}
    method = next(iter(mine.values())).info["method"]
    last = {seed: run.last for seed, run in mine.items()}
    compare = method != "local" and alone
    classes = {
        direction: [e for e in Exposure if any(e in run.megabytes[direction] for run in mine.values())]
        for direction in DIRECTIONS
    }
    return Row(
        label=label,
        method=method,
        seeds=tuple(sorted(mine)),
        best=_spread([run.best for run in mine.values()]),
        last=_spread(last.values()),
        final=_spread([run.final for run in mine.values()]),
        curve=np.mean([run.curve for run in mine.values()], axis=0),
        wins=sum(last[s] > run.last for s, run in alone.items()) if compare else None,
        compared=len(alone),
        megabytes={
            direction: {
                e: float(np.mean([run.megabytes[direction].get(e, 0.0) for run in mine.values()])) for e in occurring
            }
            for direction, occurring in classes.items()
        },
        published=published,
        base=variant.base,
        privacy=_privacy(label, list(mine.values())),
    )


def _privacy(label: str, runs: Sequence[FinishedRun]) -> PrivacyPlan | None:
    """What the runs promised; raises ``DataError`` where a silo has spent more."""
    promised = runs[0].info["plan"].get("privacy")
    if promised is None:
        return None
    plan = PrivacyPlan.model_validate(promised)
    for run in runs:
        if any(spent["epsilon"] > plan.epsilon for spent in run.info["spent"].values()):
            raise DataError(f"{run.folder}: {label} has spent more than the ε = {plan.epsilon:g} of its plan")
    return plan


def _spread(values: Iterable[float]) -> Spread:
    listed = list(values)
    return float(np.mean(listed)), float(np.std(listed)) if len(listed) > 1 else None


def _at_the_end(config: ExperimentConfig) -> str:
    """What ``Row.last`` is the mean of."""
    return (
        f"last {LAST} rounds"
        if config.rounds > LAST
        else f"all {config.rounds} rounds"
        if config.rounds > 1
        else "the round"
    )


def write_results(config: ExperimentConfig, config_path: Path, runs: Path, to: Path) -> Path:
    """Writes an experiment's page, tables (CSV and JSON) and pictures; returns the page's path."""
    # Drawing into files would take a notebook's own display away from it.
    from medsilo.simulation.figures import draw_curves, draw_exposure, draw_privacy, draw_weights

    sections = tabulate(read_runs(runs / config.name), config)
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{to}: cannot be made ({error}); name another folder with --out") from None
    pictures: dict[str, list[tuple[str, str]]] = {}
    for section in sections:
        stem = f"{config.name}-{section.file_stem}"
        curves, exposed = f"{stem}-curves.png", f"{stem}-exposure.png"
        draw_curves(section.title, {row.label: row.curve for row in section.rows}, to / curves)
        points = {row.label: (row.last, row.megabytes) for row in section.rows}
        draw_exposure(section.title, points, _at_the_end(config), to / exposed)
        pictures[section.file_stem] = [("learning curves", curves), ("accuracy against exposed bytes", exposed)]
        if any(row.privacy for row in section.rows):
            name = f"{stem}-privacy.png"
            draw_privacy(section.title, _by_epsilon(section), _at_the_end(config), to / name)
            pictures[section.file_stem].insert(0, ("accuracy against ε", name))
        for row in section.rows:
            if weights := _weights(section, row.label):
                name = f"{stem}-{folder_name(row.label)}-weights.png"
                draw_weights(f"{row.label}: {section.title}, seed {row.seeds[0]}", weights, to / name)
                pictures[section.file_stem].append((f"{row.label}: silo-to-silo weights", name))
    _write(to / f"{config.name}.csv", _csv(accuracy_columns(sections), accuracy_rows(sections)))
    _write(to / f"{config.name}-exposure.csv", _csv(EXPOSURE_COLUMNS, exposure_rows(sections)))
    _write(to / f"{config.name}.json", json.dumps(_as_json(config, sections), indent=1) + "\n")
    page = to / f"{config.name}.md"
    _write(page, markdown(config, sections, pictures, _commands(config, config_path, runs, to, sections)))
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


def markdown(
    config: ExperimentConfig,
    sections: Sequence[Section],
    pictures: Mapping[str, Sequence[tuple[str, str]]],
    commands: Sequence[str],
) -> str:
    """The results page: what was run, tables, pictures, how to repeat it."""
    lines = [f"# {config.name}", ""]
    if any(section.synthetic for section in sections):
        lines += ["**Synthetic data: generated images. No result so marked says anything about patients.**", ""]
    first = sections[0].runs[0].info
    lines += [
        f"Model: {config.model}. Training: {_training(config.training.model_dump())}; overrides are part of a method's "
        f"label. {config.rounds} rounds, seeds {', '.join(map(str, config.seeds))}. "
        f"Medsilo {first['versions']['medsilo']}, PyTorch {first['versions']['torch']}, "
        f"Python {first['versions']['python']}.",
        "",
        "Accuracy in percent: the uniform mean over silos of each one's personalised model on its own test images; "
        "mean ± standard deviation (population) over seeds, of one seed its number alone. The best round is chosen on "
        f"test images, as papers do, and so optimistic; the mean of {_at_the_end(config)} is not. A method whose "
        "personalised model is what the coordinator hands out is measured with what each round's aggregation gave. At "
        "the end: the models that the silos keep after the last round. "
        f"Separate training is `local` of the same model, training and privacy, by the mean of {_at_the_end(config)} "
        "(for a method with training or noise of its own, where there is no such run, `local` with the experiment's "
        "training, or without noise); – where there is none of that model.",
        "",
    ]
    at_end = dict.fromkeys(variant.method.name for variant in config.variants() if variant.method.made_at_end)
    if at_end:
        lines += [f"Made only at the end, so that this stands in all columns: the models of {', '.join(at_end)}.", ""]
    if notes := config.notes():
        lines += ["What methods say about such runs:", "", *(f"* {note}" for note in notes), ""]
    for section in sections:
        lines += _section(config, section, pictures.get(section.file_stem, []))
    lines += [
        "## Repeat it",
        "",
        "```",
        *commands,
        "```",
        "",
        f"The tables as files: [`{config.name}.csv`]({config.name}.csv), "
        f"[`{config.name}-exposure.csv`]({config.name}-exposure.csv), [`{config.name}.json`]({config.name}.json).",
        "",
    ]
    return "\n".join(lines)


def _section(config: ExperimentConfig, section: Section, pictures: Sequence[tuple[str, str]]) -> list[str]:
    info = section.runs[0].info
    source = info["data_source"]
    lines = [
        f"## {section.title}",
        "",
        f"Data: {info['data']} ({source}; SHA-256 of the data set's content `{info['data_sha256'][:16]}…`). "
        f"Setting: `{json.dumps(info['setting'])}`."
        + ("" if info["participation"] == 1 else f" {info['participation']:.0%} of the silos take part in a round."),
        "",
    ]
    if section.setting in config.published and info["data"] != config.published_on:
        lines += [f"The published numbers of the experiment are for {config.published_on}; none stands here.", ""]
    models = {row.label: _model(section, row.label) for row in section.rows}
    with_published = any(row.published for row in section.rows) or section.unmeasured
    private = any(row.privacy for row in section.rows)
    header = [
        "method",
        "seeds",
        "best round",
        _at_the_end(config),
        "at the end",
        "seeds on which it beats separate training",
    ]
    if private:
        lines += [*_promises(section), ""]
        header.append("ε")
    if with_published:
        header += ["published", "best round − published", "source"]
    body = []
    for row in section.rows:
        model = models[row.label]
        name = row.label if model == config.model or model in row.label else f"{row.label} ({model})"
        wins = "–" if row.wins is None else f"{row.wins} of {row.compared}"
        seeds = (
            str(len(row.seeds)) if len(row.seeds) == len(config.seeds) else f"{len(row.seeds)} of {len(config.seeds)}"
        )
        cells = [name, seeds, _pm(row.best), _pm(row.last), _pm(row.final), wins]
        if private:
            cells.append(f"{row.privacy.epsilon:g}" if row.privacy else "∞ (no noise)")
        if with_published:
            difference = "–" if row.published is None else f"{row.best[0] - row.published.accuracy:+.2f}"
            cells += [_published(row.published), difference, row.published.source if row.published else ""]
        body.append(cells)
    for label, number in section.unmeasured.items():
        body.append([label, "not run", "–", "–", "–", "–", *(["–"] * private), _published(number), "–", number.source])
    lines += _table(header, body)
    missing = [v.label for v in config.variants() if v.label not in {row.label for row in section.rows}]
    if missing:
        lines += ["", f"Not finished: {', '.join(missing)}."]
    lines += [
        "",
        "### Accuracy against exposed bytes",
        "",
        "MB (10⁶ bytes; B where so marked) of tensors per silo for the whole run, by exposure class: ↑ sent by a silo, "
        "↓ sent to it. Names, shapes, round numbers and the encoding's few bytes (PROTOCOL, IDENTITY) are not in it.",
        "",
        *_exposure_table(section, _at_the_end(config)),
        "",
    ]
    for title, name in pictures:
        lines += [f"![{title}]({name})", ""]
    return lines


def _promises(section: Section) -> list[str]:
    """What the numbers of the private runs hold for."""
    found: dict[str, None] = {}
    for row in section.rows:
        if (plan := row.privacy) is not None:
            text = (
                f"ε at δ = {plan.delta:g} ({plan.guarantee.conditions}); sampling rate {plan.sampling_rate:g}, "
                f"clipping norm {plan.clipping_norm:g}; noise such that all releases of a run keep to ε together."
            )
            found[text] = None
    return [
        *found,
        "Noise and samples of private runs come from the operating system, not from the seed: they cannot be repeated "
        "bit for bit.",
    ]


def _by_epsilon(section: Section) -> dict[str, list[tuple[float, Spread]]]:
    """For each method, accuracy by ε, ∞ last."""
    found: dict[str, list[tuple[float, Spread]]] = {}
    for row in section.rows:
        found.setdefault(row.base, []).append((row.privacy.epsilon if row.privacy else math.inf, row.last))
    return {base: sorted(points) for base, points in found.items()}


def _exposure_table(section: Section, at_the_end: str) -> list[str]:
    columns = [
        (direction, exposure)
        for direction in DIRECTIONS
        for exposure in Exposure
        if any(exposure in row.megabytes[direction] for row in section.rows)
    ]
    arrows = {"up": "↑", "down": "↓"}
    header = ["method", at_the_end, "all ↑", "all ↓", *(f"{arrows[d]} {e}" for d, e in columns)]
    body = [
        [
            row.label,
            _pm(row.last),
            *(written_size(row.total(direction)) for direction in DIRECTIONS),
            *(written_size(row.megabytes[d].get(e, 0.0)) for d, e in columns),
        ]
        for row in section.rows
    ]
    return _table(header, body)


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *body]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _pm(spread: Spread) -> str:
    return f"{spread[0]:.2f}" + ("" if spread[1] is None else f" ± {spread[1]:.2f}")


def _published(number: Published | None) -> str:
    if number is None:
        return "–"
    return f"{number.accuracy:g}" + ("" if number.std is None else f" ± {number.std:g}")


def written_size(megabytes: float, digits: int = 3) -> str:
    """A number of MB; below a thousandth of one in bytes, said so: a few bytes about the images can be the worst."""
    if megabytes < 0.001:
        return f"{megabytes * MEGABYTE:.0f} B" if megabytes else "0"
    return f"{megabytes:.{digits}g}" if megabytes < 100 else f"{megabytes:.0f}"


def _training(plan: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in plan.items()
    )


def _model(section: Section, label: str) -> str:
    return next(str(run.info["plan"]["model"]["name"]) for run in section.runs if run.info["label"] == label)


def _commands(config: ExperimentConfig, path: Path, runs: Path, to: Path, sections: Sequence[Section]) -> list[str]:
    specs = dict.fromkeys(run.info["data_spec"] for section in sections for run in section.runs)
    data = "" if config.data else "".join(f" --data {spec}" for spec in specs)
    where = "" if runs == Path("runs") else f" --runs {runs}"
    out = "" if to == Path("docs/results") else f" --out {to}"
    return [f"simulation run --config {path}{data}{where}", f"simulation results --config {path}{where}{out}"]


def accuracy_columns(sections: Sequence[Section]) -> list[str]:
    """The columns of ``accuracy_rows``; the last three only where some run has differential privacy."""
    columns = ["data", "synthetic", "setting", "method", "seeds", "best_mean", "best_std", "last10_mean", "last10_std"]
    columns += ["final_mean", "final_std"]
    private = any(row.privacy for section in sections for row in section.rows)
    return [*columns, "published", *(("epsilon", "delta", "unit") if private else ())]


def accuracy_rows(sections: Sequence[Section]) -> list[tuple[Any, ...]]:
    """A row a method and section. Accuracies are in percent, as in ``Row``; ``published`` is None where nothing was;
    ``epsilon`` is infinite without differential privacy."""
    width = len(accuracy_columns(sections))
    rows: list[tuple[Any, ...]] = []
    for section in sections:
        for row in section.rows:
            published = row.published.accuracy if row.published else None
            promised = (
                (row.privacy.epsilon, row.privacy.delta, row.privacy.unit) if row.privacy else (math.inf, *2 * (None,))
            )
            cells = (section.data, section.synthetic, section.setting, row.label, len(row.seeds), *row.best, *row.last)
            rows.append((*cells, *row.final, published, *promised)[:width])
    return rows


def exposure_rows(sections: Sequence[Section]) -> list[tuple[Any, ...]]:
    """A row (``EXPOSURE_COLUMNS``) a method, section, direction and exposure class. ``up``: sent by the silo;
    ``mb_per_silo``: 10^6 bytes of tensors for the whole run."""
    return [
        (section.data, section.synthetic, section.setting, row.label, row.last[0], direction, str(exposure), size)
        for section in sections
        for row in section.rows
        for direction in DIRECTIONS
        for exposure, size in row.megabytes[direction].items()
    ]


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
