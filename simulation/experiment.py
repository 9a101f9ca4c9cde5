"""Experiments: methods × settings × seeds (× participation × data sets), read from one YAML file.

``runs`` lists an experiment's runs; ``medsilo.simulation.execution`` does one of them,
``medsilo.simulation.scheduling`` all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from medsilo.algorithms.method import Method
from medsilo.algorithms.protection.masked import check_shared_noise
from medsilo.algorithms.protection.private import refusal
from medsilo.algorithms.registry import make
from medsilo.coordinator.config import PrivacyConfig
from medsilo.coordinator.given_weights import WeightsConfig
from medsilo.privacy.consent.plan import (
    MethodPlan,
    ModelPlan,
    RunPlan,
    SecureAggregationPlan,
    Train,
    TrainingPlan,
    taking_part,
)
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.configuration import Name, StrictModel, beside_file, explain, load
from medsilo.silo.data.settings import ByPatient, Dirichlet, Pathological, PooledDirichlet, PracticalGroups, Setting

SETTINGS: dict[str, type[Setting]] = {
    "practical": PracticalGroups,
    "pathological": Pathological,
    "dirichlet": Dirichlet,
    "dirichlet-pooled": PooledDirichlet,
    "by-patient": ByPatient,
}
"""The data settings by what an experiment calls them (``kind``)."""

FEATURES = "features"
"""The folder of kept features, in an experiment's."""

_OVERRIDES = ("name", "label", "model", "weights", "train", "training", "privacy")
_OF_A_STEP = ("optimizer", "learning_rate", "momentum", "weight_decay", "keep_optimizer_state")
_TRAIN: TypeAdapter[Train] = TypeAdapter(Train)
_SettingName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=,+-]{0,79}$")]
_Participation = Annotated[float, Field(gt=0, le=1)]


