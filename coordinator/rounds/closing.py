"""What is made of updates: a round's aggregate when it closes, and what silos are given of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from medsilo.algorithms.method import Downloads, Federation, Method, Round, SiloWeights, local_metrics
from medsilo.algorithms.models import Layout, plain_state, whole_state
from medsilo.algorithms.models.given_weights import sent_names
from medsilo.algorithms.protection import blind
from medsilo.algorithms.protection.masked import masked_specs, mean_of
from medsilo.algorithms.tensors import Part, Payload, TensorSpec, Workspace
from medsilo.algorithms.tensors.files import FileWorkspace, read_payload, write_payload, write_tensors
from medsilo.algorithms.tensors.memory import return_freed_memory
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.coordinator.given_weights import OUTCOME
from medsilo.coordinator.rounds.changes import compare
from medsilo.coordinator.rounds.comparing import Beginning, products_of_changes
from medsilo.coordinator.rounds.round_files import RoundFiles
from medsilo.coordinator.store.records import EVERYONE, Change, RoundState
from medsilo.coordinator.store.store import Store
from medsilo.privacy.consent.plan import RunPlan, SecureAggregationPlan
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MODEL, Exposure

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Aggregated:
    """What came of a round: ``silos`` whose updates were used, the files of ``downloads`` by silo and class, the file
    of the method's ``memory_file``, what is said of each silo's change, and who was given how much of whose model."""

    silos: tuple[str, ...]
    downloads: Mapping[str, Mapping[str, str]]
    memory_file: str | None
    changes: Mapping[str, Change]
    weights: SiloWeights | None


class Aggregator:
    """A method's coordinator side with its files. All but ``aggregate`` is called under the lock of ``Rounds``."""

    def __init__(
        self, config: CoordinatorConfig, plan: RunPlan, method: Method, store: Store, files: RoundFiles
    ) -> None:
        self._config = config
        self._plan = plan
        self._method = method
        self._store = store
        self._files = files
        model = config.build_model()
        if not files.initial.exists() or not store.members(plan.run):  # the plan may have been corrected
            write_payload(files.initial, {Exposure.INITIAL_MODEL: Part.of(whole_state(model))})
        self.federation = Federation(
            Layout.of(model),
            plan.training_rounds,
            plan.seed,
            tuple(sorted(config.silos)),
            plan.model.input_shape,
            config.open_public(model),
        )
        self._sent = sent_names(plan.model, model)
        del model
        return_freed_memory()

    def restore(self) -> None:
        """Reads what silos were given last, and what the method remembers."""
        self.side = self._method.coordinator_side(self.federation)
        self._kept: dict[str, Payload] = {}
        self._keep(self._store.downloads(self._plan.run))
        if name := self._store.memory_file(self._plan.run):
            self.side.memory = self._files.read_memory(name)

    def prepare(self, round_number: int, silos: Sequence[str], *, finished: bool) -> None:
        """Makes what silos are to be given in a round."""
        kept = Downloads(
            own={silo: payload for silo, payload in self._kept.items() if silo != EVERYONE},
            everyone=self._kept.get(EVERYONE),
        )
        self._current = kept if finished or self._plan.is_blind else self.side.downloads(round_number, silos, kept)
        if finished:
            self._keep_outcome(kept.everyone)

    def _keep_outcome(self, last: Payload | None) -> None:
        """Keeps the one model that the run came to, if all silos were given it whole: another run may start from it."""
        layout, path = self.federation.layout, self._files.folder / OUTCOME
        if last is None or path.exists():
            return
        if not set(layout.parameters) <= {spec for part in last.values() for spec in part.specs}:
            return
        (start,) = read_payload(self._files.initial).values()
        state = start.tensors()
        for part in last.values():
            state |= {name: tensor for name, tensor in part.tensors().items() if name in state}
        write_tensors(path, plain_state(self._config.build_model(), state))

    def for_silo(self, silo: str, *, at_end: bool, holds_model: bool) -> Payload:
        """What goes with a silo's task; the starting model, too, where it does not hold one."""
        given = {} if at_end and not self._method.downloads_last else dict(self._current.for_silo(silo))
        if Exposure.MIXING_WEIGHTS in given:
            given.pop(Exposure.SEALED_MIXTURE)  # it goes with what opens it
        return given if holds_model else {**self._start(), **given}

    def _start(self) -> Payload:
        """What a silo is sent of the starting model."""
        model = self._plan.model
        (part,) = read_payload(self._files.initial).values()
        if len(self._sent) == len(part.specs):
            return {model.start: part}
        tensors = part.tensors()
        return {model.start: Part.of({name: tensors[name] for name in self._sent})} if self._sent else {}

    def forget(self, silo: str) -> bool:
        """Lets go of what is left of a silo that has withdrawn; whether that is to be prepared anew which silos are
        given."""
        self.side.forget(silo)
        self._kept.pop(silo, None)
        self._files.delete_updates_of(silo)
        if Exposure.PEER_MODELS not in self._method.downlink or not self._kept:
            return False
        # These hold single hospitals' models as they are: until the round ends, nobody gets any.
        self._store.forget_downloads(self._plan.run)
        self._kept.clear()
        return True

    def expected_parts(self, silo: str, round_number: int) -> dict[Exposure, tuple[TensorSpec, ...]]:
        """What an update must hold, the optional parts included."""
        masks = self._plan.secure_aggregation
        if round_number < self._plan.rounds and self._plan.is_blind and masks is not None:
            found = self._blind_parts(silo, round_number, masks)
            if not self._plan.is_masked(round_number):
                return found
        else:
            found = self._plain_parts(silo, round_number)
        if Exposure.LOCAL_METRICS in self._plan.optional:
            found[Exposure.LOCAL_METRICS] = local_metrics(self._plan)
        return found

    def _blind_parts(
        self, silo: str, round_number: int, masks: SecureAggregationPlan
    ) -> dict[Exposure, tuple[TensorSpec, ...]]:
        silos = len(self._store.first_roster(self._plan.run) or ())
        if not self._plan.is_masked(round_number):
            return blind.share_parts(silos)
        mixing = blind.mixing_of(self._plan, self._method, round_number)
        return blind.upload_parts(self.side.upload_parts(round_number // 2, silo), mixing, masks, silos)

    def _plain_parts(self, silo: str, round_number: int) -> dict[Exposure, tuple[TensorSpec, ...]]:
        parts = {} if round_number == self._plan.rounds else self.side.upload_parts(round_number, silo)
        found = {exposure: tuple(specs) for exposure, specs in parts.items()}
        if self._plan.is_masked(round_number):
            found = {Exposure.MASKED_UPDATE: masked_specs(parts)}
        return found

    def beginnings(self, silos: Iterable[str], round_number: int) -> dict[str, Beginning]:
        """What each silo's round began with."""
        earlier = self._store.latest_files(self._plan.run, before=round_number)
        initial = read_payload(self._files.initial)
        return {
            silo: Beginning(
                (
                    self._current.for_silo(silo),
                    *self._files.payloads({silo: earlier[silo]} if silo in earlier else {}).values(),
                    initial,
                )
            )
            for silo in silos
        }

    def aggregate(self, state: RoundState, silos: Sequence[str]) -> Aggregated:
        """What the method makes of these silos' updates; its files are written when this returns."""
        number, is_masked = state.number, self._plan.is_masked(state.number)
        workspace = FileWorkspace(self._files.of_round(number), self._files.spares)
        files = {s: p.file for s, p in state.participants.items() if s in silos and p.file is not None}
        if self._plan.is_blind:
            return self._mix_blindly(number, files, workspace)
        if is_masked:
            uploads = latest = self.sum_up(number, silos, files, workspace)
        else:
            uploads = self._files.payloads(files)
            # A masked update is of use to its own round alone.
            everything = self._files.payloads(self._store.latest_files(self._plan.run)).items()
            latest = {silo: payload for silo, payload in everything if Exposure.MASKED_UPDATE not in payload}
        fresh = Downloads()
        if uploads and (number + 1 < self._plan.rounds or self._method.downloads_last):
            fresh = self.side.aggregate(Round(number, uploads, latest, workspace))
        changes = {} if is_masked else self._changes(number, uploads)
        named = dict(fresh.own) if fresh.everyone is None else {**fresh.own, EVERYONE: fresh.everyone}
        return Aggregated(
            tuple(uploads),
            {silo: self._files.keep_download(silo, payload, number) for silo, payload in named.items()},
            self._files.keep_memory(self.side.memory, number),
            changes,
            fresh.weights,
        )

    def _mix_blindly(self, number: int, files: Mapping[str, str], workspace: Workspace) -> Aggregated:
        """Of silos' distances the weights, and of what was sealed the mixtures, which stay here: all are shown what
        both are. Then each is given its own, with what opens it."""
        uploads, weights = self._files.payloads(files), None
        own: Mapping[str, Payload] = {}
        masks = self._plan.secure_aggregation
        assert masks is not None
        if uploads and self._plan.is_masked(number):
            told, weights = blind.weigh(uploads, blind.mixing_of(self._plan, self._method, number), masks)
            mixed, digests = blind.mix_sealed(uploads, told, workspace)
            told = blind.stated(told, digests)
            own = {silo: {**told, **payload} for silo, payload in mixed.items()}
        elif uploads:
            opening = blind.openers(uploads)
            kept = {silo: {Exposure.SEALED_MIXTURE: self._kept[silo][Exposure.SEALED_MIXTURE]} for silo in opening}
            own = {silo: {**kept[silo], **payload} for silo, payload in opening.items()}
        given = {silo: self._files.keep_download(silo, payload, number) for silo, payload in own.items()}
        return Aggregated(tuple(uploads), given, None, {}, weights)

    def closed(self, aggregated: Aggregated) -> None:
        """The round has ended in the database, too: what came of it is handed out."""
        self._keep(aggregated.downloads)

    def remove_what_is_old(self, closed: int) -> None:
        """Removes tensors of rounds that nothing needs any more."""
        needed = set(self._store.latest_files(self._plan.run).values())
        for by_class in self._store.downloads(self._plan.run).values():
            needed.update(by_class.values())
        self._files.forget(closed - self._config.keep_rounds, needed)

    def sum_up(
        self, number: int, silos: Sequence[str], files: Mapping[str, str], workspace: Workspace
    ) -> dict[str, Payload]:
        """The mean of a whole roster's masked updates in each silo's place; nothing of none, or where their masks do
        not cancel."""
        if not silos or self._plan.secure_aggregation is None:
            return {}
        parts = self.side.upload_parts(number, silos[0])
        masked = list(self._files.payloads(files).values())
        try:
            mean = mean_of(masked, parts, self._plan.secure_aggregation, workspace)
        except RefusedError as error:
            log.warning("round %d is given up: %s", number + 1, error)
            return {}
        return dict.fromkeys(silos, mean)

    def _changes(self, round_number: int, uploads: Mapping[str, Payload]) -> dict[str, Change]:
        """What is said of each silo's change of the model."""
        models = {s: upload for s, upload in uploads.items() if any(exposure in upload for exposure in MODEL)}
        if not models:
            return {}
        products = products_of_changes(models, self.beginnings(models, round_number))
        return dict(zip(models, compare(products), strict=True))

    def _keep(self, files: Mapping[str, Mapping[str, str]]) -> None:
        for silo, by_class in files.items():
            self._kept[silo] = self._files.read_download(by_class)
