"""What both ends of a connection configure alike: certificate files, and whether an address is this machine's."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from privacy.configuration import FilePath, StrictModel


class TlsFiles(StrictModel):
    """The federation's CA certificate, this party's certificate and private key, and the CA's revocation list, which
    need not be there as long as nothing is revoked."""

    ca: FilePath
    certificate: FilePath
    key: FilePath
    revoked: FilePath | None = None

    @classmethod
    def beside(cls, keys: Path) -> TlsFiles:
        """The files' usual places, in a party's folder of keys."""
        return cls(ca=keys / "ca.pem", certificate=keys / "tls.pem", key=keys / "tls.key", revoked=keys / "ca.crl")


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is an address of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
