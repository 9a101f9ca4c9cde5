"""A Flower reply, object by object: which of its bytes are of which exposure class, or why it may not leave.

A reply travels as objects named by the SHA-256 of their content, parents after children: a ``Message`` holds a
``RecordDict``, this holds records, an ``ArrayRecord`` holds ``Array``s, and these hold their bytes in ``ArrayChunk``s.
An object's content is its kind, its children's names and its body's length, a zero byte, and the body. So only a whole
reply tells what its bytes are, and none is sent before it has been read as a whole.

What is read here has one form only: what could be written in two ways could carry something between the lines.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medsilo.privacy.door.foreign_door import ForeignSchema
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.exposure import Exposure
from medsilo.silo.flower.release import PACKAGE

_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HEAD = re.compile(rb"(\w+) ([0-9a-f,]*) (0|[1-9][0-9]*)", re.ASCII)
_NUMERIC = "biufc"
_SERIALISED = "numpy.ndarray"
_MOST_DIMENSIONS = 64
Declarations = Mapping[str, Mapping[str, Exposure]]


@dataclass(frozen=True)
class _Object:
    kind: str
    children: tuple[str, ...]
    body: bytes
    head: int
    """Bytes before the body."""


@dataclass
class Reply:
    """A reply that may leave, as far as its declarations go.

    ``parts``: of each object, by its name, how many of its bytes are of which class, children before parents.
    ``tensors``: its arrays as the journal has them. ``error``: whether it tells of an error, and holds nothing else.
    """

    parts: dict[str, dict[Exposure, int]] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    error: bool = False

    @property
    def classes(self) -> set[Exposure]:
        """All of its classes."""
        return {exposure for parts in self.parts.values() for exposure in parts} | {
            Exposure(tensor["class"]) for tensor in self.tensors
        }


def object_id(content: bytes) -> str:
    """An object's name."""
    return hashlib.sha256(content).hexdigest()


def is_object_id(text: str) -> bool:
    """Whether it has the form of an object's name."""
    return _ID.fullmatch(text) is not None


def tree_ids(tree: Any) -> list[str]:
    """The names in an ``ObjectTree``, children before parents, each once."""
    found: dict[str, None] = {}

    def walk(node: Any) -> None:
        for child in node.children:
            walk(child)
        found.setdefault(node.object_id)

    walk(tree)
    return list(found)


def message_object(schema: ForeignSchema, metadata: Any, error: Any) -> bytes:
    """The content of a ``Message`` that tells of an error."""
    message = schema.make(f"{PACKAGE}.Message")
    message.metadata.CopyFrom(metadata)
    message.metadata.message_id = ""
    message.error.CopyFrom(error)
    body: bytes = message.SerializeToString(deterministic=True)
    return b"Message  %d\0" % len(body) + body


