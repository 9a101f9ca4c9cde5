"""The way to a witness: one connection for each question, and nothing on it but the bytes that were recorded."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable

from medsilo.privacy.errors import ConfigurationError, RefusedError, UnreachableError
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.witness.config import WitnessAddress
from medsilo.privacy.witness.protocol import PATH

ANSWER_SECONDS = 10.0
_LARGEST_ANSWER = 16 << 10

Dial = Callable[[str], socket.socket]
"""Opens a connection to ``host:port``."""


def dial(address: str) -> socket.socket:
    """Directly."""
    return socket.create_connection(split_address(address), timeout=ANSWER_SECONDS)


class WitnessLink:
    """One witness, as it is reached. ``dial``: opens connections."""

    def __init__(self, address: WitnessAddress, dial: Dial = dial) -> None:
        self.address = address
        self.key = address.note_key
        self._dial = dial
        self._context: ssl.SSLContext | None = None
        if address.secure:
            try:
                self._context = ssl.create_default_context(cafile=None if address.ca is None else str(address.ca))
            except OSError as error:
                raise ConfigurationError(f"witnesses: ca: {address.ca}: cannot be used ({error})") from None
            self._context.minimum_version = ssl.TLSVersion.TLSv1_2  # what witnesses of other logs may speak

    def head(self, length: int) -> bytes:
        """Request line and headers: all that goes before a question's ``length`` bytes."""
        lines = [
            f"POST {self.address.path}/{PATH} HTTP/1.1",
            f"host: {self.address.address}",
            "content-type: text/plain; charset=utf-8",
            "accept-encoding: identity",
            f"content-length: {length}",
            "connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def connect(self) -> socket.socket:
        """Raises ``UnreachableError`` if the witness is away, or shows a certificate of another."""
        try:
            plain = self._dial(self.address.address)
            plain.settimeout(ANSWER_SECONDS)
            if self._context is None:
                return plain
            try:
                return self._context.wrap_socket(plain, server_hostname=split_address(self.address.address)[0])
            except BaseException:
                plain.close()
                raise
        except OSError as error:
            raise UnreachableError(f"{self.address.address} cannot be reached: {error}") from None

    def exchange(self, connection: socket.socket, question: bytes) -> tuple[int, str, bytes]:
        """Status, media type and body of the answer; raises ``UnreachableError`` if none comes, ``RefusedError`` for
        one that is too long."""
        try:
            connection.sendall(question)
            with http.client.HTTPResponse(connection, method="POST") as answer:
                answer.begin()
                body = answer.read(_LARGEST_ANSWER + 1)
                if len(body) > _LARGEST_ANSWER:
                    raise RefusedError(f"the answer of {self.key.name} is too long")
                return answer.status, answer.headers.get_content_type(), body
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"{self.address.address} gives no answer: {error!r:.200}") from None
