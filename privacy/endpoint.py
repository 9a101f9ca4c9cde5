"""What both ends of a connection configure alike: certificate files, and whether an address is this machine's."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from privacy.configuration import FilePath, StrictModel


class TlsFiles(StrictModel):
    """Where a party's proofs of who it is lie.

    ``ca``: the federation's CA certificate. ``certificate``, ``key``: this party's own, all three as PEM files.
    """

    ca: FilePath
    certificate: FilePath
    key: FilePath

    @classmethod
    def beside(cls, keys: Path) -> TlsFiles:
        """The files' usual places, in a party's folder of keys."""
        return cls(ca=keys / "ca.pem", certificate=keys / "tls.pem", key=keys / "tls.key")


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is an address of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
