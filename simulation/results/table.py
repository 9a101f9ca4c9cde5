"""From an experiment's runs to a page: accuracy, learning curves, and accuracy against exposed bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from medsilo.privacy.budget.promise import PrivacyPlan
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.exposure import Exposure
from medsilo.simulation.execution import DIRECTIONS, Recorded, check_same
from medsilo.simulation.experiment import (
    ExperimentConfig,
    Published,
    Run,
    Variant,
    folder_name,
    section_name,
)
from medsilo.simulation.results.runs import LAST, MEGABYTE, FinishedRun, Floats

EXPOSURE_COLUMNS = (
    "data",
    "synthetic",
    "setting",
    "method",
    "tier",
    "last10_mean",
    "direction",
    "exposure",
    "mb_per_silo",
)

Spread = tuple[float, float | None]
"""Mean and (population) standard deviation over seeds; None for one seed, which says nothing of others."""


@dataclass(frozen=True)
class Against:
    """How a method's models stand against those of hospitals alone, at the run's end.

    Attributes:
        difference: in percentage points, seed by seed (on the same shards): mean and standard deviation.
        wins: seeds on which it is above 0.
        compared: seeds.
        clear: it is more than the standard deviations of both over seeds taken together; of one seed never.
    """

    difference: Spread
    wins: int
    compared: int
    clear: bool


@dataclass(frozen=True)
class Row:
    """One method in one section.

    ``best`` is the best round's accuracy (as papers report it; optimistic, a maximum over noisy measurements), ``last``
    the mean of the last ten rounds, or of all where there are not more, ``final`` that of the models that the silos
    keep after the run's end, which stands for both others where a method's models are made there, ``of_classes`` their
    mean accuracy of classes (None where a run did not measure it); ``wins`` on how many seeds ``last`` is above
    separate training's (``_separate``), of ``compared``. ``alone``: against separate training under the
    same promise; ``alone_without_noise``: against that without privacy, and
    ``alone_without_noise_of_classes`` the same by mean accuracy of classes; None where the experiment has none of that
    model.
    ``tier``: how secret daemons can keep what is sent. ``megabytes`` is the mean over seeds of
    ``FinishedRun.megabytes``. ``base`` is the label without what of its privacy
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
    tier: str
    published: Published | None = None
    base: str = ""
    privacy: PrivacyPlan | None = None
    of_classes: Spread | None = None
    alone: Against | None = None
    alone_without_noise: Against | None = None
    alone_without_noise_of_classes: Against | None = None

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
        rows = tuple(_row(variants, label, runs, published.pop(label, None), config) for label in labels)
        sections.append(Section(*name, runs, rows, published))
    if not sections:
        raise DataError("no finished run belongs to this experiment as it stands; start them with `simulation run`")
    return sections


def _separate(
    run: FinishedRun,
    runs: Sequence[FinishedRun],
    config: ExperimentConfig,
    variants: Mapping[str, Variant],
    *,
    noiseless: bool = False,
) -> FinishedRun | None:
    """What a run is held against: separate training on the same seed, of the same model, with the same training and
    promise of privacy. Failing that with the experiment's own training, or without noise: a hospital alone needs none.
    All trainings that a preset chose are the same one, and what a run without noise says stands in for it.
    ``noiseless``: without noise whatever there is."""
    mine = run.info["plan"]
    chosen = _preset(variants[run.info["label"]]) is not None

    def distance(other: FinishedRun) -> tuple[bool, bool] | None:
        plan = other.info["plan"]
        noise = _promise(plan) != _promise(mine)
        preset = _preset(variants[other.info["label"]])
        training = plan["training"] != mine["training"] and not (chosen and preset is not None)
        if plan["model"] != mine["model"] or (plan.get("privacy") is not None and (noise or noiseless)):
            return None
        if training and not chosen and plan["training"] != config.training.model_dump(mode="json"):
            return None
        return noise, training

    found = [
        (far, other)
        for other in runs
        if other.info["method"] == "local"
        and other.info["seed"] == run.info["seed"]
        and (far := distance(other)) is not None
    ]
    return min(found, key=lambda one: one[0])[1] if found else None


def _tier(plan: Mapping[str, Any]) -> str:
    from medsilo.algorithms.protection.tiers import best_tier
    from medsilo.algorithms.registry import make

    method = plan["method"]
    return best_tier(make(method["name"], method["parameters"]), plan["rounds"])


def _preset(variant: Variant) -> str | None:
    return variant.privacy.preset if variant.privacy else None


def _promise(plan: Mapping[str, Any]) -> tuple[Any, ...] | None:
    privacy = plan.get("privacy")
    return privacy and tuple(privacy[key] for key in ("epsilon", "delta", "unit"))


