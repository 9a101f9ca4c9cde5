"""Follows a journal that another process is writing: what has passed so far, added up as it grows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.records import MessageRecord, RefusalRecord, RunRecord, read
from medsilo.privacy.journal.segments import segments

_BLOCK = 1 << 20


class JournalTail:
    """The bytes that a journal records, by run, other party, direction and exposure class.

    ``update`` reads what was added since the last time; nothing is written, and nothing is verified: ``audit verify``
    does that.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._bytes: Counter[tuple[str, str, str, int | None, str]] = Counter()
        self.refusals: list[RefusalRecord] = []
        """The newest refusals, oldest first."""
        self.planned: dict[str, int] = {}
        """The rounds that a run's plan has, by run; a Flower app's plan does not say."""
        self._file: IO[bytes] | None = None
        self._rest = b""

    def update(self) -> None:
        """Takes in the records that were completed since the last call.

        Raises ``JournalError`` for a line that is not a record.
        """
        for line in self._new_lines():
            try:
                match read(json.loads(line)):
                    case MessageRecord() as record:
                        where = (record.run or "", record.direction, record.peer, record.round)
                        for name, count in record.classes.items():
                            self._bytes[(*where, name)] += count
                    case RunRecord() as record if "rounds" in record.plan:
                        self.planned[record.run] = record.plan["rounds"]
                    case RefusalRecord() as record:
                        self.refusals = [*self.refusals[-49:], record]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise JournalError(f"{self._directory}: a line is not a record: {error}") from None

    def runs(self) -> list[str]:
        """The runs in which messages passed, in the order of their first one."""
        return list(dict.fromkeys(run for run, *_ in self._bytes if run))

    def by_class(self, run: str, direction: str) -> dict[str, dict[str, int]]:
        """Bytes of a run, in rounds and outside, by other party and exposure class; of no run: its name is empty."""
        found: dict[str, dict[str, int]] = {}
        for (of, way, peer, _, name), count in self._bytes.items():
            if (of, way) == (run, direction):
                counts = found.setdefault(peer, {})
                counts[name] = counts.get(name, 0) + count
        return found

    def by_round(self, run: str, direction: str) -> dict[int, dict[str, int]]:
        """Bytes of a run by round (from 0) and exposure class, in rounds alone."""
        found: dict[int, dict[str, int]] = {}
        for (of, way, _, number, name), count in self._bytes.items():
            if (of, way) == (run, direction) and number is not None:
                counts = found.setdefault(number, {})
                counts[name] = counts.get(name, 0) + count
        return dict(sorted(found.items()))

    def _new_lines(self) -> Iterator[bytes]:
        while (file := self._file or self._next()) is not None:
            self._file = file
            while data := file.read(_BLOCK):
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from lines
            following = self._next()
            if following is None:
                return
            if data := file.read():  # written between our last look and the segment's end
                *lines, self._rest = (self._rest + data).split(b"\n")
                yield from lines
            file.close()
            self._file, self._rest = following, b""

    def _next(self) -> IO[bytes] | None:
        """The file after the one that is being read; None if there is none yet."""
        found = segments(self._directory)
        place = 0
        if self._file is not None:
            ours = os.fstat(self._file.fileno())
            place = 1 + next(n for n, path in enumerate(found) if os.path.samestat(path.stat(), ours))
        try:
            return found[place].open("rb") if place < len(found) else None
        except FileNotFoundError:
            return None  # no journal yet
