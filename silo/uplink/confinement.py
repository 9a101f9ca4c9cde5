"""A daemon without a network: a namespace of the kernel's whose only way out is the relay, which
leads to the coordinator and to witnesses.

Needs no root: an account may make a user namespace, and in it a network namespace with nothing but a loopback device.
What the daemon, a library or a thread of it wants from any other address, the kernel has no route for, and counts that.
Files and socket files of the machine stay in reach.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.journal.records import EgressRecord
from medsilo.silo.uplink.relay import COUNT, OUT, Counted, Relay, Way

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_NO_NEW_PRIVS = 1, 4, 38
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_CAPABILITY_VERSION_3 = 0x20080522
_PATIENCE = 30.0


@dataclass(frozen=True)
class Confinement:
    """The confined side's end.

    ``address``: to which the coordinator's channel goes, its own or a proxy's (``host:port``). ``witnesses``: the names
    of those that are reached by each further address. Nothing else can be reached. ``folder``: of the relay's socket
    files.
    """

    address: str
    witnesses: Mapping[str, Sequence[str]]
    folder: Path

    @property
    def way_out(self) -> Path:
        """The socket file that leads to the coordinator."""
        return self.folder / OUT

    def way_to_witnesses(self, address: str) -> Path:
        """The socket file that leads to those who are reached by this address."""
        return self.folder / _name(list(self.witnesses).index(address))

    def met(self) -> str:
        """Why the relay does not reach the coordinator; empty if its last connection came about."""
        return self.counted()[0].met

    def counted(self) -> list[Counted]:
        """What the kernel has counted so far on the relay's connections: to the coordinator, to each address of
        witnesses."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(_PATIENCE)
            link.connect(str(self.folder / COUNT))
            return [Counted(**one) for one in json.loads(b"".join(iter(lambda: link.recv(4096), b"")))]

    def record(self, since: int) -> EgressRecord:
        """The kernel's counts as a record. ``since``: the record with which this confinement began."""
        counted, *further = self.counted()
        witnesses = [
            {**{name: value for name, value in asdict(one).items() if name != "met"}, "names": list(names)}
            for one, names in zip(further, self.witnesses.values(), strict=True)
        ]
        return EgressRecord(
            since=since,
            address=counted.address,
            connections=counted.connections,
            sent=counted.sent,
            retransmitted=counted.retransmitted,
            segments=counted.segments,
            received=counted.received,
            interfaces=_interfaces(),
            refused=_without_route(),
            **({"witnesses": witnesses} if witnesses else {}),
        )


def confine(
    address: str, witnesses: Mapping[str, Sequence[str]], alive: Callable[[], None] = lambda: None
) -> Confinement:
    """Goes on in a child process without a network; the process that calls it becomes the relay, and ends as the child
    does. To be called before there are threads.

    ``address``, ``witnesses``: see ``Confinement``. ``alive``: called in the relay once it serves. Raises
    ``ConfigurationError`` where the machine lets no account make a network namespace.
    """
    folder = Path(tempfile.mkdtemp(prefix="medsilo-"))  # short enough for a socket file's name, and private
    process = os.fork()
    if process:
        _libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # the child may not look into the relay
        try:
            alive()
            further = [Way(_name(number), one, announced=True) for number, one in enumerate(witnesses)]
            code = asyncio.run(Relay(folder, [Way(OUT, address), *further]).serve_until(process))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
        os._exit(code)
    deadline = time.monotonic() + _PATIENCE
    while not (folder / "ready").exists():
        if time.monotonic() > deadline:
            raise ConfigurationError("the relay did not begin")
        time.sleep(0.01)
    _leave_the_network()
    return Confinement(address, witnesses, folder)


def _leave_the_network() -> None:
    libc, user, group = _libc(), os.geteuid(), os.getegid()
    if libc.unshare(_NEW_USER | _NEW_NET):
        raise ConfigurationError(
            f"--confined: this machine lets no account make a network namespace ({os.strerror(ctypes.get_errno())}); "
            "whoever runs it can allow user namespaces. Without the option the record's bytes are this program's own "
            "count"
        )
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
            asked = struct.pack("16sh22x", b"lo", 0)
            _, flags = struct.unpack("16sh22x", fcntl.ioctl(device, _GET_FLAGS, asked))
            fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _UP))
    except OSError as error:
        raise ConfigurationError(
            "--confined: this machine lets an account make a namespace, and not set it up "
            f"({error.strerror}); on Ubuntu that is AppArmor (docs/operating.md)"
        ) from None
    # The rights that came with the namespaces are given back, and there is no way to new ones.
    libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _name(number: int) -> str:
    """Of the socket file that leads to an address of witnesses."""
    return f"witnesses{number}"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _interfaces() -> dict[str, int]:
    """Bytes that left by each interface of the namespace, as the kernel counts them; in one of its own, loopback's."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    rows = [line.replace(":", " ").split() for line in lines]
    return {row[0]: int(row[9]) for row in rows}


def _without_route() -> int:
    """How often the kernel had no route for what this namespace wanted to send."""
    rows = [line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Ip:")]
    found = int(dict(zip(*rows, strict=True))["OutNoRoutes"])
    six = Path("/proc/self/net/snmp6")
    if six.exists():
        counts = dict(line.split() for line in six.read_text().splitlines())
        found += int(counts.get("Ip6OutNoRoutes", 0))
    return found
