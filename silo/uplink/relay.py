"""The one way out of a confined daemon: passes bytes between a socket file and one address, and has the kernel count.

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from medsilo.privacy.identity.endpoint import split_address

OUT, COUNT = "out", "count"
"""The socket files: of the way out, and of who asks for the kernel's counts."""

_TCP_INFO_BYTES = 256
_RECEIVED, _SEGMENTS, _SENT = 128, 136, 200
"""Where ``struct tcp_info`` (linux/tcp.h) has tcpi_bytes_received, tcpi_segs_out, and tcpi_bytes_sent with
tcpi_bytes_retrans behind it."""
_PIECE = 1 << 16


@dataclass
class Counted:
    """What the kernel counted on the connections to an address, those that have ended included.

    ``sent``: bytes within TCP, each once. ``retransmitted``: those that went again. ``segments``: packets that left,
    each with headers of TCP and IP around it. ``received``: bytes within TCP.
    """

    address: str
    connections: int = 0
    sent: int = 0
    retransmitted: int = 0
    segments: int = 0
    received: int = 0

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
class Relay:
    """Connects to ``address`` (``host:port``) and to nothing else, once for each connection to its socket file."""

    address: str
    folder: Path
    _ended: Counted = field(init=False)
    _open: set[socket.socket] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ended = Counted(self.address)

    def counted(self) -> Counted:
        """The counts now."""
        total = Counted(**asdict(self._ended))
        for link in self._open:
            total.connections += 1
            total.add(link)
        return total

    async def serve_until(self, process: int) -> int:
        """Serves until that process, a child, has ended; returns its exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _pass_on, process, number)
        await asyncio.start_unix_server(self._pass, self.folder / OUT)
        await asyncio.start_unix_server(self._tell, self.folder / COUNT)
        (self.folder / "ready").touch()
        _, status = await asyncio.to_thread(os.waitpid, process, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    async def _tell(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(asdict(self.counted())).encode())
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_address(self.address)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()  # the daemon says that nobody answers, and tries again
            return
        link = far_writer.get_extra_info("socket").dup()  # its counts outlast the connection
        self._open.add(link)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for end in (writer, far_writer):
                end.transport.abort()
            self._open.discard(link)
            self._ended.connections += 1
            self._ended.add(link)
            link.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


def _pass_on(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)
