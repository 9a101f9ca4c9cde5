"""``medsilo-verify BUNDLE``: says whether a bundle is sound; ends with 0, 1 (broken) or 2 (unreadable)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from .reader import verify_bundle
from .result import UnreadableError


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="medsilo-verify", description="Verifies an evidence bundle of Medsilo.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--key", type=Path, help="the owner's public audit key (audit.pub), if you have it")
    options = parser.parse_args()
    try:
        found = verify_bundle(options.bundle, key=_key(options.key) if options.key else None)
    except UnreadableError as error:
        _say([str(error)])
        sys.exit(2)
    left = [f"Left, of {name}: {count} bytes." for name, count in sorted(found.left.items())]
    _say([str(options.bundle), *found.verdict(), *found.remarks, *left])
    sys.exit(0 if found.sound else 1)


def _key(path: Path) -> bytes:
    try:
        found = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, Ed25519PublicKey):
        raise UnreadableError(f"{path}: is not a public audit key (PEM, Ed25519)")
    return found.public_bytes_raw()


def _say(lines: list[str]) -> None:
    for line in lines:
        # Evidence is somebody else's: nothing in it may steer the terminal.
        sys.stdout.write("".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line) + "\n")


if __name__ == "__main__":
    main()
