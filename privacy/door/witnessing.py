"""Has a journal's checkpoints cosigned by witnesses, in the background: no round waits for one.

A witness that is away is tried a few times and then left until the next checkpoint is due; that it is, stands in the
journal, in the party's status and in its log, once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from medsilo.privacy.door.door import Door, Gate
from medsilo.privacy.door.witness_door import WitnessDoor
from medsilo.privacy.errors import MedsiloError, RefusedError, UnreachableError
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.identity.cosignature import CosignatureError, NoteKey, cosigned_at
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.records import CosignedRecord
from medsilo.privacy.printable import from_the_other_side
from medsilo.privacy.witness.link import WitnessLink
from medsilo.privacy.witness.protocol import SIZE_TYPE, AddCheckpoint, MalformedError, joined, read_size
from medsilo.privacy.witness.status import STATUS, read_status

log = logging.getLogger(__name__)

ATTEMPTS = 3
LONGEST_SECONDS = 3600.0
"""Without rounds, a journal that has grown is shown to its witnesses so often."""
CLOSING_SECONDS = 5.0
"""How long the end of a run waits at most for its last checkpoint's cosignatures."""
_WORDS = {
    400: "does not understand what was asked",
    403: "does not know this journal's key; give its operator what `witness journal-key` prints",
    404: "does not serve this journal; give its operator what `witness journal-key` prints",
    422: "has cosigned another history of this journal than the one here; keep both, and find out which is which",
}
T = TypeVar("T")


class GateFor(Protocol):
    """Gives the gate towards a witness."""

    def __call__(self, key: NoteKey) -> Gate: ...


class _ClosedError(MedsiloError):
    """The journal is not written any more."""


