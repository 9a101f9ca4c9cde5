"""Which methods can run under differential privacy, at how many steps, and why the others cannot.

A method can if its silos train with ``site.fit`` on the cross entropy, with or without a correction, and all that they
send is made from the models that leaves them, from averages over their images that ``site.average`` noises, or from
numbers of images (public under zero-out adjacency). Methods know nothing of this; one that is not in the table is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from medsilo.algorithms.method import Method
from medsilo.privacy.budget.promise import steps_of
from medsilo.privacy.consent.plan import TrainingPlan
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.exposure import MODEL, Exposure

_ROUNDING = 1e-4
"""By how much of the largest logit may one differ."""

NOISED = "noised training (DP-SGD)"
RELEASED = "clipped and noised average"
DERIVED = "made from the noised training alone"
PUBLIC = "public under zero-out adjacency"

_MECHANISMS: dict[Exposure, str] = {
    Exposure.PROTOCOL: "nothing about patients",
    Exposure.IDENTITY: "nothing about patients",
    **dict.fromkeys(MODEL, NOISED),
    Exposure.SAMPLE_COUNT: PUBLIC,
    Exposure.PEER_DERIVED: DERIVED,
    Exposure.DERIVED_ACCURACY: DERIVED,
}


@dataclass(frozen=True)
class Average:
    """An average over the images that a method asks for (``site.average``).

    Attributes:
        content: as the method calls it.
        exposure: the class that it is sent as; None where it only enters the training.
        lasting: it is drawn once for a version of the data set; else in every round but the first.
    """

    content: str
    exposure: Exposure | None
    lasting: bool

    def times(self, rounds: int) -> int:
        """How often at most, in a run of so many rounds."""
        return 1 if self.lasting else rounds - 1


@dataclass(frozen=True)
class Supported:
    """A method that can: the epochs of its trainings, and what else of its content is made from them alone.

    Attributes:
        each_round: epochs of each training in a round; None stands for the plan's.
        at_end: epochs of each training after the last round.
        derived: classes beyond the usual that are computed from trained models only.
        averages: averages over the images besides training.
        conditions: hyper-parameters that must have one of certain values, each with the reason.
    """

    each_round: tuple[int | None, ...] = (None,)
    at_end: tuple[int, ...] = ()
    derived: frozenset[Exposure] = frozenset()
    averages: tuple[Average, ...] = ()
    conditions: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)


_IMAGES_MAY_NOT_BE_LOOKED_UP = (
    "whether a silo holds one of the coordinator's images is an answer about its patients; compare them before the run"
)
_IDENTIFIER = Average("identifier", Exposure.DATA_IDENTIFIER, lasting=True)
_CHOICE = Average("choice", None, lasting=False)
_OWN_LOSS = "its loss is its own, and single images' gradients of it have no bound here"

_TABLE: dict[str, Supported | str] = {
    "local": Supported(),
    "fedavg": Supported(),
    "fedprox": Supported(),
    "feddyn": Supported(),
    # The control variate's change is the way from the received to the trained model, divided by the steps (option II).
    "scaffold": Supported(derived=frozenset({Exposure.MODEL_GRADIENT})),
    "diversifed": Supported(),
    "fedamp": Supported(),
    "pfedsim": Supported(),
    "fedper": Supported(),
    "fedbn": Supported(),
    # The mask compares the trained model with the received one.
    "fedcac": Supported(derived=frozenset({Exposure.PARAMETER_MASK})),
    "fedpdc": Supported(
        conditions={
            "mode": (("proximal",), _OWN_LOSS),
            "check_disjoint": ((False,), _IMAGES_MAY_NOT_BE_LOOKED_UP),
        }
    ),
    "moon": _OWN_LOSS,
    "fedrod": "its balanced loss is made from the silo's class counts, which have no mechanism, and trains a head of "
    "its own",
    "perfedavg": "it takes steps of its own on the images, which nothing clips or noises",
    "pfedme": "it takes steps of its own on the images, which nothing clips or noises",
    "fedfomo": "it rates other silos' models on the silo's own images, and the ratings have no mechanism",
    "apple": "it learns its weights of other silos' models on a loss of its own, which nothing clips or noises",
    "fedproto": "prototypes are averages of the silo's images' features, and have no mechanism",
    "fedgh": "prototypes are averages of the silo's images' features, and have no mechanism",
    "fedap": "running statistics are averages over the silo's images, and have no mechanism",
    "feddbe": "its mean features are averages over the silo's images, and have no mechanism; and its loss is its own",
}


def _entry(method: Method) -> Supported | str:
    match method.name:
        case "ditto":
            return Supported(each_round=(None, getattr(method, "personal_epochs", 0) or None))
        case "feddfq":
            diem, agam = getattr(method, "diem", True), getattr(method, "agam", True)
            conditions: dict[str, tuple[tuple[object, ...], str]] = {}
            if agam:
                conditions["selection"] = (
                    ("argmin",),
                    "to try gradients one after another is to ask the images a question for each, and each has its "
                    "price; argmin asks one a round",
                )
            if diem:
                conditions["centre"] = (
                    ("model_input", "global_mean"),
                    "where no pixel is below 0, an image's length is mostly its brightness, and clipping leaves little "
                    "else",
                )
                conditions["per_class"] = ((False,), "numbers of images of each class have no mechanism")
            # The classifier's gradient is that of the noised steps, or what they made of the classifier.
            return Supported(
                derived=frozenset({Exposure.CLASSIFIER_GRADIENT}),
                averages=((_IDENTIFIER,) if diem else ()) + ((_CHOICE,) if agam else ()),
                conditions=conditions,
            )
        case "fedrep":
            return Supported(each_round=(getattr(method, "head_epochs", 1), getattr(method, "body_epochs", 1)))
        case "fedbabu":
            epochs = getattr(method, "fine_tune_epochs", 0)
            return Supported(at_end=(epochs,) if epochs else ())
        case name:
            return _TABLE.get(name, "no one has stated how its content is protected")


def refusal(method: Method) -> str | None:
    """Why a method, with its hyper-parameters, cannot run under differential privacy; None if it can."""
    entry = _entry(method)
    if isinstance(entry, str):
        return f"{method.name} cannot run with differential privacy: {entry}"
    for name, (values, reason) in entry.conditions.items():
        if getattr(method, name) not in values:
            shown = " or ".join(f"`{name}: {str(v).lower() if isinstance(v, bool) else v}`" for v in values)
            return f"{method.name} can run with differential privacy only with {shown}: {reason}"
    covered = entry.derived | {average.exposure for average in entry.averages} | _MECHANISMS.keys()
    bare = [e for e in Exposure if e in set(method.required) - covered]
    if bare:
        return (
            f"{method.name}, as configured, sends {', '.join(bare)}, for which there is no mechanism of differential "
            "privacy"
        )
    return None


def check(method: Method) -> None:
    """Raises ``ConfigurationError`` with the reason for a method that cannot run under differential privacy."""
    if (reason := refusal(method)) is not None:
        raise ConfigurationError(f"{reason}. Use another method, or a run without privacy")


def check_model(model: nn.Module, name: str, input_shape: tuple[int, int, int]) -> None:
    """Raises ``ConfigurationError`` for a model in which one image changes another's gradient: by a layer that is known
    for it, or by what a try with two images shows. Code of a user's own may mix images so that neither does.
    """
    from opacus.validators import ModuleValidator  # takes seconds to load, and runs without privacy do without it

    mixing = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "track_running_stats", False)
    ]
    if mixing:
        raise ConfigurationError(
            f"model {name} cannot be trained with differential privacy: {', '.join(mixing[:3])}"
            f"{' …' if len(mixing) > 3 else ''} mix the images of a batch, so that no image's gradient is its own. Use "
            "a model with group normalisation, for example lenet5-gn or resnet8-gn"
        )
    if errors := ModuleValidator.validate(model):
        raise ConfigurationError(
            f"model {name} cannot be trained with differential privacy: {errors[0]}; use another architecture"
        )
    if _mixes(model, input_shape):
        raise ConfigurationError(
            f"model {name} cannot be trained with differential privacy: what it says of one image changes with the one "
            "beside it, or with those that it saw before, so that no image's gradient is its own. Use another model"
        )


def _mixes(model: nn.Module, input_shape: tuple[int, int, int]) -> bool:
    """Whether with the same draws an image's logits change with the image beside it, or at the next call. The model's
    state stays as it is."""
    device = next(model.parameters()).device
    images = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    others = torch.stack([images[0], -images[1]])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    said = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for batch in (images, others, images):
            torch.manual_seed(1)  # of dropout
            said.append(functional_call(model, buffers, batch.to(device))[0])
    largest = float(said[0].abs().max())
    return any(float((one - said[0]).abs().max()) > _ROUNDING * largest for one in said)


def mechanism(method: Method, exposure: Exposure) -> str:
    """What protects a class of a supported method's content."""
    entry = _entry(method)
    if isinstance(entry, Supported):
        if exposure in entry.derived:
            return DERIVED
        if exposure in {average.exposure for average in entry.averages}:
            return RELEASED
    return _MECHANISMS.get(exposure, "none")


def planned_steps(method: Method, training: TrainingPlan, rounds: int, sampling_rate: float) -> int:
    """The most DP-SGD steps that a silo takes in a run; raises ``ConfigurationError`` for a method that cannot."""
    check(method)
    return rounds * _round_steps(method, training, sampling_rate) + _end_steps(method, sampling_rate)


def planned_averages(method: Method, rounds: int) -> tuple[Average, ...]:
    """The averages that a method asks for in a run; raises ``ConfigurationError`` for a method that cannot."""
    check(method)
    entry = _entry(method)
    assert isinstance(entry, Supported)
    return tuple(average for average in entry.averages if average.times(rounds))


def _round_steps(method: Method, training: TrainingPlan, sampling_rate: float) -> int:
    entry = _entry(method)
    assert isinstance(entry, Supported)
    return sum(steps_of(epochs or training.epochs, sampling_rate) for epochs in entry.each_round)


def _end_steps(method: Method, sampling_rate: float) -> int:
    entry = _entry(method)
    assert isinstance(entry, Supported)
    return sum(steps_of(epochs, sampling_rate) for epochs in entry.at_end)
