"""A TCP proxy that records every byte, and can hold one direction back."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Connection:
    """The bytes of one connection: ``up`` from the client, ``down`` to it."""

    up: bytearray = field(default_factory=bytearray)
    down: bytearray = field(default_factory=bytearray)


class Proxy:
    """Forwards connections on ``port`` to ``target``. ``hold_after``: after so many bytes from the client on a
    connection, nothing more is forwarded until ``release``."""

    def __init__(self, target: int, *, hold_after: int | None = None) -> None:
        self.connections: list[Connection] = []
        self.held = threading.Event()
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
            connection = Connection()
            self.connections.append(connection)
            threading.Thread(target=self._pump, args=(client, server, connection.up, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, connection.down, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, record: bytearray, upward: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if upward and self._hold_after is not None and len(record) + len(data) > self._hold_after:
                    self.held.set()
                    self._released.wait()
                record += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
