"""The page of an experiment's results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medsilo.privacy.exposure import Exposure
from medsilo.privacy.pages.wording import shown
from medsilo.simulation.execution import DIRECTIONS
from medsilo.simulation.experiment import ExperimentConfig, Published
from medsilo.simulation.results.table import Against, Row, Section, Spread, at_the_end, written_size


def markdown(
    config: ExperimentConfig,
    sections: Sequence[Section],
    pictures: Mapping[str, Sequence[tuple[str, str]]],
    commands: Sequence[str],
    tables: Sequence[str],
) -> str:
    """The results page: what was run, tables, pictures, how to repeat it."""
    lines = [f"# {config.name}", ""]
    if any(section.synthetic for section in sections):
        lines += ["**Synthetic data: generated images. No result so marked says anything about patients.**", ""]
    first = sections[0].runs[0].info
    lines += [
        f"Model: {config.model}. Training: {_training(config)}; overrides are part of a method's label. "
        f"{config.rounds} rounds, seeds {', '.join(map(str, config.seeds))}. "
        f"Medsilo {first['versions']['medsilo']}, PyTorch {first['versions']['torch']}, "
        f"Python {first['versions']['python']}.",
        "",
        "Accuracy in percent: the uniform mean over silos of each one's personalised model on its own test images; "
        "mean ± standard deviation (population) over seeds, of one seed its number alone. The best round is chosen on "
        f"test images, as papers do, and so optimistic; the mean of {at_the_end(config)} is not. A method whose "
        "personalised model is what the coordinator hands out is measured with what each round's aggregation gave. At "
        "the end: the models that the silos keep after the last round. Mean accuracy of classes: of these models, the "
        "uniform mean over the classes of a silo's test images, then over silos; a model that names one class alone "
        "has one over their number. "
        f"Separate training is `local` of the same model, training and privacy, by the mean of {at_the_end(config)} "
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
        f"The tables as files: {', '.join(f'[`{name}`]({name})' for name in tables)}.",
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
    if any(row.privacy for row in section.rows):
        lines += [*_promises(section), "", *_epsilon_table(section), ""]
    lines += _accuracy_table(config, section)
    missing = [v.label for v in config.variants() if v.label not in {row.label for row in section.rows}]
    if missing:
        lines += ["", f"Not finished: {', '.join(missing)}."]
    lines += [
        "",
        "### Accuracy against exposed bytes",
        "",
        "MB (10⁶ bytes; B where so marked) of tensors per silo for the whole run, by exposure class: ↑ sent by a silo, "
        "↓ sent to it. Names, shapes, round numbers and the encoding's few bytes (PROTOCOL, IDENTITY) are not in it. "
        "Tier: how secret daemons can keep at best what is sent. Plain: the coordinator sees each silo's. Masked sum: "
        "it sees sums alone. Blind mixture: how far models lie apart, and no model. What was simulated, and measured, "
        "is the plain method: masks change sums by rounding; blind mixing adds sketches, whole weights and hospitals' "
        "rules, by which daemons' models differ.",
        "",
        *_exposure_table(section, at_the_end(config)),
        "",
    ]
    for title, name in pictures:
        lines += [f"![{title}]({name})", ""]
    return lines


def _epsilon_table(section: Section) -> list[str]:
    """A line a method, a column an ε: accuracy at the end, and the mean accuracy of classes."""
    found: dict[str, dict[float, Row]] = {}
    for row in section.rows:
        found.setdefault(row.base, {})[row.privacy.epsilon if row.privacy else math.inf] = row
    places = sorted({epsilon for rows in found.values() for epsilon in rows})

    def cell(row: Row | None) -> str:
        if row is None:
            return "–"
        figures = ((row.final, row.alone_without_noise), (row.of_classes, row.alone_without_noise_of_classes))
        return " / ".join(
            "–" if spread is None else f"**{spread[0]:.1f}**" if against and against.clear else f"{spread[0]:.1f}"
            for spread, against in figures
        )

    header = ["method", *("∞ (no noise)" if math.isinf(epsilon) else f"ε = {epsilon:g}" for epsilon in places)]
    return [
        "At the end: accuracy / mean accuracy of classes; bold what is above alone without noise by more than both "
        "standard deviations over seeds taken together.",
        "",
        *_table(header, ([base, *(cell(rows.get(epsilon)) for epsilon in places)] for base, rows in found.items())),
    ]


def _accuracy_table(config: ExperimentConfig, section: Section) -> list[str]:
    models = {row.label: _model(section, row.label) for row in section.rows}
    with_published = any(row.published for row in section.rows) or section.unmeasured
    private = any(row.privacy for row in section.rows)
    header = [
        "method",
        "seeds",
        "best round",
        at_the_end(config),
        "at the end",
        "mean accuracy of classes",
        *(_AGAINST if private else ["seeds on which it beats separate training"]),
    ]
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
        cells = [name, seeds, _pm(row.best), _pm(row.last), _pm(row.final), _pm(row.of_classes)]
        epsilon = f"{row.privacy.epsilon:g}" if row.privacy else "∞ (no noise)"
        cells += [_above(row.alone), _above(row.alone_without_noise), epsilon] if private else [wins]
        if with_published:
            difference = "–" if row.published is None else f"{row.best[0] - row.published.accuracy:+.2f}"
            cells += [_published(row.published), difference, row.published.source if row.published else ""]
        body.append(cells)
    for label, number in section.unmeasured.items():
        empty = ["–"] * (5 + 2 * private)
        body.append([label, "not run", *empty, _published(number), "–", number.source])
    return _table(header, body)


_AGAINST = ("above alone, same ε", "above alone without noise", "ε")


def _above(against: Against | None) -> str:
    if against is None:
        return "–"
    mean, deviation = against.difference
    text = f"{mean:+.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")
    return f"**{text}**" if against.clear else text


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
            if plan.honest is not None:
                text = (
                    f"{row.label}: noise is shared out, and ε = {plan.epsilon:g} presumes {plan.honest} honest "
                    f"hospitals in each sum; by a hospital's own share alone it is {shown(plan.alone.epsilon)}."
                )
                found[text] = None
    return [
        *found,
        "",
        "Above alone: by how many points the accuracy at the end is above that of hospitals that train alone, under "
        "the same ε and without noise, seed by seed on the same shards; bold where it is more than both standard "
        "deviations over seeds taken together.",
        "",
        "Noise and samples of private runs come from the operating system, not from the seed: they cannot be repeated "
        "bit for bit.",
    ]


def _exposure_table(section: Section, at_the_end: str) -> list[str]:
    columns = [
        (direction, exposure)
        for direction in DIRECTIONS
        for exposure in Exposure
        if any(exposure in row.megabytes[direction] for row in section.rows)
    ]
    arrows = {"up": "↑", "down": "↓"}
    header = ["method", "tier", at_the_end, "all ↑", "all ↓", *(f"{arrows[d]} {e}" for d, e in columns)]
    body = [
        [
            row.label,
            row.tier,
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


def _pm(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{spread[0]:.2f}" + ("" if spread[1] is None else f" ± {spread[1]:.2f}")


def _published(number: Published | None) -> str:
    if number is None:
        return "–"
    return f"{number.accuracy:g}" + ("" if number.std is None else f" ± {number.std:g}")


def _training(config: ExperimentConfig) -> str:
    if preset := (config.privacy or {}).get("preset"):
        return f"with privacy as `preset: {preset}` chooses it at each ε"
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in config.training.model_dump().items()
    )


def _model(section: Section, label: str) -> str:
    return next(str(run.info["plan"]["model"]["name"]) for run in section.runs if run.info["label"] == label)


def commands(
    config: ExperimentConfig, path: Path, runs: Path, to: Path, sections: Sequence[Section], *, everything: bool
) -> list[str]:
    specs = dict.fromkeys(run.info["data_spec"] for section in sections for run in section.runs)
    data = "" if config.data else "".join(f" --data {spec}" for spec in specs)
    where = "" if runs == Path("runs") else f" --runs {runs}"
    out = "" if to == Path("docs/results") else f" --out {to}"
    more = " --all" if everything else ""
    return [f"simulation run --config {path}{data}{where}", f"simulation results --config {path}{where}{out}{more}"]
