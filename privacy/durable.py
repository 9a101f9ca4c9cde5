"""Files that survive a power cut whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file's content in one step that a power cut cannot halve. ``mode``: see ``replacing``."""
    with replacing(path, mode=mode) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` in one step when the block ends without an error.

    ``mode``: who may use it, less what the umask takes away.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # one that a crash left has the mode that it was made with
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a renamed file is only then sure to have its new name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