def _row(
    variants: Mapping[str, Variant],
    label: str,
    runs: Sequence[FinishedRun],
    published: Published | None,
    config: ExperimentConfig,
) -> Row:
    mine = {run.info["seed"]: run for run in runs if run.info["label"] == label}
    separate = {seed: _separate(run, runs, config, variants) for seed, run in mine.items()}
    alone = {seed: run for seed, run in separate.items() if run is not None}
    noiseless = {seed: _separate(run, runs, config, variants, noiseless=True) for seed, run in mine.items()}
    same = {seed: run for seed, run in alone.items() if _promise(run.info["plan"]) == _promise(mine[seed].info["plan"])}
    method = next(iter(mine.values())).info["method"]
    last = {seed: run.last for seed, run in mine.items()}
    compare = method != "local" and alone
    classes = {
        direction: [e for e in Exposure if any(e in run.megabytes[direction] for run in mine.values())]
        for direction in DIRECTIONS
    }
    of_classes = [run.final_of_classes for run in mine.values()]
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
        tier=_tier(next(iter(mine.values())).info["plan"]),
        published=published,
        base=variants[label].base,
        privacy=_privacy(label, list(mine.values())),
        of_classes=None if np.isnan(of_classes).any() else _spread(of_classes),
        alone=_against(mine, same, "accuracy"),
        alone_without_noise=_against(mine, noiseless, "accuracy"),
        alone_without_noise_of_classes=_against(mine, noiseless, "of_classes"),
    )


def _against(
    mine: Mapping[int, FinishedRun],
    others: Mapping[int, FinishedRun | None],
    yardstick: Literal["accuracy", "of_classes"],
) -> Against | None:
    """None where there is nothing else to be held against, or it was not measured."""

    def of(run: FinishedRun) -> float:
        return run.final if yardstick == "accuracy" else run.final_of_classes

    pairs = [(of(run), of(other)) for s, run in mine.items() if (other := others.get(s)) and other is not run]
    if not pairs or np.isnan(pairs).any():
        return None
    differences = [one - other for one, other in pairs]
    mean, _ = difference = _spread(differences)
    apart = sum(float(np.std(values)) for values in zip(*pairs, strict=True))
    return Against(difference, sum(one > 0 for one in differences), len(pairs), len(pairs) > 1 and mean > apart)


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


def at_the_end(config: ExperimentConfig) -> str:
    """What ``Row.last`` is the mean of."""
    return (
        f"last {LAST} rounds"
        if config.rounds > LAST
        else f"all {config.rounds} rounds"
        if config.rounds > 1
        else "the round"
    )


def written_size(megabytes: float, digits: int = 3) -> str:
    """A number of MB; below a thousandth of one in bytes, said so: a few bytes about the images can be the worst."""
    if megabytes < 0.001:
        return f"{megabytes * MEGABYTE:.0f} B" if megabytes else "0"
    return f"{megabytes:.{digits}g}" if megabytes < 100 else f"{megabytes:.0f}"


def accuracy_columns(sections: Sequence[Section]) -> list[str]:
    """The columns of ``accuracy_rows``; the last ones only where some run has differential privacy."""
    columns = ["data", "synthetic", "setting", "method", "seeds", "best_mean", "best_std", "last10_mean", "last10_std"]
    columns += ["final_mean", "final_std", "of_classes_mean", "of_classes_std"]
    private = any(row.privacy for section in sections for row in section.rows)
    return [*columns, "published", *(_PRIVATE_COLUMNS if private else ())]


_PRIVATE_COLUMNS = (
    "epsilon",
    "delta",
    "unit",
    "above_alone_mean",
    "above_alone_std",
    "above_alone_without_noise_mean",
    "above_alone_without_noise_std",
    "above_alone_without_noise_clearly",
    "of_classes_above_alone_without_noise_mean",
    "of_classes_above_alone_without_noise_std",
    "of_classes_above_alone_without_noise_clearly",
)


def accuracy_rows(sections: Sequence[Section]) -> list[tuple[Any, ...]]:
    """A row a method and section. Accuracies are in percent, as in ``Row``; ``published`` is None where nothing was;
    ``epsilon`` is infinite without differential privacy; ``…above_…`` are ``Against.difference`` and
    ``clear``."""
    width = len(accuracy_columns(sections))
    rows: list[tuple[Any, ...]] = []
    for section in sections:
        for row in section.rows:
            published = row.published.accuracy if row.published else None
            promised = (
                (row.privacy.epsilon, row.privacy.delta, row.privacy.unit) if row.privacy else (math.inf, *2 * (None,))
            )
            against = (row.alone_without_noise, row.alone_without_noise_of_classes)
            above = (
                *(row.alone.difference if row.alone else (None, None)),
                *(cell for one in against for cell in ((*one.difference, one.clear) if one else 3 * (None,))),
            )
            cells = (section.data, section.synthetic, section.setting, row.label, len(row.seeds), *row.best, *row.last)
            cells = (*cells, *row.final, *(row.of_classes or (None, None)), published, *promised, *above)
            rows.append(cells[:width])
    return rows


def exposure_rows(sections: Sequence[Section]) -> list[tuple[Any, ...]]:
    """A row (``EXPOSURE_COLUMNS``) a method, section, direction and exposure class. ``up``: sent by the silo;
    ``mb_per_silo``: 10^6 bytes of tensors for the whole run."""
    return [
        (
            section.data,
            section.synthetic,
            section.setting,
            row.label,
            row.tier,
            row.last[0],
            direction,
            str(exposure),
            size,
        )
        for section in sections
        for row in section.rows
        for direction in DIRECTIONS
        for exposure, size in row.megabytes[direction].items()
    ]
