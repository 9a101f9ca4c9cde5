"""Per-FedAvg (Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, first-order variant of section 5): the global model is one from
which a step or a few lead to a good model for any silo.

A silo's step on w takes two batches: w̃ = w − α ∇f(w; D), then w ← w − β ∇f(w̃; D'), leaving out the Hessian's factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.declarations import OWN_STEPS, OneOrMore, Positive, Protected, Sums
from medsilo.algorithms.families.own_steps import check_finite, mean_gradients, trained_parameters
from medsilo.algorithms.families.two_models import GLOBAL, TwoModelSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import PERSONAL, TRAINED, SiloSide
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload

Batch = tuple[Tensor, Tensor]


class PerFedAvgSilo(TwoModelSilo):
    """Its personal model is the global model after ``personal_steps`` on its own batches; w goes up."""

    method: PerFedAvg

    def train(self, round_number: int, download: Payload) -> None:
        """Personalises the global model as it came, then trains it for the federation."""
        super().finish(download)
        self._personalise(round_number)
        site, method = self.site, self.method
        site.load(self.memory[GLOBAL])
        site.model.train()
        parameters = list(trained_parameters(site.model).values())
        for support, query in pairs(site.batches(round_number)):
            start = [parameter.detach().clone() for parameter in parameters]
            self._step(support)
            gradients = mean_gradients(site, *query)
            with torch.no_grad():
                for parameter, origin, gradient in zip(parameters, start, gradients, strict=True):
                    parameter.copy_(origin - method.step_size * gradient)
        check_finite(parameters, round_number)
        self.memory[TRAINED] = state_of(site.model)

    def finish(self, download: Payload) -> None:
        """Personalises the last global model."""
        super().finish(download)
        self._personalise(self.site.rounds)

    def _personalise(self, round_number: int) -> None:
        steps = self.method.personal_steps
        self.site.load(self.memory[GLOBAL])
        self.site.model.train()
        # An epoch has at least one batch.
        for batch in itertools.islice(self.site.batches(round_number, epochs=steps, phase="personal"), steps):
            self._step(batch)
        self.memory[PERSONAL] = state_of(self.site.model)

    def _step(self, batch: Batch) -> None:
        gradients = mean_gradients(self.site, *batch)
        with torch.no_grad():
            for parameter, gradient in zip(trained_parameters(self.site.model).values(), gradients, strict=True):
                parameter.sub_(gradient, alpha=self.method.inner_rate)


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """Per-FedAvg's hyper-parameters. Training is its own (plain gradient steps): of the plan's it takes epochs and
    batch size.

    Attributes:
        inner_rate: α > 0, of the step that personalises. 0.01 is customary; the pFedMe authors' comparisons and
            PFLlib's examples use 0.005.
        step_size: β > 0, of w's step. 0.001, with many rounds, is customary: pFedMe's comparisons and PFLlib's
            examples use it.
        personal_steps: gradient steps of rate α, each on one batch, that make a silo's model of the global one; at
            least 1, the paper's number.
        weighting: the paper's mean is uniform.
    """

    name: ClassVar[str] = "perfedavg"
    silo: ClassVar[type[SiloSide]] = PerFedAvgSilo
    sends: ClassVar[str] = "model before it is adapted"
    own_steps: ClassVar[bool] = True
    under_privacy: ClassVar[Protected | str] = OWN_STEPS
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"
    inner_rate: Positive = 0.01
    step_size: Positive = 0.001
    personal_steps: OneOrMore = 1


def pairs(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch]]:
    """Consecutive batches two by two; a last one that is left over is paired with itself."""
    waiting = iter(batches)
    for first in waiting:
        yield first, next(waiting, first)
