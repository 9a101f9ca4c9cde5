"""``silo train`` with a calendar of its own: the day stands in the file ``today``."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.party.console import out
from medsilo.silo.run.daemon import train
from medsilo.silo.run.display import Display
from medsilo.silo.state.config import SiloConfig


def main() -> None:
    try:
        with Display(out) as display:
            train(
                SiloConfig.read(Path(sys.argv[-1])), display, day=lambda: date.fromisoformat(Path("today").read_text())
            )
    except MedsiloError as error:
        out.print(f"error: {error}", soft_wrap=True)
        sys.exit(error.exit_code)
