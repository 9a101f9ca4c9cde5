"""What the libraries in this process are told through its environment: here, and nowhere else.

They read it when they are loaded, so `medsilo` imports this module before anything else. What
the user's own environment says of these names does not count.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from medsilo.privacy.errors import ConfigurationError

TLS_SUITES = "GRPC_SSL_CIPHER_SUITES"
NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime: device, interpreter's path and models, seconds after it was loaded
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",  # it also reports that it is not to report
}
"""Switches of libraries that report to their makers. ``tests/end_to_end/test_no_other_packet.py`` runs every command
and looks for what is missing here."""

_UNUSABLE_SUITE = "ECDHE-PSK-CHACHA20-POLY1305"
"""gRPC for Python has no setting for versions of TLS, but it reads the cipher suites of TLS 1.2 when it is loaded;
those of 1.3 are not governed by that. This one needs a shared key, which gRPC cannot be given: neither side can agree
on TLS 1.2 with anybody. A gRPC that no longer knew the name would open no connection and no port at all."""

_grpc_came_first = "grpc" in sys.modules and os.environ.get(TLS_SUITES) != _UNUSABLE_SUITE
os.environ.update(NO_TELEMETRY)
os.environ[TLS_SUITES] = _UNUSABLE_SUITE


@contextmanager
def asking_nobody() -> Iterator[None]:
    """Processes that are begun within ask no other machine by plain HTTP: Ray's own look for a cloud's metadata, for
    its makers' statistics, whether or not these are on, and have no switch for it."""
    answers_nobody = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "localhost,127.0.0.1"}
    before = {name: os.environ.get(name) for name in answers_nobody}
    os.environ.update(answers_nobody)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def require_tls_1_3() -> None:
    """Raises ``ConfigurationError`` if gRPC would speak TLS 1.2 too; called wherever it is given certificates."""
    if _grpc_came_first or os.environ.get(TLS_SUITES) != _UNUSABLE_SUITE:
        raise ConfigurationError(
            f"gRPC was loaded before Medsilo could set {TLS_SUITES}, without which it would speak TLS 1.2 too; import "
            "Medsilo's packages before `grpc`, and leave that variable alone"
        )