class ReplyReader:
    """Reads one reply.

    Args:
        contents: the objects by name, whose names have been checked.
        tree: what was announced (an ``ObjectTree``).
        metadata: the announced message's.
    """

    def __init__(
        self, schema: ForeignSchema, declared: Declarations, contents: Mapping[str, bytes], tree: Any, metadata: Any
    ) -> None:
        self._schema = schema
        self._declared = declared
        self._contents = contents
        self._tree = tree
        self._metadata = metadata
        self._reply = Reply()

    def read(self) -> Reply:
        """Raises ``RefusedError`` saying what is not declared or has no known form, and how to declare it."""
        root = self._tree.object_id
        message = self._open(root, "Message")
        self._check_message(message)
        if message.children:
            (records,) = self._children(message, 1)
            self._read_records(records)
        self._note(root, message, {})
        if set(self._reply.parts) != set(self._contents):
            raise RefusedError("it holds objects that are no part of it")
        self._check_tree(self._tree)
        self._reply.error = not message.children
        return self._reply

    def _check_message(self, found: _Object) -> None:
        message = self._parse(found, "Message")
        if message.HasField("content") or message.HasField("error") == bool(found.children):
            raise RefusedError("its message holds neither records nor an error, or both")
        expected = self._schema.make(f"{PACKAGE}.Metadata")
        expected.CopyFrom(self._metadata)
        expected.message_id = ""
        if message.metadata != expected or self._metadata.message_id != self._tree.object_id:
            raise RefusedError("its message is not the one that was announced")

    def _read_records(self, name: str) -> None:
        records = self._open(name, "RecordDict")
        for record, child in self._references(records).items():
            found = self._open(child)
            match found.kind:
                case "ArrayRecord":
                    self._read_arrays(record, child, found)
                case "MetricRecord" | "ConfigRecord":
                    self._read_values(record, child, found)
                case kind:
                    raise RefusedError(f"record {record!r} is of the unknown kind {kind}")
        self._note(name, records, {Exposure.PROTOCOL: len(records.body)})

    def _read_arrays(self, record: str, name: str, found: _Object) -> None:
        for array, child in self._references(found).items():
            exposure = self._class("array", record, array)
            dtype, shape = self._read_array(f"array {array!r} of record {record!r}", child, exposure)
            tensor = {"class": exposure.value, "name": f"{record}/{array}", "shape": shape, "dtype": dtype}
            self._reply.tensors.append(tensor)
        self._note(name, found, {Exposure.PROTOCOL: len(found.body)})

    def _read_array(self, what: str, name: str, exposure: Exposure) -> tuple[str, list[int]]:
        array = self._open(name, "Array")
        header = _json(array, what)
        indexes: list[int] = header.get("arraychunk_ids") or []
        if header.keys() != {"dtype", "shape", "stype", "arraychunk_ids"} or not _whole_numbers(indexes):
            raise RefusedError(f"{what} has no description of a known form")
        if list(dict.fromkeys(indexes)) != list(range(len(array.children))):
            raise RefusedError(f"{what} does not use its parts in their order")
        chunks = {child: self._open(child, "ArrayChunk") for child in array.children}
        if any(chunk.children for chunk in chunks.values()):
            raise RefusedError(f"{what} has parts that have parts")
        data = b"".join(chunks[array.children[index]].body for index in indexes)
        dtype, shape = _check_npy(what, data)
        if (header["stype"], header["dtype"], header["shape"]) != (_SERIALISED, dtype, shape):
            raise RefusedError(f"{what} is described as {header['dtype']} {header['shape']}, and is {dtype} {shape}")
        for child, chunk in chunks.items():
            self._note(child, chunk, {exposure: len(chunk.body)})
        self._note(name, array, {Exposure.PROTOCOL: len(array.body)})
        return dtype, shape

    def _read_values(self, record: str, name: str, found: _Object) -> None:
        if found.children:
            raise RefusedError(f"record {record!r} has parts")
        parts: dict[Exposure, int] = {}
        what = "metric" if found.kind == "MetricRecord" else "configuration value"
        for item in self._parse(found, found.kind).items:
            exposure = self._class(what, record, item.key)
            kind = item.value.WhichOneof("value")
            if kind is None or kind.startswith(("string", "bytes")):
                raise RefusedError(
                    f"{what} {item.key!r} of record {record!r} is {'text' if kind else 'empty'}: only numbers can be "
                    "attributed, so the app has to leave it out"
                )
            length = item.ByteSize()
            parts[exposure] = parts.get(exposure, 0) + 1 + _varint_bytes(length) + length
        self._note(name, found, parts)

    def _class(self, what: str, record: str, name: str) -> Exposure:
        declared = self._declared.get(record, {})
        if fitting := [pattern for pattern in declared if fnmatch.fnmatchcase(name, pattern)]:
            return declared[max(fitting, key=len)]
        raise RefusedError(
            f"the {what} {name!r} of record {record!r} is not declared. If the hospital agrees that it leaves, it says "
            f"so under `flower: records: {record}:` with a line `{name}: CLASS`, and in the consent; if not, the app "
            "has to leave it out"
        )

    def _open(self, name: str, kind: str | None = None) -> _Object:
        content = self._contents.get(name)
        if content is None:
            raise RefusedError(f"its part {name[:16]}… was not announced")
        head, zero, body = content.partition(b"\0")
        match = _HEAD.fullmatch(head)
        if match is None or not zero or int(match[3]) != len(body):
            raise RefusedError(f"its part {name[:16]}… is in no known form")
        children = tuple(match[2].decode().split(",")) if match[2] else ()
        if len(set(children)) < len(children) or not all(map(is_object_id, children)):
            raise RefusedError(f"its part {name[:16]}… names its own parts in no known form")
        found = _Object(match[1].decode(), children, body, len(head) + 1)
        if kind is not None and found.kind != kind:
            raise RefusedError(f"its part {name[:16]}… is of the kind {found.kind}; {kind} was due")
        return found

    def _children(self, found: _Object, count: int) -> tuple[str, ...]:
        if len(found.children) != count:
            raise RefusedError(f"its {found.kind} has {len(found.children)} parts; {count} were due")
        return found.children

    def _references(self, found: _Object) -> dict[str, str]:
        """The children of an object by the names that it gives them."""
        names = _json(found, found.kind)
        if not all(isinstance(child, str) for child in names.values()):
            raise RefusedError(f"its {found.kind} is in no known form")
        if tuple(dict.fromkeys(names.values())) != found.children:
            raise RefusedError(f"its {found.kind} names other parts than it has")
        return names

    def _parse(self, found: _Object, kind: str) -> Any:
        message, plain = (self._schema.make(f"{PACKAGE}.{kind}") for _ in range(2))
        try:
            message.ParseFromString(found.body)
        except ValueError:  # protobuf's DecodeError is one
            raise RefusedError(f"its {found.kind} is in no known form") from None
        plain.CopyFrom(message)
        plain.DiscardUnknownFields()
        if plain.SerializeToString(deterministic=True) != found.body:
            raise RefusedError(f"its {found.kind} holds fields that the schema does not know, or is written unusually")
        return message

    def _note(self, name: str, found: _Object, body: Mapping[Exposure, int]) -> None:
        """Attributes an object's bytes; one that stands in several places is sent once, as it was found first."""
        if name in self._reply.parts:
            return
        if found.kind == "Message":
            body = {Exposure.PROTOCOL: len(found.body)}
        parts = {Exposure.PROTOCOL: found.head}
        for exposure, count in body.items():
            parts[exposure] = parts.get(exposure, 0) + count
        if sum(parts.values()) != found.head + len(found.body):
            raise RefusedError(f"not all bytes of its {found.kind} have a class")
        self._reply.parts[name] = parts

    def _check_tree(self, tree: Any) -> None:
        """What was announced is what came, at every place."""
        if tuple(child.object_id for child in tree.children) != self._open(tree.object_id).children:
            raise RefusedError("it has other parts than were announced")
        for child in tree.children:
            self._check_tree(child)


def _json(found: _Object, what: str) -> dict[str, Any]:
    try:
        content = json.loads(found.body)
        same = json.dumps(content).encode() == found.body
    except (ValueError, RecursionError):
        same = False
    if not same or not isinstance(content, dict):
        raise RefusedError(f"the description of {what} is in no known form")
    return content


def _check_npy(what: str, data: bytes) -> tuple[str, list[int]]:
    """Number format and shape of an array in NumPy's ``.npy`` form; it is read, and nothing in it is run."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the form")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=1000)
        start = file.tell()
        if dtype.kind not in _NUMERIC or dtype.hasobject or len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"it holds {dtype}, not numbers")
        again = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            again, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
        )
        if again.getvalue() != data[:start]:
            raise ValueError("its header is written unusually")
        if len(data) - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data) - start} bytes do not make {dtype} {list(shape)}")
    except (ValueError, SyntaxError, TypeError, OverflowError) as error:
        raise RefusedError(f"{what} is not an array of numbers in NumPy's form ({error!s:.200})") from None
    return dtype.name, list(shape)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
