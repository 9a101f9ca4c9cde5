"""Payloads over the wire: a manifest, then chunks, through the door in either direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from google.protobuf.message import Message

from medsilo.algorithms.tensors.payload import DTYPES, BufferSource, Part, Payload, TensorSpec, all_finite
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import TENSOR_CLASSES, Exposure
from medsilo.protos.medsilo.v1 import tensor_pb2
from medsilo.protos.nonces import nonce

CHUNK = (1 << 20) - 1024
"""Payload bytes of one chunk; the message around it stays below 1 MiB."""
SMALLEST_CHUNK = 1 << 16
"""Each message is a record on either side's disk: a transfer in crumbs would fill it."""
WINDOW = 8
"""Messages that are recorded together: their records share one fsync, before the first of them is sent."""

M = TypeVar("M", bound=Message)
Parts = Mapping[Exposure, Sequence[TensorSpec]]
"""What a transfer holds, by exposure class, in the order of its bytes."""
Release = Callable[[Sequence[Message]], Iterable[bytes]]
"""Lets messages leave: their bytes, once they are recorded (``Door.release``)."""


def manifest(payload: Payload) -> list[tensor_pb2.PartManifest]:
    """Names, shapes and dtypes of a payload."""
    return [
        tensor_pb2.PartManifest(
            exposure_class=exposure.number,
            tensors=[tensor_pb2.TensorSpec(name=s.name, shape=s.shape, dtype=s.dtype) for s in part.specs],
        )
        for exposure, part in payload.items()
    ]


def read_manifest(parts: Sequence[tensor_pb2.PartManifest]) -> dict[Exposure, tuple[TensorSpec, ...]]:
    """The manifest's parts; raises ``RefusedError`` for one that does not hold together."""
    found: dict[Exposure, tuple[TensorSpec, ...]] = {}
    for part in parts:
        exposure = Exposure.from_number(part.exposure_class)
        if exposure not in TENSOR_CLASSES or exposure in found:
            raise RefusedError(f"the manifest names {exposure} twice, or it does not travel as tensors")
        for spec in part.tensors:
            if spec.dtype not in DTYPES:
                raise RefusedError(f"tensor {spec.name} has dtype {spec.dtype!r}; allowed are {', '.join(DTYPES)}")
        found[exposure] = tuple(TensorSpec(s.name, tuple(s.shape), s.dtype) for s in part.tensors)
    return found


def check_parts(found: Parts, expected: Parts) -> None:
    """Raises ``RefusedError`` naming the first part or tensor that is missing, extra or of another shape."""
    for exposure in [*expected, *found]:
        if exposure not in found:
            raise RefusedError(f"{exposure} is missing")
        if exposure not in expected:
            raise RefusedError(f"{exposure} was not asked for")
        have = {spec.name: spec for spec in found[exposure]}
        for spec in expected[exposure]:
            other = have.get(spec.name)
            if other is None:
                raise RefusedError(f"{exposure}: tensor {spec.name} is missing")
            if other != spec:
                raise RefusedError(
                    f"{exposure}: tensor {spec.name} is {other.dtype} {list(other.shape)}; "
                    f"{spec.dtype} {list(spec.shape)} was expected"
                )
        if tuple(found[exposure]) != tuple(expected[exposure]):
            raise RefusedError(f"{exposure}: tensors are not those of the model, in its order")


def check_finite(payload: Payload) -> None:
    """Raises ``RefusedError`` naming the first tensor that holds NaN or an infinity."""
    for exposure, part in payload.items():
        if name := part.not_finite():
            raise RefusedError(f"{exposure}: tensor {name} holds NaN or infinite numbers")


def send(release: Release, header: Message, payload: Payload) -> Iterator[bytes]:
    """The exact bytes of a transfer's messages, which ``release`` records window by window before it hands them out.

    ``header`` is the first message; the others are of its type, each with a ``chunk``.
    """
    window: list[Message] = [header]
    for exposure, part in payload.items():
        for data in part.chunks(CHUNK):
            window.append(chunk_message(type(header), exposure, data, nonce()))
            if len(window) >= WINDOW:
                yield from release(window)
                window.clear()
    if window:
        yield from release(window)


