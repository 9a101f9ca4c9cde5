"""What methods do alike whose silos are sent other silos' models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from medsilo.algorithms.method import CoordinatorSide, Downloads, Round, State
from medsilo.algorithms.tensors import FileSource, Part, Payload, Source, TensorSpec
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import MODEL, Exposure

SENT = "sent"


T = TypeVar("T")


class PeerCoordinator(CoordinatorSide):
    """Keeps every silo's last model and hands some of them to each participant, names ``silo/tensor``."""

    def aggregate(self, ended: Round) -> Downloads:
        """All last models side by side, for ``downloads`` to choose from."""
        return Downloads(everyone={Exposure.PEER_MODELS: side_by_side(ended.latest)})

    def downloads(self, round_number: int, participants: Sequence[str], kept: Downloads) -> Downloads:
        """Each participant's choice of the others' models; nothing before the first round has ended."""
        if kept.everyone is None:
            return Downloads()
        shelf = kept.everyone[Exposure.PEER_MODELS]
        there = sorted({spec.name.partition("/")[0] for spec in shelf.specs})
        own: dict[str, Payload] = {}
        for silo in participants:
            chosen = self.choose(round_number, silo, [other for other in there if other != silo])
            own[silo] = {Exposure.PEER_MODELS: taken(shelf, chosen)} if chosen else {}
        return Downloads(own=own)

    @abstractmethod
    def choose(self, round_number: int, silo: str, available: Sequence[str]) -> list[str]:
        """Whose models a silo gets, sorted by name."""


def peer_models(download: Payload, specs: Sequence[TensorSpec]) -> dict[str, State]:
    """Peers' models by silo; none in an empty download.

    Raises ``RefusedError`` unless every one of them has exactly the names and shapes of ``specs``.
    """
    if not download:
        return {}
    part = download.get(Exposure.PEER_MODELS)
    found: dict[str, list[TensorSpec]] = {}
    for spec in part.specs if part is not None else ():
        silo, _, name = spec.name.partition("/")
        found.setdefault(silo, []).append(TensorSpec(name, spec.shape, spec.dtype))
    if part is None or not found or any(tuple(model) != tuple(specs) for model in found.values()):
        raise RefusedError("the coordinator's peer models do not have the model's names and shapes")
    models: dict[str, State] = {silo: {} for silo in found}
    for key, tensor in part.tensors().items():
        silo, _, name = key.partition("/")
        models[silo][name] = tensor
    return models


def side_by_side(payloads: Mapping[str, Payload]) -> Part:
    """Silos' models one after the other as one part, names ``silo/tensor``; their bytes stay where they are."""
    rows = [(silo, payload[exposure]) for silo, payload in payloads.items() for exposure in MODEL]
    specs = tuple(TensorSpec(f"{silo}/{s.name}", s.shape, s.dtype) for silo, part in rows for s in part.specs)
    return Part(specs, _Stretches([(part.source, 0, part.nbytes) for _, part in rows]))


def taken(shelf: Part, silos: Sequence[str]) -> Part:
    """Some silos' models out of ``side_by_side``, in its order; their bytes stay where they are."""
    specs, stretches = [], []
    start = 0
    for spec in shelf.specs:
        if spec.name.partition("/")[0] in silos:
            specs.append(spec)
            stretches.append((start, start + spec.nbytes))
        start += spec.nbytes
    if isinstance(shelf.source, FileSource):
        return Part(tuple(specs), _FileStretches(shelf.source.path, shelf.source.offset, tuple(stretches)))
    return Part(tuple(specs), _Stretches([(shelf.source, low, high) for low, high in stretches]))


class _Stretches:
    """Stretches of other sources, end to end."""

    def __init__(self, stretches: Sequence[tuple[Source, int, int]]) -> None:
        self._stretches = list(stretches)

    def read(self, start: int, stop: int) -> bytes:
        """See ``medsilo.algorithms.tensors.Source``."""
        lengths = [high - low for _, low, high in self._stretches]
        return b"".join(
            source.read(low + begin, low + end)
            for (source, low, _), begin, end in _cut(self._stretches, lengths, start, stop)
        )


@dataclass(frozen=True)
class _FileStretches(FileSource):
    """Stretches of one file, end to end. A ``FileSource``, so that the coordinator knows the file to be in use
    while they are being sent, and does not write over it."""

    stretches: tuple[tuple[int, int], ...]

    def read(self, start: int, stop: int) -> bytes:
        """See ``medsilo.algorithms.tensors.Source``."""
        lengths = [high - low for low, high in self.stretches]
        return b"".join(
            FileSource.read(self, low + begin, low + end)
            for (low, _), begin, end in _cut(self.stretches, lengths, start, stop)
        )


def _cut(stretches: Sequence[T], lengths: Sequence[int], start: int, stop: int) -> Iterator[tuple[T, int, int]]:
    """What of each stretch lies between ``start`` and ``stop`` when they are laid end to end."""
    at = 0
    for stretch, length in zip(stretches, lengths, strict=True):
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            yield stretch, low - at, high - at
        at += length
