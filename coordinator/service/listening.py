"""What the coordinator's gRPC servers show to new connections: the certificate that its files have now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from medsilo.privacy.environment import require_tls_1_3
from medsilo.privacy.identity.certificates import Credentials
from medsilo.privacy.identity.revocation import LiveCredentials


def server_credentials(
    credentials: LiveCredentials, show: Callable[[Credentials], Any], *, require_client_authentication: bool
) -> grpc.ServerCredentials:
    """Credentials for a server's port that are those of the files, also after these have changed; for TLS 1.3 alone.

    Args:
        credentials: the coordinator's.
        show: makes gRPC's ``ServerCertificateConfiguration`` of them.
        require_client_authentication: whether who shows no certificate of the CA is turned away.
    """
    shown = credentials.current
    lock = threading.Lock()

    def changed() -> Any:
        """Asked by gRPC at every new connection. Only a change may be answered with a configuration: gRPC takes its
        old one away under the handshakes that are just beginning, and with many at a time the process dies of it.
        A renewal remains such a moment, once in a certificate's life; a daemon that is started again loses nothing.
        """
        nonlocal shown
        with lock:
            now = credentials.current
            if now == shown:
                return None
            shown = now
            return show(now)

    require_tls_1_3()
    return grpc.dynamic_ssl_server_credentials(
        show(shown), changed, require_client_authentication=require_client_authentication
    )
