"""The evidence bundle's file, read line by line: a header, and the records exactly as they were signed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from .merkle import perfect_subtrees
from .result import UnreadableError

_LONGEST_LINE = 16 << 20
_HEX32 = re.compile(r"[0-9a-f]{64}")
Subtree = tuple[int, bytes]
"""A perfect subtree of 2^level leaves, of which only the root is told: level and root."""


@dataclass(frozen=True)
class Header:
    """What a bundle says before its records. ``size``: records of the journal that ``checkpoint`` covers; ``first``,
    ``count``: those that are here; ``before``, ``behind``: what stands for the others. Of a range, ``public_key`` is
    the key that signed the checkpoint, and ``schemas`` those of its messages that stand before it."""

    party: str
    federation: str
    origin: str
    size: int
    first: int
    count: int
    before: tuple[Subtree, ...]
    behind: tuple[Subtree, ...]
    checkpoint: str
    public_key: str | None
    schemas: tuple[tuple[str, ...], ...]

    @property
    def whole(self) -> bool:
        """Whether every record of the journal is here."""
        return self.first == 0 and self.count == self.size

    def check(self) -> None:
        """Raises ``ValueError`` unless its parts make up the journal, each in the one way that there is."""
        end = self.first + self.count
        parts = ((self.before, 0, self.first), (self.behind, end, self.size))
        if end > self.size or any(
            [level for level, _ in subtrees] != [level for _, level in perfect_subtrees(*span)]
            for subtrees, *span in parts
        ):
            raise ValueError("its parts do not make up the journal")
        if self.whole != (self.public_key is None) or (self.whole and self.schemas):
            raise ValueError("a range names its key and schemas, a whole journal has them in its records")


def open_bundle(path: Path) -> tuple[Header, Iterator[bytes]]:
    """A bundle's header, and its records' lines; raises ``UnreadableError`` for anything else."""
    try:
        lines = _lines(path)
        content = next(lines).removeprefix(b'"header":').removesuffix(b",")
        held = json.loads(content)
        wrong = [name for name, good in _HEADER.items() if name not in held or not good(held[name])]
        if wrong or len(held) != len(_HEADER):
            what = wrong[0] if wrong else "it"
            raise UnreadableError(f"{path}: is not an evidence bundle: header.{what} is not in its form")
        if rfc8785.dumps(held) != content:
            raise ValueError("not canonical")
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError, StopIteration):
        raise UnreadableError(f"{path}: is not an evidence bundle as `audit export` writes it") from None
    del held["v"]
    for name in ("before", "behind"):
        held[name] = tuple((part["level"], bytes.fromhex(part["root"])) for part in held[name])
    held["schemas"] = tuple(map(tuple, held["schemas"]))
    return Header(**held), lines


def _lines(path: Path) -> Iterator[bytes]:
    """The header's line, then the records' lines; the frame around them is checked."""

    def fail(what: str) -> UnreadableError:
        return UnreadableError(f"{path}: {what}; a bundle is read as `audit export` wrote it, line by line")

    with path.open("rb", buffering=1 << 18) as file:

        def line() -> bytes:
            found = file.readline(_LONGEST_LINE)
            if not found.endswith(b"\n"):
                raise fail("is cut off, or has a line that is too long")
            return found[:-1]

        if line() != b"{":
            raise fail("does not begin as a bundle")
        header = line()
        if not header.startswith(b'"header":{') or not header.endswith(b"},"):
            raise fail("has no header")
        yield header
        if line() != b'"records":[':
            raise fail("has no records")
        more = True
        while more:
            record = line()
            more = record.endswith(b",")
            yield record[:-1] if more else record
        if line() != b"]}" or file.read(1):
            raise fail("does not end as a bundle")


def _number(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**53


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _key(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _HEX32.fullmatch(value) is not None)


def _subtrees(most: int) -> Callable[[Any], bool]:
    def good(part: Any) -> bool:
        form = isinstance(part, dict) and set(part) == {"level", "root"}
        return (
            form
            and type(part["level"]) is int
            and 0 <= part["level"] <= 62
            and bool(part["root"])
            and _key(part["root"])
        )

    return lambda value: isinstance(value, list) and len(value) <= most and all(map(good, value))


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(files, list) and all(map(_text, files)) for files in value)


_HEADER: Mapping[str, Callable[[Any], bool]] = {
    "v": lambda value: type(value) is int and value == 1,
    "party": _text,
    "federation": _text,
    "origin": _text,
    "size": _number(1),
    "first": _number(0),
    "count": _number(1),
    "before": _subtrees(64),
    "behind": _subtrees(128),
    "checkpoint": _text,
    "public_key": _key,
    "schemas": _schemas,
}
