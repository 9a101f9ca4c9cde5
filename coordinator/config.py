"""The coordinator's configuration file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from medsilo.coordinator import presets
from medsilo.coordinator.given_weights import WeightsConfig
from medsilo.coordinator.store.engine import has_password
from medsilo.privacy.budget.accounting import (
    DiscreteGaussian,
    Event,
    GaussianRelease,
    SampledGaussian,
    Unit,
    noise_multiplier_for,
)
from medsilo.privacy.budget.promise import MetricsPlan, PrivacyPlan, ReleasePlan
from medsilo.privacy.consent.plan import (
    MethodPlan,
    ModelPlan,
    RunPlan,
    SecureAggregationPlan,
    TrainingPlan,
    taking_part,
)
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import BLIND_DOWNLINK, MODEL, Exposure, expand
from medsilo.privacy.files.configuration import HIDDEN, FilePath, Name, StrictModel, explain
from medsilo.privacy.identity.endpoint import Address, Host, is_loopback
from medsilo.privacy.party.party import PartyConfig
from medsilo.privacy.witness.config import MOST_WITNESSES, WitnessAddress

if TYPE_CHECKING:
    from torch import nn

    from medsilo.algorithms.datasets.public_set import PublicImages
    from medsilo.algorithms.method import Method

# What needs PyTorch is imported where it is used: loading it takes seconds, and `coordinator status` can do without.


class AverageConfig(StrictModel):
    """How an average over a silo's units is protected.

    ``bound``: R, the most that one unit's vector counts (its Euclidean norm). ``noise_multiplier``: z, of the noise on
    the sum, with standard deviation z · R.
    """

    bound: float = Field(gt=0, allow_inf_nan=False)
    noise_multiplier: float = Field(default=10.0, ge=0.1, allow_inf_nan=False)


class PrivacyConfig(StrictModel):
    """Differential privacy of a run (adjacency zero-out, accountant PLD).

    ``epsilon``, ``delta``: what all of the run's releases may cost a silo together; the noise is chosen for that. A δ
    well below one over a silo's number of units is usual. ``unit``: whose contribution is hidden; ``patient`` needs
    shards that say whose each image is. ``clipping_norm``: C, the most that one unit's gradient counts.
    ``sampling_rate``: q, with which a step takes each unit; an epoch then has 1/q steps, and ``training.batch_size``
    counts for nothing. ``identifier``: of FedDFQ's data identifier; the training's noise is chosen such that all
    together keep to the target. ``choice``: of the changes of the loss among which FedDFQ chooses (per length of the
    step). ``metrics_epsilon``: what accuracies may cost a silo's test images, all rounds together; with ``ask_for:
    [LOCAL_METRICS]``. ``averaged_share``: of a training's steps, the last, whose models are averaged into what it
    gives, at no cost; at 0 it gives the last one's. ``preset``: ``head``, for a linear layer on fixed features,
    chooses ``sampling_rate``, ``clipping_norm``, ``averaged_share`` and the whole of ``training`` by rules that look at
    no data; the ``unit`` is then the patient unless the file says ``image``. ``units``: for a preset, the fewest images
    (patients) that a hospital trains on. ``honest``: how many hospitals of each masked sum are honest at least; noise
    is then shared out, so that so many together add what each adds otherwise. With masks in every round, fedavg, and
    one step a round on all images.
    """

    epsilon: float = Field(gt=0, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=1)
    unit: Unit = "image"
    clipping_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    sampling_rate: float = Field(gt=0, le=1)
    identifier: AverageConfig = AverageConfig(bound=3.0)
    choice: AverageConfig = AverageConfig(bound=1.0)
    metrics_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    averaged_share: float = Field(default=0.0, ge=0, le=1)
    preset: Literal["head"] | None = None
    units: int | None = Field(default=None, ge=1)
    honest: int | None = Field(default=None, ge=2)

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("preset") is None:
            return fields
        unit = fields.get("unit", presets.UNIT)
        if unit not in get_args(Unit):
            return fields
        chosen = presets.mechanism(unit, shared_out=fields.get("honest") is not None)
        if given := [key for key in chosen if key in fields]:
            raise ValueError(f"`preset` chooses {', '.join(given)}; leave {'it' if len(given) == 1 else 'them'} out")
        return {**fields, **chosen, "unit": unit}

    @model_validator(mode="after")
    def _known(self) -> PrivacyConfig:
        if (self.preset is None) != (self.units is None):
            raise ValueError(
                "`preset` and `units` (the fewest images, or patients, that a hospital trains on) go together"
            )
        return self

    def training(self, method: Method, training: TrainingPlan, rounds: int, hospitals: int) -> TrainingPlan:
        """The training of a round: as it is given, or as the preset chooses it. ``hospitals``: those of a round.

        Raises ``BudgetError`` if no noise keeps to the target.
        """
        known = self._setting(method, rounds, hospitals)
        return training if known is None else presets.training(known)

    def warnings(self, method: Method, rounds: int, hospitals: int) -> list[str]:
        """What the preset says of such a run; raises ``BudgetError`` as ``training`` does."""
        known = self._setting(method, rounds, hospitals)
        return [] if known is None else presets.warnings(known)

    def _setting(self, method: Method, rounds: int, hospitals: int) -> presets.Known | None:
        """What a preset chooses by; None where there is none."""
        if self.units is None:
            return None
        from medsilo.algorithms.protection.private import planned_steps

        training = TrainingPlan(epochs=presets.epochs(rounds, shared_out=self.honest is not None))
        if not (steps := planned_steps(method, training, rounds, self.sampling_rate)):
            return None
        noise = self.plan(method, training, rounds).noise_multiplier
        averaged = hospitals if method.downlink else 1
        return presets.Known(
            self.units, self.clipping_norm, averaged, self.honest or 1, rounds, noise, steps, self.unit
        )

    def plan(self, method: Method, training: TrainingPlan, rounds: int) -> PrivacyPlan:
        """The plan with the least noise that keeps to the target; raises ``BudgetError`` if none does."""
        from medsilo.algorithms.protection.private import planned_averages, planned_steps

        steps = planned_steps(method, training, rounds, self.sampling_rate)
        settings = {"identifier": self.identifier, "choice": self.choice}
        averages = planned_averages(method, rounds)
        fixed = tuple(
            GaussianRelease(settings[one.content].noise_multiplier, one.times(rounds))
            for one in averages
            if one.bound is None
        )
        like_steps = sum(one.times(rounds) for one in averages if one.bound is not None)
        noise = _noise_multiplier(self.epsilon, self.delta, self.sampling_rate, steps, like_steps, fixed)
        releases = tuple(
            ReleasePlan(content=one.content, times=one.times(rounds), **settings[one.content].model_dump())
            if one.bound is None
            else ReleasePlan(content=one.content, times=one.times(rounds), bound=one.bound, noise_multiplier=noise)
            for one in averages
        )
        return PrivacyPlan(
            **self.model_dump(exclude={*settings, "metrics_epsilon", "preset", "units"}),
            noise_multiplier=noise,
            steps=steps,
            releases=releases,
            metrics=self._metrics(rounds),
        )

    def _metrics(self, rounds: int) -> MetricsPlan | None:
        if self.metrics_epsilon is None:
            return None
        # One a round, and one of what is handed out at the end.
        target, releases = self.metrics_epsilon, rounds + 1
        deviation, each = _deviation(target, self.delta, releases), target / releases
        if math.sqrt(2 * math.exp(-each)) / -math.expm1(-each) <= deviation:
            # Of a few releases, that is less noise: its cost has no δ, but adds up.
            return MetricsPlan(epsilon=each, releases=releases)
        return MetricsPlan(mechanism="discrete-gaussian", epsilon=target, deviation=deviation, releases=releases)


@lru_cache(maxsize=64)
def _noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, releases: int, fixed: tuple[Event, ...]
) -> float:
    def events(noise: float) -> list[Event]:
        training: list[Event] = [SampledGaussian(sampling_rate, noise, steps)] if steps else []
        return [*training, *([GaussianRelease(noise, releases)] if releases else []), *fixed]

    return noise_multiplier_for(epsilon, delta=delta, events=events)


@lru_cache(maxsize=64)
def _deviation(epsilon: float, delta: float, releases: int) -> float:
    return noise_multiplier_for(epsilon, delta=delta, events=lambda noise: [DiscreteGaussian(noise, releases)])


_NO_HEAD = (
    "head is for models of which one linear layer is trained, on features that are fixed; of {} more is trained. Say "
    "`train: head` under `run.model`, or leave the preset out"
)


def _is_head(model: nn.Module) -> bool:
    """Whether all that is trained is one linear layer."""
    from torch import nn

    layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    return len(layers) == 1 and isinstance(layers[0], nn.Linear)


class SecureAggregationConfig(StrictModel):
    """Masks under which silos send their updates, so that this coordinator learns sums alone; or seals, so that it
    mixes models that it does not see.

    ``mode``: ``sum``, or ``blind``, for methods that give each silo a mixture of its own. ``minimum``: the fewest silos
    whose sum it may learn, or whose models a mixture may hold. ``fraction_bits``: F; numbers are summed as multiples of
    2^-F. ``sketch_size``, ``largest_isolation``: of blind mixtures: from how many numbers distances between models are
    estimated, by default from an eighth of what is compared, and 512 at most; how far a model may stand out of any
    mixture, 1 by default (two models in equal parts): weights beyond that are taken down to it.
    """

    mode: Literal["sum", "blind"] = "sum"
    minimum: int = Field(default=3, ge=3)
    fraction_bits: int = Field(default=32, ge=8, le=48)
    sketch_size: int | None = Field(default=None, ge=1, le=1 << 20)
    largest_isolation: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _of_mode(self) -> SecureAggregationConfig:
        others = ("fraction_bits",) if self.mode == "blind" else ("sketch_size", "largest_isolation")
        if given := sorted(self.model_fields_set.intersection(others)):
            raise ValueError(
                f"`mode: {self.mode}` has no {', '.join(given)}; leave {'it' if len(given) == 1 else 'them'} out"
            )
        return self

    def plan(self, method: Method, rounds: int, model: Callable[[], nn.Module]) -> SecureAggregationPlan:
        """What the plan says of it, for so many rounds of training of such a model; raises ``ConfigurationError`` for a
        method that cannot."""
        from medsilo.algorithms.models import Layout
        from medsilo.algorithms.protection.blind import blind_method, default_sketch
        from medsilo.algorithms.protection.masked import masked_rounds
        from medsilo.privacy.secure_aggregation.blind_mixing import FRACTION_BITS

        if self.mode == "sum":
            return SecureAggregationPlan(
                minimum=self.minimum, fraction_bits=self.fraction_bits, rounds=masked_rounds(method, rounds)
            )
        blind_method(method)
        return SecureAggregationPlan(
            mode="blind",
            minimum=self.minimum,
            fraction_bits=FRACTION_BITS,
            rounds=2 * rounds,
            sketch_size=self.sketch_size or default_sketch(method, Layout.of(model()), rounds),
            largest_isolation=self.largest_isolation or 1.0,
        )


class ModelConfig(ModelPlan):
    """What every silo trains.

    ``name``: a network of ``medsilo.algorithms.models``, ``torchvision:NAME``, ``torchvision-features:NAME`` (a linear
    layer on what that one's features are, with ``weights``), or ``module:factory`` of one's own. ``input_shape``:
    channels, height, width of an image. ``classes``: how many the images have. ``weights``: what it starts from; random
    numbers by default.
    """

    weights: WeightsConfig | None = None  # type: ignore[assignment]

    def plan(self, *, trusted: tuple[str, ...], runs: Path | None) -> ModelPlan:
        """What the run's plan says of it; raises ``ConfigurationError`` for weights that cannot be used."""
        bare = ModelPlan.model_validate(self.model_dump(exclude={"weights"}))
        if self.weights is None:
            return bare
        return bare.model_copy(update={"weights": self.weights.plan(bare, trusted=trusted, runs=runs)})


class RunConfig(StrictModel):
    """One run.

    ``name``: new for every run that differs from an earlier one. ``model``, ``training``: what every silo trains, and
    how in one round. ``rounds``: their number. ``seed``: draws the first model, the order of images, and who takes
    part. ``participation``: share of the silos in each round, drawn anew. ``method``: ``name`` and any of the method's
    hyper-parameters. ``quorum``: how many of a round's silos must deliver before it may end: a number, or ``all``.
    ``deadline_minutes``: how long the round waits for the rest once it is open; without one it waits for all.
    ``ask_for``: exposure classes that silos may add if they consent (``LOCAL_METRICS`` fills ``coordinator results``).
    ``max_update_norm``: updates whose change of the model is longer are refused; none by default, for what is usual
    depends on model and training (``coordinator status`` shows it). ``privacy``: differential privacy; none by default.
    ``secure_aggregation``: masks, or seals; none by default.
    """

    name: Name
    method: dict[str, str | bool | int | float | None]
    model: ModelConfig
    training: TrainingPlan = TrainingPlan()
    rounds: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=1, ge=0, lt=2**53)
    participation: float = Field(default=1.0, gt=0, le=1)
    quorum: int | Literal["all"] = "all"
    deadline_minutes: float | None = Field(default=None, ge=0)
    ask_for: tuple[str, ...] = ()
    max_update_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    privacy: PrivacyConfig | None = None
    secure_aggregation: SecureAggregationConfig | None = None

    @property
    def exchanges(self) -> int:
        """The plan's rounds: with blind mixtures two for each round of training."""
        masks = self.secure_aggregation
        return 2 * self.rounds if masks is not None and masks.mode == "blind" else self.rounds

    @model_validator(mode="after")
    def _measured_nowhere(self) -> RunConfig:
        if self.privacy is not None and bool(self.ask_for) != (self.privacy.metrics_epsilon is not None):
            raise ValueError(
                "with `privacy`, accuracies on silos' own images are noised: `ask_for: [LOCAL_METRICS]` and `privacy: "
                "metrics_epsilon` (what they may cost, for example 2) go together; leave both away to ask for none"
            )
        return self

    @model_validator(mode="after")
    def _one_choice(self) -> RunConfig:
        if self.privacy is not None and self.privacy.preset is not None and "training" in self.model_fields_set:
            raise ValueError(f"`privacy: preset: {self.privacy.preset}` chooses the training; leave `training:` out")
        return self

    @model_validator(mode="after")
    def _training_fits(self) -> RunConfig:
        self.training.check(self.model.input_shape, private=self.privacy is not None)
        return self

    @model_validator(mode="after")
    def _seen(self) -> RunConfig:
        if self.secure_aggregation is not None and self.max_update_norm is not None:
            raise ValueError(
                "`max_update_norm` needs to see single updates, which `secure_aggregation` hides; use one of them"
            )
        return self

    @field_validator("method")
    @classmethod
    def _named(cls, method: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(method.get("name"), str):
            raise ValueError("needs a `name`, for example `name: diversifed`")
        return method

    @field_validator("quorum")
    @classmethod
    def _positive(cls, quorum: int | str) -> int | str:
        if isinstance(quorum, int) and quorum < 1:
            raise ValueError("should be a number of silos from 1, or all")
        return quorum

    @field_validator("ask_for")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unsupported = [name for name in names if name != Exposure.LOCAL_METRICS]
        if unsupported:
            raise ValueError(f"can only hold LOCAL_METRICS, not {', '.join(unsupported)}")
        return names


class EnrolmentConfig(StrictModel):
    """A second port, where hospitals that were invited get their certificates (`coordinator invite`).

    ``listen``: its address and port. ``host``: the name or address by which hospitals reach this machine. ``ca``: the
    folder of the federation's CA, whose key signs. ``days``: how long the certificates are valid.
    """

    listen: Address
    host: Host
    ca: FilePath
    days: int = Field(default=365, ge=1, le=3650)


class CoordinatorConfig(PartyConfig):
    """``coordinator.yaml``. Relative paths are taken from the file's folder.

    ``listen``: address and port; ``"[::]:7443"`` is every address of this machine, IPv6 and IPv4. ``silos``: the
    hospitals that may take part. ``start_with``: the run starts when so many of them have joined; by default all.
    ``run``: what is trained, and how. ``state``: folder for everything the coordinator keeps. ``store``: database URL,
    without a password; SQLite in the state folder by default. ``lease_seconds``: with PostgreSQL, how long after this
    coordinator's death another takes over. ``tls``: by default the files in ``state/keys``. ``insecure``: plain text,
    only for a loopback address. ``keep_rounds``: how many past rounds' tensors stay on disk. ``message_seconds``: how
    long one message (1 MiB at most) of a hospital's update or download may take; then its call is cut, and it tries
    again. ``public_data``: an ``.npz`` of public images, for methods that measure models on them (FedPDC).
    ``enrolment``: a port for hospitals that were invited; none by default. ``trusted_models``: users' own model
    factories that a plan may name. ``witnesses``: who is asked to cosign the journal's checkpoints; nobody by default.
    """

    role = "coordinator"

    name: Name = "coordinator"
    listen: Address
    store: str | None = None
    lease_seconds: float = Field(default=15, ge=3, le=300)
    silos: tuple[Name, ...] = Field(min_length=1)
    start_with: int | None = Field(default=None, ge=1)
    run: RunConfig
    enrolment: EnrolmentConfig | None = None
    keep_rounds: int = Field(default=2, ge=1)
    message_seconds: float = Field(default=300, ge=1, le=86_400, allow_inf_nan=False)
    public_data: FilePath | None = None
    trusted_models: tuple[str, ...] = ()
    witnesses: tuple[WitnessAddress, ...] = Field(default=(), max_length=MOST_WITNESSES)

    @field_validator("store")
    @classmethod
    def _without_password(cls, store: str | None) -> str | None:
        if store is not None and has_password(store):
            raise PydanticCustomError(
                HIDDEN,
                "holds a password; leave it out, and give it in the environment variable PGPASSWORD or in a file that "
                "PGPASSFILE names (docs/postgresql.md)",
            )
        return store

    @model_validator(mode="after")
    def _consistent(self) -> CoordinatorConfig:
        if len(set(self.silos)) != len(self.silos):
            raise ValueError("a silo stands twice under `silos`")
        if self.start_with is not None and self.start_with > len(self.silos):
            raise ValueError(f"`start_with` is {self.start_with}, but there are {len(self.silos)} silos")
        if isinstance(self.run.quorum, int) and self.run.quorum > len(self.silos):
            raise ValueError(f"`run.quorum` is {self.run.quorum}, but there are {len(self.silos)} silos")
        if (masks := self.run.secure_aggregation) is not None:
            if self.insecure:
                raise ValueError(
                    "`run.secure_aggregation` needs certificates, by which hospitals know each other's keys; "
                    "`insecure: true` has none"
                )
            share, most = self.run.participation, self.start_with or len(self.silos)
            in_a_round = taking_part(most, share)
            if in_a_round < masks.minimum:
                raise ValueError(
                    f"`run.secure_aggregation.minimum` is {masks.minimum}, but a round may have only {in_a_round} "
                    "silos; add silos, raise `start_with` or `participation`, or lower the minimum (3 at least)"
                )
            if masks.mode == "blind" and self.run.quorum != "all":
                raise ValueError(
                    "`run.secure_aggregation: mode: blind` needs all silos in every round, for each helps to open the "
                    "others' mixtures: leave `quorum` out"
                )
        if self.insecure and self.enrolment is not None:
            raise ValueError("`enrolment` gives certificates, and `insecure: true` has none; leave one of them away")
        if self.insecure and not is_loopback(self.listen):
            raise ValueError(f"`insecure: true` is for loopback addresses only, not {self.listen}")
        return self

    @property
    def invitations(self) -> Path:
        """The file of the invitations that were sent to hospitals."""
        return self.state / "invitations.json"

    @property
    def database(self) -> str:
        """The store's URL."""
        return self.store or f"sqlite:///{self.state / 'coordinator.db'}"

    def make_method(self) -> Method:
        """The run's method; raises ``ConfigurationError`` for hyper-parameters that it does not have."""
        from medsilo.algorithms.registry import make

        parameters = dict(self.run.method)
        name = str(parameters.pop("name"))
        try:
            return make(name, parameters)
        except ConfigurationError as error:
            raise self._wrong("run.method", error) from None

    def warnings(self) -> list[str]:
        """What method and preset say of such a run; raises ``ConfigurationError`` as ``make_method`` does, and
        ``BudgetError`` if no noise keeps to the target."""
        run, method = self.run, self.make_method()
        in_a_round = taking_part(len(self.silos), run.participation)
        found = method.warnings(in_a_round, run.model.name, run.training.optimizer)
        return found if run.privacy is None else [*found, *run.privacy.warnings(method, run.rounds, in_a_round)]

    @property
    def weights(self) -> tuple[Path, ...]:
        """The file of the weights that the run starts from, if it starts from any."""
        given = self.run.model.weights
        return () if given is None else (given.path(self.state / "runs"),)

    def model_plan(self) -> ModelPlan:
        """What the plan says of the model; raises ``ConfigurationError`` for weights that cannot be used."""
        try:
            return self.run.model.plan(trusted=self.trusted_models, runs=self.state / "runs")
        except ConfigurationError as error:
            raise self._wrong("run.model.weights", error) from None

    def build_model(self) -> nn.Module:
        """The run's first model, with the weights that it starts from; raises ``ConfigurationError`` for one that
        cannot be built."""
        from medsilo.algorithms.models import build_start

        plan = self.model_plan()
        try:
            return build_start(plan, seed=self.run.seed, trusted=self.trusted_models, weights=self.weights)
        except ConfigurationError as error:
            raise self._wrong("run.model", error) from None

    def _wrong(self, key: str, why: object) -> ConfigurationError:
        file = "" if self._file is None else f"{self._file}: "
        return ConfigurationError(f"{file}`{key}`: {why}")

    def open_public(self, model: nn.Module) -> PublicImages | None:
        """The public images, to be measured with a copy of ``model``; None where the method needs none.

        Raises ``ConfigurationError`` if it does and there are none.
        """
        from medsilo.algorithms.datasets import load_npz
        from medsilo.algorithms.datasets.public_set import PublicImages

        if not self.make_method().needs_public:
            return None
        if self.public_data is None:
            raise self._wrong(
                "public_data",
                f"is missing; {self.run.method['name']} measures models on public images: name an .npz of them",
            )
        return PublicImages(load_npz(self.public_data), copy.deepcopy(model), self.run.model.input_shape)

    def plan(self) -> RunPlan:
        """The plan that silos are asked to join."""
        from medsilo.algorithms.protection.masked import check_participation, check_shared_noise, required
        from medsilo.algorithms.protection.private import check_model, reporting_refusal

        method = self.make_method()
        run = self.run
        if run.training.batch_size < 2:
            raise self._wrong("run.training.batch_size", "should be at least 2")
        training = run.training
        if run.privacy is not None:
            model = self.build_model()
            check_model(model, run.model.name, run.model.input_shape)
            if run.privacy.preset is not None and not _is_head(model):
                raise self._wrong("run.privacy.preset", _NO_HEAD.format(run.model.name))
            in_a_round = taking_part(len(self.silos), run.participation)
            training = run.privacy.training(method, training, run.rounds, in_a_round)
        if run.max_update_norm is not None and not method.uploads & set(MODEL):
            raise self._wrong("run.max_update_norm", f"is for models, and {method.name} sends none; leave it out")
        masks = (
            run.secure_aggregation.plan(method, run.rounds, self.build_model)
            if run.secure_aggregation is not None
            else None
        )
        given = BLIND_DOWNLINK if masks is not None and masks.mode == "blind" else method.downlink
        if run.privacy is not None and run.ask_for and (reason := reporting_refusal(method)) is not None:
            raise self._wrong("run.ask_for", reason)
        model_plan = self.model_plan()
        asked = {*required(method, masks, run.rounds), *model_plan.asks}
        needed = tuple(exposure for exposure in Exposure if exposure in asked)
        try:
            plan = RunPlan(
                federation=self.federation,
                coordinator=self.name,
                run=run.name,
                method=MethodPlan(name=method.name, parameters=method.parameters()),
                model=model_plan,
                training=training,
                rounds=run.exchanges,
                seed=run.seed,
                required=needed,
                optional=tuple(sorted(expand(run.ask_for) - set(needed))),
                downlink=tuple(exposure for exposure in Exposure if exposure in given | {model_plan.start}),
                participation=run.participation,
                privacy=run.privacy.plan(method, training, run.rounds) if run.privacy is not None else None,
                secure_aggregation=masks,
            )
        except ValidationError as error:
            raise self._wrong("run", "; ".join(explain(error, RunPlan))) from None
        try:
            check_participation(plan, method)
        except ConfigurationError as error:
            raise self._wrong("run.participation", error) from None
        try:
            check_shared_noise(plan, method)
        except ConfigurationError as error:
            raise self._wrong("run.privacy.honest", error) from None
        return plan
