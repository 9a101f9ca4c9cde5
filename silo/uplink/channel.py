"""How a silo's connections are made: one gRPC channel to the coordinator, and nothing said on it that is not needed."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import grpc

from medsilo.privacy.environment import require_tls_1_3
from medsilo.privacy.errors import IdentityError, UnreachableError
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.identity.endpoint import split_address
from medsilo.privacy.identity.identity import Identity
from medsilo.privacy.printable import from_the_other_side
from medsilo.silo.state.proxy import ProxyConfig

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS: float = 20
"""How long nothing may come before the other side is asked whether it is there, and then how long for its answer."""
_LONGEST_ANSWER = 64 << 10


def open_channel(
    address: str,
    coordinator: Identity,
    credentials: grpc.ChannelCredentials | None,
    *,
    proxy: ProxyConfig | None = None,
    way_out: Path | None = None,
) -> grpc.Channel:
    """A channel to ``host:port``, where nobody but ``coordinator`` is spoken to; in plain text without ``credentials``.

    ``way_out``: the socket file that leads there, or to the proxy, where the address itself cannot be reached.

    Raises ``IdentityError`` if the proxy's name and password cannot be read.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),
        # What is not needed is not said, nor asked for (docs/what-the-network-sees.md).
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.service_config_disable_resolution", 1),
        # Nothing but the configuration says where the connection goes: gRPC would follow the environment, whose
        # `no_proxy` counts even against a proxy that the program asks for (docs/networks.md).
        ("grpc.enable_http_proxy", 0),
        ("grpc.address_http_proxy_enabled_addresses", ""),
    ]
    if proxy is not None:
        options.append(("grpc.http_connect_server", address))
        if (authorization := proxy.authorization()) is not None:
            options.append(("grpc.http_connect_headers", f"Proxy-Authorization:{authorization}"))
    target = f"dns:///{address if proxy is None else proxy.address}" if way_out is None else f"unix:{way_out}"
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    # The name in the certificate is the coordinator's identity, wherever its address is.
    options.append(("grpc.ssl_target_name_override", coordinator.server_name))
    return grpc.secure_channel(target, credentials, options=options)


def said(error: grpc.RpcError) -> str:
    """What the other side, or gRPC, says of a call that failed: on one line and printable, whoever wrote it."""
    return from_the_other_side(error.details() or "")


def channel_credentials(ca_pem: bytes, own: Credentials | None = None) -> grpc.ChannelCredentials:
    """What a channel needs to believe the certificates of a CA (PEM) and, if given, to show the own; TLS 1.3 alone."""
    require_tls_1_3()
    key, certificate = (None, None) if own is None else (own.private_key_pem, own.certificate_pem)
    return grpc.ssl_channel_credentials(root_certificates=ca_pem, private_key=key, certificate_chain=certificate)


def shown_certificates(address: str, coordinator: Identity, *, proxy: ProxyConfig | None = None) -> list[bytes]:
    """The certificates (PEM) that whoever answers at ``host:port`` shows in a TLS handshake, its own first.

    None of them is believed yet. Nothing is sent but the handshake. Raises ``UnreachableError`` if nothing answers,
    or does not speak TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with connect(address, proxy=proxy) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=coordinator.server_name) as wrapped:
                # Public from Python 3.13 on; before that the same call of the object below it.
                source: Any = wrapped if hasattr(wrapped, "get_unverified_chain") else wrapped._sslobj  # type: ignore[attr-defined]
                return [_pem(item) for item in source.get_unverified_chain() or ()]
        except (ssl.SSLError, OSError) as error:
            raise UnreachableError(
                f"what answers at {address} does not complete a TLS 1.3 handshake ({error}); check the address and port"
            ) from None


def connect(address: str, *, proxy: ProxyConfig | None = None, way_out: Path | None = None) -> socket.socket:
    """A connection to ``host:port``, through the proxy if there is one.

    ``way_out``: the relay's announced socket file that leads there, or to the proxy, where the address itself cannot be
    reached.

    Raises ``UnreachableError`` saying whether it is the name, the way or the proxy, and ``IdentityError`` if the proxy
    wants another name and password.
    """
    if proxy is None:
        return _connect_directly(address) if way_out is None else _connect_by(way_out, address)
    try:
        plain = _connect_directly(proxy.address) if way_out is None else _connect_by(way_out, proxy.address)
    except UnreachableError as error:
        raise UnreachableError(f"the proxy: {error}") from None
    try:
        _ask_to_connect(plain, address, proxy)
    except BaseException:
        plain.close()
        raise
    return plain


def _ask_to_connect(plain: socket.socket, address: str, proxy: ProxyConfig) -> None:
    """CONNECT (RFC 9110, section 9.3.6), spoken here to look at certificates; calls go through gRPC's own."""
    authorization = proxy.authorization()
    own = f"Proxy-Authorization: {authorization}\r\n" if authorization else ""
    answer = b""
    try:
        plain.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{own}\r\n".encode())
        while b"\r\n\r\n" not in answer and len(answer) < _LONGEST_ANSWER:
            if not (piece := plain.recv(1)):  # what follows the answer is not the proxy's any more
                break
            answer += piece
    except OSError as error:
        raise UnreachableError(f"the proxy at {proxy.address} does not answer ({error})") from None
    words = answer.split(None, 2)
    status = words[1].decode("ascii", "replace") if len(words) > 1 else "nothing"
    if status == "407":
        raise IdentityError(
            f"the proxy at {proxy.address} wants a name and password, or others than it got (HTTP 407): a file with "
            "one line, name:password, named as `credentials:` of `proxy:`"
        )
    if status != "200":
        raise UnreachableError(
            f"the proxy at {proxy.address} does not let this machine through to {address} (it answered {status}); "
            "whoever runs the proxy has to allow CONNECT to that host and port"
        )


def _connect_directly(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        return socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except socket.gaierror as error:
        raise UnreachableError(
            f"the name {host} cannot be resolved ({error.strerror}); check its spelling, and the name service of this "
            "machine"
        ) from None
    except OSError as error:
        raise UnreachableError(
            f"{address} cannot be reached ({error.strerror or error}); check that the coordinator runs there, and that "
            f"this network's firewall lets connections out to port {port}"
        ) from None


def _connect_by(way_out: Path, address: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    line = b""
    try:
        link.settimeout(2 * CONNECT_SECONDS)  # the relay gives up before
        link.connect(str(way_out))
        while not line.endswith(b"\n") and (piece := link.recv(1)):
            line += piece
    except OSError as error:
        link.close()
        raise UnreachableError(f"{address} cannot be reached: the relay does not answer ({error})") from None
    if line != b"\n":
        link.close()
        said = line.decode(errors="replace").strip() or "the relay ended the connection"
        raise UnreachableError(f"{address} cannot be reached ({said})")
    return link


def _pem(certificate: Any) -> bytes:
    der = certificate if isinstance(certificate, bytes) else certificate.public_bytes(ssl._ssl.ENCODING_DER)  # type: ignore[attr-defined]
    return ssl.DER_cert_to_PEM_cert(der).encode()
