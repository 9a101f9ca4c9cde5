"""The invitations that were sent to hospitals: a file in the coordinator's state folder.

Of a code it holds the public key that the code gives, from which the code cannot be found. The file is changed under a
lock, so `coordinator invite` may be used while the daemon runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from medsilo.privacy.errors import ConfigurationError, RefusedError
from medsilo.privacy.files.configuration import Name, StrictModel, explain
from medsilo.privacy.files.durable import write_atomically

State = Literal["open", "used", "taken back", "expired"]


class Kept(StrictModel):
    """One invitation, as the coordinator keeps it.

    ``public_key``: Ed25519, hex. ``used_for``: SHA-256 of the statement's certificate request and audit key that it was
    used for; the same may come again.
    """

    id: str
    silo: Name
    public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    made_at: datetime
    expires: datetime
    used_at: datetime | None = None
    used_for: str | None = None
    revoked_at: datetime | None = None

    @property
    def state(self) -> State:
        """What it is good for now."""
        if self.used_at is not None:
            return "used"
        if self.revoked_at is not None:
            return "taken back"
        return "expired" if datetime.now(UTC) > self.expires else "open"


class _File(StrictModel):
    invitations: tuple[Kept, ...] = ()


class Invitations:
    """``path``: the file; its folder is made when it is needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> tuple[Kept, ...]:
        """All of them, oldest first; raises ``ConfigurationError`` for a file that cannot be read."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return _File.model_validate(content).invitations
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            problem = "; ".join(explain(error, _File))
        except (OSError, ValueError) as error:
            problem = str(error)
        raise ConfigurationError(
            f"{self._path}: the invitations cannot be read: {problem}. If the disk is well and this account may read "
            "the file, move it away and invite anew (`coordinator invite`): hospitals that have enrolled stay "
            "enrolled, and no backup is needed"
        )

    def add(self, silo: str, public_key: bytes, expires: datetime) -> None:
        """Keeps an invitation; the hospital's open ones are taken back."""
        with self._changing() as kept:
            self._revoke(kept, silo)
            new = Kept(
                id=secrets.token_hex(4),
                silo=silo,
                public_key=public_key.hex(),
                made_at=_now(),
                expires=expires,
            )
            kept.append(new)

    def revoke(self, silo: str) -> int:
        """Takes a hospital's open invitations back; returns how many there were."""
        with self._changing() as kept:
            return self._revoke(kept, silo)

    def use(self, invitation: Kept, what_for: str) -> None:
        """Uses an invitation up, durably; for the same keys that may be done again until it expires.

        Raises ``RefusedError`` if it is not open any more.
        """
        with self._changing() as kept:
            place = next(n for n, one in enumerate(kept) if one.id == invitation.id)
            if not _check(kept[place], what_for):
                kept[place] = kept[place].model_copy(update={"used_at": _now(), "used_for": what_for})

    def check(self, invitation: Kept, what_for: str) -> None:
        """Raises as ``use`` does; nothing is used up."""
        _check(next(one for one in self.all() if one.id == invitation.id), what_for)

    @staticmethod
    def _revoke(kept: list[Kept], silo: str) -> int:
        places = [n for n, one in enumerate(kept) if one.silo == silo and one.state == "open"]
        for place in places:
            kept[place] = kept[place].model_copy(update={"revoked_at": _now()})
        return len(places)

    @contextmanager
    def _changing(self) -> Iterator[list[Kept]]:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.all()
            kept = list(before)
            yield kept
            if tuple(kept) != before:
                content = _File(invitations=tuple(kept)).model_dump(mode="json")
                write_atomically(self._path, json.dumps(content, indent=2).encode(), mode=0o600)
        finally:
            os.close(lock)


_REASONS: dict[State, str] = {
    "used": "the invitation was used on {0.used_at:%Y-%m-%d %H:%M} UTC, for other keys. If that was not this hospital, "
    "tell the coordinator's operator at once; if it was, and the keys are lost, ask for another invitation",
    "taken back": "the invitation was taken back on {0.revoked_at:%Y-%m-%d %H:%M} UTC; ask the coordinator's operator "
    "for another",
    "expired": "the invitation expired on {0.expires:%Y-%m-%d %H:%M} UTC; ask the coordinator's operator for another "
    "(`coordinator invite`)",
}


def _check(found: Kept, what_for: str) -> bool:
    """Whether it was used for the same already; raises ``RefusedError`` if it cannot be used."""
    again = found.used_for == what_for
    if (again and _now() > found.expires) or (not again and found.state != "open"):
        raise RefusedError(_REASONS["expired" if again else found.state].format(found))
    return again


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
