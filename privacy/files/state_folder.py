"""A party's state folder is its own account's alone: 0700 and 0600 for all that is in it, whatever the umask was.

Updates, models, journals and databases say much about patients and hospitals. A private key or a token that others
could read is not put right here: it may be known by now, and whoever uses it refuses it and says so.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_OTHERS = 0o077
_SECRET = (".key", ".key.next", "page.token")
_PUBLIC = (".pem", ".csr", ".pub")
_SHOWN = 3


@contextmanager
def writing_privately() -> Iterator[None]:
    """Meanwhile this process makes files and folders for its own account alone."""
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def keep_private(folder: Path, say: Callable[[str], object] = log.warning) -> None:
    """From here on this process makes files and folders for its own account alone, and what others could read of the
    state folder so far is put right.

    ``say``: is told in one line what was put right, and what cannot be, as it belongs to another account.
    """
    os.umask(_OTHERS)
    mended, left = [], []
    for path, mode in _readable(folder):
        try:
            path.chmod(mode & ~_OTHERS)
        except FileNotFoundError:
            continue  # a process that is at work there has removed it
        except PermissionError:
            left.append(path)
        else:
            mended.append(path)
    for paths, what in (
        (mended, "now only this account can"),
        (left, f"and they belong to another account, so that this one cannot change it: sudo chmod -R go= {folder}"),
    ):
        if told := [path for path in paths if not path.name.endswith(_PUBLIC)]:
            say(f"{folder}: other accounts of this machine could read {name_some(told, folder)}; {what}")


def readable_by_others(folder: Path) -> list[Path]:
    """What in a state folder, which may not be there yet, other accounts have a right to; without certificates, which
    are public."""
    return [path for path, _ in _readable(folder) if not path.name.endswith(_PUBLIC)]


def name_some(paths: list[Path], folder: Path) -> str:
    """The first few of many paths in a folder, for a message."""
    folder = folder.resolve()
    shown = ", ".join(str(path.relative_to(folder)) if path != folder else "the folder" for path in paths[:_SHOWN])
    return shown if len(paths) <= _SHOWN else f"{shown} and {len(paths) - _SHOWN} more"


def _readable(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files and folders to which others have any right, with their modes."""
    folder = folder.resolve()  # the link to a folder says nothing of who may read it
    for place, folders, files in os.walk(folder):
        inside = [Path(place, name) for name in (*folders, *files) if not name.endswith(_SECRET)]
        for path in [folder, *inside] if Path(place) == folder else inside:
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISLNK(mode) and mode & _OTHERS:
                yield path, stat.S_IMODE(mode)
