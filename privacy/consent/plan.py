"""The run plan: everything about a run that a silo must know before it says yes, and its hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from medsilo.privacy.budget.promise import MetricsPlan, PrivacyPlan, ReleasePlan
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MADE_OF_UPDATES, Exposure
from medsilo.privacy.files.canonical import write_canonical
from medsilo.privacy.files.configuration import Name, StrictModel, explain
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.printable import Printable
from medsilo.protos.medsilo.v1 import plan_pb2

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class WeightsPlan(StrictModel):
    """The given weights that a run starts from.

    Attributes:
        sha256: of the file.
        tensors_sha256: of what is taken from it (``medsilo.algorithms.models.given_weights.tensors_sha256``): what a
            silo is sent must have it.
        source: where they are from, in words.
        licence: under which they may be used; None where that is not said.
        public: no hospital's images have made them. Others count as made of hospitals' models.
        without: the path of the layer that is drawn anew, where the file's has another number of classes; None where
            all is taken.
        brought: every silo brings the file itself, and it never travels.
    """

    sha256: _Sha256
    tensors_sha256: _Sha256
    source: Printable = Field(min_length=1, max_length=300)
    licence: Printable | None = Field(default=None, min_length=1, max_length=300)
    public: bool = False
    without: Printable | None = Field(default=None, min_length=1, max_length=200)
    brought: bool = False

    @property
    def words(self) -> str:
        """What the run starts from, in a sentence or two."""
        made = "public" if self.public else "made of hospitals' models"
        licence = f"licence: {self.licence}" if self.licence else "no licence is named"
        how = "every hospital brings the file itself" if self.brought else "the coordinator sends them"
        new = f" Its layer {self.without} is drawn anew." if self.without else ""
        return f"It starts from given weights, {made}: {self.source} ({licence}; SHA-256 {self.sha256}); {how}.{new}"


MOST = 10_000
"""The most layers, or the highest rank, that a plan may name."""


class LastLayers(StrictModel):
    """The last layers of a network. ``last``: how many, the classifier among them."""

    last: int = Field(ge=2, le=MOST)


class Rank(StrictModel):
    """Of low-rank updates. ``rank``: r; a layer's update is a product of two matrices with r columns and r rows."""

    rank: int = Field(ge=1, le=MOST)


class LowRankUpdates(StrictModel):
    """An update of low rank for every other layer, and the classifier whole (LoRA). ``lora``: of which rank."""

    lora: Rank


def _train_of(value: Any) -> Any:
    """Says in one sentence what none of the four kinds is."""
    match value:
        case "all" | "head" | LastLayers() | LowRankUpdates():
            return value
        case {"last": int(number)} | {"lora": {"rank": int(number)}} if len(value) == 1 and 1 <= number <= MOST:
            return "head" if value == {"last": 1} else value
    raise ValueError("should be all, head, {last: N} (the last N layers) or {lora: {rank: R}}, with N and R from 1")


Train = Annotated[Literal["all", "head"] | LastLayers | LowRankUpdates, BeforeValidator(_train_of)]
"""What of a network is trained. The rest is frozen: it stays as it starts, and only what is trained travels."""


