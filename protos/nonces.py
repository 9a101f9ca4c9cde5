"""The random bytes in every message."""

from __future__ import annotations

import secrets

NONCE_BYTES = 16


def nonce() -> bytes:
    """Sixteen random bytes for a message: its hash then tells nothing of what else is in it."""
    return secrets.token_bytes(NONCE_BYTES)
