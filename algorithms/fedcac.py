"""FedCAC: share what is robust with everyone, what is critical with those alike (Wu et al., "Bold but Cautious:
Unlocking the Potential of Personalized Federated Learning through Cautiously Aggressive Collaboration", ICCV 2023,
section 4).

A parameter's sensitivity is |θ Δθ|, θ after and Δθ over a round's local training; the share τ of a layer with the
largest is critical, mask m_i (0/1). Two silos' masks overlap by O_ij = 1 − ‖m_i − m_j‖₁ / (2n), n critical
parameters in each. Silo i collaborates on critical parameters with those whose overlap reaches

    T_t = O_avg + t/β (O_max − O_avg),

mean and largest over all pairs of the round's participants. It goes on from

    m_i ⊙ (average over itself and its collaborators) + (1 − m_i) ⊙ (average over all).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.declarations import MIXTURES, Blind, Positive, Protected, Share, Sums
from medsilo.algorithms.families.sharing import model_upload
from medsilo.algorithms.method import (
    PERSONAL,
    CoordinatorSide,
    Downloads,
    Method,
    Round,
    SiloSide,
    load_parameters,
)
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import BLOCK, Part, Payload, Stack, TensorSpec
from medsilo.privacy.exposure import MODEL, Exposure

_MASK = "mask"
_GLOBAL = "global."
_CUSTOM = "custom."
_TOLERANCE = 1e-12
"""Overlaps are ratios of whole numbers: the last bit of the threshold must not part a silo from its equals."""


class FedCACSilo(SiloSide):
    """Its personal model is the one that it trained last."""

    method: FedCAC

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs from the received mixture, then the sensitivities."""
        site, specs = self.site, self.site.layout.parameters
        state = dict(self.memory[PERSONAL])
        if download:
            received = load_parameters(download, Exposure.PEER_DERIVED, _both(specs))
            mask = self.memory.get(_MASK, {})
            for name in (spec.name for spec in specs):
                state[name] = received[_GLOBAL + name]
                if name in mask:
                    state[name] = torch.where(mask[name] != 0, received[_CUSTOM + name], state[name])
        site.load(state)
        site.fit(round_number)
        trained = state_of(site.model)
        self.memory[_MASK] = {
            spec.name: critical(trained[spec.name], state[spec.name], share=self.method.critical_share)
            for spec in specs
        }
        self.memory[PERSONAL] = trained

    def rehearse(self) -> None:
        """A mask of zeros."""
        specs = self.site.layout.parameters
        self.memory[_MASK] = {spec.name: torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs}

    def upload(self) -> Payload:
        """The trained model and its mask."""
        payload = model_upload(self.memory[PERSONAL], self.site.layout)
        return {**payload, Exposure.PARAMETER_MASK: Part.of(self.memory[_MASK])}


class FedCACCoordinator(CoordinatorSide):
    """Averages over all, and over each silo's collaborators."""

    method: FedCAC

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """The model and a mask of its shape."""
        layout = self.federation.layout
        masks = tuple(TensorSpec(spec.name, spec.shape, "U8") for spec in layout.parameters)
        return {**layout.model_parts(), Exposure.PARAMETER_MASK: masks}

    def aggregate(self, ended: Round) -> Downloads:
        """Both averages for each silo that has ever delivered; for all others twice the average over all."""
        silos = list(ended.latest)
        present = torch.tensor([silo in ended.uploads for silo in silos])
        share = self.method.critical_share
        count = sum(critical_count(math.prod(spec.shape), share) for spec in self.federation.layout.parameters)
        together = overlaps([payload[Exposure.PARAMETER_MASK] for payload in ended.latest.values()], count)
        custom = collaboration_weights(together, present, progress=(ended.number + 1) / self.method.rounds_to_solitude)
        whole = present.to(torch.float64).reshape(1, -1) / present.sum()
        custom = torch.cat([custom, whole])
        stack = Stack.of(list(ended.latest.values()), MODEL)
        rows = len(custom)
        blocks = itertools.chain(
            stack.map(lambda block: (whole @ block).to(torch.float32).expand(rows, -1)),
            stack.map(lambda block: (custom @ block).to(torch.float32)),
        )
        *own, everyone = ended.workspace.write(_both(stack.specs), rows, blocks)
        return Downloads(
            own={silo: {Exposure.PEER_DERIVED: row} for silo, row in zip(silos, own, strict=True)},
            everyone={Exposure.PEER_DERIVED: everyone},
        )


