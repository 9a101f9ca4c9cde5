"""The evidence bundle's file, read line by line: a header, and the records exactly as they were signed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import rfc8785

from .form import HEX32, Form, items, matching, text, whole, wrong
from .merkle import perfect_subtrees
from .result import UnreadableError

_LONGEST_LINE = 16 << 20
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
        if (name := wrong(held, _HEADER)) is not None:
            raise UnreadableError(f"{path}: is not an evidence bundle: header.{name} is not in its form")
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


_SUBTREE: Form = {"level": whole(0, 62), "root": matching(HEX32)}
_HEADER: Form = {
    "v": whole(1, 1),
    **dict.fromkeys(("party", "federation", "origin", "checkpoint"), text()),
    **{"size": whole(1), "first": whole(0), "count": whole(1)},
    "before": items(64, lambda part: wrong(part, _SUBTREE) is None),
    "behind": items(128, lambda part: wrong(part, _SUBTREE) is None),
    "public_key": lambda value: value is None or matching(HEX32)(value),
    "schemas": items(1 << 20, items(1 << 20, text())),
}
