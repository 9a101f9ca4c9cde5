"""How a silo's connections are made: one gRPC channel to the coordinator, and nothing said on it that is not needed."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import grpc

from privacy.errors import UnreachableError
from privacy.pki import Credentials, Identity

CONNECT_SECONDS = 10.0


def open_channel(address: str, coordinator: Identity, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel to ``host:port``, where nobody but ``coordinator`` is spoken to; in plain text without "
    "``credentials``."""
    options: list[tuple[str, int | str]] = [
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),
        # What is not needed is not said, nor asked for (docs/what-the-network-sees.md).
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.service_config_disable_resolution", 1),
    ]
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    # The name in the certificate is the coordinator's identity, wherever its address is.
    options.append(("grpc.ssl_target_name_override", coordinator.server_name))
    return grpc.secure_channel(address, credentials, options=options)


def channel_credentials(own: Credentials) -> grpc.ChannelCredentials:
    """What a channel needs to show the own certificate."""
    return grpc.ssl_channel_credentials(
        root_certificates=own.ca_pem, private_key=own.private_key_pem, certificate_chain=own.certificate_pem
    )


def shown_certificates(address: str, coordinator: Identity) -> list[bytes]:
    """The certificates (PEM) that whoever answers at ``host:port`` shows in a TLS handshake, its own first.

    None of them is believed yet. Nothing is sent but the handshake. Raises ``UnreachableError`` if nothing answers,
    or does not speak TLS 1.3.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with connect(address) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=coordinator.server_name) as wrapped:
                # Public from Python 3.13 on; before that the same call of the object below it.
                source: Any = wrapped if hasattr(wrapped, "get_unverified_chain") else wrapped._sslobj  # type: ignore[attr-defined]
                return [_pem(item) for item in source.get_unverified_chain() or ()]
        except (ssl.SSLError, OSError) as error:
            raise UnreachableError(
                f"what answers at {address} does not complete a TLS 1.3 handshake ({error}); check the address and port"
            ) from None


def connect(address: str) -> socket.socket:
    """A TCP connection to ``host:port``; raises ``UnreachableError`` saying whether it is the name or the way."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        return socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
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


def _pem(certificate: Any) -> bytes:
    der = certificate if isinstance(certificate, bytes) else certificate.public_bytes(ssl._ssl.ENCODING_DER)  # type: ignore[attr-defined]
    return ssl.DER_cert_to_PEM_cert(der).encode()
