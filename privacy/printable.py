"""Text from elsewhere as it may be shown: it cannot move a cursor, colour a terminal, turn the direction of writing
or begin a line of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import AfterValidator

from medsilo.privacy.errors import RefusedError

_LONGEST = 2000
_FORMULA = "=+-@"


def printable(text: str, *, lines: bool = False) -> str:
    """``text`` with every character that is not to be seen (control, format, surrogate, unassigned; any space but the
    plain one) as its escape, such as ``\\x1b``. ``lines``: line breaks, tabs and no-break spaces (``1 000``)
    stay, for our own words."""
    kept = "\n\t\N{NO-BREAK SPACE}" if lines else ""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)


def cell(text: str) -> str:
    """``text`` as a table's cell in CSV: printable, and behind an apostrophe where a spreadsheet would take it for a
    formula (OWASP, "CSV Injection")."""
    shown = printable(text)
    return f"'{shown}" if len(shown) > 1 and shown[0] in _FORMULA else shown


def from_the_other_side(text: str) -> str:
    """What the other side says in words: on one line, printable, and at most 2000 characters of it."""
    shown = printable(text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown} …"


def check_texts(message: Message) -> None:
    """Raises ``RefusedError``, naming the field, if a text in a message could do more than be read."""
    for path, text in _texts(message, ""):
        if not text.isprintable():
            raise RefusedError(
                f"{message.DESCRIPTOR.full_name}.{path} holds control characters: {printable(text)[:100]}"
            )


def _texts(message: Message, prefix: str) -> Iterator[tuple[str, str]]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            yield from ((path, text) for text in ([value] if isinstance(value, str) else value))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in [value] if isinstance(value, Message) else value:
                yield from _texts(child, f"{path}.")


def _checked(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{printable(text)[:100]!r} holds control characters")
    return text


Printable = Annotated[str, AfterValidator(_checked)]
"""A text in a document that both sides read."""
