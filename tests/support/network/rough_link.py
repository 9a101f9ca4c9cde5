"""Hosts of their own (network namespaces) and bad cables between them: late, lossy, narrow, cut without a word.

What `tc netem` would do, for kernels that lack it: each end of a cable is a TUN device, and every packet between the
two passes a thread of this process. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_TCP, _SYN = 6, 0x02
_LONGEST_QUEUE_SECONDS = 1.0
"""What waits longer for its turn on a narrow cable is dropped, as routers do."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class RoughLink:
    """A cable between two hosts. ``delay``: seconds, one way. ``loss``: share of packets. ``rate``: bytes per second,
    each way; 0 for no limit. ``down``: everything is dropped, and nobody is told. ``forgets``: a NAT on the way that
    drops what comes on a TCP connection after so many idle seconds, without a word; 0 for none."""

    def __init__(self, name: str, ends: Sequence[tuple[str, Sequence[str]]], *, seed: int = 1) -> None:
        self.delay, self.loss, self.rate, self.down, self.forgets = 0.0, 0.0, 0.0, False, 0.0
        self.passed = self.lost = 0
        self._random = random.Random(seed)
        self._heard: dict[bytes, float] = {}
        self._stopped = threading.Event()
        self._files = [self._plug(f"{name}{side}", *end) for side, end in zip("ab", ends, strict=True)]
        self._threads = [
            threading.Thread(target=self._carry, args=pair, daemon=True)
            for pair in (tuple(self._files), tuple(reversed(self._files)))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        for file in self._files:
            os.close(file)

    @staticmethod
    def _plug(name: str, namespace: str, addresses: Sequence[str]) -> int:
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
        ip("link", "set", name, "netns", namespace)
        for address in addresses:
            ip("-n", namespace, "addr", "add", address, "dev", name, *(["nodad"] if ":" in address else []))
        ip("-n", namespace, "link", "set", name, "up")
        return file

    def _carry(self, source: int, sink: int) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        free_at = 0.0
        while not self._stopped.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
            ready, _, _ = select.select([source], [], [], min(pause, 0.05))
            now = time.monotonic()
            if ready:
                packet = os.read(source, 1 << 16)
                start = max(now, free_at)
                if self._drops(packet, now) or start - now > _LONGEST_QUEUE_SECONDS:
                    self.lost += 1
                else:
                    self.passed += 1
                    free_at = start + (len(packet) / self.rate if self.rate else 0.0)
                    waiting.append((free_at + self.delay, packet))
            while waiting and waiting[0][0] <= now:
                with suppress(OSError):
                    os.write(sink, waiting.popleft()[1])

    def _drops(self, packet: bytes, now: float) -> bool:
        if self.down or self._random.random() < self.loss:
            return True
        if not self.forgets or packet[0] >> 4 != 4 or packet[9] != _TCP:
            return False
        begin = 4 * (packet[0] & 15)
        ends = sorted([packet[12:16] + packet[begin : begin + 2], packet[16:20] + packet[begin + 2 : begin + 4]])
        flow = b"".join(ends)
        if not packet[begin + 13] & _SYN and now - self._heard.get(flow, now) > self.forgets:
            return True
        self._heard[flow] = now
        return False


class RoughHosts:
    """The coordinator's host and one for each silo, each with a cable of its own to the coordinator's.

    ``links`` and ``namespaces`` by party; ``addresses``: the coordinator's as each silo sees it, IPv4 and IPv6. Raises
    ``OSError`` or ``CalledProcessError`` where the machine does not allow it.
    """

    def __init__(self, silos: Sequence[str]) -> None:
        prefix = f"rough{os.getpid()}"
        self.namespaces = {party: f"{prefix}-{number}" for number, party in enumerate(["coordinator", *silos])}
        self.links: dict[str, RoughLink] = {}
        self.addresses: dict[str, tuple[str, str]] = {}
        try:
            for namespace in self.namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            for number, silo in enumerate(silos):
                near, far = ((f"10.78.{number}.{end}", f"fd78:{number}::{end}") for end in (2, 1))
                ends = [
                    (self.namespaces[party], (f"{one}/30", f"{other}/64"))
                    for party, (one, other) in ((silo, near), ("coordinator", far))
                ]
                self.links[silo] = RoughLink(f"r{os.getpid() % 100_000}-{number}", ends, seed=number)
                self.addresses[silo] = far
        except BaseException:
            self.close()
            raise

    @staticmethod
    def possible() -> bool:
        """Whether this machine allows it: namespaces and TUN devices."""
        probe = f"probe{os.getpid()}"
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            return False
        try:
            ip("netns", "add", probe)
        except (OSError, subprocess.CalledProcessError):
            return False
        ip("netns", "del", probe)
        return True

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for namespace in self.namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
