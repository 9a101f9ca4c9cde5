"""Payloads as safetensors files: written as their bytes arrive, read back without loading them.

Tensors are stored under ``CLASS/name``. A file appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from medsilo.algorithms.tensors.payload import FileSource, Part, Payload, TensorSpec
from medsilo.privacy.errors import DataError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.files.durable import fsync_folder

_HEADER_LIMIT = 100_000_000
PROCESS = secrets.token_hex(4)
"""In the names of files that another process on the same folder must not write over."""


class Spares:
    """Files that are no longer needed, to be written over.

    Writing over a file costs a fraction of writing a new one: its pages are in memory already. Holds at most
    ``most`` files; more are removed.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [path for path in folder.iterdir() if path.is_file()]

    def give(self, path: Path) -> None:
        """Takes a file out of use."""
        with self._lock:
            if len(self._files) >= self._most:
                path.unlink()
                return
            spare = self._folder / f"{os.getpid()}-{next(_numbers)}"
            path.replace(spare)
            self._files.append(spare)

    def take(self, target: Path) -> bool:
        """Moves a spare file to ``target``; False if there is none."""
        with self._lock:
            while self._files:
                # Another process on the same folder, which has lost its lease, may have taken it before.
                with contextlib.suppress(FileNotFoundError):
                    self._files.pop().replace(target)
                    return True
            return False


class PayloadWriter:
    """Writes one safetensors file; leaving the ``with`` block without ``commit`` removes what was written."""

    def __init__(
        self, path: Path, parts: Mapping[Exposure, Sequence[TensorSpec]], *, spares: Spares | None = None
    ) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}.partial")
        header = _header((f"{exposure}/{spec.name}", spec) for exposure, specs in parts.items() for spec in specs)
        path.parent.mkdir(parents=True, exist_ok=True)
        reused = spares is not None and spares.take(self._partial)
        self._file = self._partial.open("r+b" if reused else "wb", buffering=0)
        self.start = len(header)
        self._parts = parts
        self.write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._partial.unlink()

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def payload(self) -> Payload:
        """The parts as far as they are written, for a check before ``commit``."""
        found = {}
        start = self.start
        for exposure, specs in self._parts.items():
            part = Part(tuple(specs), FileSource(self._partial, start))
            found[exposure] = part
            start += part.nbytes
        return found

    def commit(self) -> None:
        """Makes the file durable and gives it its name."""
        self._file.truncate()
        os.fsync(self._file.fileno())
        self._partial.replace(self.path)
        fsync_folder(self.path.parent)


_numbers = itertools.count()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors to a safetensors file, durably, without a copy of them all in memory."""
    part = Part.of(tensors)
    path.unlink(missing_ok=True)  # not written over: it may be mapped, or have another name
    with path.open("wb") as file:
        file.write(_header((spec.name, spec) for spec in part.specs))
        for chunk in part.chunks(1 << 20):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _header(named: Iterable[tuple[str, TensorSpec]]) -> bytes:
    """The beginning of a safetensors file with these tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, spec in named:
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_payload(path: Path, payload: Payload) -> None:
    """Writes a payload's parts to one file."""
    with PayloadWriter(path, {exposure: part.specs for exposure, part in payload.items()}) as writer:
        for part in payload.values():
            for chunk in part.chunks(1 << 20):
                writer.write(chunk)
        writer.commit()


def read_payload(path: Path) -> Payload:
    """A file's parts; their bytes stay on disk until they are read.

    Raises ``DataError`` for a file that is missing or is not one of ours.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        found: dict[Exposure, list[TensorSpec]] = {}
        starts: dict[Exposure, int] = {}
        end = 0
        for key, entry in header.items():
            name, exposure = key.partition("/")[2], Exposure(key.partition("/")[0])
            spec = TensorSpec(name, tuple(entry["shape"]), entry["dtype"])
            if not all(type(size) is int and size >= 0 for size in spec.shape):
                raise ValueError(f"tensor {name} has the shape {spec.shape}")
            if entry["data_offsets"] != [end, end + spec.nbytes]:
                raise ValueError(f"tensor {name} does not follow the one before it")
            found.setdefault(exposure, []).append(spec)
            starts.setdefault(exposure, 8 + length + end)
            end += spec.nbytes
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"it should hold {8 + length + end} bytes, not {path.stat().st_size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a payload: {error}") from None
    return {exposure: Part(tuple(specs), FileSource(path, starts[exposure])) for exposure, specs in found.items()}


class FileWorkspace:
    """Writes a coordinator's results to files of one folder, a row a file."""

    def __init__(self, folder: Path, spares: Spares) -> None:
        self._folder = folder
        self._spares = spares

    def write(self, specs: tuple[TensorSpec, ...], rows: int, blocks: Iterator[Tensor]) -> list[Part]:
        """See ``medsilo.algorithms.tensors.Workspace``."""
        paths = [self._folder / f"result-{PROCESS}-{next(_numbers)}-{row}.safetensors" for row in range(rows)]
        with contextlib.ExitStack() as stack:
            parts = {Exposure.PEER_DERIVED: specs}
            writers = [stack.enter_context(PayloadWriter(path, parts, spares=self._spares)) for path in paths]
            for block in blocks:
                values: np.ndarray = block.numpy()
                for writer, row in zip(writers, values, strict=True):
                    writer.write(memoryview(row).cast("B"))
            # The disk takes them together faster than one after the other.
            with ThreadPoolExecutor(max(1, len(writers))) as pool:
                list(pool.map(PayloadWriter.commit, writers))
        return [Part(specs, FileSource(path, writer.start)) for path, writer in zip(paths, writers, strict=True)]
