"""All messages of the schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def messages_below(message: Any) -> Iterator[Any]:
    yield message
    for nested in message.nested_types:
        yield from messages_below(nested)


def messages_of(file: Any) -> Iterator[Any]:
    for message in file.message_types_by_name.values():
        yield from messages_below(message)
