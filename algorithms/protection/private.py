"""What a method's statement ``under_privacy`` comes to: whether it can run under differential privacy, at how many
steps, and what protects each class of what it sends. Methods' sides know nothing of this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.func import functional_call

from medsilo.algorithms.declarations import Average, Condition, Protected
from medsilo.algorithms.method import Method
from medsilo.algorithms.models import classifier_of
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

Stated = TypeVar("Stated", Average, Condition)

_MECHANISMS: dict[Exposure, str] = {
    Exposure.PROTOCOL: "nothing about patients",
    Exposure.IDENTITY: "nothing about patients",
    **dict.fromkeys(MODEL, NOISED),
    Exposure.SAMPLE_COUNT: PUBLIC,
    Exposure.PEER_DERIVED: DERIVED,
    Exposure.DERIVED_ACCURACY: DERIVED,
}


def refusal(method: Method) -> str | None:
    """Why a method, with its hyper-parameters, cannot run under differential privacy; None if it can."""
    stated = method.under_privacy
    if isinstance(stated, str):
        return f"{method.name} cannot run with differential privacy: {stated}"
    if (needed := unmet(method, stated.conditions)) is not None:
        return f"{method.name} can run with differential privacy only with {needed}"
    averaged = {average.exposure for average in _asked(method, stated.averages)}
    covered = stated.derived | averaged | _MECHANISMS.keys()
    bare = [e for e in Exposure if e in set(method.required) - covered]
    if bare:
        return (
            f"{method.name}, as configured, sends {', '.join(bare)}, for which there is no mechanism of differential "
            "privacy"
        )
    return None


def reporting_refusal(method: Method) -> str | None:
    """Why accuracies of a method's personalised models cannot leave a run with differential privacy, though it can run;
    None if they can."""
    stated = method.under_privacy
    if isinstance(stated, str) or (needed := unmet(method, stated.reporting)) is None:
        return None
    return f"accuracies of {method.name}'s models can leave a run with differential privacy only with {needed}"


def unmet(method: Method, conditions: tuple[Condition, ...]) -> str | None:
    """What a method's hyper-parameters would have to be, and why; None where they are."""
    for one in _asked(method, conditions):
        if getattr(method, one.name) not in one.values:
            shown = " or ".join(f"`{one.name}: {str(v).lower() if isinstance(v, bool) else v}`" for v in one.values)
            return f"{shown}: {one.reason}"
    return None


def check(method: Method) -> None:
    """Raises ``ConfigurationError`` with the reason for a method that cannot run under differential privacy."""
    if (reason := refusal(method)) is not None:
        raise ConfigurationError(f"{reason}. Use another method, or a run without privacy")


def check_model(model: nn.Module, name: str, input_shape: tuple[int, int, int]) -> None:
    """Raises ``ConfigurationError`` for a model in which one image changes another's gradient, or in which single
    images' gradients cannot be told apart: by a layer that is known for it, or by what tries with two and three images
    show. Code of a user's own may do so where none of them does.
    """
    # They take seconds to load, and runs without privacy do without them.
    from opacus.validators import ModuleValidator

    from medsilo.algorithms.protection.per_image import tells_apart

    model.train()
    mixing = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if (isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "track_running_stats", False))
        and module.training  # what is frozen is not: it takes its running statistics as they are
    ]
    if mixing:
        raise ConfigurationError(
            f"model {name} cannot be trained with differential privacy: {', '.join(mixing[:3])}"
            f"{' …' if len(mixing) > 3 else ''} mix the images of a batch, so that no image's gradient is its own. Use "
            "a model with group normalisation, for example lenet5-gn or resnet8-gn; or freeze them (`train: head`)"
        )
    if errors := ModuleValidator.validate(model):
        raise ConfigurationError(
            f"model {name} cannot be trained with differential privacy: {errors[0]}; use another architecture"
        )
    with _random_where_zero(model):
        if _mixes(model, input_shape):
            raise ConfigurationError(
                f"model {name} cannot be trained with differential privacy: what it says of one image changes with the "
                "one beside it, or with those that it saw before, so that no image's gradient is its own. Use another "
                "model"
            )
        if not tells_apart(model, input_shape):
            raise ConfigurationError(
                f"model {name} cannot be trained with differential privacy: what its layers give for the gradients of "
                "single images is not these images'. Let each layer take the images in the rows of its input (batch "
                "first), and use weights in their own layers alone"
            )


@contextmanager
def _random_where_zero(model: nn.Module) -> Iterator[None]:
    """Inside, the classifier, and all other parameters that are zero, as many are at first, are random numbers: behind
    zeros nothing of an image would be seen."""
    classifier = {id(parameter) for parameter in classifier_of(model)[1].parameters()}
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        filled = [
            (parameter, parameter.clone())
            for parameter in model.parameters()
            if id(parameter) in classifier or not parameter.any()
        ]
        for parameter, _ in filled:
            drawn = torch.randn(parameter.shape, generator=numbers) / max(1, parameter.shape[-1:].numel()) ** 0.5
            parameter.copy_(drawn)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in filled:
                parameter.copy_(before)


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
    stated = method.under_privacy
    if isinstance(stated, Protected):
        if exposure in stated.derived:
            return DERIVED
        if exposure in {average.exposure for average in _asked(method, stated.averages)}:
            return RELEASED
    return _MECHANISMS.get(exposure, "none")


def planned_steps(method: Method, training: TrainingPlan, rounds: int, sampling_rate: float) -> int:
    """The most DP-SGD steps that a silo takes in a run; raises ``ConfigurationError`` for a method that cannot."""
    stated = _protected(method)

    def steps(trainings: tuple[int | str | None, ...], default: int) -> int:
        epochs = [getattr(method, one) if isinstance(one, str) else one for one in trainings]
        return sum(steps_of(one or default, sampling_rate) for one in epochs if one or default)

    return rounds * steps(stated.each_round, training.epochs) + steps(stated.at_end, 0)


def planned_averages(method: Method, rounds: int) -> tuple[Average, ...]:
    """The averages that a method asks for in a run; raises ``ConfigurationError`` for a method that cannot."""
    return tuple(average for average in _asked(method, _protected(method).averages) if average.times(rounds))


def _protected(method: Method) -> Protected:
    check(method)
    assert isinstance(method.under_privacy, Protected)
    return method.under_privacy


def _asked(method: Method, stated: tuple[Stated, ...]) -> list[Stated]:
    """Those that a method's hyper-parameters have not switched off."""
    return [one for one in stated if one.only_if is None or getattr(method, one.only_if)]
