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
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, Literal

from medsilo.privacy.errors import BudgetError
from medsilo.privacy.pages.wording import shown

Unit = Literal["image", "patient"]
"""Whose contribution the guarantee hides."""

ACCOUNTANT = "PLD"
DISCRETISATION = 1e-3
"""Width of the privacy loss distribution's cells; wider cells give a larger, still valid ε."""

_LARGEST_GROUP = 32
"""For larger groups no bound is computed: it would be of no use, and takes minutes."""

WEAK_EPSILON = 8.0
"""Above it a limit is called weak: with one false alarm in a thousand, a test may find out every unit that was used."""

WEAK_DELTA = 1e-3
"""Above it too: as many units may be given away whole, whatever ε is."""

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
        sampling_rate: q in (0, 1]; at 1 nothing is sampled, and the steps cost what so many Gaussian releases do.
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


@dataclass(frozen=True)
class DiscreteGaussian:
    """Counts with discrete Gaussian noise (Canonne, Kamath and Steinke 2020); one unit changes a count by at most 1.

    Attributes:
        deviation: σ ≥ 0.1, in units: a whole number k is drawn with probability proportional to exp(-k²/2σ²).
        releases: how often.
    """

    kind: ClassVar[str] = "discrete-gaussian"
    deviation: float
    releases: int = 1

    def __post_init__(self) -> None:
        _check(0.1 <= self.deviation < math.inf, "deviation", self.deviation, "at least 0.1")
        _check(self.releases >= 1, "releases", self.releases, "at least 1")


@dataclass(frozen=True)
class SharedGaussian:
    """Sums over the units of several hospitals that leave under masks, to whose noise each hospital adds a share.

    It costs what Gaussian releases of ``noise_multiplier`` do, for all who know the noise of no more than so many
    hospitals that ``honest`` others are in each sum (``medsilo.privacy.budget.shared_noise`` shows why). For whoever
    knows all other hospitals' noise it costs what ``own_share`` of it does.

    Attributes:
        noise_multiplier: z > 0, of the noise of ``honest`` hospitals together.
        honest: how many there are in each sum at least, the one whose units these are among them; at least 2.
        releases: how many sums.
    """

    kind: ClassVar[str] = "shared-gaussian"
    noise_multiplier: float
    honest: int
    releases: int = 1

    def __post_init__(self) -> None:
        _check(0 < self.noise_multiplier < math.inf, "noise_multiplier", self.noise_multiplier, "above 0")
        _check(isinstance(self.honest, int) and self.honest >= 2, "honest", self.honest, "a whole number, at least 2")
        _check(self.releases >= 1, "releases", self.releases, "at least 1")


Event = SampledGaussian | GaussianRelease | DiscreteLaplace | DiscreteGaussian | SharedGaussian


@dataclass(frozen=True)
class GroupedSteps:
    """Steps of DP-SGD as a group of their units bears them: a patient whose images are each sampled and clipped alone.

    It is charged nowhere, only added up (see ``as_group``).

    Attributes:
        steps_of_one: what was charged.
        size: how many units the group has, at least 2.
    """

    steps_of_one: SampledGaussian
    size: int


@dataclass(frozen=True)
class GroupedCounts:
    """Counts as a group of ``size`` of their units bears them, by as much as that. Charged nowhere, only added up."""

    count: DiscreteGaussian
    size: int


