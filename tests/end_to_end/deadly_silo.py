"""The ``silo`` command, killed before the so many-th of its steps on disk: ``deadly_silo 3 consent withdraw …``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from silo import cli


def main() -> None:
    at = int(sys.argv.pop(1))
    steps = itertools.count(1)

    def deadly(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(steps) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **options)

        return call

    for name in ("fsync", "replace", "unlink", "write"):
        setattr(os, name, deadly(getattr(os, name)))
    cli.main()
