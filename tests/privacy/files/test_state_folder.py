"""A state folder is its own account's alone, wherever it really lies."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from medsilo.privacy.files.state_folder import keep_private, readable_by_others


@pytest.mark.parametrize("linked", [False, True], ids=["a folder", "a link to one"])
def test_a_state_folder_that_stood_open_is_put_right(tmp_path: Path, linked: bool) -> None:
    before = os.umask(0)
    try:
        real = tmp_path / "disk" / "state"
        (real / "journal").mkdir(parents=True)
        (real / "journal" / "records.jsonl").touch()
        state = tmp_path / "state"
        if linked:
            state.symlink_to(real)
        state = state if linked else real
        assert len(readable_by_others(state)) == 3
        said: list[str] = []
        keep_private(state, said.append)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (real, *real.rglob("*"))}
    assert set(modes.values()) == {0o700, 0o600}, modes
    assert modes[real] == 0o700
    (line,) = said
    assert f"{state}: other accounts of this machine could read the folder, journal, journal/records.jsonl" in line
    assert readable_by_others(state) == []
