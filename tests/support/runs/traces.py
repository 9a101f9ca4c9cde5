"""Whether stretches of a hospital's model stand in what a coordinator has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.runs.federation import Federation, Process


def memory_of(process: Process) -> Iterator[bytes]:
    """The readable memory of a process, one mapping a time."""
    with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if place is None:  # what it cannot write is code and libraries
                continue
            start, stop = int(place[1], 16), int(place[2], 16)
            try:
                memory.seek(start)
                yield memory.read(stop - start)
            except OSError:
                continue


def traces(one: Federation, process: Process, needles: list[bytes]) -> tuple[int, int]:
    """In how many places of the coordinator's memory, and of its files, any of these bytes stand."""
    found = sum(needle in stretch for stretch in memory_of(process) for needle in needles)
    files = [path for path in (one.folder / "state" / "coordinator").rglob("*") if path.is_file()]
    assert any(path.name == "records.jsonl" for path in files), "the journal is searched as well"
    return found, sum(needle in path.read_bytes() for path in files for needle in needles)