class Described(Protocol):
    """What a run's record says of its images: a data set, or the record of one
    (``medsilo.simulation.execution.Recorded``)."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def synthetic(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def image_shape(self) -> tuple[int, int, int]: ...
    @property
    def num_classes(self) -> int: ...


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _entry(value: Any) -> Any:
    """A method by its name alone is one with its defaults."""
    return {"name": value} if isinstance(value, str) else value


class Published(StrictModel):
    """A number from a paper.

    ``accuracy``, ``std``: in percent. ``source``: where it stands.
    """

    accuracy: float
    std: float | None = None
    source: str = ""


def _number(value: Any) -> Any:
    return {"accuracy": value} if isinstance(value, int | float) else value


class ExperimentConfig(StrictModel):
    """An experiment file; ``docs/experiments.md`` explains it by example.

    Attributes:
        name: of the experiment, of its folder and of its page.
        data: one or more of ``pathmnist``, ``synthetic``, or the path of an ``.npz`` file (from the experiment file's
            folder). ``--data`` takes its place.
        setting: ``kind`` and the fields of that setting (``medsilo.silo.data.sharding``).
        settings: in place of ``setting`` several such by name.
        model: an architecture of ``medsilo.algorithms.models``.
        weights: what the model starts from, as in a coordinator's file; a method with ``weights: null`` starts from
            random numbers.
        train: what of the model is trained, as in a coordinator's file: all of it by default.
        training: of all methods that do not say otherwise.
        rounds: of every run.
        seeds: one run a seed; the seed draws shards, models, orders and participants.
        participation: share of the silos in each round; several are swept over.
        methods: each a ``name`` with any of the method's hyper-parameters; further ``model``, ``train``, ``training``,
            ``privacy`` and ``weights: null``, which override the experiment's, and ``label``, what tables call it. A
            list stands for a sweep over its values.
        privacy: differential privacy, as in a coordinator's file; none by default. An ``epsilon`` of ``.inf`` stands
            for training without it. A method's ``privacy: null`` is none for that method.
        public_per_class: images of each class that methods with public images (FedPDC) have at the coordinator.
        public_share: in place of that their number as a share of the split that they are cut from.
        weights_every: after how many rounds silo-to-silo weights are kept, for methods that have such.
        checkpoint_seconds: how much work a kill may cost; 0 keeps every round.
        published: papers' numbers, by setting (and participation, as pages call it) and label.
        published_on: the data set that they are for; on the page of another they are not shown.
        device: where to train.
        trusted_models: own model factories (``package.module:callable``) that may be named as a model.
        trusted_methods: own methods (``package.module:Class``) that may be named as a method.
        engine: "auto" chooses by the model (``medsilo.simulation.execution.choose_engine``) and says what; "alone"
            trains silo by silo, with the daemons' bits; "threads" several silos side by side, with the same
            bits; "lanes" (for CPUs; needs the extra of that name) does the same, and small convolutional networks in
            about six tenths of its time, equal up to rounding; "stacked" all silos as one program, equal up to
            rounding, which is faster for small models and on GPUs.

    >>> from medsilo import ExperimentConfig
    >>> ExperimentConfig.read("configs/experiments/synthetic-small.yaml").name
    'synthetic-small'
    """

    name: Name
    data: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    setting: dict[str, Any] | None = None
    settings: dict[_SettingName, dict[str, Any]] = Field(default_factory=dict)
    model: str = "diversifed-cnn"
    weights: WeightsConfig | None = None
    train: Train = "all"
    training: TrainingPlan = TrainingPlan()
    rounds: int = Field(ge=1)
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**53)], ...], BeforeValidator(_listed)]
    participation: Annotated[tuple[_Participation, ...], BeforeValidator(_listed), Field(min_length=1)] = (1.0,)
    methods: Annotated[tuple[Annotated[dict[str, Any], BeforeValidator(_entry)], ...], BeforeValidator(_listed)]
    privacy: dict[str, Any] | None = None
    public_per_class: int | None = Field(default=None, ge=1)
    public_share: float | None = Field(default=None, gt=0, le=1)
    weights_every: int = Field(default=10, ge=1)
    checkpoint_seconds: float = Field(default=60.0, ge=0)
    published: dict[str, dict[str, Annotated[Published, BeforeValidator(_number)]]] = Field(default_factory=dict)
    published_on: str = ""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    trusted_models: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    trusted_methods: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    engine: Literal["auto", "alone", "threads", "lanes", "stacked"] = "auto"

    @field_validator("model", "train", "training", mode="before")
    @classmethod
    def _not_swept(cls, value: Any, info: ValidationInfo) -> Any:
        keys = [info.field_name, *(value if isinstance(value, dict) else ())]
        given = [value, *(value.values() if isinstance(value, dict) else ())]
        for key, one in zip(keys, given, strict=True):
            if isinstance(one, list):
                raise ValueError(
                    f"{key} is one for all methods that do not say otherwise; a sweep stands inside a method, for "
                    "example `methods: [{name: fedavg, model: [mlp-64, lenet5]}]`"
                )
        return value

    @field_validator("data")
    @classmethod
    def _beside_file(cls, specs: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return tuple(str(beside_file(spec, info)) if spec.endswith(".npz") else spec for spec in specs)

    @classmethod
    def read(cls, path: str | Path) -> ExperimentConfig:
        """Raises ``ConfigurationError`` naming the file and every key that is wrong."""
        return _checked(load(Path(path), cls), str(path))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ExperimentConfig:
        """An experiment from what its file would hold; raises ``ConfigurationError`` naming every key that is wrong."""
        where = f"experiment {fields.get('name', 'without a name')!s:.80}"
        try:
            config = cls.model_validate(dict(fields))
        except ValidationError as error:
            raise ConfigurationError("\n".join(f"{where}: {line}" for line in explain(error, cls))) from None
        return _checked(config, where)

    def check(self) -> None:
        """Raises ``ConfigurationError`` for settings, methods or published numbers that cannot be used."""
        if (self.setting is None) == (not self.settings):
            raise ConfigurationError("give either one `setting:` or several named `settings:`")
        if self.public_per_class is not None and self.public_share is not None:
            raise ConfigurationError("give either `public_per_class:` or `public_share:`, not both")
        for what, values in (("seeds", self.seeds), ("participation", self.participation)):
            if len(set(values)) < len(values):
                raise ConfigurationError(f"`{what}` has a value twice; a run is done once")
        if not self.seeds or not self.methods:
            raise ConfigurationError(f"`{'methods' if self.seeds else 'seeds'}` is empty; give at least one")
        if self.engine == "lanes" and self.device != "cpu":
            raise ConfigurationError("`engine: lanes` is for CPUs; on a GPU take `engine: stacked`")
        settings = self.make_settings()
        labels: dict[str, Variant] = {}
        for variant in self.variants():
            if variant.label in labels:
                raise ConfigurationError(f"two methods are called {variant.label!r}; give each a `label:` of its own")
            labels[variant.label] = variant
            if variant.privacy is not None:
                if (reason := refusal(variant.method)) is not None:
                    raise ConfigurationError(f"{reason}. Give it what it needs, or `privacy: null`")
                if self.engine not in ("auto", "alone"):
                    raise ConfigurationError(
                        "with differential privacy silos are trained one after the other: engine: alone"
                    )
            if variant.method.needs_public and self.public_per_class is None and self.public_share is None:
                raise ConfigurationError(
                    f"{variant.label} measures models on public images at the coordinator; say how many to set aside "
                    "with `public_per_class:` (for example 20) or `public_share:`"
                )
        sections = [section_name(name, share) for name in settings for share in self.participation]
        if unknown := set(self.published) - set(sections):
            raise ConfigurationError(
                f"published: {', '.join(sorted(unknown))} is not a setting of this experiment; its settings are "
                f"{', '.join(sections)}"
            )
        if bool(self.published) != bool(self.published_on):
            raise ConfigurationError(
                "numbers in `published:` are for one data set; name it, for example `published_on: pathmnist`"
                if self.published
                else "`published_on:` is for numbers in `published:`, and there are none"
            )

    def notes(self) -> list[str]:
        """What the methods say about such runs, as a coordinator's operator is told."""
        found: dict[str, None] = {}
        variants = list(self.variants())
        in_a_round = [
            taking_part(setting.silos, share)
            for setting in self.make_settings().values()
            for share in self.participation
        ]
        for silos, variant in itertools.product(in_a_round, variants):
            for text in variant.method.warnings(silos, variant.model, variant.training.optimizer):
                found[f"{variant.label}: {text}"] = None
        for variant in variants:
            given = [key for key in _OF_A_STEP if getattr(variant.training, key) != getattr(self.training, key)]
            if variant.method.own_steps and given:
                found[
                    f"{variant.label}: {variant.method.name} takes steps of its own; {', '.join(given)} of `training:` "
                    "change nothing"
                ] = None
        return list(found)

    def make_settings(self) -> dict[str, Setting]:
        """The data settings by name; a single one is named after its kind."""
        named = self.settings or {str((self.setting or {}).get("kind")): self.setting or {}}
        return {name: _make_setting(name, fields) for name, fields in named.items()}

    def variants(self) -> Iterator[Variant]:
        """Every method with every combination of the values that it is swept over, in the file's order."""
        for entry in self.methods:
            if not isinstance(entry.get("name"), str):
                raise ConfigurationError(f"methods: {entry} needs a `name`, for example `name: diversifed`")
            own = entry.get("privacy", {})
            if not isinstance(own, dict | None):
                raise ConfigurationError(
                    f"methods: {entry['name']}: privacy should hold `key: value` pairs, or be null"
                )
            privacy = {} if own is None else {**(self.privacy or {}), **own}
            for chosen in _combinations({**entry, "privacy": privacy}):
                yield self._variant(entry, chosen, [key for key, value in privacy.items() if isinstance(value, list)])

    def _variant(self, entry: Mapping[str, Any], chosen: dict[str, Any], swept: Sequence[str]) -> Variant:
        parameters = {key: value for key, value in chosen.items() if key not in _OVERRIDES}
        base = label_of(entry, chosen)
        label = "-".join([base, *(f"{key}={chosen['privacy'][key]}" for key in swept)])
        override = chosen.get("training", {})
        if not isinstance(override, dict):
            raise ConfigurationError(f"methods: {label}: training should hold `key: value` pairs, not {override!r}")
        try:
            training = TrainingPlan.model_validate({**self.training.model_dump(), **override})
        except ValidationError as error:
            lines = "; ".join(explain(error, TrainingPlan))
            raise ConfigurationError(f"methods: {label}: training: {lines}") from None
        try:
            method = make(entry["name"], parameters, trusted=self.trusted_methods)
        except ConfigurationError as error:
            raise ConfigurationError(f"methods: {error}") from None
        privacy = _make_privacy(label, chosen["privacy"]) if chosen["privacy"] else None
        if chosen.get("weights") is not None:
            raise ConfigurationError(
                f"methods: {label}: weights stand at the experiment, for all methods; one can do without: "
                "`weights: null`"
            )
        weights = None if "weights" in chosen else self.weights
        try:
            train = _TRAIN.validate_python(chosen.get("train", self.train))
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigurationError(f"methods: {label}: train: {said}") from None
        return Variant(label, method, training, str(chosen.get("model", self.model)), weights, train, privacy, base)


