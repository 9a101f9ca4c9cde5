"""``medsilo-verify BUNDLE``: says whether a bundle is sound; ends with 0, 1 (broken) or 2 (unreadable)."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from .reader import verify_bundle
from .result import UnreadableError


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="medsilo-verify", description="Verifies an evidence bundle of Medsilo.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--key", help="the owner's public audit key: 64 hexadecimal digits")
    options = parser.parse_args()
    if options.key is not None and re.fullmatch("[0-9a-fA-F]{64}", options.key) is None:
        parser.error("--key: should be 64 hexadecimal digits")
    try:
        found = verify_bundle(options.bundle, key=bytes.fromhex(options.key) if options.key else None)
    except UnreadableError as error:
        _say([str(error)])
        sys.exit(2)
    left = [f"Left, of {name}: {count} bytes." for name, count in sorted(found.left.items())]
    _say(
        [
            str(options.bundle),
            *found.verdict(),
            *found.remarks,
            *(["What left, by exposure class:"] if left else []),
            *left,
        ]
    )
    sys.exit(0 if found.sound else 1)


def _say(lines: list[str]) -> None:
    for line in lines:
        # Evidence is somebody else's: nothing in it may steer the terminal.
        sys.stdout.write("".join(sign if sign.isprintable() else "�" for sign in line) + "\n")


if __name__ == "__main__":
    main()
