"""What methods do alike whose silos train close to a model of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from medsilo.algorithms.families.sharing import model_upload
from medsilo.algorithms.method import PERSONAL, Correction, SiloHalf, Site, load_parameters
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload, columns_of
from medsilo.privacy.exposure import Exposure

SAME = 1e-12
"""Two models at most this far apart count as identical: the direction between them is undefined, so they neither
attract nor repel each other (the zero sub-gradient)."""


class TetheredSilo(SiloHalf):
    """Trains its own model, held to a centre that the coordinator sends; plainly while there is none.

    ``strength``: of the tether, ``strength/2 · ‖w − centre‖²``. ``start``: whether training goes on from the silo's own
    model or starts at the centre.
    """

    def __init__(self, site: Site, strength: float, *, start: Literal["own", "z"] = "own") -> None:
        super().__init__(site)
        self.strength = strength
        self.start = start

    def train(self, round_number: int, download: Payload) -> None:
        """E epochs; ``strength · (w − centre)`` is added to every gradient."""
        site = self.site
        site.load(self.memory[PERSONAL])
        correction = None
        if download:
            centre = load_parameters(download, Exposure.PEER_DERIVED, site.layout.parameters)
            if self.start == "z":
                site.load(centre)
            correction = Correction(self.strength, centre)
        site.fit(round_number, correction=correction)
        self.memory[PERSONAL] = state_of(site.model)

    def upload(self) -> Payload:
        """The silo's own model."""
        return model_upload(self.memory[PERSONAL], self.site.layout)


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


def columns(models: Tensor) -> Iterable[Tensor]:
    columns = columns_of(len(models))
    for start in range(0, models.shape[1], columns):
        yield models[:, start : start + columns].to(torch.float64)
