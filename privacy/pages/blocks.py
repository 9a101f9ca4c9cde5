"""What a report's document is made of: HTML and PDF are two views of the same blocks.

Text is plain, with code between backticks and line breaks; whatever a record holds is shown as text, never understood
as markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")
Tone = Literal["good", "attention", "bad", "plain"]
Source = Literal["record", "hospital", "beside", "blank"]
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn")


@dataclass(frozen=True)
class Answered:
    """A question of page one: the answer in a few words, and what is to be said about it."""

    question: str
    verdict: str
    sentences: list[str]
    tone: Tone = "plain"
    points: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: str = "heading"


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names the row, columns in ``numbers`` (from 0) hold figures.

    ``widths``: shares of the page's width, for paper; 0 for as wide as the content.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]
    numbers: list[int]
    widths: list[int]
    kind: str = "table"


@dataclass(frozen=True)
class Picture:
    """An SVG, with what it shows in words; the same figures stand in a table after it."""

    svg: str
    description: str
    kind: str = "picture"


@dataclass(frozen=True)
class Fold:
    """Details that a page may fold away and paper shows."""

    title: str
    blocks: list[Block]
    kind: str = "fold"


@dataclass(frozen=True)
class Steps:
    """Numbered steps."""

    items: list[str]
    kind: str = "steps"


@dataclass(frozen=True)
class Terms:
    """Words and what they mean."""

    items: list[tuple[str, str]]
    kind: str = "terms"


@dataclass(frozen=True)
class Cited:
    """A link to the records that prove a statement: the anchor of their entry, and their short name."""

    anchor: str
    label: str


@dataclass(frozen=True)
class Fact:
    """A sentence with where it comes from: records, the hospital's word, a file beside the record, or a person who has
    yet to fill it in."""

    text: str
    source: Source
    cited: list[Cited] = field(default_factory=list)
    kind: str = "fact"


@dataclass(frozen=True)
class Records:
    """Where citations lead: anchor, numbers and SHA-256 of each."""

    items: list[tuple[str, str, str]]
    kind: str = "records"


Block = Paragraph | Heading | Table | Picture | Fold | Steps | Terms | Fact | Records


@dataclass(frozen=True)
class Section:
    """A part of the document below its own heading; ``anchor`` is the heading's name in links."""

    anchor: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """All that a report's reader sees; ``evidence`` says what it was made from."""

    title: str
    subtitle: str
    warnings: list[str]
    answers: list[Answered]
    sections: list[Section]
    evidence: str

    def to_data(self) -> dict[str, Any]:
        """The document as JSON-like data."""
        return asdict(self)


def texts_of(value: Any) -> Iterator[str]:
    """All texts in JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from texts_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from texts_of(one)


def harmless(value: T) -> T:
    """The same with control and text-direction characters made visible: a refused message may have come with some."""
    changed: Any = value
    if isinstance(value, str):
        changed = "".join("\N{REPLACEMENT CHARACTER}" if _unseen(character) else character for character in value)
    elif isinstance(value, (list, tuple)):
        changed = type(value)(harmless(one) for one in value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = type(value)(**{one.name: harmless(getattr(value, one.name)) for one in fields(value)})
    return cast("T", changed)


def _unseen(character: str) -> bool:
    return character != "\n" and unicodedata.category(character) in _UNSEEN
