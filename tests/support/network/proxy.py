"""A TCP proxy that records every byte, can hold one direction back, and can cut connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """Where a connection ends: after so many bytes from the client or to it, or with the first byte to the client
    after so many from it."""

    up: int | None = None
    down: int | None = None
    answer_after: int | None = None


@dataclass
class Connection:
    """The bytes of one connection: ``up`` from the client, ``down`` to it."""

    cut: Cut = Cut()
    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class Proxy:
    """Forwards connections on ``port`` to ``target``. ``hold_after``: after so many bytes from the client on a
    connection, nothing more is forwarded until ``release``. ``cuts``: where the first connections end, one each."""

    def __init__(self, target: int, *, hold_after: int | None = None, cuts: Sequence[Cut] = ()) -> None:
        self.connections: list[Connection] = []
        self.held = threading.Event()
        self.cuts = list(cuts)
        self.made: list[Cut] = []
        """The cuts that have been made."""
        self._target = target
        self._hold_after = hold_after
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        self._hold_after = None
        self._released.set()

    def close(self) -> None:
        self.release()
        for open_socket in (self._listener, *self._sockets):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            connection = Connection(self.cuts.pop(0) if self.cuts else Cut())
            self.connections.append(connection)
            threading.Thread(target=self._pump, args=(client, server, connection, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, connection, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, connection: Connection, upward: bool) -> None:
        record, cut = (connection.up, connection.cut.up) if upward else (connection.down, connection.cut.down)
        lost = None if upward else connection.cut.answer_after
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if upward and self._hold_after is not None and len(record) + len(data) > self._hold_after:
                    self.held.set()
                    self._released.wait()
                if lost is not None and len(connection.up) > lost:
                    self.made.append(connection.cut)
                    break
                if cut is not None and len(record) + len(data) > cut:
                    sink.sendall(data[: cut - len(record)])
                    self.made.append(connection.cut)
                    break
                record += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