@dataclass(frozen=True)
class Variant:
    """One method with its hyper-parameters, and what it is trained with. ``label`` is what tables call it; ``base`` is
    the label without what of its privacy is swept over."""

    label: str
    method: Method
    training: TrainingPlan
    model: str
    weights: WeightsConfig | None
    train: Train
    privacy: PrivacyConfig | None
    base: str


@dataclass(frozen=True)
class Run:
    """One method on one data set, in one setting, with one seed. ``folder`` is where it writes; ``features`` where what
    fixed extractors make of the images is kept for all of the experiment's runs."""

    config: ExperimentConfig
    data: str
    setting_name: str
    setting: Setting
    participation: float
    variant: Variant
    seed: int
    folder: Path
    features: Path | None = None

    @property
    def title(self) -> str:
        """How progress and errors call it."""
        return f"{'/'.join(self.folder.parts[-4:-1])}, seed {self.seed}"

    @property
    def weights(self) -> tuple[Path, ...]:
        """The file of the weights that it starts from, if it starts from any."""
        return () if self.variant.weights is None else (self.variant.weights.path(None),)

    def plan(self, dataset: Described) -> RunPlan:
        """The plan that daemons would be given; raises ``ConfigurationError`` where there cannot be one."""
        variant, method = self.variant, self.variant.method
        try:
            model = ModelPlan(
                name=variant.model,
                input_shape=dataset.image_shape,
                classes=dataset.num_classes,
                train=variant.train,
            )
        except ValidationError as error:
            raise ConfigurationError(
                f"{dataset.source}: no model is for {dataset.num_classes} classes of images "
                f"{'×'.join(map(str, dataset.image_shape))}: {'; '.join(explain(error, ModelPlan))}"
            ) from None
        if variant.weights is not None:
            try:
                weights = variant.weights.plan(model, trusted=self.config.trusted_models, runs=None)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self.title}: weights: {error}") from None
            model = model.model_copy(update={"weights": weights})
        training, rounds = variant.training, self.config.rounds
        if variant.privacy is not None:
            in_a_round = taking_part(self.setting.silos, self.participation)
            training = variant.privacy.training(method, training, rounds, in_a_round)
        try:
            training.check(model.input_shape, private=variant.privacy is not None)
        except ValueError as error:
            raise ConfigurationError(f"{self.title}: training: {error}") from None
        try:
            plan = self._plan(model, training)
            check_shared_noise(plan, method)
        except ValidationError as error:
            raise ConfigurationError(f"{self.title}: {'; '.join(explain(error, RunPlan))}") from None
        return plan

    def _plan(self, model: ModelPlan, training: TrainingPlan) -> RunPlan:
        variant, method, rounds = self.variant, self.variant.method, self.config.rounds
        masks = None
        if variant.privacy is not None and variant.privacy.honest is not None:
            # What is simulated is the sum alone, without masks.
            masks = SecureAggregationPlan(minimum=max(3, self.setting.silos), rounds=rounds)
        return RunPlan(
            federation="simulation",
            coordinator="coordinator",
            run=self.config.name,
            method=MethodPlan(name=method.name, parameters=method.parameters()),
            model=model,
            training=training,
            rounds=rounds,
            seed=self.seed,
            required=tuple(exposure for exposure in Exposure if exposure in {*method.required, *model.asks}),
            downlink=tuple(exposure for exposure in Exposure if exposure in method.downlink | {model.start}),
            participation=self.participation,
            privacy=variant.privacy.plan(method, training, rounds) if variant.privacy else None,
            secure_aggregation=masks,
        )


