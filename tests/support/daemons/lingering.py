"""A command whose process stays: ``lingering NAMESPACE ENDED silo export …``, in another host's network unless
NAMESPACE is `-`. Its exit code goes to the file ENDED, and whatever its libraries still have in mind, they can do.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from tests.support.network.watched_hosts import enter

SECONDS = 15
"""Telemetry is sent in batches: onnxruntime's leaves about nine seconds after the library was loaded."""


def main() -> None:
    _, namespace, ended = (sys.argv.pop(0) for _ in range(3))
    if namespace != "-":
        enter(namespace)
    name = (
        f"{__package__}.{sys.argv[0]}"
        if (Path(__file__).parent / f"{sys.argv[0]}.py").exists()
        else f"medsilo.{sys.argv[0]}.cli"
    )
    code = 0
    try:
        importlib.import_module(name).main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    sys.stdout.flush()
    Path(ended).write_text(str(code))
    time.sleep(SECONDS)
    sys.exit(code)
