"""What releases cost: events, the ε of their composition, and the noise with which a plan keeps to a target.

An event is pure data: a mechanism's parameters, and how often it runs. ``epsilon`` composes events with the privacy
loss distribution accountant of ``dp-accounting`` (Koskela et al. 2020; Doroshenko et al., "Connect the Dots", 2022),
whose discretisation rounds up: the ε is an upper bound.

>>> plan = SampledGaussian(sampling_rate=0.2, noise_multiplier=2, steps=500)
>>> round(epsilon([plan], delta=1e-5), 3)
12.621

A noise multiplier is the noise's standard deviation divided by the clipping norm: by how much one unit (an image, a
patient) can move a sum if its contribution is taken out. What "taken out" means is the adjacency, and an ε says
nothing without it, its δ, the unit and the accountant: ``Guarantee`` holds them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, Literal

from privacy.errors import BudgetError

Unit = Literal["image", "patient"]
"""Whose contribution the guarantee hides."""

ACCOUNTANT = "PLD"
DISCRETISATION = 1e-3
"""Width of the privacy loss distribution's cells; wider cells give a larger, still valid ε."""

_HOPELESS = 100.0
_LARGEST = 1e4


class Adjacency(StrEnum):
    """Which data sets count as neighbours.

    ``ZERO_OUT``: one unit's records are blanked, so that they have no gradient; their number is public. ``ADD_REMOVE``:
    one unit is there or not, and the number of units is secret too. ``REPLACE_ONE``: one unit becomes any other.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class SampledGaussian:
    """Steps of DP-SGD: each takes every unit with probability ``sampling_rate`` (Poisson), clips and adds noise.

    Attributes:
        sampling_rate: q in (0, 1].
        noise_multiplier: z > 0.
        steps: how many, at least 1; one whose sample is empty counts.
    """

    kind: ClassVar[str] = "sampled-gaussian"
    sampling_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        _check(0 < self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "in (0, 1]")
        _check(0 < self.noise_multiplier < math.inf, "noise_multiplier", self.noise_multiplier, "above 0")
        _check(self.steps >= 1, "steps", self.steps, "at least 1")


@dataclass(frozen=True)
class GaussianRelease:
    """Sums over all units with Gaussian noise.

    Attributes:
        noise_multiplier: z > 0.
        releases: how often; the same noised bytes sent again are no new release.
    """

    kind: ClassVar[str] = "gaussian"
    noise_multiplier: float
    releases: int = 1

    def __post_init__(self) -> None:
        _check(0 < self.noise_multiplier < math.inf, "noise_multiplier", self.noise_multiplier, "above 0")
        _check(self.releases >= 1, "releases", self.releases, "at least 1")


@dataclass(frozen=True)
class DiscreteLaplace:
    """Counts with two-sided geometric noise (Ghosh et al. 2009); one unit changes a count by at most 1.

    Attributes:
        epsilon: of one release, above 0; its δ is 0.
        releases: how often.
    """

    kind: ClassVar[str] = "discrete-laplace"
    epsilon: float
    releases: int = 1

    def __post_init__(self) -> None:
        _check(0 < self.epsilon < math.inf, "epsilon", self.epsilon, "above 0")
        _check(self.releases >= 1, "releases", self.releases, "at least 1")


Event = SampledGaussian | GaussianRelease | DiscreteLaplace

_KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in (SampledGaussian, GaussianRelease, DiscreteLaplace)}


def describe(event: Event) -> dict[str, Any]:
    """An event as it stands in ledger and journal."""
    return {"kind": event.kind, **asdict(event)}


def read(description: Any) -> Event:
    """The event of a description; raises ``ValueError`` for anything else than what ``describe`` gives."""
    if not isinstance(description, dict) or description.get("kind") not in _KINDS:
        raise ValueError(f"{description!r} is not a privacy event")
    fields = {name: value for name, value in description.items() if name != "kind"}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in fields.values()):
        raise ValueError(f"{description!r} is not a privacy event")
    try:
        event = _KINDS[description["kind"]](**fields)
    except TypeError:
        raise ValueError(f"{description!r} is not a privacy event") from None
    if not isinstance(_times(event), int):
        raise ValueError(f"{description!r} has no whole number of releases")
    return event


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy, with all that it takes to read it."""

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency = Adjacency.ZERO_OUT
    accountant: str = ACCOUNTANT

    def __str__(self) -> str:
        return f"ε = {shown(self.epsilon)} at δ = {self.delta:g} ({self.conditions})"

    @property
    def conditions(self) -> str:
        """What the numbers hold for."""
        return f"unit {self.unit}, adjacency {self.adjacency}, accountant {self.accountant}"


