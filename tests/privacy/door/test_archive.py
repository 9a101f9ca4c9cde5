"""What a silo keeps of what it has sent: the way out that a message names is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from medsilo.privacy.door.archive import SentArchive
from medsilo.privacy.errors import DataError, IdentityError

CALL = "0" * 32


def test_with_a_damaged_key_moved_away_messages_are_kept_again_and_only_the_old_ones_are_closed(tmp_path: Path) -> None:
    key, moved = tmp_path / "keys" / "sent.key", tmp_path / "sent.key"
    SentArchive(tmp_path / "sent", key).keep(CALL, 0, b"before")
    key.write_bytes(key.read_bytes()[:-1])
    with pytest.raises(IdentityError, match=r"Move it away, and the same command makes another.*unless a backup"):
        SentArchive(tmp_path / "sent", key)
    key.rename(moved)
    archive = SentArchive(tmp_path / "sent", key)
    archive.keep("1" * 32, 0, b"after")
    assert list(archive.read("1" * 32)) == [b"after"]
    with pytest.raises(DataError):
        list(archive.read(CALL))