def _checked(config: ExperimentConfig, where: str) -> ExperimentConfig:
    try:
        config.check()
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    return config


def runs(config: ExperimentConfig, data: tuple[str, ...], folder: Path) -> list[Run]:
    """The experiment's runs, seed by seed, so that early results compare all methods.

    Args:
        config: the experiment.
        data: data sets in place of the file's, where given.
        folder: of the experiment; runs get ``DATA/SETTING/LABEL/seed-N`` in it.
    """
    specs = tuple(spec if not spec.endswith(".npz") else str(Path(spec).absolute()) for spec in data or config.data)
    if not specs:
        raise ConfigurationError(f"{config.name}: names no data set; give one with --data, or put `data:` in the file")
    names = [data_name(spec) for spec in specs]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"two data sets are called alike ({', '.join(names)}); rename a file")
    found = []
    axes = itertools.product(
        config.seeds, zip(specs, names, strict=True), config.make_settings().items(), config.participation
    )
    variants = list(config.variants())
    for seed, (spec, name), (setting_name, setting), participation in axes:
        section = section_name(setting_name, participation)
        for variant in variants:
            place = folder / folder_name(name) / folder_name(section) / folder_name(variant.label) / f"seed-{seed}"
            kept = folder / FEATURES
            found.append(Run(config, spec, setting_name, setting, participation, variant, seed, place, kept))
    return found


