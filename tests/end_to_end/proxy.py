"""A TCP proxy that records every byte, and can hold one direction back; and a reader of the gRPC messages in them."""

from __future__ import annotations

import hashlib
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


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


def grpc_messages(data: bytes | bytearray, *, from_client: bool) -> dict[int, list[tuple[int, str]]]:
    """(length, SHA-256) of every complete gRPC message of each HTTP/2 stream, in order."""
    if from_client:
        assert data.startswith(_PREFACE), "not HTTP/2"
        data = data[len(_PREFACE) :]
    streams: dict[int, bytearray] = {}
    position = 0
    while position + 9 <= len(data):
        length = int.from_bytes(data[position : position + 3], "big")
        kind, flags = data[position + 3], data[position + 4]
        stream = int.from_bytes(data[position + 5 : position + 9], "big") & 0x7FFFFFFF
        content = data[position + 9 : position + 9 + length]
        position += 9 + length
        if kind == 0:
            if flags & 0x8:
                content = content[1 : len(content) - content[0]]
            streams.setdefault(stream, bytearray()).extend(content)
    return {stream: _split(bytes(content)) for stream, content in streams.items()}


def _split(content: bytes) -> list[tuple[int, str]]:
    messages = []
    while len(content) >= 5:
        assert content[0] == 0, "a compressed message"
        length = int.from_bytes(content[1:5], "big")
        if len(content) < 5 + length:
            break
        message, content = content[5 : 5 + length], content[5 + length :]
        messages.append((length, hashlib.sha256(message).hexdigest()))
    return messages
