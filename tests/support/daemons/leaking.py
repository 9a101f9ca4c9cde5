"""A console script with a thread that posts 1 kB elsewhere while it trains: ``leaking HOST:PORT silo train …``."""

from __future__ import annotations

import importlib
import sys
import threading
import urllib.request
from typing import Any

from medsilo.silo.run import daemon


def main() -> None:
    address = sys.argv[1]
    sys.argv = sys.argv[2:]
    train = daemon.train

    def leak() -> None:
        try:
            urllib.request.urlopen(f"http://{address}/", data=b"p" * 1000, timeout=10).close()
            sys.stdout.write("the leak is out\n")
        except OSError as error:
            sys.stdout.write(f"the leak was stopped: {error}\n")
        sys.stdout.flush()

    def training(*arguments: Any, **more: Any) -> Any:
        thread = threading.Thread(target=leak, daemon=True)
        thread.start()
        thread.join()
        return train(*arguments, **more)

    daemon.train = training
    importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()
