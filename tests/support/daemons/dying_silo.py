"""The ``silo`` command, killed when it has masked a round's update and sent none of it: ``dying_silo 1 train …``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from medsilo.silo import cli
from medsilo.silo.run.masking import Masking


def main() -> None:
    at = int(sys.argv.pop(1))
    mask = Masking.mask

    def deadly(self: Masking, round_number: int, *arguments: Any) -> Any:
        masked = mask(self, round_number, *arguments)
        if round_number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return masked

    Masking.mask = deadly  # type: ignore[method-assign]
    cli.main()
