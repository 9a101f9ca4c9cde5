"""What a federated method is: hyper-parameters, declared exposure, a silo side and a coordinator side.

A method is one file that defines a frozen dataclass deriving from ``Method``, and is listed in
``medsilo.algorithms.registry``. The runtimes (daemons and simulation) do everything else: they move payloads, keep
memories across restarts, check shapes and finiteness, measure accuracy. Consent, journal and differential privacy
wrap a method from outside; no method knows about them.

The order of a round t at a silo: ``train(t, download)`` then ``upload()``. At the coordinator: ``downloads`` for
the silos that take part, then ``aggregate`` over the uploads that came in time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, get_type_hints

import torch
from torch import Tensor, nn

from medsilo.algorithms.declarations import (
    ONE_MEAN,
    UNSTATED_BLIND,
    UNSTATED_PRIVACY,
    UNSTATED_SUMS,
    Blind,
    Protected,
    Sums,
)
from medsilo.algorithms.models import Layout
from medsilo.algorithms.tensors import Payload, TensorSpec, Workspace
from medsilo.privacy.consent.plan import RunPlan, TrainingPlan, taking_part
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import MADE_OF_UPDATES, STARTS, Exposure

State = dict[str, Tensor]
"""Tensors by name, on the CPU."""

Memory = dict[str, State]
"""What a side keeps between rounds and across restarts: named groups of tensors."""

PERSONAL = "personal"
"""The group of a silo's memory that holds its personalised model's whole state (parameters and buffers)."""

TRAINED = "trained"
"""The group of a silo's memory that holds the model as it left local training, where that is not the personal one."""

Objective = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A loss of a batch: (model, images, labels) to a scalar, the mean over the batch's images; see ``Site.batch_mean``."""


Watch = Callable[[Mapping[str, Tensor]], None]
"""Is shown a step's gradients by the parameters' names; they are overwritten by the next step."""

Vectors = Callable[[Tensor, Tensor], Tensor]
"""Of images ``[b, C, H, W]`` and labels ``[b]`` a vector each, ``[b, D]``: every row is made from its own image and
label alone, and from nothing else that tells about the silo's images."""


@dataclass(frozen=True)
class Correction:
    """What is added to the parameters' gradients after the backward pass and before the optimiser's step:
    ``strength * (w - centre) + linear``.

    It does not depend on data, so under differential privacy it comes after the noise and costs nothing; and as it
    is plain tensors, many silos' corrections can be stacked.

    Attributes:
        strength: of the proximal term ``strength/2 * ||w - centre||^2``, at least 0.
        centre: by parameter name; parameters that are not named are left alone.
        linear: by parameter name.
    """

    strength: float = 0.0
    centre: Mapping[str, Tensor] = field(default_factory=dict)
    linear: Mapping[str, Tensor] = field(default_factory=dict)

    def bind(self, parameters: Mapping[str, nn.Parameter]) -> Callable[[], None]:
        """A function that adds the correction to the gradients of these parameters, as they stand when it is called."""
        pulled = [name for name in parameters if name in self.centre and self.strength]
        pushed = [name for name in parameters if name in self.linear]
        centres = [self.centre[name].to(parameters[name].device) for name in pulled]
        linears = [self.linear[name].to(parameters[name].device) for name in pushed]

        def correct() -> None:
            with torch.no_grad():
                if pulled:
                    distances = torch._foreach_sub([parameters[name] for name in pulled], centres)
                    torch._foreach_add_(_gradients(parameters, pulled), distances, alpha=self.strength)
                if pushed:
                    torch._foreach_add_(_gradients(parameters, pushed), linears)

        return correct


