"""Two hosts (network namespaces) that know no way but to each other, and a recorder of every packet between them.

Whatever either wants from elsewhere goes onto the cable, where nobody passes it on: the default route and the name
server lie behind the other host. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

HOSPITAL, COORDINATOR, NAME_SERVER = "10.80.0.1", "10.80.0.2", "10.80.1.53"
_IPV6 = ("fd80::1", "fd80::2")
_CLONE_NEWNET = 0x40000000
_EVERY_PROTOCOL, _IPV4_TYPE, _ARP_TYPE, _IPV6_TYPE = 3, 0x0800, 0x0806, 0x86DD
_TCP, _UDP = 6, 17
_DNS = 53
_THE_KERNELS_OWN = (0, 58)
"""What IPv6 needs of itself to find out who is there: hop-by-hop options (MLD) and ICMPv6."""


def enter(namespace: str) -> None:
    """This thread, or a process of one thread, goes on in another host's network."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


class WatchedHosts:
    """``hospital``, ``coordinator``: the namespaces. Raises ``OSError`` or ``CalledProcessError`` where the machine
    does not allow them."""

    def __init__(self, allowed: tuple[int, ...]) -> None:
        self.hospital, self.coordinator = (f"watched{os.getpid()}-{number}" for number in (1, 2))
        self._names = Path("/etc/netns", self.hospital)
        self._allowed = allowed
        self._lock = threading.Lock()
        self._between = 0
        self._others: list[str] = []
        self._stopped = threading.Event()
        self._recorder: threading.Thread | None = None
        try:
            self._lay_cable()
            self._names.mkdir(parents=True)
            (self._names / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n")
            listening = threading.Event()
            self._recorder = threading.Thread(target=self._record, args=(listening,), daemon=True)
            self._recorder.start()
            listening.wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stopped.set()
        if self._recorder is not None:
            self._recorder.join()
        shutil.rmtree(self._names, ignore_errors=True)
        for namespace in (self.hospital, self.coordinator):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    @property
    def between(self) -> int:
        """How many packets went between hospital and coordinator, on the allowed ports."""
        with self._lock:
            return self._between

    @property
    def others(self) -> list[str]:
        """Every other packet, in words."""
        with self._lock:
            return list(self._others)

    def forget(self) -> None:
        """Begins a new list of other packets."""
        with self._lock:
            self._others.clear()

    def _lay_cable(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        for namespace in (self.hospital, self.coordinator):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        peer = ["peer", "name", "cable", "netns", self.coordinator]
        ip("-n", self.hospital, "link", "add", "cable", "type", "veth", *peer)
        for number, namespace in enumerate((self.hospital, self.coordinator)):
            ip("-n", namespace, "addr", "add", f"{(HOSPITAL, COORDINATOR)[number]}/24", "dev", "cable")
            with suppress(subprocess.CalledProcessError):  # a machine without IPv6 has nothing there to look for
                ip("-n", namespace, "addr", "add", f"{_IPV6[number]}/64", "dev", "cable", "nodad")
            ip("-n", namespace, "link", "set", "cable", "up")
        for number, namespace in enumerate((self.hospital, self.coordinator)):
            ip("-n", namespace, "route", "add", "default", "via", (COORDINATOR, HOSPITAL)[number])
            with suppress(subprocess.CalledProcessError):
                ip("-n", namespace, "-6", "route", "add", "default", "via", _IPV6[1 - number])

    def _record(self, listening: threading.Event) -> None:
        enter(self.hospital)
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_EVERY_PROTOCOL)) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
            plain.settimeout(0.2)
            listening.set()
            while not self._stopped.is_set():
                try:
                    packet, (device, kind, *_) = plain.recvfrom(1 << 16)
                except TimeoutError:
                    continue
                told = self._explain(packet, kind, own=device == "lo")
                with self._lock:
                    if told is None:
                        self._between += 1
                    elif told:
                        self._others.append(f"{time.strftime('%H:%M:%S')} {told}")

    def _explain(self, packet: bytes, kind: int, *, own: bool) -> str | None:
        """What a packet is, in words; None for one between the two as allowed, nothing for what says nothing."""
        if kind == _ARP_TYPE or (kind == _IPV6_TYPE and packet[6] in _THE_KERNELS_OWN):
            return ""
        if kind == _IPV4_TYPE:
            begin, protocol, ends = 4 * (packet[0] & 15), packet[9], (packet[12:16], packet[16:20])
        elif kind == _IPV6_TYPE:
            begin, protocol, ends = 40, packet[6], (packet[8:24], packet[24:40])
        else:
            return f"a frame of type {kind:#06x}"
        source, target = (str(ip_address(end)) for end in ends)
        ports = [int.from_bytes(packet[begin + at : begin + at + 2]) for at in (0, 2)]
        if own and not (protocol in (_TCP, _UDP) and _DNS in ports):
            return ""  # a machine speaks to itself
        allowed = protocol == _TCP and {source, target} == {HOSPITAL, COORDINATOR}
        if allowed and ports[0 if target == HOSPITAL else 1] in self._allowed:
            return None
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in packet[begin : begin + 80])
        return f"{source}:{ports[0]} to {target}:{ports[1]}, protocol {protocol}: {text}"
