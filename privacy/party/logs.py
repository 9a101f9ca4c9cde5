"""What daemons say while they run: lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import logging
from enum import StrEnum

from pythonjsonlogger.json import JsonFormatter

from medsilo.privacy.printable import printable


class OneLine(logging.Formatter):
    """A line of its own for each record, whatever its words hold; a stack of calls below it is set in."""

    def format(self, record: logging.LogRecord) -> str:
        first, *more = printable(super().format(record), lines=True).split("\n")
        words = printable(record.getMessage(), lines=True).count("\n")
        whole = "\\n".join([first, *more[:words]])
        return "\n    ".join([whole, *more[words:]])


class LogFormat(StrEnum):
    """How a daemon's lines look."""

    TEXT = "text"
    JSON = "json"


def begin(form: LogFormat, *, level: int = logging.INFO) -> None:
    """From here on all log lines go to standard error in that form."""
    handler = logging.StreamHandler()
    if form is LogFormat.JSON:
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        formatter: logging.Formatter = JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=names, datefmt="%Y-%m-%dT%H:%M:%S%z"
        )
    else:
        formatter = OneLine("%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(formatter)
    # A library that was loaded before may have put a handler of its own there.
    logging.basicConfig(force=True, level=level, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)
