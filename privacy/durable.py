"""Files that survive a power cut whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content in one step that a power cut cannot halve."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a renamed file is only then sure to have its new name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
