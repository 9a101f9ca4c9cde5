"""Many silos' models side by side: combined and transformed block by block, in bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from medsilo.algorithms.tensors.payload import BLOCK, MemorySource, Part, Payload, TensorSpec
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure

_FULL_ROWS = 32


_THREADS = min(4, os.cpu_count() or 1)


T = TypeVar("T")


def columns_of(rows: int) -> int:
    """Elements of each of so many rows that are read at once: of more rows fewer, so that a block's memory is bounded
    (32 MiB in float64) however many silos there are."""
    return min(BLOCK, _FULL_ROWS * BLOCK // max(1, rows))


class Stack:
    """N rows of D float32 numbers: silos' parts, each flattened and joined, read block by block.

    Raises ``RefusedError`` if rows differ in names or shapes, or hold anything but float32.
    """

    def __init__(self, rows: Sequence[Sequence[Part]]) -> None:
        self._rows = [[part for part in row if part.nbytes] for row in rows]
        layouts = {tuple(spec for part in row for spec in part.specs) for row in rows}
        if len(layouts) != 1:
            raise RefusedError("models of different shapes cannot be combined")
        self.specs: tuple[TensorSpec, ...] = layouts.pop()
        if any(spec.dtype != "F32" for spec in self.specs):
            raise RefusedError("only float32 tensors can be combined")
        self.shape = (len(rows), sum(spec.nbytes for spec in self.specs) // 4)
        self._columns = columns_of(len(rows))

    @classmethod
    def of(cls, payloads: Sequence[Payload], classes: Sequence[Exposure]) -> Stack:
        """A stack of the given classes' parts, one row a payload."""
        return cls([[payload[exposure] for exposure in classes if exposure in payload] for payload in payloads])

    def map(self, function: Callable[[Tensor], T], *, exact: bool = True) -> Iterator[T]:
        """A function of each block of columns, in order: ``Tensor[N, b]`` in float64, b ≤ ``columns_of(N)``; where it
        need not be ``exact``, in float32, which takes half the time.

        Blocks are read and worked on in a few threads; as each is worked on by itself, results do not depend on how
        many there are.
        """
        waiting: deque[Future[T]] = deque()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="stack") as pool:
            for start in range(0, self.shape[1], self._columns):
                waiting.append(pool.submit(self._apply, function, start, exact))
                if len(waiting) > 2 * _THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _apply(self, function: Callable[[Tensor], T], start: int, exact: bool) -> T:
        return function(self._block(start, exact))

    def _block(self, start: int, exact: bool) -> Tensor:
        stop = min(start + self._columns, self.shape[1])
        block = np.empty((len(self._rows), stop - start), dtype=np.float64 if exact else np.float32)
        for index, row in enumerate(self._rows):
            block[index] = np.frombuffer(_read_across(row, 4 * start, 4 * stop), dtype="<f4")
        return torch.from_numpy(block)


def _read_across(parts: Sequence[Part], start: int, stop: int) -> bytes | memoryview:
    pieces = []
    begin = 0
    for part in parts:
        low, high = max(start, begin), min(stop, begin + part.nbytes)
        if low < high:
            pieces.append(part.source.read(low - begin, high - begin))
        begin += part.nbytes
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Workspace(Protocol):
    """Where a coordinator's results are written: memory in simulation, files in the daemon."""

    def write(self, specs: tuple[TensorSpec, ...], rows: int, blocks: Iterator[Tensor]) -> list[Part]:
        """Writes ``rows`` parts from consecutive blocks ``Tensor[rows, b]``, float32."""
        ...


class MemoryWorkspace:
    """Keeps results in memory."""

    def write(self, specs: tuple[TensorSpec, ...], rows: int, blocks: Iterator[Tensor]) -> list[Part]:
        """See ``Workspace``."""
        written = list(blocks)
        whole = torch.cat(written, dim=1) if written else torch.empty(rows, 0)
        return [Part(specs, MemorySource([row])) for row in whole]


def combine(stack: Stack, weights: Tensor, workspace: Workspace) -> list[Part]:
    """Linear combinations of a stack's rows, in float64.

    Args:
        stack: N rows.
        weights: ``Tensor[K, N]``; result k is the sum over rows of ``weights[k, row] * row``.
        workspace: where the K results go.
    """
    weights = weights.to(torch.float64)
    return transform(stack, lambda block: weights @ block, len(weights), workspace)


def transform(stack: Stack, function: Callable[[Tensor], Tensor], rows: int, workspace: Workspace) -> list[Part]:
    """Applies a column-wise function to every block: ``Tensor[N, b] -> Tensor[rows, b]``, float64."""
    return workspace.write(stack.specs, rows, stack.map(lambda block: function(block).to(torch.float32)))