class ModelPlan(StrictModel):
    """The architecture that every silo builds.

    ``name``: a network of ``medsilo.algorithms.models``, ``torchvision:NAME``, ``torchvision-features:NAME``, or
    ``module:factory`` of one's own. ``input_shape``: channels, height, width of an image. ``classes``: how many the
    images have. ``weights``: what it starts from; random numbers without it. ``train``: what of it is trained, and so
    travels: ``all``; ``head``, the classifier; ``{last: N}``, the last N layers; ``{lora: {rank: R}}``, the classifier
    and an update of rank R for every other layer. The rest stays as it starts.
    """

    name: str = Field(min_length=1, max_length=200)
    input_shape: tuple[int, int, int]
    classes: int = Field(ge=2, le=100_000)
    weights: WeightsPlan | None = None
    train: Train = "all"

    @property
    def start(self) -> Exposure:
        """The class of the starting model as the coordinator sends it."""
        given = self.weights
        of_hospitals = given is not None and not given.public and not given.brought
        return Exposure.PEER_INITIAL_MODEL if of_hospitals else Exposure.INITIAL_MODEL

    @property
    def asks(self) -> frozenset[Exposure]:
        """What a silo must consent to for the starting model: that one made of hospitals' models reaches others."""
        return frozenset({self.start}) & MADE_OF_UPDATES

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A model that is trained whole, from random numbers, is written, and hashed, as before there were others."""
        content: dict[str, Any] = serialise(self)
        if content.get("weights", self) is None:
            del content["weights"]
        if content.get("train") == "all":
            del content["train"]
        return content

    @field_validator("input_shape")
    @classmethod
    def _sizes(cls, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        if not all(1 <= size <= 4096 for size in shape):
            raise ValueError("channels, height and width must each lie in 1 … 4096")
        return shape


class AugmentationPlan(StrictModel):
    """One random change of the training images, drawn anew for each image at every step.

    ``kind``: which. ``amount``: how strong at most: the probability of ``horizontal_flip`` and ``vertical_flip``; the
    degrees of a ``rotation`` to either side; the pixels by which a ``crop`` moves the image in either direction; the
    share by which ``brightness``, ``contrast`` and ``saturation`` go up or down, at most 1; the share of the colour
    circle by which ``hue`` turns, at most 0.5. What comes in over an edge is the image's mirror.
    """

    kind: Literal["horizontal_flip", "vertical_flip", "rotation", "crop", "brightness", "contrast", "saturation", "hue"]
    amount: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_range(self) -> AugmentationPlan:
        most = {"rotation": 180.0, "crop": 4095.0, "hue": 0.5}.get(self.kind, 1.0)
        if self.amount > most:
            raise ValueError(f"the amount of {self.kind} should be at most {most:g}, not {self.amount:g}")
        if self.kind == "crop" and self.amount != int(self.amount):
            raise ValueError(f"crop moves by whole pixels, not {self.amount:g}")
        return self


class TrainingPlan(StrictModel):
    """Local training of one round.

    ``epochs``: passes over the silo's images. ``batch_size``: images of a step. ``optimizer``, ``learning_rate``: of
    the steps. ``momentum``: of ``sgd``. ``weight_decay``: of either. ``keep_optimizer_state``: what the optimiser
    remembers of its steps (Adam's moments, momentum) stays at the silo and goes on in its next round; otherwise every
    training begins with a fresh optimiser. ``augmentation``: random changes of the images before every step, one after
    the other; none by default. ``class_weights``: ``balanced`` lets an image of class c count n / (K · n_c), by the
    silo's own n training images, the K classes that it has, and its n_c images of the class; the weights stay at the
    silo.
    """

    epochs: int = Field(default=10, ge=1, le=100_000)
    batch_size: int = Field(default=100, ge=1)
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    keep_optimizer_state: bool = False
    augmentation: tuple[AugmentationPlan, ...] = ()
    class_weights: Literal["balanced"] | None = None

    @field_validator("augmentation")
    @classmethod
    def _once_each(cls, steps: tuple[AugmentationPlan, ...]) -> tuple[AugmentationPlan, ...]:
        if len({step.kind for step in steps}) < len(steps):
            raise ValueError("a kind of change should be named once")
        return steps

    def check(self, input_shape: tuple[int, int, int], *, private: bool) -> None:
        """Raises ``ValueError`` for what images of this shape (C, H, W), or a run with privacy, cannot have."""
        channels, height, width = input_shape
        for step in self.augmentation:
            if step.kind in ("saturation", "hue") and channels != 3:
                raise ValueError(f"augmentation: {step.kind} needs RGB images, and these have {channels} channel(s)")
            if step.kind == "crop" and step.amount >= min(height, width):
                raise ValueError(f"augmentation: crop by {step.amount:g} pixels needs images larger than that")
        if private and self.class_weights is not None:
            raise ValueError(
                "class_weights are made from a silo's label counts, which have no mechanism of differential privacy: "
                "leave them out, or train without privacy"
            )

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is not asked for is not written, so that a plan without it is hashed as before there was any."""
        content: dict[str, Any] = serialise(self)
        for later in ("keep_optimizer_state", "augmentation", "class_weights"):
            if not content[later]:
                del content[later]
        return content


class MethodPlan(StrictModel):
    """A method's name with all its hyper-parameters."""

    name: str = Field(min_length=1, max_length=100)
    parameters: dict[Printable, Printable | bool | int | float | None]


class SecureAggregationPlan(StrictModel):
    """Masks under which silos send their updates, so that the coordinator learns sums alone; or seals, so that it mixes
    models blindly.

    Attributes:
        minimum: the fewest silos whose sum it may learn, or whose models a mixture may hold. With two, each could work
            out what the other sent.
        fraction_bits: F; numbers are summed as multiples of 2^-F, modulo 2^64
            (``medsilo.privacy.secure_aggregation.masking``), or mixed as such.
        rounds: how many rounds, from the first, are masked: all but where a method needs single models later.
        mode: ``sum``; or ``blind``: each silo opens a mixture of its own
            (``medsilo.privacy.secure_aggregation.blind_mixing``). A round of training then takes two of the run's: in
            the first sealed models go up, in the second what opens their mixtures.
        sketch_size: of blind mixtures: of how many numbers the sketches are that distances are taken of, all together
            where a method compares several (one a class, say).
        largest_isolation: of blind mixtures: how far a model may stand out of any that it goes into
            (``medsilo.privacy.secure_aggregation.mixing_rules``).
    """

    minimum: int = Field(ge=3, le=100_000)
    fraction_bits: int = Field(default=32, ge=8, le=48)
    rounds: int = Field(ge=1, le=1_000_000)
    mode: Literal["sum", "blind"] = "sum"
    sketch_size: int | None = Field(default=None, ge=1, le=1 << 20)
    largest_isolation: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> SecureAggregationPlan:
        if any((value is not None) != (self.mode == "blind") for value in (self.sketch_size, self.largest_isolation)):
            raise ValueError("`mode: blind` goes together with sketch_size and largest_isolation")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A plan with sums under masks is written, and hashed, as before there was anything else."""
        content: dict[str, Any] = serialise(self)
        if self.mode == "sum":
            del content["mode"], content["sketch_size"], content["largest_isolation"]
        return content


def taking_part(silos: int, share: float) -> int:
    """How many of ``silos`` a round has when ``share`` of them (0 to 1) take part: at least one."""
    return silos if share >= 1 else max(1, round(share * silos))


@dataclass(frozen=True, slots=True)
class Trust:
    """That of each ``of`` hospitals whose updates are summed so many at least are ``honest``: they add their share of
    the noise, and tell nobody of it.

    >>> str(Trust(4, 6)), Trust(4, 6).covers(Trust(3, 6)), Trust(4, 6).covers(Trust(5, 6))
    ('4 of 6', True, False)
    """

    honest: int
    of: int

    def __str__(self) -> str:
        return f"{self.honest} of {self.of}"

    def covers(self, wanted: Trust) -> bool:
        """Whether it is enough for what is wanted: sums of as many at least have as many honest hospitals."""
        return self.of <= wanted.of and self.honest >= wanted.honest


class Proposal(Protocol):
    """What a consent is held against: a run's plan, or what stands for one where another system leads the run."""

    @property
    def run(self) -> str: ...

    @property
    def method(self) -> MethodPlan: ...

    @property
    def training(self) -> TrainingPlan | None:
        """How a round is trained; None where another system decides that."""

    @property
    def rounds(self) -> int | None:
        """How many rounds it has; None where the other system decides that on the way."""

    @property
    def required(self) -> tuple[Exposure, ...]: ...

    @property
    def optional(self) -> tuple[Exposure, ...]: ...

    @property
    def privacy(self) -> PrivacyPlan | None: ...

    @property
    def secure_aggregation(self) -> SecureAggregationPlan | None: ...

    @property
    def trust(self) -> Trust | None: ...

    @property
    def coordinator_identity(self) -> Identity: ...


class RunPlan(StrictModel):
    """A run's method, model, training and exposure, fixed before the run starts.

    ``required``: classes that a silo's consent must hold. ``optional``: classes that the coordinator would like
    as well; a silo without consent to them takes part all the same. ``downlink``: what the coordinator sends.
    ``privacy``: with what differential privacy silos train; none without it. ``secure_aggregation``: how updates are
    masked; not at all without it.
    """

    # As they are, not as null: numbers that are not finite have no canonical form, and their plan is refused.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    federation: Name
    coordinator: Name
    run: Name
    method: MethodPlan
    model: ModelPlan
    training: TrainingPlan
    rounds: int = Field(ge=1, le=1_000_000)
    seed: int = Field(ge=0, lt=2**53)
    required: tuple[Exposure, ...]
    optional: tuple[Exposure, ...] = ()
    downlink: tuple[Exposure, ...] = ()
    participation: float = Field(default=1.0, gt=0, le=1)
    privacy: PrivacyPlan | None = None
    secure_aggregation: SecureAggregationPlan | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A plan without privacy or masks is written, and hashed, as before there were any."""
        content: dict[str, Any] = serialise(self)
        for part in ("privacy", "secure_aggregation"):
            if content.get(part, self) is None:
                del content[part]
        return content

    @model_validator(mode="after")
    def _training_fits(self) -> RunPlan:
        self.training.check(self.model.input_shape, private=self.privacy is not None)
        return self

    @model_validator(mode="after")
    def _can_share_noise(self) -> RunPlan:
        if self.privacy is not None and self.privacy.honest is not None:
            _check_shared_noise(self.privacy.honest, self)
        return self

    @property
    def trust(self) -> Trust | None:
        """What a hospital that takes part must trust in, where noise is shared out."""
        if self.privacy is None or self.privacy.honest is None or self.secure_aggregation is None:
            return None
        return Trust(self.privacy.honest, self.secure_aggregation.minimum)

    def is_masked(self, round_number: int) -> bool:
        """Whether silos send that round's updates for a roster: under masks, or sealed."""
        masks = self.secure_aggregation
        return masks is not None and round_number < masks.rounds and not (self.is_blind and round_number % 2)

    @property
    def is_blind(self) -> bool:
        """Whether the coordinator mixes models that it does not see. A round of training then takes two of the run's
        rounds: ``2r``, in which it is trained, and ``2r + 1``, in which silos help to open its mixtures."""
        return self.secure_aggregation is not None and self.secure_aggregation.mode == "blind"

    @property
    def training_rounds(self) -> int:
        """How many rounds of training the run has: what methods count."""
        return self.rounds // self.rounds_each

    @property
    def rounds_each(self) -> int:
        """How many of the run's rounds a round of training takes."""
        return 2 if self.is_blind else 1

    @property
    def coordinator_identity(self) -> Identity:
        """The coordinator that leads the run."""
        return Identity(self.federation, "coordinator", self.coordinator)

    def canonical(self) -> bytes:
        """The plan as canonical JSON (RFC 8785)."""
        return write_canonical(self.model_dump(mode="json"))

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical JSON: what a silo joins."""
        return hashlib.sha256(self.canonical()).digest()

    def to_message(self) -> plan_pb2.RunPlan:
        """The plan as it travels."""
        return plan_pb2.RunPlan(
            federation=self.federation,
            coordinator=self.coordinator,
            run=self.run,
            method=plan_pb2.Method(
                name=self.method.name, parameters_json=write_canonical(self.method.parameters).decode()
            ),
            model=plan_pb2.Model(
                **self.model.model_dump(exclude={"train"}, exclude_none=True), train=_train_message(self.model.train)
            ),
            training=plan_pb2.Training(**self.training.model_dump()),
            rounds=self.rounds,
            seed=self.seed,
            required=[exposure.number for exposure in self.required],
            optional=[exposure.number for exposure in self.optional],
            downlink=[exposure.number for exposure in self.downlink],
            participation=self.participation,
            privacy=None if self.privacy is None else plan_pb2.Privacy(**self.privacy.model_dump()),
            secure_aggregation=None
            if self.secure_aggregation is None
            else plan_pb2.SecureAggregation(**self.secure_aggregation.model_dump()),
        )

    @classmethod
    def from_message(cls, message: plan_pb2.RunPlan) -> RunPlan:
        """Raises ``RefusedError`` naming what is wrong with a plan that does not hold together."""
        try:
            parameters = json.loads(message.method.parameters_json)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the plan's hyper-parameters are not JSON: {error}") from None
        fields: dict[str, Any] = {
            "federation": message.federation,
            "coordinator": message.coordinator,
            "run": message.run,
            "method": {"name": message.method.name, "parameters": parameters},
            "model": {
                "name": message.model.name,
                "input_shape": tuple(message.model.input_shape),
                "classes": message.model.classes,
                "weights": _weights_fields(message.model.weights) if message.model.HasField("weights") else None,
                "train": _train_fields(message.model.train) if message.model.HasField("train") else "all",
            },
            "training": _training_fields(message.training),
            "rounds": message.rounds,
            "seed": message.seed,
            "participation": message.participation,
            "privacy": _privacy_fields(message.privacy) if message.HasField("privacy") else None,
            "secure_aggregation": _masks_fields(message.secure_aggregation)
            if message.HasField("secure_aggregation")
            else None,
        }
        for kind in ("required", "optional", "downlink"):
            fields[kind] = tuple(Exposure.from_number(number) for number in getattr(message, kind))
        try:
            plan = cls.model_validate(fields)
            plan.canonical()
        except ValidationError as error:
            raise RefusedError("the plan is not usable: " + "; ".join(explain(error, cls))) from None
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the plan has no canonical form: {error}") from None
        return plan


def _check_shared_noise(honest: int, plan: RunPlan) -> None:
    """Raises ``ValueError`` for a plan whose noise is shared out, though it is not made for that."""
    masks, training = plan.secure_aggregation, plan.training
    if masks is None or masks.mode == "blind" or masks.rounds < plan.rounds:
        raise ValueError("noise can be shared out (`privacy: honest`) under masks alone, in every round")
    if honest >= masks.minimum:
        raise ValueError(
            f"`privacy: honest` is {honest}, and a masked sum may have {masks.minimum} hospitals: each of those knows "
            "its own noise, so that it should be less than `secure_aggregation: minimum`"
        )
    assert plan.privacy is not None
    if plan.privacy.steps != plan.rounds or training.epochs != 1 or plan.participation < 1:
        raise ValueError(
            "noise is shared out for one step a round (`epochs: 1`, `sampling_rate: 1`) of all hospitals "
            "(`participation: 1`): in a second step, the first one's noise would be the hospital's own share alone"
        )
    if training.optimizer != "sgd" or training.weight_decay or training.augmentation:
        raise ValueError(
            "noise is shared out in plain steps: `optimizer: sgd`, with or without momentum, and no weight_decay or "
            "augmentation"
        )


def _weights_fields(message: plan_pb2.Weights) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in WeightsPlan.model_fields}
    return fields | {name: fields[name] or None for name in ("licence", "without")}


def _train_message(train: Train) -> plan_pb2.Train | None:
    match train:
        case "all":
            return None
        case LowRankUpdates(lora=lora):
            return plan_pb2.Train(rank=lora.rank)
        case LastLayers(last=last):
            return plan_pb2.Train(last=last)
        case _:
            return plan_pb2.Train(last=1)


def _train_fields(message: plan_pb2.Train) -> dict[str, Any]:
    if message.rank and message.last:
        return {"last": message.last, "lora": {"rank": message.rank}}  # which no plan says, and is refused
    return {"lora": {"rank": message.rank}} if message.rank else {"last": message.last}


def _training_fields(message: plan_pb2.Training) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in TrainingPlan.model_fields}
    fields["augmentation"] = tuple({"kind": step.kind, "amount": step.amount} for step in message.augmentation)
    fields["class_weights"] = message.class_weights or None
    return fields


def _masks_fields(message: plan_pb2.SecureAggregation) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in SecureAggregationPlan.model_fields}
    # Where sums are masked, plans do not say them.
    later = {name: fields[name] or None for name in ("sketch_size", "largest_isolation")}
    return fields | {"mode": fields["mode"] or "sum"} | later


def _privacy_fields(message: plan_pb2.Privacy) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in PrivacyPlan.model_fields}
    fields["honest"] = message.honest or None
    fields["releases"] = tuple(
        {name: getattr(release, name) for name in ReleasePlan.model_fields} for release in message.releases
    )
    metrics = {name: getattr(message.metrics, name) for name in MetricsPlan.model_fields}
    # With discrete Laplace noise, plans do not say them.
    metrics |= {"mechanism": metrics["mechanism"] or "discrete-laplace", "deviation": metrics["deviation"] or None}
    fields["metrics"] = metrics if message.HasField("metrics") else None
    return fields
