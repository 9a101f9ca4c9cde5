"""Which records prove a statement: their numbers and a hash, and the way back from both to the records.

A citation of one record has the record's leaf hash (RFC 6962: SHA-256(0x00 ‖ line)); one of several has the SHA-256 of
their leaf hashes, one after the other in the journal's order. Both follow from the journal's lines alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medsilo.privacy.audit.bundle import open_evidence
from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.journal.merkle import leaf_hash
from medsilo.privacy.pages.wording import grouped, ranges

_SHORT = 8


@dataclass(frozen=True)
class Citation:
    """Records of a journal. ``spans``: first and last number of each unbroken range; ``sha256``: see above, hex."""

    spans: tuple[tuple[int, int], ...]
    sha256: str

    @property
    def count(self) -> int:
        """How many records."""
        return sum(last - first + 1 for first, last in self.spans)

    @property
    def numbers(self) -> str:
        """``17``, or ``19–480, 502``."""
        return ranges(number for first, last in self.spans for number in range(first, last + 1))

    @property
    def label(self) -> str:
        """``record 17 · 3fa9c1d2``, or ``43 records · 7ac3e001``."""
        what = f"record {self.spans[0][0]}" if self.count == 1 else f"{grouped(self.count)} records"
        return f"{what} · {self.sha256[:_SHORT]}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in documents: ``{"records": [[17, 17]], "sha256": …}``."""
        return {"records": [list(span) for span in self.spans], "sha256": self.sha256}


@dataclass
class Citing:
    """A citation while the journal is read: takes leaf hashes in the records' order."""

    _spans: list[list[int]] = field(default_factory=list)
    _first: bytes = b""
    _all: Any = field(default_factory=hashlib.sha256)

    def take(self, index: int, leaf: bytes) -> None:
        """Adds a record. One that is the last already stays there once."""
        if self._spans and self._spans[-1][1] == index:
            return
        if self._spans and self._spans[-1][1] == index - 1:
            self._spans[-1][1] = index
        else:
            self._spans.append([index, index])
        self._first = self._first or leaf
        self._all.update(leaf)

    def citation(self) -> Citation:
        """What it has taken so far."""
        spans = tuple((first, last) for first, last in self._spans)
        one = len(spans) == 1 and spans[0][0] == spans[0][1]
        return Citation(spans, self._first.hex() if one else self._all.hexdigest())


def cite(evidence: Path, numbers: Iterable[tuple[int, int]]) -> tuple[Citation, list[bytes]]:
    """The citation of records by their numbers (first and last of each range), and their lines.

    ``evidence``: a bundle, or a journal's folder. Raises ``ConfigurationError`` for a number that is not there.
    """
    wanted = sorted({number for first, last in numbers for number in range(first, last + 1)})
    citing = Citing()
    found: list[bytes] = []
    for index, line in _numbered(evidence):
        if len(found) == len(wanted):
            break
        if index == wanted[len(found)]:
            citing.take(index, leaf_hash(line))
            found.append(line)
    if len(found) < len(wanted):
        raise ConfigurationError(f"{evidence}: there is no record {wanted[len(found)]} in it")
    return citing.citation(), found


def citations_in(document: Any) -> Iterator[Mapping[str, Any]]:
    """All citations in a JSON document, wherever they stand in it; in a text too that is one (where a form knows texts
    alone)."""
    if isinstance(document, str) and document.startswith('{"records": [['):
        yield json.loads(document)
    elif isinstance(document, Mapping):
        if set(document) >= {"records", "sha256"} and isinstance(document["records"], list):
            yield document
        else:
            for value in document.values():
                yield from citations_in(value)
    elif isinstance(document, list):
        for value in document:
            yield from citations_in(value)


def check_citations(document: Path, evidence: Path) -> tuple[int, list[str]]:
    """Resolves the citations in a JSON document; returns how many hold, and a sentence for each that does not.

    Raises ``ConfigurationError`` for a file that is no JSON, or has a citation that is none.
    """
    try:
        cited = [
            (tuple((int(first), int(last)) for first, last in one["records"]), str(one["sha256"]))
            for one in citations_in(json.loads(document.read_bytes()))
        ]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{document}: cannot be read as a document with citations: {error}") from None
    found = [Citing() for _ in cited]
    for index, line in _numbered(evidence):
        leaf = leaf_hash(line)
        for (spans, _), citing in zip(cited, found, strict=True):
            if any(first <= index <= last for first, last in spans):
                citing.take(index, leaf)
    wrong = [
        f"{Citation(spans, sha256).label}: the evidence has other records there, or none, with the hash "
        f"{there.sha256[:_SHORT]}"
        for (spans, sha256), there in zip(cited, (citing.citation() for citing in found), strict=True)
        if there != Citation(spans, sha256)
    ]
    return len(cited) - len(wrong), wrong


def _numbered(evidence: Path) -> Iterator[tuple[int, bytes]]:
    opened = open_evidence(evidence)
    return enumerate(opened.lines, 0 if opened.header is None else opened.header.first)