Grouped = GroupedSteps | GroupedCounts
_KINDS: dict[str, type[Event]] = {
    kind.kind: kind for kind in (SampledGaussian, GaussianRelease, DiscreteLaplace, DiscreteGaussian, SharedGaussian)
}


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

    @property
    def if_alone(self) -> str:
        """It as the second figure beside one that presumes other hospitals' noise, as a sentence."""
        return (
            "That presumes that the hospitals with which it shared noise out were honest, as many as each run says; "
            "against one of those that looks itself, and knows its own share, one share fewer protects; "
            f"against all others together, by its own share of the noise alone, it is {self}."
        )

    @property
    def is_weak(self) -> bool:
        """Whether it rules hardly anything out about single units."""
        return self.epsilon > WEAK_EPSILON or self.delta > WEAK_DELTA

    @property
    def odds(self) -> str:
        """What it allows, in odds: for every test, P(yes | used) ≤ e^ε · P(yes | not used) + δ.

        >>> Guarantee(2.0, 1e-5, "image").odds.partition("; ")[2]
        'with one false alarm in a thousand, at most 0.8 % of the used images are found out.'
        """
        factor = math.exp(min(self.epsilon, _HOPELESS))
        shown_factor = f"{math.ceil(10 * factor) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"
        if factor >= 1e6:
            return (
                f"What ε = {shown(self.epsilon)} allows: e^ε, by which an attacker's odds on one {self.unit} can rise, "
                "is above a million. That is so weak a limit that it rules nothing out."
            )
        found = min(1.0, factor / 1000 + self.delta)
        share = f"at most {math.ceil(1000 * found) / 10:.1f} % of" if found < 1 else "as many as all"
        text = (
            f"What ε = {shown(self.epsilon)} allows: no test on what left calls a used {self.unit} “used” more than "
            f"e^ε = {shown_factor} times as often as an unused one, δ apart. An attacker's even odds on one "
            f"{self.unit} become {shown_factor} to 1 at most; with one false alarm in a thousand, {share} the used "
            f"{self.unit}s are found out."
        )
        return f"{text} That is a weak limit." if self.is_weak else text


def as_group(event: Event, size: int | None) -> Event | Grouped | None:
    """What an event costs a group of its units together; ``None`` for no bound, or where the size is not known."""
    if size == 1:
        return event
    if size is None or size > _LARGEST_GROUP:
        return None
    match event:
        case SampledGaussian() if event.sampling_rate == 1:
            return GaussianRelease(event.noise_multiplier / size, event.steps)
        case SampledGaussian():
            return GroupedSteps(event, size)
        case GaussianRelease():
            return GaussianRelease(event.noise_multiplier / size, event.releases)
        case SharedGaussian():
            return SharedGaussian(event.noise_multiplier / size, event.honest, event.releases)
        case DiscreteLaplace():
            return DiscreteLaplace(event.epsilon * size, event.releases)
        case DiscreteGaussian():
            return GroupedCounts(event, size)


def own_share(event: Event | Grouped) -> Event | Grouped:
    """What an event costs with the hospital's own noise alone, all others' being known: what it is, but for noise that
    is shared out.

    >>> own_share(SharedGaussian(noise_multiplier=6, honest=4))
    GaussianRelease(noise_multiplier=3.0, releases=1)
    """
    if isinstance(event, SharedGaussian):
        return GaussianRelease(event.noise_multiplier / math.sqrt(event.honest), event.releases)
    return event


def epsilon(events: Iterable[Event | Grouped], *, delta: float, adjacency: Adjacency = Adjacency.ZERO_OUT) -> float:
    """The ε at which the composition of all events is (ε, δ)-differentially private; 0 for none.

    Discrete Laplace events are added by basic composition, as earlier journals say that they were. Under replace-one
    counts change by two: one unit is taken out, and another put in. A group's steps are those of a mixture of
    Gaussians, one for each number of its units in a sample (Ganesh, "Tight group-level DP guarantees for DP-SGD with
    sampling via mixture of Gaussians mechanisms", 2024).
    ``math.inf`` for a composition that is so far from private that its distribution would fill the memory, and for
    groups under replace-one. Raises ``ValueError`` for a δ outside (0, 1).
    """
    _check(0 < delta < 1, "delta", delta, "in (0, 1)")
    merged: dict[Event | Grouped, int] = {}
    for event in events:
        alone = _with_times(event, 1)
        merged[alone] = merged.get(alone, 0) + _times(event)
    return _epsilon(tuple(sorted((_with_times(e, n) for e, n in merged.items()), key=repr)), delta, adjacency)


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[Event | Grouped, ...], delta: float, adjacency: Adjacency) -> float:
    # Takes a second to load, and most commands do without it.
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = {
        Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
        Adjacency.ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    if sum(_central_limit(event) ** 2 for event in events) > _HOPELESS**2:
        return math.inf

    def gaussian(deviation: float, rate: float = 1.0) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            deviation,
            sampling_prob=rate,
            neighboring_relation=relation,
            value_discretization_interval=DISCRETISATION,
        )

    def counted(count: DiscreteGaussian, sensitivity: int) -> pld.PrivacyLossDistribution:
        return pld.from_discrete_gaussian_mechanism(
            count.deviation, sensitivity, value_discretization_interval=DISCRETISATION
        ).self_compose(count.releases)

    units = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    pure, total = 0.0, None
    for event in events:
        match event:
            case SampledGaussian(rate, noise, steps) if rate < 1:
                found = gaussian(noise, rate).self_compose(steps)
            case SampledGaussian(_, noise, times) | GaussianRelease(noise, times) | SharedGaussian(noise, _, times):
                # So many sums are one with less noise.
                found = gaussian(noise / math.sqrt(times))
            case DiscreteGaussian():
                found = counted(event, units)
            case GroupedCounts():
                found = counted(event.count, event.size * units)
            case DiscreteLaplace():
                pure += event.epsilon * event.releases * units
                continue
            case GroupedSteps():
                if adjacency is Adjacency.REPLACE_ONE:
                    return math.inf
                sizes, chances = _in_a_sample(event)
                mixture = pld.from_mixture_gaussian_mechanism(
                    event.steps_of_one.noise_multiplier, sizes, chances, value_discretization_interval=DISCRETISATION
                )
                found = mixture.self_compose(event.steps_of_one.steps)
        total = found if total is None else total.compose(found)
    return pure + (float(total.get_epsilon_for_delta(delta)) if total is not None else 0.0)