def _gradients(parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> list[Tensor]:
    found = []
    for name in names:
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


class Site(Protocol):
    """What a silo's runtime gives to the silo side of a method."""

    name: str
    layout: Layout
    input_shape: tuple[int, int, int]
    num_samples: int
    num_units: int
    num_classes: int
    training: TrainingPlan
    rounds: int

    @property
    def model(self) -> nn.Module:
        """The plan's architecture; its contents are whatever was loaded or trained last."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads a whole state, or only some of its tensors, into the model."""
        ...

    def fit(
        self,
        round_number: int,
        *,
        correction: Correction | None = None,
        objective: Objective | None = None,
        trainable: Collection[str] | None = None,
        extra: nn.Module | None = None,
        epochs: int | None = None,
        phase: str = "training",
        watch: Watch | None = None,
    ) -> int:
        """The plan's local training; returns the number of its steps. The optimiser is a fresh one, or, where the plan
        says so, goes on from the phase's last training.

        Args:
            round_number: enters the order of the images.
            correction: added to every gradient.
            objective: the loss of a batch; ``loss`` of the model's logits by default.
            trainable: names of the parameters to train, the others stay as they are; all by default.
            extra: a module of the method's own that is trained along with the model (on the model's device).
            epochs: instead of the plan's.
            phase: several trainings in one round take different phases, and with them different orders.
            watch: is shown every step's gradients, as they are before the correction.
        """
        ...

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The plan's loss of a batch (logits ``[b, classes]``, labels ``[b]``), for objectives of a method's own: the
        mean cross entropy, weighted by class where the plan says so."""
        ...

    def batch_mean(self, values: Tensor) -> Tensor:
        """For objectives: the mean of a batch's rows ``[b, ...]``, where it enters anything but a mean over the images.
        Several processes may each have a part of the batch; this is the mean over all of it."""
        ...

    def average(
        self,
        content: str,
        vectors: Vectors,
        *,
        round_number: int,
        lasting: bool = False,
        at_home: bool = False,
        inputs: bool = False,
        at_once: int | None = None,
    ) -> Tensor:
        """The mean over all training images of a vector each: float64 ``[D]``, on the CPU. With privacy it is the mean
        over its units (``num_units``; without, they are the images), each the mean of its images' vectors.

        Args:
            content: what the vectors are. A plan with privacy says under this name how they are clipped and noised.
            vectors: gives them; is called with the images in parts.
            round_number: in which round it is asked for.
            lasting: the vectors depend on image and label alone, and under this name are always the same, so that an
                answer once given may be given again.
            at_home: without noise with privacy as well. Neither it nor anything made of it may leave the silo.
            inputs: ``vectors`` is given what ``fit`` gives to the model: fixed features, where the model has such.
            at_once: for how many images there is memory for vectors; by default for a thousand.
        """
        ...

    def noise(self, content: str) -> float:
        """The standard deviation of the noise in each number of such an average that is not ``at_home``; 0 without
        privacy."""
        ...

    def batches(
        self, round_number: int, *, epochs: int | None = None, phase: str = "training"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The mini-batches (images, labels) that ``fit`` would go through, for training of a method's own."""
        ...

    def train_data(self) -> tuple[Tensor, Tensor]:
        """All training images ``[n, C, H, W]``, in network scale, and labels ``[n]``."""
        ...

    def reserve(self, share: float) -> None:
        """Sets a share of the training images aside for validation, drawn by the run's seed; once, before training."""
        ...

    def reserved_data(self) -> tuple[Tensor, Tensor]:
        """The images and labels that ``reserve`` set aside."""
        ...

    @property
    def has_validation(self) -> bool:
        """Whether there are images for ``validation_loss``: to measure a model before the run's start is loaded would
        be to measure another one."""
        ...

    def validation_loss(self, state: Mapping[str, Tensor]) -> float | None:
        """A state's mean loss on the shard's validation images, else on those that ``reserve`` set aside; None where
        there are neither. With privacy too: no account holds these images, so what depends on it must not leave."""
        ...

    def holds_any(self, hashes: Collection[bytes]) -> int:
        """How many of the silo's images (training and test) have one of these SHA-256 hashes of their pixels."""
        ...


class SiloSide(ABC):
    """A method's side at one silo. ``memory`` is kept across restarts by the runtime."""

    def __init__(self, method: Method, site: Site) -> None:
        self.method = method
        self.site = site
        self.memory: Memory = {}

    def begin(self, initial: State) -> None:
        """Takes the starting model, a whole state; called once, before the first training."""
        self.memory[PERSONAL] = initial

    @abstractmethod
    def train(self, round_number: int, download: Payload) -> None:
        """One round of local training; ``download`` is empty where the coordinator has nothing to say yet."""

    @abstractmethod
    def upload(self) -> Payload:
        """What goes to the coordinator after a round's training; must not change ``memory``."""

    def blind_upload(self) -> Payload:
        """Where mixtures are blind: what is mixed and what is compared (``declarations.Mixing``), in every round."""
        return self.upload()

    def finish(self, download: Payload) -> None:  # noqa: B027 most methods have nothing to do
        """Takes the last download, after the last round."""

    def rehearse(self) -> None:  # noqa: B027 most methods have nothing to do
        """Brings ``memory`` to the form it has after the first training, without training: ``upload`` then has the
        names and shapes of a real one."""

    def personal(self) -> State:
        """The personalised model's whole state; runtimes save that group of the memory, so methods keep to it."""
        return self.memory[PERSONAL]


class PublicSet(Protocol):
    """Public images at the coordinator, with which it may measure models."""

    def accuracy(self, parameters: Mapping[str, Tensor]) -> float:
        """Share of the public images that a model with these parameters (buffers as at the start) gets right."""
        ...

    def hashes(self) -> Tensor:
        """``uint8 [n, 32]``: SHA-256 of each image's pixels."""
        ...


@dataclass
class Federation:
    """What a coordinator's runtime gives to the coordinator side of a method.

    ``silos``: all that may ever take part, sorted. ``input_shape``: channels, height and width of an image.
    ``public``: the coordinator's public images, where it has some.
    """

    layout: Layout
    rounds: int
    seed: int
    silos: tuple[str, ...] = ()
    input_shape: tuple[int, int, int] = (3, 28, 28)
    public: PublicSet | None = None


@dataclass(frozen=True)
class SiloWeights:
    """How much of whose model silos were given: ``weights[i, j]`` of ``silos[j]``'s for ``silos[i]``.

    ``weights`` is ``Tensor[K, K]``, float64. A negative weight pushes i away from j.
    """

    silos: tuple[str, ...]
    weights: Tensor


@dataclass
class Downloads:
    """What silos get: ``own`` by silo name, else ``everyone``. ``weights`` is for people to look at: by which the own
    ones were mixed, where they were."""

    own: Mapping[str, Payload] = field(default_factory=dict)
    everyone: Payload | None = None
    weights: SiloWeights | None = None

    def for_silo(self, silo: str) -> Payload:
        """The silo's payload; empty where there is none."""
        found = self.own.get(silo, self.everyone)
        return found if found is not None else {}


@dataclass(frozen=True)
class Round:
    """What a coordinator has of a round that ends.

    Attributes:
        number: from 0.
        uploads: this round's uploads by silo, in the order of their names.
        latest: the last upload of every silo that has ever delivered, this round's included.
        workspace: where large results go.
    """

    number: int
    uploads: Mapping[str, Payload]
    latest: Mapping[str, Payload]
    workspace: Workspace


class CoordinatorSide:
    """A method's side at the coordinator. ``memory`` is kept across restarts by the runtime.

    ``by_silo``: groups of the memory whose tensors go by the names of silos.
    """

    by_silo: ClassVar[tuple[str, ...]] = ()

    def __init__(self, method: Method, federation: Federation) -> None:
        self.method = method
        self.federation = federation
        self.memory: Memory = {}

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """Names and shapes of what the silo must upload in this round, by default of the whole model; anything else is
        refused."""
        return self.federation.layout.model_parts()

    def aggregate(self, ended: Round) -> Downloads:
        """Ends a round: what silos get at their next task. A silo for which nothing new is returned keeps what it was
        given before."""
        return Downloads()

    def forget(self, silo: str) -> None:
        """A silo has withdrawn: what the memory holds of it goes, and ``latest`` does not name it any more."""
        for group in self.by_silo:
            self.memory.get(group, {}).pop(silo, None)

    def downloads(self, round_number: int, participants: Sequence[str], kept: Downloads) -> Downloads:
        """Begins a round: what each participant gets with its task; by default what ``aggregate`` left."""
        return kept


ONE_FOR_ALL = frozenset({*STARTS, Exposure.PEER_DERIVED})
"""``Method.common`` where what the coordinator makes of a round is one thing, given to all."""

LATER = {"later": True}
"""Metadata of a hyper-parameter that is not written while it has its default: the last release's runs go on under the
hash of a plan without it."""


@dataclass(frozen=True)
class Method(ABC):
    """A method's hyper-parameters, and what it states of itself, as class variables.

    What it is: ``name``, as plans name it. ``silo`` and ``coordinator``: its sides, made of a method and a site or a
    federation. ``sends``, ``gets``: what a silo sends and what it is given, in a few words for tables.

    What it exposes, besides ``uploads`` and ``downlink``: ``common``, the classes of what silos are given that are the
    same for all silos of a round, the starting model always: these alone can two silos hold against each other.
    ``under_privacy``, ``under_masks`` and ``under_blind``: how differential privacy protects it, in which rounds its
    coordinator needs no more than sums, and by which weights it mixes models that it need not see; or why not, in
    words. They are never inherited: a class that changes a method has changed what they rest on, and states them anew.

    How it runs: ``downloads_last``: whether silos need what ``aggregate`` gives after the last round.
    ``needs_public``: whether the coordinator needs public images. ``measures_received``: whether the personalised model
    is what the coordinator hands out (one global model), so that a round's outcome is measured with what its
    aggregation gave, not right after local training. ``made_at_end``: whether it is made only after the last round, by
    ``finish``: what is measured in the rounds is then another model. ``own_steps``: whether it trains by steps of its
    own (``Site.batches``) and not by ``Site.fit``.
    """

    name: ClassVar[str]
    silo: ClassVar[type[SiloSide]]
    coordinator: ClassVar[type[CoordinatorSide]]
    sends: ClassVar[str] = ""
    gets: ClassVar[str] = ""
    common: ClassVar[frozenset[Exposure]] = frozenset(STARTS)
    under_privacy: ClassVar[Protected | str] = UNSTATED_PRIVACY
    under_masks: ClassVar[Sums | str] = UNSTATED_SUMS
    under_blind: ClassVar[Blind | str] = UNSTATED_BLIND
    downloads_last: ClassVar[bool] = False
    needs_public: ClassVar[bool] = False
    measures_received: ClassVar[bool] = False
    made_at_end: ClassVar[bool] = False
    own_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ``ConfigurationError`` for a hyper-parameter outside its ``Range``."""
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            for span in getattr(kind, "__metadata__", ()):
                value = getattr(self, name)
                require(span.holds(value), f"{self.name}: {name} is {value}; it must be {span.words}")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for statement in ("under_privacy", "under_masks"):
            if statement not in cls.__dict__:
                setattr(cls, statement, Method.__dict__[statement])
        if "under_blind" not in cls.__dict__:
            cls.under_blind = ONE_MEAN if isinstance(cls.under_masks, Sums) else UNSTATED_BLIND

    @property
    @abstractmethod
    def uploads(self) -> frozenset[Exposure]:
        """Exposure classes that a silo sends to the coordinator."""

    @property
    @abstractmethod
    def downlink(self) -> frozenset[Exposure]:
        """Exposure classes that the coordinator sends to a silo, the starting model apart."""

    @property
    def required(self) -> tuple[Exposure, ...]:
        """What a silo must consent to: what it sends, what is measured on that, and what of it reaches other silos."""
        asked = {Exposure.PROTOCOL, Exposure.IDENTITY} | self.uploads
        asked |= self.downlink & MADE_OF_UPDATES
        return tuple(exposure for exposure in Exposure if exposure in asked)

    def silo_side(self, site: Site) -> SiloSide:
        """A fresh silo side."""
        return self.silo(self, site)

    def coordinator_side(self, federation: Federation) -> CoordinatorSide:
        """A fresh coordinator side."""
        return self.coordinator(self, federation)

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """What an operator should know before a run: so many silos in a round, that model, that optimiser."""
        return []

    def parameters(self) -> dict[str, Any]:
        """All hyper-parameters by name; those that are ``LATER`` only where they are not at their defaults."""
        values = dataclasses.asdict(self)
        for item in dataclasses.fields(self):
            if item.metadata == LATER and values[item.name] == item.default:
                del values[item.name]
        return values


def require(condition: bool, message: str) -> None:
    """Raises ``ConfigurationError`` for a hyper-parameter outside its range."""
    if not condition:
        raise ConfigurationError(message)


def load_parameters(download: Payload, exposure: Exposure, specs: Sequence[TensorSpec]) -> State:
    """A download's tensors, checked to be exactly those of ``specs``; raises ``RefusedError`` otherwise."""
    part = download.get(exposure)
    if part is None or part.specs != tuple(specs):
        raise RefusedError(f"the coordinator's {exposure} part does not have the model's names and shapes")
    return part.tensors()


def subset(state: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> State:
    """The tensors of a state that ``specs`` names, in that order."""
    return {spec.name: state[spec.name] for spec in specs}


def participants(silos: Sequence[str], *, share: float, seed: int, round_number: int) -> tuple[str, ...]:
    """The silos that take part in a round: ``medsilo.privacy.consent.plan.taking_part`` of them, drawn by seed and
    round.

    The draw depends on the names present and on nothing else, so daemons and simulation agree.
    """
    names = sorted(silos)
    if share >= 1:
        return tuple(names)
    count = taking_part(len(names), share)
    generator = torch.Generator().manual_seed(derive_seed(seed, "participants", round_number))
    chosen = torch.randperm(len(names), generator=generator)[:count].tolist()
    return tuple(names[index] for index in sorted(chosen))


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2^63) for one purpose, from the run's seed: SHA-256 over both."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def local_metrics(plan: RunPlan) -> tuple[TensorSpec, ...]:
    """What a silo that consents to LOCAL_METRICS adds to its upload: its personalised model on its own test images.

    With differential privacy that is the accuracy alone, as a noisy count: a sum of losses has no bound.
    """
    accuracy = TensorSpec("accuracy", ())
    return (accuracy,) if plan.privacy is not None else (accuracy, TensorSpec("loss", ()))
