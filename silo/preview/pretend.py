"""A plan's run among hospitals that are all here: what the daemons do, without network, journal or ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from medsilo.algorithms.method import PERSONAL, TRAINED, Downloads, Federation, Memory, Method, Round, State
from medsilo.algorithms.method import participants as drawn
from medsilo.algorithms.models import Layout, state_of, whole_state
from medsilo.algorithms.models.given_weights import sent_names
from medsilo.algorithms.tensors import MemoryWorkspace, Part, Payload
from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.silo.training.measuring import Measurement
from medsilo.silo.training.site import LocalSite


class WatchedSite(LocalSite):
    """Keeps the model that a round's training began with, until it is asked for."""

    began: State | None = None

    def fit(self, round_number: int, **options: Any) -> int:
        """As ever."""
        if self.began is None:
            self.began = state_of(self.model)
        return super().fit(round_number, **options)


class PretendRun:
    """A run among pretend hospitals, which take turns with one module.

    ``up`` and ``down`` are what the hospital of each name has sent and was sent so far, in bytes of tensors by exposure
    class.

    Args:
        plan: the run's.
        method: the plan's.
        model: the plan's starting model.
        sites: the hospitals by name, all with that module.
        trained: is told of each training that has ended.
    """

    def __init__(
        self,
        plan: RunPlan,
        method: Method,
        model: nn.Module,
        sites: Mapping[str, LocalSite],
        trained: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._method, self._model = plan, method, model
        self._sites = dict(sorted(sites.items()))
        self._trained = trained
        start = state_of(model)
        names = tuple(self._sites)
        federation = Federation(Layout.of(model), plan.rounds, plan.seed, names, plan.model.input_shape)
        self._coordinator = method.coordinator_side(federation)
        self._sides = {name: method.silo_side(site) for name, site in self._sites.items()}
        for side in self._sides.values():
            side.begin({name: tensor.clone() for name, tensor in start.items()})
        self._handed = Downloads()
        self._latest: dict[str, Payload] = {}
        self.up: dict[str, dict[Exposure, int]] = {name: {} for name in names}
        whole, sent = whole_state(model), sent_names(plan.model, model)
        first = {plan.model.start: Part.of({one: whole[one] for one in sent}).nbytes} if sent else {}
        self.down: dict[str, dict[Exposure, int]] = {name: dict(first) for name in names}

    def round(self, number: int, *, always: Collection[str] = ()) -> None:
        """Trains and ends a round. ``always``: who takes part, whoever is drawn."""
        share, seed = self._plan.participation, self._plan.seed
        chosen = sorted({*drawn(list(self._sides), share=share, seed=seed, round_number=number), *always})
        given = self._coordinator.downloads(number, chosen, self._handed)
        uploads = {}
        for name in chosen:
            download = given.for_silo(name)
            _count(self.down[name], download)
            self._sides[name].train(number, download)
            self._trained()
            uploads[name] = self._latest[name] = self._sides[name].upload()
            _count(self.up[name], uploads[name])
            self._model.zero_grad(set_to_none=True)
        if number + 1 == self._plan.rounds and not self._method.downloads_last:
            return
        latest = dict(sorted(self._latest.items()))
        fresh = self._coordinator.aggregate(Round(number, uploads, latest, MemoryWorkspace()))
        everyone = fresh.everyone if fresh.everyone is not None else self._handed.everyone
        self._handed = Downloads({**self._handed.own, **fresh.own}, everyone)

    def finish(self) -> None:
        """Hands out what the last round has made."""
        for name, side in self._sides.items():
            download = self._handed.for_silo(name) if self._method.downloads_last else {}
            _count(self.down[name], download)
            side.finish(download)

    def measured(self) -> list[Measurement]:
        """Each hospital's own model on its test images, of those that have some."""
        found = (self._sites[name].measure(side.personal()) for name, side in self._sides.items())
        return [one for one in found if one is not None]

    def released(self, name: str) -> State:
        """The model of a hospital's last upload; parts that stay there as they are."""
        return released_model(self._sides[name].memory, self._latest[name])


def released_model(memory: Memory, upload: Payload) -> State:
    """The trained model as it would leave; parts that would stay here as they are."""
    state = dict(memory.get(TRAINED, memory[PERSONAL]))
    for exposure in MODEL:
        if exposure in upload:
            state.update({name: tensor for name, tensor in upload[exposure].tensors().items() if name in state})
    return state


def _count(total: dict[Exposure, int], payload: Payload) -> None:
    for exposure, part in payload.items():
        total[exposure] = total.get(exposure, 0) + part.nbytes
