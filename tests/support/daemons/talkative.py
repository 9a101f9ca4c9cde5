"""Any console script with every library's log at its most detailed: ``talkative silo train --config …``."""

from __future__ import annotations

import importlib
import logging
import sys


def main() -> None:
    logging.basicConfig(level=logging.DEBUG, force=True)
    # The commands set a level of their own.
    logging.basicConfig = lambda **_: None  # type: ignore[assignment]
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger(__name__).debug("this is said too")
    sys.argv = sys.argv[1:]
    importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()
