"""What a method's statement ``under_masks`` comes to: in which rounds it can run under masks; an update under masks and
back.

A method can where all that its coordinator makes of a round's updates is made of their weighted mean and their number.
Then it is given the mean in each silo's place, and notices nothing: methods' sides know nothing of masks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medsilo.algorithms.declarations import Sums
from medsilo.algorithms.families.sharing import COUNT, count_part
from medsilo.algorithms.method import Method
from medsilo.algorithms.protection import blind
from medsilo.algorithms.tensors import BLOCK, MemorySource, Part, Payload, TensorSpec, Workspace
from medsilo.privacy.budget.accounting import WEAK_DELTA, WEAK_EPSILON
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.secure_aggregation.masking import LARGEST_WEIGHT, decode, encode

WEIGHT = TensorSpec("weight", (), "I64")
"""First in a masked update: the number of images, or 1 where silos count alike. Masked with the rest, so that the
coordinator learns the sum of all weights."""

Parts = Mapping[Exposure, Sequence[TensorSpec]]


def masked_rounds(method: Method, rounds: int) -> int:
    """How many of a run's rounds, from the first, can be masked; raises ``ConfigurationError`` with the reason if none
    can."""
    if (aggregation := getattr(method, "aggregation", "mean")) != "mean":
        raise ConfigurationError(
            f"{method.name} with `aggregation: {aggregation}` cannot run with secure aggregation: it compares single "
            "silos' numbers, which masks hide. Use `aggregation: mean`, or a run without `secure_aggregation`"
        )
    reason = method.under_masks
    if isinstance(reason, Sums):
        if possible := reason.rounds(method, rounds):
            return possible
        reason = reason.otherwise
    raise ConfigurationError(
        f"{method.name} cannot run with secure aggregation: {reason}. Use another method, or a run without "
        "`secure_aggregation`"
    )


def required(method: Method, masks: SecureAggregationPlan | None, rounds: int) -> tuple[Exposure, ...]:
    """What a silo must consent to: the method's classes, but for those that leave in masked rounds alone."""
    if masks is None:
        return method.required
    if masks.mode == "blind":
        return blind.required(method, masks.rounds // 2)
    asked = set(method.required) - method.uploads | {Exposure.MASKED_UPDATE}
    if masks.rounds < rounds:
        # Later rounds send single models, and no number of images.
        asked |= method.uploads - {Exposure.SAMPLE_COUNT}
    return tuple(exposure for exposure in Exposure if exposure in asked)


def silos_may_change(plan: RunPlan, method: Method) -> bool:
    """Whether a masked run's sums may be of other silos from round to round.

    Two sums that differ by a few silos give away what those sent, and their number of images exactly. Differential
    privacy bounds the one, where it is more than a name; against the other nothing helps but that silos count alike.
    """
    bounded = plan.privacy is not None and not plan.privacy.guarantee.is_weak and not plan.is_blind
    return bounded and Exposure.SAMPLE_COUNT not in method.uploads


def check_participation(plan: RunPlan, method: Method) -> None:
    """Raises ``ConfigurationError`` for masks over other silos in every round, where sums must be of the same ones."""
    if plan.secure_aggregation is not None and plan.participation < 1 and not silos_may_change(plan, method):
        raise ConfigurationError(
            f"a participation of {plan.participation:g} draws other silos in each round, and two masked sums that "
            "differ by a few silos give away what those sent. Use `participation: 1`; or a run with `privacy` (an "
            f"epsilon of at most {WEAK_EPSILON:g}, a delta of at most {WEAK_DELTA:g}) in which silos count alike "
            "(`weighting: uniform` where the method has it)"
        )


def check_masks(plan: RunPlan, method: Method) -> None:
    """Raises ``RefusedError`` for a plan whose masks are not what it says, or in whose rounds other silos are drawn:
    nothing in it is taken on trust."""
    if (masks := plan.secure_aggregation) is None:
        return
    try:
        if masks.mode == "blind":
            blind.check_plan(plan, masks, method)
            return
        possible = masked_rounds(method, plan.rounds)
        check_participation(plan, method)
        check_shared_noise(plan, method)
    except ConfigurationError as error:
        raise RefusedError(f"the plan announces masks, but {error}") from None
    if masks.rounds != possible:
        raise RefusedError(
            f"the plan announces masks in {masks.rounds} rounds; {method.name} has {possible} such rounds"
        )


def check_shared_noise(plan: RunPlan, method: Method) -> None:
    """Raises ``ConfigurationError`` for a method with which noise that is shared out would not protect single units."""
    if plan.trust is None:
        return
    if not (isinstance(method.under_masks, Sums) and method.under_masks.from_mean):
        raise ConfigurationError(
            f"{method.name} cannot share noise out (`privacy: honest`): its silos go on from models of their own, "
            "which hold their own shares of the noise alone, and what these tell of images is in every later sum. Use "
            "fedavg, or leave `honest` out"
        )
    if Exposure.SAMPLE_COUNT not in method.uploads:
        raise ConfigurationError(
            f"{method.name} shares noise out (`privacy: honest`) with `weighting: samples` alone: the sum of all "
            "clipped gradients is divided by the number of all units"
        )


def masked_specs(parts: Parts) -> tuple[TensorSpec, ...]:
    """Names and shapes of an update under masks, whose parts are these without; named ``CLASS/tensor``."""
    named = (
        TensorSpec(f"{exposure}/{spec.name}", spec.shape, "I64")
        for exposure in _summed(parts)
        for spec in parts[exposure]
    )
    return (WEIGHT, *named)


def encode_upload(upload: Payload, plan: SecureAggregationPlan, silos: int) -> tuple[int, NDArray[np.uint64]]:
    """An update as numbers to be masked and summed over so many silos, in the order of ``masked_specs``.

    The first is the weight. Raises ``TrainingError`` naming a tensor with a number beyond the range.
    """
    count = upload.get(Exposure.SAMPLE_COUNT)
    weight = 1 if count is None else int(count.tensors()[COUNT.name])
    pieces = [np.array([weight], dtype=np.uint64)]
    for exposure in _summed(upload):
        for name, tensor in upload[exposure].tensors().items():
            if tensor.dtype != torch.float32:
                raise RefusedError(f"tensor {name} is {tensor.dtype}; only float32 can be masked")
            pieces.append(
                encode(
                    tensor.numpy().reshape(-1),
                    weight=weight,
                    fraction_bits=plan.fraction_bits,
                    silos=silos,
                    what=f"tensor {name}",
                )
            )
    return weight, np.concatenate(pieces)


def noised_upload(upload: Payload, noised: Mapping[str, Tensor]) -> NDArray[np.uint64]:
    """The same for an update that is whole numbers already, with noise that is shared out.

    ``noised``: the numbers by tensor's name, int64. Raises ``RefusedError`` for a tensor without: rounded now, its
    noise would be no whole numbers, and the sum nothing that is accounted for.
    """
    pieces = [upload[Exposure.SAMPLE_COUNT].tensors()[COUNT.name].numpy().reshape(1).astype(np.uint64)]
    for exposure in _summed(upload):
        for spec in upload[exposure].specs:
            numbers = noised.get(spec.name)
            if numbers is None or numbers.shape != spec.shape:
                raise RefusedError(f"tensor {spec.name} was not made with noise that is shared out: it is not masked")
            pieces.append(numbers.numpy().reshape(-1).view(np.uint64))
    return np.concatenate(pieces)


def masked_payload(upload: Payload, masked: NDArray[np.uint64]) -> Payload:
    """The masked numbers of an update as they travel."""
    specs = masked_specs({exposure: part.specs for exposure, part in upload.items()})
    return {Exposure.MASKED_UPDATE: Part(specs, MemorySource([torch.from_numpy(masked.view(np.int64))]))}


def mean_of(updates: Sequence[Payload], parts: Parts, plan: SecureAggregationPlan, workspace: Workspace) -> Payload:
    """The weighted mean of masked updates of a whole roster, as a payload of the method's parts.

    Where the method weights by numbers of images it holds the number 1: given for every silo, all weigh the same.
    Raises ``RefusedError`` if the weights do not add up to anything: then the masks did not cancel.
    """
    sources = [update[Exposure.MASKED_UPDATE].source for update in updates]

    def total(start: int, stop: int) -> NDArray[np.uint64]:
        found = np.zeros((stop - start) // 8, dtype=np.uint64)
        for source in sources:
            found += np.frombuffer(source.read(start, stop), dtype="<u8")
        return found

    weight = int(total(0, 8).view(np.int64)[0])
    if not len(sources) <= weight <= len(sources) * LARGEST_WEIGHT:
        raise RefusedError(f"the masks of {len(sources)} updates do not cancel (their weights add up to {weight})")

    def blocks(start: int, stop: int) -> Iterator[Tensor]:
        for begin in range(start, stop, 8 * BLOCK):
            mean = decode(total(begin, min(begin + 8 * BLOCK, stop)), fraction_bits=plan.fraction_bits) / weight
            yield torch.from_numpy(mean.astype(np.float32)).reshape(1, -1)

    found: dict[Exposure, Part] = {}
    start = WEIGHT.nbytes
    for exposure in _summed(parts):
        specs = tuple(parts[exposure])
        stop = start + 2 * sum(spec.nbytes for spec in specs)
        (found[exposure],) = workspace.write(specs, 1, blocks(start, stop))
        start = stop
    if Exposure.SAMPLE_COUNT in parts:
        found[Exposure.SAMPLE_COUNT] = count_part(1)
    return found


def digest(payload: Payload) -> bytes:
    """SHA-256 of a payload's names, shapes and bytes."""
    found = hashlib.sha256()
    for exposure in Exposure:
        if (part := payload.get(exposure)) is not None:
            names = [[spec.name, list(spec.shape), spec.dtype] for spec in part.specs]
            found.update(json.dumps([exposure.value, names], separators=(",", ":")).encode() + b"\n")
            for chunk in part.chunks(1 << 20):
                found.update(chunk)
    return found.digest()


def _summed(classes: Mapping[Exposure, object]) -> list[Exposure]:
    """The classes of an update that are summed, in the one order that both sides use."""
    return [exposure for exposure in Exposure if exposure in classes and exposure != Exposure.SAMPLE_COUNT]
