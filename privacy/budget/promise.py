"""What a plan promises about privacy, and which releases that pays for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from medsilo.privacy.budget.accounting import (
    Adjacency,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    GaussianRelease,
    Guarantee,
    SampledGaussian,
    SharedGaussian,
    Unit,
    epsilon,
    own_share,
)
from medsilo.privacy.files.configuration import StrictModel


class ReleasePlan(StrictModel):
    """A mean over all units that a method releases besides its training.

    Attributes:
        content: what the units' vectors are, as the method calls it.
        bound: R, the most that one unit's vector counts (its Euclidean norm).
        noise_multiplier: z; the noise on the sum has standard deviation z · R.
        times: how often in the run.
    """

    content: str = Field(min_length=1, max_length=100)
    bound: float = Field(gt=0, allow_inf_nan=False)
    noise_multiplier: float = Field(ge=0.1, allow_inf_nan=False)
    times: int = Field(ge=1, lt=2**31)

    def event(self, times: int) -> GaussianRelease:
        """What so many of them cost."""
        return GaussianRelease(self.noise_multiplier, times)


class MetricsPlan(StrictModel):
    """Accuracies on a silo's held-out test units, as counts with whole numbers as noise.

    ``mechanism``: of the noise, discrete Gaussian or, which is less noise in runs of a few rounds, discrete Laplace.
    ``deviation``: σ of the former, in units. ``epsilon``: with the former, what all of them together cost those units
    at the run's δ, at most; with the latter, what one of them costs, at a δ of 0. ``releases``: how many in the run.
    """

    mechanism: Literal["discrete-laplace", "discrete-gaussian"] = "discrete-laplace"
    epsilon: float = Field(gt=0, allow_inf_nan=False)
    deviation: float | None = Field(default=None, ge=0.1, allow_inf_nan=False)
    releases: int = Field(ge=1, lt=2**31)

    @model_validator(mode="after")
    def _has_its_noise(self) -> MetricsPlan:
        if (self.deviation is None) != (self.mechanism == "discrete-laplace"):
            raise ValueError("a deviation belongs to the discrete Gaussian, and to nothing else")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A plan with discrete Laplace noise is written, and hashed, as before there was any other."""
        content: dict[str, Any] = serialise(self)
        if self.deviation is None:
            del content["mechanism"], content["deviation"]
        return content

    def event(self, times: int) -> DiscreteGaussian | DiscreteLaplace:
        """What so many of them cost."""
        if self.deviation is None:
            return DiscreteLaplace(self.epsilon, times)
        return DiscreteGaussian(self.deviation, times)


class PrivacyPlan(StrictModel):
    """Differential privacy of a run: what it promises each silo, and the mechanisms that keep the promise.

    Attributes:
        epsilon: what all of the run's releases cost a silo together, at most, at ``delta`` for one ``unit`` under
            ``adjacency``, by ``accountant``.
        clipping_norm: C, the most that one unit's gradient counts (its Euclidean norm over all trained parameters).
        noise_multiplier: z; the noise on a step's sum of gradients has standard deviation z · C.
        sampling_rate: q; a step takes each unit with this probability, independently (Poisson sampling).
        steps: T, of all trainings in all rounds; 0 for a method that trains nothing, whose releases are all that costs.
        averaged_share: of a training's steps, the last, whose models are averaged into what it gives; at 0 it gives the
            last one's. Made from noised steps alone, the mean costs nothing.
        honest: how many hospitals of each masked sum are honest at least; then each adds but its share of the noise,
            such that so many together have z · C. None where each adds all of it.
        releases: what the method releases besides; all of it and the training together keep the promise.
        metrics: accuracies on test images, which concern other units and have an account of their own.
    """

    epsilon: float = Field(gt=0, allow_inf_nan=False)
    delta: float = Field(gt=0, lt=1)
    unit: Unit = "image"
    adjacency: Literal["zero-out"] = "zero-out"
    accountant: Literal["PLD"] = "PLD"
    clipping_norm: float = Field(gt=0, allow_inf_nan=False)
    noise_multiplier: float = Field(ge=0.1, allow_inf_nan=False)
    sampling_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=0, lt=2**31)
    averaged_share: float = Field(default=0.0, ge=0, le=1)
    honest: int | None = Field(default=None, ge=2, le=100_000)
    releases: tuple[ReleasePlan, ...] = ()
    metrics: MetricsPlan | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without an average, or noise that is shared out, a plan is written, and hashed, as before there was any."""
        content: dict[str, Any] = serialise(self)
        if not self.averaged_share:
            del content["averaged_share"]
        if self.honest is None:
            del content["honest"]
        return content

    @model_validator(mode="after")
    def _shares_steps_alone(self) -> PrivacyPlan:
        if self.honest is not None and (self.sampling_rate < 1 or self.averaged_share or self.releases):
            raise ValueError(
                "noise that is shared out (`honest`) is for one step a round on all images: sampling_rate 1, no "
                "averaged_share, and no other releases"
            )
        return self

    @field_validator("releases")
    @classmethod
    def _once_each(cls, releases: tuple[ReleasePlan, ...]) -> tuple[ReleasePlan, ...]:
        if len({release.content for release in releases}) < len(releases):
            raise ValueError("a content of a release should be named once")
        return releases

    def steps_of(self, epochs: int) -> int:
        """The steps of a training: an epoch has as many as take each unit once on average."""
        return steps_of(epochs, self.sampling_rate)

    def training(self, steps: int) -> SampledGaussian | SharedGaussian:
        """What so many steps cost, at least 1."""
        if self.honest is not None:
            return SharedGaussian(self.noise_multiplier, self.honest, steps)
        return SampledGaussian(self.sampling_rate, self.noise_multiplier, steps)

    def cost(self, steps: int, releases: Mapping[str, int]) -> list[Event]:
        """What so many steps cost with so many releases of each content."""
        training: list[Event] = [self.training(steps)] if steps else []
        return training + [one.event(times) for one in self.releases if (times := releases.get(one.content, 0))]

    def release(self, content: str) -> ReleasePlan | None:
        """How a content is released; None where the plan has no such release."""
        return next((release for release in self.releases if release.content == content), None)

    @property
    def events(self) -> list[Event]:
        """All that the run costs a silo's training units."""
        return self.cost(self.steps, {release.content: release.times for release in self.releases})

    @property
    def guarantee(self) -> Guarantee:
        """What the run promises; where noise is shared out, presuming that ``honest`` hospitals are."""
        return Guarantee(self.epsilon, self.delta, self.unit, Adjacency(self.adjacency), self.accountant)

    def __str__(self) -> str:
        """The promise, and where noise is shared out, what it presumes and what holds without that."""
        if self.honest is None:
            return str(self.guarantee)
        return (
            f"{self.guarantee}, if {self.honest} hospitals of each sum are honest, and {self.alone} if none but it is"
        )

    @property
    def alone(self) -> Guarantee:
        """What holds whoever else is honest, by the hospital's own noise alone: the promise, but for noise that is
        shared out."""
        if self.honest is None:
            return self.guarantee
        cost = epsilon([own_share(event) for event in self.events], delta=self.delta)
        return Guarantee(cost, self.delta, self.unit, Adjacency(self.adjacency), self.accountant)


def steps_of(epochs: int, sampling_rate: float) -> int:
    """Steps of ``epochs`` epochs under Poisson sampling; 1/q that is whole but for rounding counts as whole."""
    return epochs * math.ceil(1 / sampling_rate - 1e-9)
