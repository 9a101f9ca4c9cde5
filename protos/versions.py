"""The versions of the protocol: what this release speaks, with which others it works, what each of them had.

``released/`` holds the schemas of every protocol version that a release spoke, as they were then; nothing there ever
changes. A change of a schema after that belongs to the next version, and says so where it stands (``since``).
"""

from __future__ import annotations

from pathlib import Path

PROTOCOL_VERSION = 2
"""What this release speaks. The first change of a schema after a release raises it by one."""
OLDEST_VERSION = 1
"""The oldest that this release works with: at least the one before its own."""
RELEASED = Path(__file__).parent / "released"


def released(version: int) -> Path:
    """The file with the schemas of a released version: a ``FileDescriptorSet``."""
    return RELEASED / f"version{version}.binpb"
