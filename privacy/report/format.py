"""The formats of a report; by itself, as command lines name them before anything of a report is loaded."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """A report's file format, spelled as in ``--format``.

    >>> from medsilo import Format
    >>> [str(format) for format in Format]
    ['html', 'pdf', 'json']
    """

    HTML = "html"
    PDF = "pdf"
    JSON = "json"
