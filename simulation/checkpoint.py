"""A simulation's whole state in one safetensors file: tensors by number, and JSON that says what each is.

The file appears complete or not at all, and holds data only, never code. The JSON is the last tensor, ``state``
(bytes). Tensors are written one after the other, so that a checkpoint costs no second copy of the models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from medsilo.algorithms.method import Memory
from medsilo.algorithms.tensors import DTYPES, MemorySource, Part, Payload, TensorSpec
from medsilo.privacy.errors import DataError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import fsync_folder

_CHUNK = 1 << 20
_KINDS: dict[str, torch.dtype] = {
    **DTYPES,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_HEADER_LIMIT = 100_000_000

Numbers = dict[str, dict[str, int]]
"""Groups of names, each with the number of its tensor."""


class CheckpointWriter:
    """Collects what a checkpoint is to hold; ``write`` writes it."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, list[int], int]] = []
        self._chunks: list[Callable[[], Iterable[bytes | memoryview]]] = []
        self._parts: dict[int, tuple[Part, dict[str, int]]] = {}

    def memory(self, memory: Memory) -> Numbers:
        """Adds what a side remembers."""
        return {
            group: {name: self._tensor(tensor) for name, tensor in state.items()} for group, state in memory.items()
        }

    def payload(self, payload: Payload) -> Numbers:
        """Adds a payload; a part that several payloads share is written once."""
        return {str(exposure): self._part(part) for exposure, part in payload.items()}

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Replaces ``path`` in one step. ``state`` is JSON, with the numbers that were given out."""
        text = json.dumps(state, separators=(",", ":")).encode()
        header: dict[str, Any] = {}
        end = 0
        named = [*((str(number), entry) for number, entry in enumerate(self._entries))]
        for name, (kind, shape, nbytes) in [*named, ("state", ("U8", [len(text)], len(text)))]:
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for chunks in self._chunks:
                for chunk in chunks():
                    file.write(chunk)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        fsync_folder(path.parent)

    def _tensor(self, tensor: Tensor) -> int:
        if tensor.dtype not in _NAMES:
            raise DataError(f"a tensor of type {tensor.dtype} cannot be kept; use one of {', '.join(_KINDS)}")
        nbytes = tensor.numel() * tensor.element_size()
        source = MemorySource([tensor])
        self._entries.append((_NAMES[tensor.dtype], list(tensor.shape), nbytes))
        self._chunks.append(lambda: (source.read(0, nbytes),) if nbytes else ())
        return len(self._entries) - 1

    def _part(self, part: Part) -> dict[str, int]:
        if id(part) not in self._parts:
            first = len(self._entries)
            self._entries += [(spec.dtype, list(spec.shape), spec.nbytes) for spec in part.specs]
            self._chunks.append(lambda: part.chunks(_CHUNK))
            # The part is kept with its numbers: an id is a part's own only as long as the part lives.
            self._parts[id(part)] = (part, {spec.name: first + index for index, spec in enumerate(part.specs)})
        return self._parts[id(part)][1]


class CheckpointReader:
    """A checkpoint's contents, read into memory.

    Raises ``DataError`` for a file that is not a whole checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _HEADER_LIMIT:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(length))
                end = header["state"]["data_offsets"][1]
                if path.stat().st_size != 8 + length + end:
                    raise ValueError(f"it should hold {8 + length + end} bytes, not {path.stat().st_size}")
                self._tensors = []
                for number in range(len(header) - 1):
                    entry = header[str(number)]
                    self._tensors.append(torch.empty(entry["shape"], dtype=_KINDS[entry["dtype"]]))
                    if self._tensors[-1].numel():
                        file.readinto(cast("Any", self._tensors[-1].reshape(-1).view(torch.uint8).numpy()))
                self.state: dict[str, Any] = json.loads(file.read())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise DataError(
                f"{path}: cannot be read as a checkpoint ({error}); delete it, and this run begins anew"
            ) from None

    def memory(self, numbers: Numbers) -> Memory:
        """What a side remembered."""
        return {
            group: {name: self._tensors[number] for name, number in state.items()} for group, state in numbers.items()
        }

    def payload(self, numbers: Numbers) -> Payload:
        """A payload, in memory."""
        found = {}
        for exposure, named in numbers.items():
            tensors = [self._tensors[number] for number in named.values()]
            specs = tuple(TensorSpec.of(name, tensor) for name, tensor in zip(named, tensors, strict=True))
            found[Exposure(exposure)] = Part(specs, MemorySource(tensors))
        return found