@dataclass(frozen=True)
class FedCAC(Method):
    """FedCAC's hyper-parameters.

    Attributes:
        critical_share: τ in [0, 1], the share of each parameter tensor that is critical; 0 makes this uniform
            FedAvg. The authors' published configurations use 0.5 on CIFAR-10 and 0.4 on CIFAR-100.
        rounds_to_solitude: β > 0: after β rounds the threshold has reached the largest overlap, and beyond them it
            exceeds it, so that critical parameters stay at their silo (except where all pairs overlap alike: these go
            on together). The authors use 100 on CIFAR-10 and 170 on CIFAR-100, over 300 rounds.

    Decided here: averages are uniform, so that no number of images is exposed; a silo that missed the round is
    measured by its last mask and model, and counts towards nobody else's average; one that has no mask yet takes the
    average over all. With two participants there is one pair, and both share everything.
    """

    name: ClassVar[str] = "fedcac"
    silo: ClassVar[type[SiloSide]] = FedCACSilo
    coordinator: ClassVar[type[CoordinatorSide]] = FedCACCoordinator
    sends: ClassVar[str] = "model, mask of the parameters that matter to it"
    gets: ClassVar[str] = "average, and a mixture of silos with similar masks"
    uploads: ClassVar[frozenset[Exposure]] = frozenset({*MODEL, Exposure.PARAMETER_MASK})
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})
    # The mask compares the trained model with the received one.
    under_privacy: ClassVar[Protected | str] = Protected(derived=frozenset({Exposure.PARAMETER_MASK}))
    under_masks: ClassVar[Sums | str] = f"{MIXTURES}, by their masks of the parameters that matter"
    under_blind: ClassVar[Blind | str] = (
        "its mixtures go by masks of the parameters that matter, and a blind mixture has one weight for all of a model"
    )
    critical_share: Share = 0.5
    rounds_to_solitude: Positive = 100.0

    def warnings(self, silos: int, model: str, optimizer: str) -> list[str]:
        """Too few silos to choose from."""
        if silos < 3:
            return ["fedcac is plain averaging with fewer than three silos: there is nobody to choose among"]
        return []


def critical_count(size: int, share: float) -> int:
    """How many of a tensor's numbers are critical: the share, rounded half up."""
    return math.floor(share * size + 0.5)


def critical(after: Tensor, before: Tensor, *, share: float) -> Tensor:
    """The mask of a tensor's critical numbers: the largest |θ Δθ|, the earlier of two alike.

    Args:
        after: θ, a parameter after training, of any shape.
        before: the same before training.
        share: τ.

    Returns:
        ``uint8`` of the same shape, 1 for critical.
    """
    sensitivity = (after * (after - before)).abs().reshape(-1)
    order = torch.sort(sensitivity, descending=True, stable=True).indices
    mask = torch.zeros(len(sensitivity), dtype=torch.uint8)
    mask[order[: critical_count(len(sensitivity), share)]] = 1
    return mask.reshape(after.shape)


def overlaps(masks: Sequence[Part], count: int) -> Tensor:
    """O_ij = 1 − ‖m_i − m_j‖₁ / (2 count) of all pairs: ``Tensor[N, N]``, float64; ones for a count of 0.

    Masks are read block by block; any byte but 0 counts as 1.
    """
    distances = torch.zeros(len(masks), len(masks), dtype=torch.float64)
    for start in range(0, masks[0].nbytes, BLOCK):
        stop = min(start + BLOCK, masks[0].nbytes)
        block = np.stack([np.frombuffer(mask.source.read(start, stop), np.uint8) != 0 for mask in masks])
        bits = torch.from_numpy(block).to(torch.float64)
        sums = bits.sum(dim=1)
        distances += sums.unsqueeze(0) + sums.unsqueeze(1) - 2 * bits @ bits.T
    return 1 - distances / (2 * count) if count else torch.ones_like(distances)


def collaboration_weights(together: Tensor, present: Tensor, *, progress: float) -> Tensor:
    """Each silo's uniform average over itself and those present whose overlap reaches the threshold.

    Args:
        together: O, ``Tensor[N, N]``, float64, symmetric.
        present: ``Tensor[N]``, bool: whose model may count for others, and whose pairs make the threshold.
        progress: t/β.

    Returns:
        ``Tensor[N, N]``, float64, with rows that sum to 1.
    """
    count = len(together)
    chosen = torch.eye(count, dtype=torch.bool)
    there = int(present.sum())
    if there > 1:
        pairs = torch.triu(present.unsqueeze(0) & present.unsqueeze(1), diagonal=1)
        mean, largest = together[pairs].mean(), together[pairs].max()
        threshold = mean + progress * (largest - mean)
        chosen |= (together >= threshold - _TOLERANCE) & present.unsqueeze(0)
    weights = chosen.to(torch.float64)
    return weights / weights.sum(dim=1, keepdim=True)


def _both(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(prefix + spec.name, spec.shape, spec.dtype) for prefix in (_GLOBAL, _CUSTOM) for spec in specs
    )
