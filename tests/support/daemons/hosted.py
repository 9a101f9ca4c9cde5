"""A command on a host of its own, with other timers: ``hosted NAMESPACE KEEPALIVE_SECONDS LONGEST_PAUSE_SECONDS silo
train …``.

In the process itself, so that it can be forked; `ip netns exec` would start an interpreter anew.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from medsilo.coordinator.service import service
from medsilo.silo.uplink import channel, waiting

_CLONE_NEWNET = 0x40000000


def main() -> None:
    _, namespace, keepalive, pause = (sys.argv.pop(0) for _ in range(4))
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    channel.KEEPALIVE_SECONDS = float(keepalive)
    waiting.LONGEST_PAUSE_SECONDS = float(pause)
    service.SHORTEST_PING_SECONDS = channel.KEEPALIVE_SECONDS / 2
    os.environ["OMP_NUM_THREADS"] = "1"
    importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()
