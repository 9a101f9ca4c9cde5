"""A proxy in the middle of a TLS connection, with both parties' keys: what it records is what the other side sees."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from dataclasses import dataclass, field

from tests.support.runs.federation import Federation


@dataclass
class Opened:
    """One connection, decrypted: the name asked for, the certificate shown, and the bytes ``up`` from the silo."""

    name: str | None
    protocol: str | None
    certificate: bytes | None
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class TlsProxy:
    """Shows the coordinator's certificate to a silo, and the silo's to the coordinator."""

    def __init__(self, one: Federation, silo: str) -> None:
        self.connections: list[Opened] = []
        self._target = one.port
        self._names: list[str | None] = []
        ca = one.folder / "ca" / "ca.pem"
        self._inner = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
        self._inner.verify_mode = ssl.CERT_REQUIRED
        self._outer = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(ca))
        for context, party in ((self._inner, "coordinator"), (self._outer, silo)):
            context.load_cert_chain(one.keys(party) / "tls.pem", one.keys(party) / "tls.key")
            context.set_alpn_protocols(["h2"])
        self._inner.sni_callback = lambda _socket, name, _context: self._names.append(name)
        self._loop = asyncio.new_event_loop()
        started: threading.Event = threading.Event()
        self.port = 0

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._inner, limit=1 << 20)
            )
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = writer.get_extra_info("ssl_object")
        opened = Opened(self._names[-1], tls.selected_alpn_protocol(), tls.getpeercert(binary_form=True))
        self.connections.append(opened)
        try:
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._target, ssl=self._outer, server_hostname="coordinator.coordinator.test"
            )
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._pump(reader, up_writer, opened.up), self._pump(up_reader, writer, opened.down), return_exceptions=True
        )

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(1 << 16):
                record += data
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
