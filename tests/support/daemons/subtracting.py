"""A coordinator that hands out the same models in two rounds and leaves the last hospital out of the second, so that
the difference of the two sums is that hospital's update: ``subtracting serve …``. It writes down each sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from medsilo.algorithms.method import Downloads
from medsilo.algorithms.tensors import Part, Payload
from medsilo.algorithms.tensors.files import read_payload
from medsilo.coordinator import cli
from medsilo.coordinator.rounds.closing import Aggregator
from medsilo.coordinator.rounds.machine import Machine, State
from medsilo.privacy.exposure import Exposure


def main() -> None:
    chosen, sum_up = Machine.chosen, Aggregator.sum_up

    def without_the_last(self: Machine, state: State, number: int) -> tuple[str, ...]:
        names = chosen(self, state, number)
        return names if number == 0 or len(names) < 4 else names[:-1]

    def noting(
        self: Aggregator, number: int, silos: Sequence[str], files: Mapping[str, str], workspace: Any
    ) -> dict[str, Payload]:
        found = sum_up(self, number, silos, files, workspace)
        updates = self._files.payloads(files).values()
        weight = sum(int(u[Exposure.MASKED_UPDATE].tensors()["weight"]) for u in updates) % 2**64
        mean = next(iter(found.values()))
        sums = {
            name: tensor.double() * weight
            for exposure, part in mean.items()
            if exposure is not Exposure.SAMPLE_COUNT
            for name, tensor in part.tensors().items()
        }
        save_file({**sums, "weight": torch.tensor(weight)}, self._config.state / f"sum-{number}.safetensors")
        return found

    def the_same_again(side: Any, *_: Any) -> Downloads:
        initial = side.initial[Exposure.INITIAL_MODEL].tensors()
        names = [spec.name for spec in side.parameters]
        return Downloads(everyone={Exposure.PEER_DERIVED: Part.of({name: initial[name] for name in names})})

    restore = Aggregator.restore

    def restored(self: Aggregator) -> None:
        restore(self)
        side = self.side
        side.initial = read_payload(self._files.initial)  # type: ignore[attr-defined]
        side.parameters = self.federation.layout.parameters  # type: ignore[attr-defined]
        side.aggregate = lambda *arguments: the_same_again(side, *arguments)  # type: ignore[method-assign]

    def never(*_: Any) -> bool:
        """An honest coordinator gives a round up that lacks one of the run's set."""
        return False

    Machine.chosen = without_the_last  # type: ignore[method-assign]
    Machine._is_lost = never  # type: ignore[method-assign]
    Aggregator.sum_up = noting  # type: ignore[method-assign,assignment]
    Aggregator.restore = restored  # type: ignore[method-assign]
    cli.main()
