"""Separate training: every silo trains alone. The baseline that exposes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from medsilo.algorithms.declarations import Blind, Protected, Sums
from medsilo.algorithms.method import PERSONAL, CoordinatorSide, Method, SiloSide
from medsilo.algorithms.models import state_of
from medsilo.algorithms.tensors import Payload, TensorSpec
from medsilo.privacy.exposure import Exposure


class LocalSilo(SiloSide):
    """Continues its own model."""

    def train(self, round_number: int, download: Payload) -> None:
        """E more epochs."""
        self.site.load(self.memory[PERSONAL])
        self.site.fit(round_number)
        self.memory[PERSONAL] = state_of(self.site.model)

    def upload(self) -> Payload:
        """Nothing."""
        return {}


class LocalCoordinator(CoordinatorSide):
    """Wants nothing."""

    def upload_parts(self, round_number: int, silo: str) -> Mapping[Exposure, Sequence[TensorSpec]]:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Local(Method):
    """Separate training ("Separate" in the DiversiFed paper's tables). No hyper-parameters of its own.

    All silos start from the same seeded model and never hear of each other again.
    """

    name: ClassVar[str] = "local"
    silo: ClassVar[type[SiloSide]] = LocalSilo
    coordinator: ClassVar[type[CoordinatorSide]] = LocalCoordinator
    sends: ClassVar[str] = "nothing but the progress of rounds"
    gets: ClassVar[str] = "the first model"
    uploads: ClassVar[frozenset[Exposure]] = frozenset()
    downlink: ClassVar[frozenset[Exposure]] = frozenset()
    under_privacy: ClassVar[Protected | str] = Protected()
    under_masks: ClassVar[Sums | str] = "it sends nothing that could be masked"
    under_blind: ClassVar[Blind | str] = "it sends nothing that could be mixed"
