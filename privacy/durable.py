"""Files and lines that survive a power cut whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class Appender:
    """Appends to an owner's files, and to none of them once the disk has failed to keep something.

    ``refused`` and ``lost`` make the owner's errors: of a write that failed and was undone, and of bytes that may be on
    disk or not.
    """

    def __init__(self, *, refused: Callable[[OSError], Exception], lost: Callable[[OSError], Exception]) -> None:
        self._refused = refused
        self._lost = lost
        self._failure: OSError | None = None

    @property
    def usable(self) -> bool:
        """Whether the disk has kept everything so far."""
        return self._failure is None

    def check_usable(self) -> None:
        """Raises the owner's error if the disk has failed before."""
        if self._failure is not None:
            raise self._lost(self._failure)

    def append(self, file: int, data: bytes) -> None:
        """Writes all of the bytes at a file's end, or none; they are durable after ``sync``."""
        self.check_usable()
        end = os.fstat(file).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            # Half a line would spoil the next one.
            os.ftruncate(file, end)
            raise self._refused(error) from error

    def sync(self, file: int, *, folder: Path | None = None) -> None:
        """Makes a file's bytes durable; ``folder``: its name in there too."""
        try:
            os.fsync(file)
            if folder is not None:
                fsync_folder(folder)
        except OSError as error:
            # What a failed fsync leaves on disk is unknown, and a second one may report success all the same.
            self._failure = error
            raise self._lost(error) from error


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