class Witnessing:
    """Shows one journal's checkpoints to its witnesses, whenever that is ``due``.

    ``folder``: the party's state. ``run``, ``plan_sha256``: in which run it is. ``notice``: told when a witness goes
    away, or comes back.
    """

    def __init__(
        self,
        links: Sequence[WitnessLink],
        door: Door,
        gate_for: GateFor,
        folder: Path,
        *,
        run: str | None = None,
        plan_sha256: str | None = None,
        notice: Callable[[str], object] = log.warning,
    ) -> None:
        self._links = links
        self._door = door
        self._doors = {
            link.key: WitnessDoor(door, gate_for(link.key), link.key, run=run, plan_sha256=plan_sha256)
            for link in links
        }
        self._status = folder / STATUS
        self._notice = notice
        self._told = read_status(folder)
        self._away: set[str] = set()
        self._shown = 0
        """Size of the journal up to which all was shown, or is the record of showing it."""
        self._own = 0
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witnesses", daemon=True)
        if links:
            self._thread.start()

    def due(self) -> None:
        """A checkpoint is to be cosigned: a round has been settled. Returns at once."""
        self._due.set()

    def close(self) -> None:
        """Has the last checkpoint cosigned, for which it waits ``CLOSING_SECONDS`` at most; then nothing is written any
        more."""
        self._stopping = True
        self._due.set()
        if self._links:
            self._thread.join(CLOSING_SECONDS)
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        while True:
            self._due.wait(LONGEST_SECONDS)
            self._due.clear()
            last = self._stopping
            with suppress(_ClosedError):
                try:
                    self._show(1 if last else ATTEMPTS)
                except MedsiloError as error:
                    log.warning("the witnesses could not be asked: %s", error)
            if last:
                return

    def _show(self, attempts: int) -> None:
        journal = self._door.journal
        if len(journal) <= self._shown:
            return
        note = self._writing(journal.checkpoint)
        self._own = 0
        with ThreadPoolExecutor(len(self._links), thread_name_prefix="witness") as pool:
            answers = list(pool.map(partial(self._asked, note=note, attempts=attempts), self._links))
        lines = [answer for answer in answers if not isinstance(answer, MedsiloError)]
        away = {
            link.key.name: from_the_other_side(str(answer))
            for link, answer in zip(self._links, answers, strict=True)
            if isinstance(answer, MedsiloError)
        }
        if lines or set(away) != self._away:
            keys = [link.key.text for link, answer in zip(self._links, answers, strict=True) if isinstance(answer, str)]
            self._noted(CosignedRecord(checkpoint=joined(note, lines), witnesses=keys, away=away))
        self._shown = read_note(note).size + self._own
        self._tell(away)

    def _asked(self, link: WitnessLink, *, note: str, attempts: int) -> str | MedsiloError:
        """A witness's line under a checkpoint, or why there is none."""
        retrying = Retrying(
            stop=stop_after_attempt(attempts),
            wait=wait_exponential_jitter(multiplier=0.2, max=5.0),
            retry=retry_if_exception_type(UnreachableError),
            reraise=True,
        )
        try:
            return retrying(self._ask, link, note)
        except MedsiloError as error:
            return error

    def _ask(self, link: WitnessLink, note: str) -> str:
        size, name = read_note(note).size, link.key.name
        self._doors[link.key].check()
        old = min(int(self._told.get(name, {}).get("size", 0)), size)
        status, kind, body = self._exchange(link, note, old, size)
        if status == 409 and kind == SIZE_TYPE:
            told = read_size(body)
            if told > size:
                raise RefusedError(
                    f"{name} has cosigned {told} records of this journal, which holds {size}: it was put back to an "
                    "earlier state, or another has signed with its key"
                )
            if told == old:
                raise RefusedError(f"{name} {_WORDS[422]}")
            status, kind, body = self._exchange(link, note, told, size)
        if status != 200:
            if status in _WORDS:
                raise RefusedError(f"{name} {_WORDS[status]} ({status})")
            raise UnreachableError(f"{name} answers with status {status}")
        line = _line_of(body, note, link.key)
        time = cosigned_at(joined(note, [line]), link.key)
        self._told[name] = {"size": size, "time": time}
        return line

    def _exchange(self, link: WitnessLink, note: str, old: int, size: int) -> tuple[int, str, bytes]:
        proof = tuple(self._door.journal.consistency(old, size)) if old else ()
        question = AddCheckpoint(old, proof, note)
        door = self._doors[link.key]
        with link.connect() as connection:
            shown = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
            digest = hashlib.sha256(shown).hexdigest() if shown else ""
            data, _ = self._writing(lambda: door.release(question, digest, link.head))
            with self._lock:
                self._own += 1
            return link.exchange(connection, data)

    def _noted(self, record: CosignedRecord) -> None:
        self._writing(lambda: self._door.note(record))
        self._own += 1

    def _writing(self, write: Callable[[], T]) -> T:
        """Writes to the journal, as long as it is open."""
        with self._lock:
            if self._closed:
                raise _ClosedError("the journal is closed")
            return write()

    def _tell(self, away: dict[str, str]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        found: dict[str, Any] = {}
        for link in self._links:
            name = link.key.name
            before = self._told.get(name, {})
            since = before.get("away_since") or now
            found[name] = {
                "key": link.key.text,
                "size": before.get("size", 0),
                "time": before.get("time"),
                "away": away.get(name),
                "away_since": since if name in away else None,
            }
        self._told = found
        for name in sorted(set(away) - self._away):
            self._notice(f"witness {name}: {away[name]}; nothing waits for it, and it is asked again")
        for name in sorted(self._away - set(away)):
            self._notice(f"witness {name} cosigns again")
        self._away = set(away)
        try:
            write_atomically(self._status, json.dumps(found, indent=1).encode(), mode=0o600)
        except OSError as error:
            log.warning("what the witnesses have cosigned could not be kept: %s", error)


def _line_of(body: bytes, note: str, key: NoteKey) -> str:
    """The line by that key in a witness's answer, which holds; raises ``RefusedError`` if there is none."""
    try:
        for line in body.decode().splitlines():
            if cosigned_at(joined(note, [line]), key) is not None:
                return line
    except (CosignatureError, MalformedError, UnicodeDecodeError) as error:
        raise RefusedError(f"the answer of {key.name} cannot be used: {error}") from None
    raise RefusedError(f"{key.name} has not signed with the key that the configuration names")
