"""What both ends of a connection configure alike: certificate files and addresses."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from medsilo.privacy.files.configuration import FilePath, StrictModel

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")


class TlsFiles(StrictModel):
    """Where a party's proofs of who it is lie.

    ``ca``: the federation's CA certificate. ``certificate``, ``key``: this party's own, all three as PEM files.
    ``revoked``: the CA's revocation list, which need not be there as long as nothing is revoked.
    """

    ca: FilePath
    certificate: FilePath
    key: FilePath
    revoked: FilePath | None = None

    @classmethod
    def beside(cls, keys: Path) -> TlsFiles:
        """The files' usual places, in a party's folder of keys."""
        return cls(ca=keys / "ca.pem", certificate=keys / "tls.pem", key=keys / "tls.key", revoked=keys / "ca.crl")


def check_host(host: str) -> str:
    """A host name, an IPv4 address, or an IPv6 address with or without brackets; the answer is without.

    Raises ``ValueError`` saying what it should be.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if bare != host or ":" in host:
            return str(ipaddress.IPv6Address(bare))
        if host.replace(".", "").isdecimal():
            return str(ipaddress.IPv4Address(host))
    except ValueError as error:
        raise ValueError(f"{host} is not an IP address: {error}") from None
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"{host!r} is not a host name; write letters, digits, dots and hyphens (xn--… for others)")
    return host


def split_address(address: str) -> tuple[str, int]:
    """Host (see ``check_host``) and port of ``host:port``, in which an IPv6 address stands in brackets.

    Raises ``ValueError`` saying how to write it.
    """
    host, _, port = address.rpartition(":")
    if "/" in address:
        raise ValueError("should be host:port alone, without https:// and without a path")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError('an IPv6 address stands in brackets before its port, and in quotes: "[2001:db8::5]:7443"')
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError('should be host:port, for example coordinator.example.org:7443 or "[2001:db8::5]:7443"')
    return check_host(host), int(port)


def _checked(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""``host:port`` (see ``split_address``)."""
Host = Annotated[str, AfterValidator(check_host)]
"""A field of a configuration that ``check_host`` takes."""


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is an address of this machine alone."""
    host = split_address(address)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
