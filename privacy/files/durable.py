"""Files and lines that survive a power cut whole, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from medsilo.privacy.errors import DiskError

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full. Free some space there",
    errno.EDQUOT: "the disk quota is used up. Free some space there, or have the quota raised",
    errno.EFBIG: "a file may not grow further. Raise the limit on files' sizes",
    errno.EROFS: "the disk is read-only. See in the system's log why, and mount it for writing",
    errno.EIO: "the disk failed (input/output error). See in the system's log why, and check the disk or the share",
    errno.EMFILE: "Too many open files and connections. Raise this process' limit (`ulimit -n`, or LimitNOFILE= of "
    "its systemd unit)",
    errno.ENFILE: "Too many open files on this machine. Raise its limit (fs.file-max), or end what holds so many",
}


class Appender:
    """Appends to an owner's files, and to none of them once the disk has failed to keep something.

    ``folder``: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failure: OSError | None = None

    @property
    def usable(self) -> bool:
        """Whether the disk has kept everything so far."""
        return self._failure is None

    def check_usable(self) -> None:
        """Raises ``DiskError`` if the disk has failed before."""
        if self._failure is not None:
            raise _failed(self._failure, self._folder)

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
            try:
                os.ftruncate(file, end)
            except OSError as second:
                self._failure = second
            raise _failed(error, self._folder) from error

    def sync(self, file: int, *, folder: Path | None = None) -> None:
        """Makes a file's bytes durable; ``folder``: its name in there too."""
        try:
            os.fsync(file)
            if folder is not None:
                fsync_folder(folder)
        except OSError as error:
            # What a failed fsync leaves on disk is unknown, and a second one may report success all the same.
            self._failure = error
            raise _failed(error, self._folder) from error


def disk_error(error: BaseException, where: Path | str) -> DiskError | None:
    """What a full, read-only or failing disk made of a write there, in words; None for any other error."""
    if isinstance(error, DiskError):
        return error
    if not isinstance(error, OSError) or error.errno not in _WAYS_OUT:
        return None
    return _failed(error, where)


def _failed(error: OSError, where: Path | str) -> DiskError:
    way_out = _WAYS_OUT.get(error.errno or 0, f"it cannot be written ({error.strerror}). Find out why")
    found = DiskError(
        f"{where}: {way_out}, then give the same command again: it goes on where it was. What was kept is not lost, "
        "and nothing leaves or counts that could not be kept"
    )
    found.passes = error.errno in (errno.EMFILE, errno.ENFILE)
    return found


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Meanwhile a full, read-only or failing disk is a ``DiskError`` that names the folder."""
    try:
        yield
    except OSError as error:
        found = disk_error(error, folder)
        if found is None:
            raise
        raise found from error


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
        # Made here, and not what somebody who may write to the folder has put there meanwhile: a link leads elsewhere.
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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
