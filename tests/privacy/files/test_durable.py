"""A disk that is full, read-only or failing spoils nothing, and is told in words with the way out."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from medsilo.privacy.errors import DiskError
from medsilo.privacy.files.durable import Appender, on_disk, write_atomically
from medsilo.privacy.party.console import run


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "input/output error"),
        (errno.EMFILE, r"ulimit -n"),
        (errno.ENFILE, "on this machine"),
    ],
)
def test_a_disk_that_fails_is_named_with_the_way_out(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(DiskError, match=words) as caught, on_disk(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path) in str(caught.value)
    assert "give the same command again" in str(caught.value)
    assert caught.value.exit_code == 13
    assert "backup" not in str(caught.value)


def test_an_error_of_another_kind_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError), on_disk(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")


def test_a_line_that_cannot_be_taken_back_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line stands at the file's end; another one after it would be part of a broken record."""
    file = os.open(tmp_path / "lines", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    appender = Appender(tmp_path)
    appender.append(file, b"whole\n")
    write = os.write

    def half(to: int, data: Any) -> int:
        if len(data) < 5:
            raise OSError(errno.EIO, "Input/output error")
        return write(to, data[: len(data) // 2])

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(DiskError):
            appender.append(file, b"broken\n")
    assert not appender.usable
    with pytest.raises(DiskError):
        appender.append(file, b"next\n")
    os.close(file)
    assert (tmp_path / "lines").read_bytes() == b"whole\nbro"


def test_any_command_on_a_full_disk_ends_with_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def write() -> None:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["write"])
        with pytest.raises(SystemExit) as ending:
            run(app)
    gc.unfreeze()  # a command's process would have ended
    assert ending.value.code == 13
    assert "what this command writes: the disk is full" in capsys.readouterr().err


def test_nobody_can_put_a_link_in_the_way_of_a_file_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that others may write to, such as /tmp, between making room and writing."""
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    unlink = Path.unlink

    def planting(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if path.name == ".bundle.json.partial":
            path.symlink_to(other)

    monkeypatch.setattr(Path, "unlink", planting)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "bundle.json", b"evidence")
    assert other.read_bytes() == b"precious"
