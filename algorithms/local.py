"""Separate training: every silo trains alone. The baseline that exposes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from medsilo.algorithms.method import PERSONAL, CoordinatorHalf, Federation, Method, SiloHalf, Site
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload, TensorSpec
from medsilo.privacy.exposure import Exposure


@dataclass(frozen=True)
class Local(Method):
    """Separate training ("Separate" in the DiversiFed paper's tables). No hyper-parameters of its own.

    All silos start from the same seeded model and never hear of each other again.
    """

    name: ClassVar[str] = "local"

    @property
    def uploads(self) -> frozenset[Exposure]:
        """Nothing."""
        return frozenset()

    @property
    def downlink(self) -> frozenset[Exposure]:
        """Nothing."""
        return frozenset()

    def silo_half(self, site: Site) -> SiloHalf:
        """Trains on from where it was."""
        return LocalSilo(site)

    def coordinator_half(self, federation: Federation) -> CoordinatorHalf:
        """Counts rounds."""
        return LocalCoordinator(federation)


class LocalSilo(SiloHalf):
    """Continues its own model."""

    def train(self, round_number: int, download: Payload) -> None:
        """E more epochs."""
        del download
        self.site.load(self.memory[PERSONAL])
        self.site.fit(round_number)
        self.memory[PERSONAL] = state_of(self.site.model)

    def upload(self) -> Payload:
        """Nothing."""
        return {}


class LocalCoordinator(CoordinatorHalf):
    """Wants nothing."""

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """Nothing."""
        del round_number, silo
        return {}
