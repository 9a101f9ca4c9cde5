"""Tells systemd, where it started this process, that the daemon is ready, and that it is alive (``sd_notify``).

The protocol is a datagram to the socket that ``NOTIFY_SOCKET`` names; without that variable nothing happens.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable


def notify(state: str) -> None:
    """Sends a state, for example ``READY=1`` or ``STOPPING=1``. A manager that does not listen is no reason to stop."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # in the abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
            link.sendto(state.encode(), address)
    except OSError:
        return


def watch(is_alive: Callable[[], bool]) -> None:
    """Answers systemd's watchdog from a thread, twice as often as it asks, while ``is_alive`` says so.

    A daemon whose threads wait for each other for ever stops answering, and is started anew.
    """
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    pause = threading.Event()

    def answer() -> None:
        while not pause.wait(int(microseconds) / 2e6):
            if is_alive():
                notify("WATCHDOG=1")

    threading.Thread(target=answer, name="watchdog", daemon=True).start()
