"""The ways out of a confined daemon: each passes bytes between a socket file and one address, and has the
kernel count them.

It runs in a process of its own, outside the daemon's network namespace, reads no key and no image, and looks at none of
the bytes, which TLS has encrypted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from medsilo.privacy.identity.endpoint import split_address

OUT, COUNT = "out", "count"
"""The socket files: of the way to the coordinator, and of who asks for the kernel's counts."""
CONNECT_SECONDS = 10.0

_TCP_INFO_BYTES = 256
_RECEIVED, _SEGMENTS, _SENT = 128, 136, 200
"""Where ``struct tcp_info`` (linux/tcp.h) has tcpi_bytes_received, tcpi_segs_out, and tcpi_bytes_sent with
tcpi_bytes_retrans behind it."""
_PIECE = 1 << 16


@dataclass
class Counted:
    """What the kernel counted on the connections to an address, those that have ended included.

    ``sent``: bytes within TCP, each once. ``retransmitted``: those that went again. ``segments``: packets that left,
    each with headers of TCP and IP around it. ``received``: bytes within TCP. ``met``: why the last connection did not
    come about; empty if it did.
    """

    address: str
    connections: int = 0
    sent: int = 0
    retransmitted: int = 0
    segments: int = 0
    received: int = 0
    met: str = ""

    def add(self, link: socket.socket) -> None:
        """Takes in a connection's counts; those of a kernel before 4.19 lack what was sent and raise ``OSError``."""
        found = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(found) < _SENT + 16:
            raise OSError("this kernel does not count the bytes of a connection (Linux 4.19 does)")
        sent, retransmitted = struct.unpack_from("=QQ", found, _SENT)
        self.sent += sent - retransmitted
        self.retransmitted += retransmitted
        self.segments += struct.unpack_from("=I", found, _SEGMENTS)[0]
        self.received += struct.unpack_from("=Q", found, _RECEIVED)[0]


@dataclass
class Way:
    """Connects to ``address`` (``host:port``) and to nothing else, once for each connection to the socket file
    ``name``.

    ``announced``: whoever connects to the file is first told, in one line, why the address cannot be reached; an empty
    line if it was.
    """

    name: str
    address: str
    announced: bool = False
    _ended: Counted = field(init=False)
    _open: set[socket.socket] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ended = Counted(self.address)

    def counted(self) -> Counted:
        """The counts now."""
        total = replace(self._ended)
        for link in self._open:
            total.connections += 1
            total.add(link)
        return total

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection to the socket file."""
        host, port = split_address(self.address)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError as error:
            self._ended.met = _reason(error, host)
            if self.announced:
                writer.write(f"{self._ended.met}\n".encode())
                writer.close()
            else:
                writer.transport.abort()  # the daemon asks what was met, says it, and tries again
            return
        self._ended.met = ""
        link = far_writer.get_extra_info("socket").dup()  # its counts outlast the connection
        self._open.add(link)
        try:
            if self.announced:
                writer.write(b"\n")
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for end in (writer, far_writer):
                end.transport.abort()
            self._open.discard(link)
            self._ended.connections += 1
            self._ended.add(link)
            link.close()


@dataclass(frozen=True)
class Relay:
    """The ways, their socket files in ``folder``."""

    folder: Path
    ways: Sequence[Way]

    async def serve_until(self, process: int) -> int:
        """Serves until that process, a child, has ended; returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _pass_on, process, number)
        for way in self.ways:
            await asyncio.start_unix_server(way.carry, self.folder / way.name)
        await asyncio.start_unix_server(self._tell, self.folder / COUNT)
        (self.folder / "ready").touch()
        _, status = await asyncio.to_thread(os.waitpid, process, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    async def _tell(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps([asdict(way.counted()) for way in self.ways]).encode())
        writer.close()


def _reason(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host} cannot be resolved: {error.strerror}"
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no answer within {CONNECT_SECONDS:g} s"
    said = os.strerror(error.errno) if error.errno else str(error)
    return " ".join(said.split())


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


def _pass_on(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
