"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1): control variates take the difference between a silo's gradient and the federation's out of training.

From the global model x, silo i makes K steps y ← y − η (g(y) − c_i + c), then (option II, Eq. 4)

    c_i⁺ = c_i − c + (x − y)/(K η),

and uploads y and c_i⁺ − c_i. With N silos, of which S took part, the coordinator sends (Eq. 5)

    x ← x + η_g/|S| Σ_{i ∈ S} (y_i − x),    c ← c + 1/N Σ_{i ∈ S} (c_i⁺ − c_i).

Option II reads the mean gradient off the way that the model went, which is exact for plain SGD. With momentum m a
steady gradient moves the model by η/(1 − m), so that takes η's place (ours). Adam's steps do not tell the gradient;
SCAFFOLD is made for SGD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from medsilo.algorithms.declarations import Positive, Protected, Sums
from medsilo.algorithms.families.partial_sharing import PartialSharingCoordinator, PartialSharingSilo
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.method import (
    PERSONAL,
    TRAINED,
    CoordinatorSide,
    Correction,
    Downloads,
    Round,
    SiloSide,
    State,
    load_parameters,
    subset,
)
from medsilo.algorithms.models import Layout, state_of
from medsilo.algorithms.tensors import Part, Payload, Stack, TensorSpec, Workspace, combine
from medsilo.privacy.exposure import MODEL, Exposure

PREFIX = "control."
"""What the names of the global control variate's tensors begin with in the coordinator's part."""

_GLOBAL = "global"
_CONTROL = "control"
_SHARED = "shared-control"
_CHANGE = "control-change"


class ScaffoldSilo(PartialSharingSilo):
    """Keeps c_i and, as it came last, c."""

    method: Scaffold

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the global model; c − c_i is added to every gradient."""
        self.finish(download)
        site, layout = self.site, self.site.layout
        start = subset(self.memory[PERSONAL], layout.parameters)
        shared, own = self._controls()
        site.load(self.memory[PERSONAL])
        steps = site.fit(round_number, correction=Correction(linear={n: shared[n] - own[n] for n in start}))
        trained = state_of(site.model)
        way = steps * mean_step(site.training.learning_rate, site.training.momentum)
        change = {name: (start[name] - trained[name]) / way - shared[name] for name in start}
        self.memory[TRAINED] = trained
        self.memory[_CONTROL] = {name: own[name] + change[name] for name in start}
        self.memory[_CHANGE] = change

    def rehearse(self) -> None:
        """As if training had changed nothing."""
        super().rehearse()
        self.memory[_CHANGE] = self._controls()[0]

    def finish(self, download: Payload) -> None:
        """Takes the global model and the global control variate."""
        if not download:
            super().finish(download)
            return
        received = load_parameters(download, Exposure.PEER_DERIVED, download_specs(self.site.layout))
        parameters = subset(received, self.site.layout.parameters)
        super().finish({Exposure.PEER_DERIVED: Part.of(parameters)})
        self.memory[_SHARED] = {name: received[PREFIX + name] for name in parameters}

    def upload(self) -> Payload:
        """The trained model and c_i⁺ − c_i."""
        change = subset(self.memory[_CHANGE], self.site.layout.parameters)
        return {**super().upload(), Exposure.MODEL_GRADIENT: Part.of(change)}

    def _controls(self) -> tuple[State, State]:
        """c and c_i, zeros before their first values."""
        start = subset(self.memory[PERSONAL], self.site.layout.parameters)
        nothing = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        return self.memory.get(_SHARED, nothing), self.memory.get(_CONTROL, nothing)


class ScaffoldCoordinator(PartialSharingCoordinator):
    """Keeps x and c."""

    method: Scaffold

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The whole model and the control variate's change."""
        parts = super().upload_parts(round_number, silo)
        return {**parts, Exposure.MODEL_GRADIENT: self.federation.layout.parameters}

    def aggregate(self, ended: Round) -> Downloads:
        """x and c for everyone."""
        given = list(ended.uploads.values())
        weights = self._weights(given)
        step = self.method.global_step if _GLOBAL in self.memory else 1.0
        models = [[upload[exposure] for exposure in MODEL] for upload in given]
        self.memory[_GLOBAL] = self._moved(_GLOBAL, models, step * weights, 1 - step, ended.workspace)
        share = len(ended.uploads) / (len(self.federation.silos) or len(ended.latest))
        changes = [[upload[Exposure.MODEL_GRADIENT]] for upload in given]
        self.memory[_CONTROL] = self._moved(_CONTROL, changes, share * weights, 1.0, ended.workspace)
        control = {PREFIX + name: tensor for name, tensor in self.memory[_CONTROL].items()}
        return Downloads(everyone={Exposure.PEER_DERIVED: Part.of({**self.memory[_GLOBAL], **control})})

    def _moved(self, group: str, rows: list[list[Part]], weights: Tensor, keep: float, workspace: Workspace) -> State:
        """``keep`` times what the memory holds (zeros at first) plus the weighted rows."""
        if group in self.memory:
            rows = [*rows, [Part.of(subset(self.memory[group], self.federation.layout.parameters))]]
            weights = torch.cat([weights, torch.tensor([keep], dtype=torch.float64)])
        return combine(Stack(rows), weights.reshape(1, -1), workspace)[0].tensors()


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD's hyper-parameters.

    Attributes:
        global_step: η_g > 0, the coordinator's step; the paper's experiments "always use" 1 (section 7), at which the
            model is the mean of the uploads. The first round always takes the mean: the coordinator's side does not
            know the starting model.
        weighting: the paper's sums are uniform. With "samples" both means are weighted.
    """

    name: ClassVar[str] = "scaffold"
    silo: ClassVar[type[SiloSide]] = ScaffoldSilo
    coordinator: ClassVar[type[CoordinatorSide]] = ScaffoldCoordinator
    sends: ClassVar[str] = "model, mean gradient (control variate)"
    gets: ClassVar[str] = "average of both"
    takes_robust: ClassVar[bool] = False
    # The control variate's change is the way from the received to the trained model, divided by the steps (option II).
    under_privacy: ClassVar[Protected | str] = Protected(derived=frozenset({Exposure.MODEL_GRADIENT}))
    under_masks: ClassVar[Sums | str] = Sums()
    weighting: Literal["samples", "uniform"] = "uniform"
    global_step: Positive = 1.0

    @property
    def uploads(self) -> frozenset[Exposure]:
        """The model, and the change of the control variate, which is a mean gradient."""
        return super().uploads | {Exposure.MODEL_GRADIENT}

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """What the plan's optimiser has to be."""
        if optimizer == "sgd":
            return []
        return [f"scaffold reads gradients off SGD's steps: use training.optimizer sgd, {optimizer}'s mislead it"]


def mean_step(learning_rate: float, momentum: float) -> float:
    """How far SGD goes along a steady gradient of length 1 in one step."""
    return learning_rate / (1 - momentum)


def download_specs(layout: Layout) -> tuple[TensorSpec, ...]:
    """The coordinator's part: the global model, then the global control variate under prefixed names."""
    return layout.parameters + tuple(TensorSpec(PREFIX + s.name, s.shape, s.dtype) for s in layout.parameters)
