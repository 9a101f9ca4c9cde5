"""A command to which faults happen, one after the other: ``deadly kill:disk:14:before,full:rpc:3:1.5 silo train …``.

They are injected by ``faults.c``, which is preloaded, and told in a log beside the command's own.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medsilo.privacy.door.door import Door
from tests.support.runs.faults import KINDS, PLACES, Fault, happened, log_of, state_of


def main() -> None:
    arm()()
    run()


def run() -> None:
    """The command itself."""
    importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()


def arm() -> Callable[[], None]:
    """Takes the faults from the command line; they happen once what it returns has been called."""
    specs = sys.argv[1]
    del sys.argv[:2]
    library = ctypes.CDLL(None)
    text, whole = ctypes.c_char_p, ctypes.c_int
    library.fault_add.argtypes = [text, whole, whole, ctypes.c_long, whole, ctypes.c_double, text]
    for fault in (Fault.read(spec) for spec in specs.split(",") if spec):
        kind, place = KINDS.index(fault.kind), PLACES.index(fault.place)
        where = fault.where.encode()
        library.fault_add(str(fault).encode(), kind, place, fault.step, fault.after, fault.seconds, where)
    log = log_of(Path.cwd(), sys.argv[-1])
    recovering = [sum("recovered" in line for line in happened(log)) < sum("fault" in line for line in happened(log))]
    seen = [0]

    def boundary(what: str, step: Callable[..., Any], *, answers: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            library.fault_rpc(what.encode(), 0)
            found = step(*arguments, **options)
            library.fault_rpc(what.encode(), 1)
            if library.fault_count() > seen[0]:
                seen[0], recovering[0] = library.fault_count(), True
            elif answers and recovering[0]:
                # A message was taken in again.
                recovering[0] = False
                with log.open("a") as file:
                    file.write(f'{{"recovered": "{what}", "at": {time.monotonic():.6f}}}\n')
            return found

        return call

    for name in ("release", "admit", "ended"):
        setattr(Door, name, boundary(name, getattr(Door, name), answers=name == "admit"))
    return lambda: library.fault_begin(str(state_of(Path.cwd(), sys.argv[-1])).encode(), str(log).encode())