def chunk_message(kind: type[M], exposure: Exposure, data: bytes | memoryview, nonce: bytes) -> M:
    """A stream's message with a chunk of one class."""
    message = kind()
    chunk: tensor_pb2.TensorChunk = message.chunk  # type: ignore[attr-defined]
    chunk.nonce = nonce
    setattr(chunk, exposure.chunk_field, bytes(data))
    return message


class Sink(Protocol):
    """Takes a transfer's bytes in order."""

    def write(self, data: bytes) -> object: ...


class Receiver:
    """Takes the chunks of a transfer in their order and writes their bytes to a sink.

    Numbers are looked at as they pass: NaN and infinities are refused. ``unchecked`` names the parts of mixed
    dtypes, which ``check_finite`` has to look at afterwards.
    """

    def __init__(self, parts: Parts, sink: Sink) -> None:
        self._due = [(exposure, sum(spec.nbytes for spec in specs)) for exposure, specs in parts.items()]
        kinds = {exposure: {spec.dtype for spec in specs} for exposure, specs in parts.items()}
        self._dtype = {exposure: next(iter(dtypes)) for exposure, dtypes in kinds.items() if len(dtypes) == 1}
        self.unchecked = tuple(exposure for exposure, dtypes in kinds.items() if len(dtypes) > 1)
        self._sink = sink

    def take(self, chunk: tensor_pb2.TensorChunk) -> None:
        """Raises ``RefusedError`` for bytes of another class than is due, more than the manifest said, or numbers
        that are not finite."""
        self._skip_empty()
        name = chunk.WhichOneof("data")
        data: bytes = getattr(chunk, name) if name else b""
        if not data:
            raise RefusedError("a chunk without bytes")
        exposure, left = self._due[0] if self._due else (None, 0)
        if exposure is None or name != exposure.chunk_field or len(data) > left:
            raise RefusedError(f"a chunk of {len(data)} bytes of {name} is not what the manifest announced next")
        if dtype := self._dtype.get(exposure):
            if len(data) % DTYPES[dtype].itemsize:
                raise RefusedError(f"{exposure}: a chunk of {len(data)} bytes splits a number of type {dtype}")
            if not all_finite(data, dtype):
                raise RefusedError(f"{exposure}: holds NaN or infinite numbers")
        if len(data) < min(SMALLEST_CHUNK, left):
            raise RefusedError(
                f"{exposure}: a chunk of {len(data)} bytes; only the last may have fewer than {SMALLEST_CHUNK}"
            )
        self._sink.write(data)
        self._due[0] = (exposure, left - len(data))

    def finish(self) -> None:
        """Raises ``RefusedError`` if the transfer ended early."""
        self._skip_empty()
        if self._due:
            exposure, missing = self._due[0]
            raise RefusedError(f"the stream ended {missing} bytes short in {exposure}")

    def _skip_empty(self) -> None:
        while self._due and self._due[0][1] == 0:
            self._due.pop(0)


class MemorySink:
    """Keeps a transfer's bytes in memory."""

    def __init__(self, parts: Parts) -> None:
        """Raises ``RefusedError`` if there is no memory for what is announced."""
        self._parts = parts
        self._end = 0
        size = sum(s.nbytes for specs in parts.values() for s in specs)
        try:
            self._data = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            raise RefusedError(f"{size} bytes are announced, which is more than this machine can hold") from None
        self._view = memoryview(cast("Any", self._data.numpy()))

    def write(self, data: bytes) -> None:
        """Appends bytes; there is room for exactly what the manifest announces."""
        self._view[self._end : self._end + len(data)] = data
        self._end += len(data)

    def payload(self) -> Payload:
        """The transfer's parts."""
        found = {}
        start = 0
        for exposure, specs in self._parts.items():
            size = sum(spec.nbytes for spec in specs)
            found[exposure] = Part(tuple(specs), BufferSource(self._data[start : start + size]))
            start += size
        return found
