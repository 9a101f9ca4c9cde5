"""Faults on purpose: what there is, how a run of daemons goes through them, and what must hold afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.runs.federation import Federation, Process

KINDS = ("kill", "power", "full", "read-only", "io-error", "clock")
"""``kill``: SIGKILL. ``power``: a power cut, after which what no sync had reached is gone or torn. ``full``,
``read-only``, ``io-error``: what the disk answers. ``clock``: it jumps, and is put right
after five seconds."""
PLACES = ("disk", "rpc")
DISK_FAILED, CLOCK_WRONG = 13, 16
"""Exit codes (docs/exit-codes.md) of daemons whose disk fails, or who find certificates not valid by their clock."""
RESTART_SECONDS = 0.5
"""A service waits a little before it starts again what cannot go on."""
SECONDS, SECONDS_FOR_EACH = 180, 60
"""How long a run may take, and how much longer for each fault."""
SOURCE = Path(__file__).with_name("faults.c")


@dataclass(frozen=True)
class Fault:
    """One fault at a step, counted from the fault before it or from the process's start.

    ``place``: a step on disk, or a boundary of a call (a message recorded, sent, received, answered). ``after``: the
    step is still taken. ``seconds``: how long an error lasts (0: for one step), or how far the clock jumps. ``where``:
    on disk, only steps on paths that hold this text count.
    """

    kind: str
    place: str
    step: int
    after: bool = False
    seconds: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.place}/{self.where}" if self.where else self.place
        return f"{self.kind}:{place}:{self.step}:{'after' if self.after else 'before'}:{self.seconds:g}"

    @classmethod
    def read(cls, text: str) -> Fault:
        kind, place, step, when, *seconds = text.split(":")
        place, _, where = place.partition("/")
        return cls(kind, place, int(step), when == "after", float(seconds[0]) if seconds else 0.0, where)


def library() -> Path | None:
    """``faults.c`` compiled; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"medsilo-faults-{os.getuid()}-{digest}.so"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        words = [
            compiler,
            "-std=gnu11",
            "-O1",
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            str(partial),
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(words, check=True)
        partial.replace(path)
    return path


needs_faults = pytest.mark.skipif(shutil.which("cc") is None, reason="faults are injected by a library that needs cc")


def log_of(folder: Path, config: str) -> Path:
    """Where it is told what happened to a configuration's command."""
    return folder / f"{Path(config).stem}.faults"


def state_of(folder: Path, config: str) -> Path:
    return (folder / "state" / Path(config).stem).resolve()


def happened(log: Path) -> list[dict[str, Any]]:
    """Faults and recoveries, in order."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Kept:
    """What parties had on disk whenever one of them ended: whole lines of journals and ledgers, which must stay."""

    def __init__(self, one: Federation) -> None:
        self._one = one
        self._seen: dict[Path, set[bytes]] = {}

    def look(self, party: str) -> None:
        """Takes in what a party that has ended has on disk."""
        state = self._one.folder / "state" / party
        for path in (*state.glob("journal/*.jsonl"), *state.glob("ledger/*.jsonl")):
            content = path.read_bytes()
            self._seen.setdefault(path, set()).add(content[: content.rfind(b"\n") + 1])

    def check(self) -> None:
        """Raises ``AssertionError`` unless all of it is still there."""
        for path, seen in self._seen.items():
            now = path.read_bytes()
            assert all(now.startswith(before) for before in seen), f"{path} has lost lines"


def run_through(
    one: Federation,
    planned: Mapping[str, Sequence[Fault]],
    *,
    all_of_them: bool = True,
    at_an_end: Callable[[str], object] = lambda _: None,
) -> None:
    """A run during which faults happen to parties; one that ends of it is started again, as a service would be.

    ``all_of_them``: every fault has to happen. ``at_an_end``: called with a party that has ended, before it starts
    again.
    """

    def faults_of(party: str) -> list[dict[str, Any]]:
        return [line for line in happened(log_of(one.folder, party)) if "fault" in line]

    def begin(party: str) -> Process:
        left = planned.get(party, [])[len(faults_of(party)) :]
        prefix = ("deadly", ",".join(map(str, left))) if planned.get(party) else ()
        if party == "coordinator":
            return one.start_coordinator(prefix=prefix)
        return one.start_silo(party, prefix=prefix)

    running = {party: begin(party) for party in ("coordinator", *one.silos)}
    starts = dict.fromkeys(running, 1)
    known = {None, 0, -signal.SIGKILL, DISK_FAILED}
    if any(fault.kind == "clock" for faults in planned.values() for fault in faults):
        known.add(CLOCK_WRONG)
    deadline = time.monotonic() + SECONDS + SECONDS_FOR_EACH * sum(map(len, planned.values()))
    while any(process.poll() != 0 for process in running.values()):
        for party, process in running.items():
            code = process.poll()
            assert code in known, f"{party} ended with {code}\n{one.everything_said()}"
            if code:
                one.processes.remove(process)
                starts[party] += 1
                at_an_end(party)
                assert starts[party] <= 2 * len(planned.get(party, ())) + 20, (
                    f"{party} is not up again\n{one.everything_said()}"
                )
                time.sleep(0 if code == -signal.SIGKILL else RESTART_SECONDS)
                running[party] = begin(party)
        assert time.monotonic() < deadline, f"the run does not come to its end\n{one.everything_said()}"
        time.sleep(0.02)
    if all_of_them:
        assert {party: len(faults_of(party)) for party in planned} == {p: len(f) for p, f in planned.items()}
