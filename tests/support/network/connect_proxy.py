"""A hospital's HTTP proxy: CONNECT alone, with a name and password (Basic), and on request with a fault."""

from __future__ import annotations

import base64
import socket
import threading
from contextlib import suppress

END = b"\r\n\r\n"


class ConnectProxy:
    """Listens on ``port``. ``login``: ``name:password`` that it demands; none by default. ``refuses``: a status with
    which it answers every request, instead of connecting. ``requests``: what it was asked, up to the empty line."""

    def __init__(self, *, login: str | None = None, refuses: int | None = None, host: str = "127.0.0.1") -> None:
        self.requests: list[bytes] = []
        self.statuses: list[int] = []
        self.refuses = refuses
        self._wanted = None if login is None else b"Basic " + base64.b64encode(login.encode())
        self._sockets: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends every connection."""
        for open_socket in self._sockets:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            request = b""
            while END not in request:
                if not (data := client.recv(4096)):
                    return
                request += data
            head, _, rest = request.partition(END)
            self.requests.append(head)
            status, server = self._connect(head)
            self.statuses.append(status)
            client.sendall(f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}".encode() + END)
            if server is None:
                return
            self._sockets.append(server)
            with server:
                server.sendall(rest)
                back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
                back.start()
                self._pump(client, server)
                back.join()

    def _connect(self, head: bytes) -> tuple[int, socket.socket | None]:
        request, *lines = head.split(b"\r\n")
        method, target, _ = request.split(b" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if self._wanted is not None and headers.get(b"proxy-authorization") != self._wanted:
            return 407, None
        if self.refuses is not None:
            return self.refuses, None
        if method != b"CONNECT":
            return 405, None
        host, _, port = target.decode().rpartition(":")
        try:
            return 200, socket.create_connection((host.strip("[]"), int(port)))
        except OSError:
            return 502, None

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
