"""The wire schema that a journal keeps, of whatever version it is: which exposure class each field of a message has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .result import EvidenceError
from .signed import decoded

_PREFIX = "EXPOSURE_CLASS_"
_EXPOSURE = 52014
"""Number of the option ``exposure`` in a field's options."""


class StoredSchema:
    """The exposure class of every field of every message of a schema.

    ``stored``: its files (``FileDescriptorProto``), base64. ``sha256``: over these, in their order. Raises
    ``EvidenceError`` for what is no such schema.
    """

    def __init__(self, stored: Sequence[str]) -> None:
        self._names: dict[int, str] = {}
        self._messages: dict[str, dict[str, tuple[str, int]]] = {}
        try:
            files = [decoded(text) for text in stored]
            for file in files:
                self._read(file)
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"the stored schema cannot be read: {error}") from None
        self.sha256 = hashlib.sha256(b"".join(files)).hexdigest()
        self._known: dict[str, dict[str, str]] = {}

    def classes(self, message_type: str, fields: Mapping[str, Any]) -> dict[str, int]:
        """Bytes of each exposure class, from the bytes of each field path.

        Raises ``EvidenceError`` for a field that the schema gives no class.
        """
        known = self._known.setdefault(message_type, {})
        found: dict[str, int] = {}
        for path, count in fields.items():
            name = known.get(path)
            if name is None:
                name = known[path] = self._class(message_type, path)
            if type(count) is not int or count < 1:
                raise EvidenceError(f"field {path} of {message_type} has {count!r:.40} bytes")
            found[name] = found.get(name, 0) + count
        return found

    def _class(self, message_type: str, path: str) -> str:
        at = f"field {path:.200} of {message_type:.200}"
        type_name, number = message_type, 0
        for part in path.split("."):
            message = self._messages.get(type_name)
            if message is None:
                raise EvidenceError(f"{at}: the schema has no message {type_name:.200}")
            if part not in message:
                raise EvidenceError(f"{at} is not in the schema, so its bytes have no exposure class")
            type_name, number = message[part]
        if not (name := self._names.get(number, "")):
            raise EvidenceError(f"{at} has no exposure class that this release knows")
        return name

    def _read(self, file: bytes) -> None:
        """A ``FileDescriptorProto``: its package (2), messages (4) and enumerations (5)."""
        parts = list(_fields(file))
        package = "".join(_text(value) for number, value in parts if number == 2)
        for number, value in parts:
            if number == 4:
                self._add(package, value)
            elif number == 5 and _text(dict(_fields(value)).get(1, b"")) == "ExposureClass":
                for one in (dict(_fields(item)) for tag, item in _fields(value) if tag == 2):
                    name = _text(one[1]).removeprefix(_PREFIX)
                    self._names[one.get(2, 0)] = "" if name == "UNSPECIFIED" else name

    def _add(self, scope: str, message: bytes) -> None:
        """A ``DescriptorProto``: its name (1), fields (2: name 1, type 6, options 8) and nested messages (3)."""
        parts = list(_fields(message))
        name = f"{scope}.{_text(dict(parts)[1])}"
        fields = self._messages[name] = {}
        for number, value in parts:
            if number == 2:
                field = dict(_fields(value))
                options = dict(_fields(field.get(8, b"")))
                fields[_text(field[1])] = _text(field.get(6, b"")).removeprefix("."), options.get(_EXPOSURE, 0)
            elif number == 3:
                self._add(name, value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: numbers, or bytes; raises ``ValueError``."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data) and shift < 70:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise ValueError("a number in it is cut short")

    while at < len(data):
        tag = varint()
        match tag & 7:
            case 0:
                yield tag >> 3, varint()
                continue
            case 2:
                length = varint()
            case wire if wire in (1, 5):
                length = 8 if wire == 1 else 4
            case _:
                raise ValueError("it is no protobuf message")
        if at + length > len(data):
            raise ValueError("a field in it is cut short")
        yield tag >> 3, data[at : at + length]
        at += length


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a name in it is a number")
    return value.decode()
