"""MR-MTL: mean-regularised multi-task learning (Liu et al., "On Privacy and Personalization in Cross-Silo Federated
Learning", NeurIPS 2022): every silo trains a model of its own, held near the mean of all.

Silo k goes on from its own w_k towards the minimum of

    F_k(w_k) + λ/2 ‖w_k − w̄‖²,

w̄ being the mean of the models that silos sent in the round before, all of them alike. In the first round there is no
w̄, and silos train plainly. The coordinator needs the mean alone, so that masks can hide the single models.

λ is the plan's, the same for all and in every round, or each silo's own choice:

* ``choice: validation``. In the rounds 1, 2, 4, 8 … a silo trains from the same w_k with five λ, a tenth to ten times
  the plan's, and keeps the model with the least loss on its validation images, and that λ until it chooses again. So
  the model that leaves depends on those images, by a choice that no mechanism noises, and on five trainings in place of
  one. With differential privacy neither is charged, so there it is refused.
* ``choice: home``. λ stays the plan's in every round. After the last one, when nothing leaves any more, a silo takes of
  the models w̄ + a (w_k − w̄), a = 0, ¼ … 1, the one with the least loss on its shard's validation images. Where F_k's
  curvature is h in all directions, its minimum with λ is the one with a = h/(h + λ). w_k and w̄ are what the run's
  training, which is charged, has made; the choice among them reads validation images alone, which no training has
  seen and no account holds, and it stays at the silo with all that depends on it. So it costs nothing, as long as no
  accuracy of the chosen model leaves: a plan with differential privacy that asks for those is refused. Without
  validation images, or without w̄, a silo keeps w_k.

Between the silos' own distances, ‖w_k − w̄‖, and the noise in them lies another choice that would cost nothing; it
needs the curvature, which no released number tells, and is not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from medsilo.algorithms.declarations import Condition, NonNegative, Protected, Share, Sums
from medsilo.algorithms.families.tethered import Tethered, TetheredSilo
from medsilo.algorithms.method import (
    LATER,
    ONE_FOR_ALL,
    PERSONAL,
    CoordinatorSide,
    Correction,
    Downloads,
    Method,
    Round,
    SiloSide,
    Site,
    State,
    load_parameters,
    require,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload, Stack, combine
from medsilo.privacy.errors import TrainingError
from medsilo.privacy.exposure import MODEL, Exposure

_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_CHOSEN = "choice"
_CENTRE = "centre"


class MRMTLSilo(TetheredSilo):
    """Trains near the mean; chooses how near, where the plan leaves that to it."""

    method: MRMTL

    def __init__(self, method: Method, site: Site) -> None:
        super().__init__(method, site)
        if self.method.choice == "validation":
            require(
                not site.training.keep_optimizer_state,
                "mrmtl: `choice: validation` trains several times from one start, each with a fresh optimiser; leave "
                "`keep_optimizer_state` out, or use `choice: plan`",
            )
            if not site.has_validation:
                site.reserve(self.method.validation_share)

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs; or, in a round in which the silo chooses, so many with each λ."""
        centre = load_parameters(download, Exposure.PEER_DERIVED, self.site.layout.parameters) if download else None
        if self.method.choice == "home" and centre is not None:
            self.memory[_CENTRE] = centre
        if self.method.choice != "validation" or centre is None:
            super().train(round_number, download)
            return
        weights = [float(self.memory[_CHOSEN]["weight"])] if _CHOSEN in self.memory else []
        if not weights or round_number & (round_number - 1) == 0:
            weights = [factor * self.method.proximal_weight for factor in _FACTORS]
        found: list[tuple[float, State, float]] = []
        for weight in weights:
            try:
                found.append((*self._trained(round_number, weight, centre), weight))
            except TrainingError:
                # Too strong a pull for the plan's step size; some weaker one is not.
                if weight == weights[-1] and not found:
                    raise
        _, self.memory[PERSONAL], best = min(found, key=lambda one: (math.isnan(one[0]), one[0]))
        self.memory[_CHOSEN] = {"weight": torch.tensor(best, dtype=torch.float64)}

    def finish(self, download: Payload) -> None:
        """With ``choice: home`` takes the best mixture of the silo's own model and the last mean."""
        centre = self.memory.get(_CENTRE)
        if self.method.choice != "home" or centre is None:
            return
        own = self.memory[PERSONAL]
        mixed = [own | {name: torch.lerp(centre[name], own[name], share) for name in centre} for share in _SHARES]
        losses = [self.site.validation_loss(state) for state in mixed]
        known = [(loss, number) for number, loss in enumerate(losses) if loss is not None and not math.isnan(loss)]
        if known:
            self.memory[PERSONAL] = mixed[min(known)[1]]

    def _trained(self, round_number: int, weight: float, centre: State) -> tuple[float, State]:
        """The model of a training with this λ, and its validation loss."""
        self.site.load(self.memory[PERSONAL])
        self.site.fit(round_number, correction=Correction(weight, centre))
        state = state_of(self.site.model)
        loss = self.site.validation_loss(state)
        return float("nan") if loss is None else loss, state


class MRMTLCoordinator(CoordinatorSide):
    """Averages this round's models."""

    def aggregate(self, ended: Round) -> Downloads:
        """w̄ for everyone."""
        count = len(ended.uploads)
        weights = torch.full((1, count), 1 / count, dtype=torch.float64)
        (mean,) = combine(Stack.of(list(ended.uploads.values()), MODEL), weights, ended.workspace)
        return Downloads(everyone={Exposure.PEER_DERIVED: mean})


@dataclass(frozen=True)
class MRMTL(Tethered):
    """MR-MTL's hyper-parameters.

    Attributes:
        proximal_weight: λ ≥ 0; 0 is separate training, and the larger it is, the more alike the models become. The
            paper searches it by data set and by privacy budget: the noisier the silos' training, the more they gain
            from each other. 0.1 is ours.
        choice: who chooses λ: the "plan", or each silo by its "validation" images, or at "home" after the last round
            (see above).
        validation_share: of the training images, set aside for ``choice: validation`` where the shard has no validation
            images.
    """

    name: ClassVar[str] = "mrmtl"
    silo: ClassVar[type[SiloSide]] = MRMTLSilo
    coordinator: ClassVar[type[CoordinatorSide]] = MRMTLCoordinator
    gets: ClassVar[str] = "average, which its own model is held near"
    common: ClassVar[frozenset[Exposure]] = ONE_FOR_ALL
    under_privacy: ClassVar[Protected | str] = Protected(
        conditions=(
            Condition(
                "choice",
                ("plan", "home"),
                "a model that leaves would depend on validation images by a choice that nothing noises",
            ),
        ),
        reporting=(
            Condition("choice", ("plan",), "else a model is chosen by validation images that no noise protects"),
        ),
    )
    under_masks: ClassVar[Sums | str] = Sums()
    proximal_weight: NonNegative = 0.1
    choice: Literal["plan", "validation", "home"] = field(default="plan", metadata=LATER)
    validation_share: Share = field(default=0.1, metadata=LATER)

    @property
    def tether(self) -> float:
        """λ."""
        return self.proximal_weight