def data_name(spec: str) -> str:
    """What folders and pages call a data set."""
    return Path(spec).stem if spec.endswith(".npz") else spec


def section_name(setting_name: str, participation: float) -> str:
    """What folders and pages call a setting with so much participation."""
    return setting_name if participation == 1 else f"{setting_name}-participation={participation:g}"


def label_of(entry: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """A method's label: its own if it has one, with what it is swept over; else its name with all that is given."""
    parts = [str(entry.get("label", entry["name"]))]
    for key, value in _flat(chosen).items():
        swept = isinstance(_flat(entry).get(key, []), list)
        if swept or "label" not in entry:
            parts.append(f"{key}={value}")
    return "-".join(parts)


def folder_name(text: str) -> str:
    """``text`` as the name of a folder on any system; different texts get different names."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", text)
    if safe == text and len(text) <= 100 and not text.startswith("."):
        return text
    return f"{safe[:80].lstrip('.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a method entry gives besides name, label and privacy; keys inside others stand beside them."""
    training = entry.get("training")
    besides = ("name", "label", "weights", "training", "privacy")
    given = {key: value for key, value in entry.items() if key not in besides}
    return {**_leaves(given), **_leaves(training if isinstance(training, dict) else {})}


def _leaves(entry: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entry.items():
        found |= _leaves(value) if isinstance(value, dict) else {key: value}
    return found


def _combinations(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An entry with one value for each of its lists, in every combination; the last list turns fastest."""
    axes = []
    for key, value in entry.items():
        values = (
            list(_combinations(value)) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        )
        if not values:
            raise ConfigurationError(f"methods: {key} of {entry.get('name', 'training')} is an empty list; give values")
        axes.append([(key, each) for each in values])
    for chosen in itertools.product(*axes):
        yield dict(chosen)


def _make_privacy(label: str, fields: Mapping[str, Any]) -> PrivacyConfig | None:
    if fields.get("epsilon") == math.inf:
        return None
    try:
        return PrivacyConfig.model_validate(fields)
    except ValidationError as error:
        lines = "; ".join(explain(error, PrivacyConfig))
        raise ConfigurationError(f"methods: {label}: privacy: {lines}") from None


def _make_setting(name: str, fields: Mapping[str, Any]) -> Setting:
    given = dict(fields)
    kind = given.pop("kind", None)
    if kind not in SETTINGS:
        raise ConfigurationError(f"setting {name}: kind is {kind!r}; use one of {', '.join(SETTINGS)}")
    chosen = SETTINGS[kind]
    known = {item.name for item in dataclasses.fields(chosen)}
    if unknown := sorted(set(given) - known):
        raise ConfigurationError(
            f"setting {name}: {kind} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    try:
        made: Setting = TypeAdapter(chosen).validate_python(given)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, m['loc']))}: {m['msg']} (got {m['input']!r})" for m in error.errors())
        raise ConfigurationError(f"setting {name}: {wrong}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"setting {name}: {error}") from None
    return made
