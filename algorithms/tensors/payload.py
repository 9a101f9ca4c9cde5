"""Tensors in transit: parts (all tensors of one exposure class), payloads, and stacks of many silos' models.

A part's bytes may lie in memory or in a file. A stack reads several silos' parts side by side, block by block,
so that a coordinator never holds a whole model, however many silos there are.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from medsilo.privacy.errors import DataError, RefusedError
from medsilo.privacy.exposure import Exposure

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = {"F32": "<f4", "F64": "<f8"}
BLOCK = 1 << 17
"""Elements of a row that a stack of up to ``_FULL_ROWS`` rows reads at once; fixed, because sums depend on it in their
last bit."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype (safetensors' spelling)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """Raises ``RefusedError`` for a dtype that does not travel."""
        if tensor.dtype not in _DTYPE_NAMES:
            raise RefusedError(f"tensor {name} is {tensor.dtype}; what travels is one of {', '.join(DTYPES)}")
        return cls(name, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype])


class Source(Protocol):
    """Where a part's bytes lie."""

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from ``start`` up to ``stop``; they may be the source's own, so they are not to be changed."""
        ...


class MemorySource:
    """Bytes of tensors in memory, one after the other, without a copy of the whole."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views = [
            memoryview(cast("Any", tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            for tensor in tensors
            if tensor.numel()
        ]
        self._ends = list(itertools.accumulate(len(view) for view in self._views))

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """See ``Source``."""
        pieces = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[index] - len(self._views[index])
            end = min(stop, self._ends[index])
            pieces.append(self._views[index][start - begin : end - begin])
            start = end
            index += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class BufferSource:
    """Bytes ``uint8 [n]`` as they came over the wire; a part's tensors lie in them, without a copy."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._view = memoryview(cast("Any", data.numpy()))

    def read(self, start: int, stop: int) -> memoryview:
        """See ``Source``."""
        return self._view[start:stop]

    def tensor(self, start: int, spec: TensorSpec) -> Tensor | None:
        """The tensor at ``start``; None where its numbers do not lie as the processor wants them."""
        dtype = DTYPES[spec.dtype]
        stretch = self._data[start : start + spec.nbytes]
        if stretch.storage_offset() % dtype.itemsize:
            return None
        return stretch.view(dtype).reshape(spec.shape)


@dataclass(frozen=True)
class FileSource:
    """A stretch of a file, from ``offset``."""

    path: Path
    offset: int

    @cached_property
    def _file(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def read(self, start: int, stop: int) -> bytes:
        """See ``Source``."""
        data = os.pread(self._file, stop - start, self.offset + start)
        if len(data) != stop - start:
            raise DataError(f"{self.path}: ends after {self.offset + start + len(data)} bytes")
        return data

    def __del__(self) -> None:
        if "_file" in self.__dict__:
            os.close(self._file)


@dataclass(frozen=True)
class Part:
    """All tensors of one exposure class, in the order of their bytes (little-endian, row-major)."""

    specs: tuple[TensorSpec, ...]
    source: Source

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Part:
        """A part of tensors in memory."""
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in tensors.items())
        return cls(specs, MemorySource(list(tensors.values())))

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, read into memory; of a ``BufferSource`` the very bytes, which are not to be changed."""
        found = {}
        start = 0
        for spec in self.specs:
            held = self.source.tensor(start, spec) if isinstance(self.source, BufferSource) else None
            found[spec.name] = self._read(start, spec) if held is None else held
            start += spec.nbytes
        return found

    def _read(self, start: int, spec: TensorSpec) -> Tensor:
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(
            self.source.read(start, start + spec.nbytes), dtype=np.uint8
        )
        return tensor

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """The bytes in pieces of at most ``size``."""
        for start in range(0, self.nbytes, size):
            yield self.source.read(start, min(start + size, self.nbytes))

    def not_finite(self) -> str | None:
        """Name of the first tensor that holds NaN or an infinity, if any."""
        start = 0
        for spec in self.specs:
            step = BLOCK * DTYPES[spec.dtype].itemsize
            for begin in range(start, start + spec.nbytes, step):
                if not all_finite(self.source.read(begin, min(begin + step, start + spec.nbytes)), spec.dtype):
                    return spec.name
            start += spec.nbytes
        return None


def all_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Whether whole numbers of a dtype (safetensors' spelling) hold neither NaN nor an infinity."""
    if dtype not in _FLOATS:
        return True
    values = np.frombuffer(data, dtype=_FLOATS[dtype])
    # If the sum is finite, so is every number; only if not (it may have overflowed) is it worth looking closer.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


Payload = Mapping[Exposure, Part]
"""What goes over the wire in one transfer: parts by exposure class."""


def payload_tensors(payload: Payload, classes: Sequence[Exposure]) -> dict[str, Tensor]:
    """All tensors of the given classes that a payload holds, by name."""
    return {
        name: tensor
        for exposure in classes
        if exposure in payload
        for name, tensor in payload[exposure].tensors().items()
    }
