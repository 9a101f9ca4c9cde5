"""The schema that a journal's messages were attributed with, as the journal keeps it: of whatever version it is."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from medsilo.privacy.errors import JournalError
from medsilo.privacy.exposure import Exposure
from medsilo.protos.medsilo.v1 import exposure_pb2

_PREFIX = "EXPOSURE_CLASS_"


class StoredSchema:
    """The exposure class of every field of every message of a schema.

    ``stored``: its files (``FileDescriptorProto``), base64. ``sha256``: over these, in their order. Raises
    ``JournalError`` for what is no such schema.
    """

    def __init__(self, stored: Sequence[str]) -> None:
        try:
            files = [base64.b64decode(text, validate=True) for text in stored]
            protos = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
            self._names = {
                value.number: value.name.removeprefix(_PREFIX)
                for file in protos
                for enum in file.enum_type
                if enum.name == "ExposureClass"
                for value in enum.value
            }
        except (ValueError, TypeError, DecodeError) as error:
            # Text that is not UTF-8 comes out of protobuf as bytes, and makes a TypeError here.
            raise JournalError(f"the stored schema cannot be read: {error}") from None
        self.sha256 = hashlib.sha256(b"".join(files)).hexdigest()
        self._messages: dict[str, descriptor_pb2.DescriptorProto] = {}
        for file in protos:
            self._add(file.package, file.message_type)
        self._known: dict[str, dict[str, str]] = {}
        self._exposures: dict[tuple[str, str], Exposure] = {}

    def _add(self, scope: str, messages: Iterable[descriptor_pb2.DescriptorProto]) -> None:
        for message in messages:
            self._messages[f"{scope}.{message.name}"] = message
            self._add(f"{scope}.{message.name}", message.nested_type)

    def exposure(self, message_type: str, path: str) -> Exposure:
        """The class of a field path; raises ``JournalError`` if the schema gives it none."""
        found = self._exposures.get((message_type, path))
        if found is None:
            (name,) = self.classes(message_type, {path: 1})
            found = self._exposures[message_type, path] = Exposure(name)
        return found

    def classes(self, message_type: str, fields: Mapping[str, Any]) -> dict[str, int]:
        """Bytes of each exposure class, from the bytes of each field path.

        Raises ``JournalError`` for a field that the schema gives no class.
        """
        known = self._known.setdefault(message_type, {})
        found: dict[str, int] = {}
        for path, count in fields.items():
            name = known.get(path)
            if name is None:
                try:
                    name = known[path] = self._class(message_type, path)
                except TypeError:  # as above: a type's name that is not UTF-8
                    raise JournalError(f"field {path:.200} of {message_type:.200}: its type has no name") from None
            if type(count) is not int or count < 1:
                raise JournalError(f"field {path} of {message_type} has {count!r:.40} bytes")
            found[name] = found.get(name, 0) + count
        return found

    def _class(self, message_type: str, path: str) -> str:
        at = f"field {path:.200} of {message_type:.200}"
        fields: Mapping[str, descriptor_pb2.FieldDescriptorProto] = {}
        type_name, field = message_type, None
        for part in path.split("."):
            message = self._messages.get(type_name)
            if message is None:
                raise JournalError(f"{at}: the schema has no message {type_name:.200}")
            fields = {item.name: item for item in message.field}
            field = fields.get(part)
            if field is None:
                raise JournalError(f"{at} is not in the schema, so its bytes have no exposure class")
            type_name = field.type_name.removeprefix(".")
        assert field is not None
        name = self._names.get(field.options.Extensions[exposure_pb2.exposure], "")  # type: ignore[index]
        if name not in Exposure.__members__:
            raise JournalError(f"{at} has no exposure class that this release knows")
        return name
