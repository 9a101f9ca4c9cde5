"""A command on a host of its own, impatient: ``hosted NAMESPACE KEEPALIVE_SECONDS silo train …``.

In the process itself, so that it can be forked; `ip netns exec` would start an interpreter anew.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from coordinator import service
from silo import uplink

_CLONE_NEWNET = 0x40000000


def main() -> None:
    _, namespace, keepalive = (sys.argv.pop(0) for _ in range(3))
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    uplink.KEEPALIVE_SECONDS = float(keepalive)
    service.SHORTEST_PING_SECONDS = uplink.KEEPALIVE_SECONDS / 2
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module(f"{sys.argv[0]}.cli").main()