def _in_a_sample(event: GroupedSteps) -> tuple[list[float], list[float]]:
    """How many of a group's units a step may take, and with which probabilities."""
    q, size = event.steps_of_one.sampling_rate, event.size
    return (
        [float(k) for k in range(size + 1)],
        [math.comb(size, k) * q**k * (1 - q) ** (size - k) for k in range(size + 1)],
    )


def _central_limit(event: Event | Grouped) -> float:
    """μ of the Gaussian mechanism that an event resembles (Bu et al., "Deep Learning with Gaussian DP", 2020)."""
    match event:
        case SampledGaussian() if event.sampling_rate == 1:
            return math.sqrt(event.steps) / event.noise_multiplier
        case SampledGaussian():
            exponent = min(event.noise_multiplier**-2, 700.0)
            return event.sampling_rate * math.sqrt(event.steps * math.expm1(exponent))
        case GaussianRelease() | SharedGaussian():
            return math.sqrt(event.releases) / event.noise_multiplier
        case DiscreteGaussian():
            return math.sqrt(event.releases) / event.deviation
        case GroupedCounts():
            return math.sqrt(event.count.releases) * event.size / event.count.deviation
        case DiscreteLaplace():
            return 0.0
        case GroupedSteps():
            sizes, chances = _in_a_sample(event)
            variance = event.steps_of_one.noise_multiplier**2
            total = sum(
                p * r * math.expm1(min(k * n / variance, 700.0))
                for k, p in zip(sizes, chances, strict=True)
                for n, r in zip(sizes, chances, strict=True)
            )
            return math.sqrt(event.steps_of_one.steps * total)


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


def _times(event: Event | Grouped) -> int:
    match event:
        case SampledGaussian():
            return event.steps
        case GroupedSteps():
            return event.steps_of_one.steps
        case GroupedCounts():
            return event.count.releases
        case _:
            return event.releases


def _with_times(event: Event | Grouped, times: int) -> Event | Grouped:
    match event:
        case SampledGaussian():
            return SampledGaussian(event.sampling_rate, event.noise_multiplier, times)
        case GaussianRelease():
            return GaussianRelease(event.noise_multiplier, times)
        case SharedGaussian():
            return SharedGaussian(event.noise_multiplier, event.honest, times)
        case DiscreteLaplace():
            return DiscreteLaplace(event.epsilon, times)
        case GroupedSteps():
            return GroupedSteps(replace(event.steps_of_one, steps=times), event.size)
        case GroupedCounts():
            return GroupedCounts(replace(event.count, releases=times), event.size)
        case DiscreteGaussian():
            return DiscreteGaussian(event.deviation, times)


def _check(condition: bool, name: str, value: float, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}; it must be {wanted}")
