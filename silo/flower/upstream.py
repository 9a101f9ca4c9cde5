"""The way to Flower's server: one connection for each request, and nothing on it but what the door has recorded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from medsilo.privacy.errors import ConfigurationError, RefusedError, UnreachableError
from medsilo.privacy.identity.endpoint import split_address

MEDIA_TYPE = "application/protobuf"
LARGEST_ANSWER = 1 << 30
_SECONDS = 60.0
_KEY, _TIME, _SIGNATURE = "flwr-public-key", "flwr-timestamp", "flwr-signature"
_TIME_FORM = re.compile(r"[0-9T:+.-]{19,35}", re.ASCII)


@dataclass(frozen=True)
class NodeHeaders:
    """The headers by which the server knows a SuperNode: its public key, and the time under its signature.

    They go on as they came, once it is clear that they are that and nothing else.
    """

    public_key: str
    timestamp: str
    signature: str

    @classmethod
    def read(cls, headers: Mapping[str, str], version: str) -> NodeHeaders:
        """Raises ``RefusedError`` for headers of another release than ``version``, or that are not a key, a time and
        its signature."""
        headers = {name.lower(): value for name, value in headers.items()}
        release = headers.get("flwr-package-name"), headers.get("flwr-package-version")
        if release != ("flwr", version):
            raise RefusedError(
                f"it comes from {' '.join(map(str, release))}; `flower: python:` has flwr {version}, which alone passes"
            )
        found = cls(*(headers.get(name, "") for name in (_KEY, _TIME, _SIGNATURE)))
        try:
            pem = base64.b64decode(found.public_key, validate=True)
            key = check_public_key(pem)
            signature = base64.b64decode(found.signature, validate=True)
            if _TIME_FORM.fullmatch(found.timestamp) is None:
                raise ValueError
            datetime.fromisoformat(found.timestamp)
            key.verify(signature, found.timestamp.encode(), ec.ECDSA(hashes.SHA256()))
        except (binascii.Error, ValueError, InvalidSignature):
            raise RefusedError("its headers do not hold a SuperNode's key and signed time") from None
        return found

    def lines(self) -> dict[str, str]:
        """As they stand in a request."""
        return {_KEY: self.public_key, _TIME: self.timestamp, _SIGNATURE: self.signature}


def check_public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    """A SuperNode's public key; raises ``RefusedError`` for anything else, or anything beside it."""
    try:
        key = serialization.load_pem_public_key(pem)
        plain = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    except ValueError:
        raise RefusedError("it holds no public key where one was due") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or plain != pem:
        raise RefusedError("its public key is not a plain elliptic-curve key")
    return key


class Upstream:
    """Where the server is. ``version``: of the ``flwr`` that asks it. ``ca``: certificates (PEM) to check its own with,
    in TLS 1.3 alone; ``insecure``: plain text."""

    def __init__(self, address: str, version: str, *, ca: Path | None, insecure: bool) -> None:
        self.version = version
        self._host, self._port = split_address(address)
        self._address = address
        self._context: ssl.SSLContext | None = None
        if not insecure:
            try:
                self._context = ssl.create_default_context(cafile=None if ca is None else str(ca))
            except OSError as error:
                raise ConfigurationError(f"ca: {ca}: is not a file of certificates in PEM form ({error})") from None
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def head(self, path: str, length: int, node: NodeHeaders) -> bytes:
        """Request line and headers: all that goes before a request's ``length`` bytes."""
        lines = {
            "host": self._address,
            "content-type": MEDIA_TYPE,
            "accept": MEDIA_TYPE,
            "accept-encoding": "identity",
            "content-length": str(length),
            "connection": "close",
            "flwr-package-name": "flwr",
            "flwr-package-version": self.version,
            "flwr-component-name": "SuperNode",
            **node.lines(),
        }
        text = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", ""]
        return "\r\n".join(text).encode("ascii")

    def connect(self) -> Connection:
        """Raises ``UnreachableError`` if the server does not answer, or does not show a certificate of its own."""
        try:
            plain = socket.create_connection((self._host, self._port), timeout=_SECONDS)
            if self._context is None:
                return Connection(plain, "")
            try:
                secured = self._context.wrap_socket(plain, server_hostname=self._host)
            except BaseException:
                plain.close()
                raise
        except OSError as error:
            raise UnreachableError(f"{self._address} cannot be reached: {error}") from None
        return Connection(secured, hashlib.sha256(secured.getpeercert(binary_form=True) or b"").hexdigest())


@dataclass
class Connection:
    """One connection. ``certificate_sha256``: of the certificate that the server showed; empty in plain text."""

    socket: socket.socket
    certificate_sha256: str

    def exchange(self, request: bytes) -> tuple[int, bytes]:
        """Status and content of the answer; raises ``UnreachableError`` if none comes."""
        try:
            self.socket.sendall(request)
            with http.client.HTTPResponse(self.socket, method="POST") as answer:
                answer.begin()
                content = answer.read(LARGEST_ANSWER + 1)
                if len(content) > LARGEST_ANSWER:
                    raise RefusedError(f"the server's answer is larger than {LARGEST_ANSWER >> 20} MiB")
                if answer.length:
                    raise http.client.IncompleteRead(content, answer.length)
                return answer.status, content
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"the server gave no whole answer: {error!r}") from None

    def close(self) -> None:
        """Lets go of it."""
        with suppress(OSError):
            self.socket.close()
