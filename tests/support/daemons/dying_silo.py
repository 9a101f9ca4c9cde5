"""The ``silo`` command, killed when it has masked (or sealed) a round's update, or made what opens others' mixtures,
and sent none of it: ``dying_silo 1 train …``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from medsilo.silo import cli
from medsilo.silo.run.blinding import Blinding
from medsilo.silo.run.masking import Masking


def main() -> None:
    at = int(sys.argv.pop(1))
    for kind, step in ((Masking, "mask"), (Blinding, "shares")):
        setattr(kind, step, _deadly(getattr(kind, step), at))
    cli.main()


def _deadly(step: Callable[..., Any], at: int) -> Callable[..., Any]:
    def deadly(self: Masking, round_number: int, *arguments: Any) -> Any:
        made = step(self, round_number, *arguments)
        if round_number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    return deadly