def shown(epsilon: float) -> str:
    """An ε with three decimals, rounded up; the sign ∞ where there is no bound."""
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000 - 1e-6) / 1000:.3f}"


def epsilon(events: Iterable[Event], *, delta: float, adjacency: Adjacency = Adjacency.ZERO_OUT) -> float:
    """The ε at which the composition of all events is (ε, δ)-differentially private; 0 for none.

    Discrete Laplace events are added by basic composition: PLD knows continuous Laplace noise, which is not the same.
    ``math.inf`` for a composition that is so far from private that its distribution would fill the memory.
    Raises ``ValueError`` for a δ outside (0, 1), or for counts with another adjacency than zero-out or add-remove.
    """
    _check(0 < delta < 1, "delta", delta, "in (0, 1)")
    merged: dict[Event, int] = {}
    for event in events:
        alone = _with_times(event, 1)
        merged[alone] = merged.get(alone, 0) + _times(event)
    return _epsilon(tuple(sorted((_with_times(e, n) for e, n in merged.items()), key=repr)), delta, adjacency)


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[Event, ...], delta: float, adjacency: Adjacency) -> float:
    # Takes a second to load, and most commands do without it.
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relations = {
        Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }
    if sum(_central_limit(event) ** 2 for event in events) > _HOPELESS**2:
        return math.inf
    accountant = PLDAccountant(relations[adjacency], value_discretization_interval=DISCRETISATION)
    pure, gaussian = 0.0, False
    for event in events:
        match event:
            case SampledGaussian():
                noise = dp_accounting.GaussianDpEvent(event.noise_multiplier)
                sampled = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, noise)
                accountant.compose(noise if event.sampling_rate == 1 else sampled, event.steps)
                gaussian = True
            case GaussianRelease():
                accountant.compose(dp_accounting.GaussianDpEvent(event.noise_multiplier), event.releases)
                gaussian = True
            case DiscreteLaplace():
                if adjacency is Adjacency.REPLACE_ONE:
                    raise ValueError("a count's discrete Laplace noise is not accounted for under replace-one")
                pure += event.epsilon * event.releases
    return pure + (float(accountant.get_epsilon(delta)) if gaussian else 0.0)


def _central_limit(event: Event) -> float:
    """μ of the Gaussian mechanism that an event resembles (Bu et al., "Deep Learning with Gaussian DP", 2020)."""
    match event:
        case SampledGaussian():
            exponent = min(event.noise_multiplier**-2, 700.0)
            return event.sampling_rate * math.sqrt(event.steps * math.expm1(exponent))
        case GaussianRelease():
            return math.sqrt(event.releases) / event.noise_multiplier
        case DiscreteLaplace():
            return 0.0


def noise_multiplier_for(
    target: float, *, delta: float, events: Callable[[float], Sequence[Event]], tolerance: float = 1e-3
) -> float:
    """The least noise multiplier, to within ``tolerance`` and rounded up to a multiple of it, with which all planned
    releases together keep to a target ε under zero-out adjacency.

    ``events`` gives the planned releases for a noise multiplier; those whose noise is fixed may stand among them.
    Raises ``BudgetError`` if no amount of noise is enough: then the fixed releases alone cost more.
    """
    _check(target > 0, "the target epsilon", target, "above 0")

    def fits(steps: int) -> bool:
        return epsilon(events(steps * tolerance), delta=delta) <= target

    high = round(1 / tolerance)
    while not fits(high):
        high *= 2
        if high * tolerance > _LARGEST:
            raise BudgetError(
                f"no noise keeps the planned releases to ε = {target:g} at δ = {delta:g}: plan fewer rounds, a smaller "
                "sampling rate, or a larger epsilon"
            )
    # A multiplier below a tenth gives no privacy worth the name.
    low = 0 if high * tolerance <= 1 else high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if middle * tolerance >= 0.1 and fits(middle):
            high = middle
        else:
            low = middle
    return round(high * tolerance, 9)


def _times(event: Event) -> int:
    return event.steps if isinstance(event, SampledGaussian) else event.releases


def _with_times(event: Event, times: int) -> Event:
    match event:
        case SampledGaussian():
            return SampledGaussian(event.sampling_rate, event.noise_multiplier, times)
        case GaussianRelease():
            return GaussianRelease(event.noise_multiplier, times)
        case DiscreteLaplace():
            return DiscreteLaplace(event.epsilon, times)


def _check(condition: bool, name: str, value: float, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}; it must be {wanted}")
