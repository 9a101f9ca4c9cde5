"""A command, killed before or after a step that it takes on disk, by number: ``deadly 3 before silo consent …``."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    at, when, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    del sys.argv[:3]
    steps = itertools.count(1)

    def deadly(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            last = next(steps) == at
            if last and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return step(*arguments, **options)
            finally:  # a step may fail, such as taking away a file that is not there
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in ("fsync", "replace", "link", "unlink", "truncate", "write"):
        setattr(os, name, deadly(getattr(os, name)))
    importlib.import_module(f"{program}.cli").main()
