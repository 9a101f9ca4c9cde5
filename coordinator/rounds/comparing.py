"""Updates beside what silos were sent, read block by block: the inner products of all silos' changes.

Models alone are looked at: the change of each tensor since the silo was sent it for this round; if it was not (a
classifier that stays with the silo), since the silo's last update; at first, since the starting model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medsilo.algorithms.tensors import Part, Payload, Source, Stack, TensorSpec
from medsilo.privacy.exposure import MODEL, Exposure

_MODELS = (Exposure.PEER_DERIVED, *MODEL, Exposure.INITIAL_MODEL)


@dataclass(frozen=True)
class _Stretch:
    """A source from ``start``."""

    source: Source
    start: int

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """See ``Source``."""
        return self.source.read(self.start + start, self.start + stop)


@dataclass(frozen=True)
class Beginning:
    """Where a silo's round began: what it was sent, its own update before, the starting model; each as far as there is
    one, and the first that holds a tensor counts."""

    payloads: tuple[Payload, ...]


def norm_of_change(update: Payload, beginning: Beginning) -> float:
    """Euclidean norm of an update's change; 0 for an update without a model."""
    return math.sqrt(max(0.0, products_of_changes({"": update}, {"": beginning})[0][0]))


def products_of_changes(updates: Mapping[str, Payload], beginnings: Mapping[str, Beginning]) -> list[list[float]]:
    """The inner products ``[N][N]`` of N silos' changes, in the order of ``updates``, to some four digits; 0 for
    updates without models. All must hold the same tensors."""
    rows: list[list[Part]] = []
    starts: list[list[Part]] = []
    which: list[int] = []
    places: dict[tuple[tuple[int, int], ...], int] = {}
    for silo, update in updates.items():
        specs = [s for e in MODEL if e in update for s in update[e].specs if s.dtype == "F32"]
        start = _find(specs, beginnings[silo].payloads)
        rows.append(_find(specs, (update,)))
        # Silos that were sent the same have one row in common.
        key = tuple((id(part.source.source), part.source.start) for part in start if isinstance(part.source, _Stretch))
        if key not in places:
            places[key] = len(starts)
            starts.append(start)
        which.append(places[key])
    stack = Stack([*rows, *starts])
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)

    def products(block: Tensor) -> Tensor:
        change = block[: len(rows)]
        for index, start in enumerate(which):
            change[index] -= block[len(rows) + start]
        found = (change @ change.T).to(torch.float64)
        if not found.isfinite().all():  # numbers near float32's largest, which do not come from training
            change = torch.nan_to_num(change).to(torch.float64)
            found = change @ change.T
        return found

    for part in stack.map(products, exact=False):
        total += part
    found: list[list[float]] = total.tolist()
    return found


def _find(specs: Sequence[TensorSpec], payloads: Sequence[Payload]) -> list[Part]:
    """These tensors as parts, stretches that lie side by side together."""
    where: dict[TensorSpec, tuple[Source, int]] = {}
    for payload in payloads:
        for exposure in _MODELS:
            if (part := payload.get(exposure)) is None:
                continue
            start = 0
            for spec in part.specs:
                where.setdefault(spec, (part.source, start))
                start += spec.nbytes
    found: list[tuple[list[TensorSpec], Source, int, int]] = []
    for spec in specs:
        source, start = where[spec]
        if found and found[-1][1] is source and found[-1][3] == start:
            before, _, first, _ = found.pop()
            found.append(([*before, spec], source, first, start + spec.nbytes))
        else:
            found.append(([spec], source, start, start + spec.nbytes))
    return [Part(tuple(joined), _Stretch(source, first)) for joined, source, first, _ in found]
