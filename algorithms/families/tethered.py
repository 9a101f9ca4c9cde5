"""What methods do alike whose silos train close to a model of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medsilo.algorithms.families.sharing import model_upload
from medsilo.algorithms.method import PERSONAL, Correction, Method, SiloSide, load_parameters
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload
from medsilo.privacy.exposure import MODEL, Exposure

SAME = 1e-12
"""Two models at most this far apart count as identical: the direction between them is undefined, so they neither
attract nor repel each other (the zero sub-gradient)."""


class TetheredSilo(SiloSide):
    """Trains its own model, held to a centre that the coordinator sends; plainly while there is none."""

    method: Tethered

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs; ``tether · (w − centre)`` is added to every gradient."""
        site = self.site
        site.load(self.memory[PERSONAL])
        correction = None
        if download:
            centre = load_parameters(download, Exposure.PEER_DERIVED, site.layout.parameters)
            if self.method.starts_at_centre:
                site.load(centre)
            correction = Correction(self.method.tether, centre)
        site.fit(round_number, correction=correction)
        self.memory[PERSONAL] = state_of(site.model)

    def upload(self) -> Payload:
        """The silo's own model."""
        return model_upload(self.memory[PERSONAL], self.site.layout)


@dataclass(frozen=True)
class Tethered(Method):
    """A method whose silos train models of their own, each held to a centre.

    ``tether``: λ of the term ``λ/2 · ‖w − centre‖²``. ``starts_at_centre``: whether training starts at the centre and
    does not go on from the silo's own model.
    """

    silo: ClassVar[type[SiloSide]] = TetheredSilo
    sends: ClassVar[str] = "model"
    uploads: ClassVar[frozenset[Exposure]] = frozenset(MODEL)
    downlink: ClassVar[frozenset[Exposure]] = frozenset({Exposure.PEER_DERIVED})

    @property
    @abstractmethod
    def tether(self) -> float:
        """λ ≥ 0."""

    @property
    def starts_at_centre(self) -> bool:
        """By default a silo goes on from its own model."""
        return False


def squared_distances(block: Tensor) -> Tensor:
    """One block's share of the squared distances: ``Tensor[N, b] -> Tensor[N, N]``, upper triangle, float64.

    Squares of direct differences: the shorter way over inner products loses all digits where models are much
    larger than the distances between them.
    """
    count = len(block)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for row in range(count - 1):
        difference = block[row + 1 :] - block[row]
        squares[row, row + 1 :] = torch.linalg.vecdot(difference, difference)
    return squares


def pairwise_distances(shares: Iterable[Tensor], count: int) -> Tensor:
    """Euclidean distances between ``count`` models from ``squared_distances`` of their blocks, added in order.

    Returns ``Tensor[count, count]``, float64, symmetric.
    """
    squares = torch.zeros(count, count, dtype=torch.float64)
    for share in shares:
        squares += share
    return (squares + squares.T).sqrt()
