"""A coordinator that keeps a second journal towards the last hospital from the second round on, with the same key:
``two_faced serve …``. What hospitals sign it hands on, as it has to if it is to hand on anything."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from medsilo.coordinator import cli, daemon
from medsilo.privacy.door.door import Call, Door
from medsilo.privacy.door.gossip import Word
from medsilo.privacy.door.receipts import ReceiptState
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import read


class Second(Door):
    """What the deceived hospital is shown."""

    first: Door

    def _words(self, peer: str) -> list[Word]:
        words = self.first._words(peer)
        while len(self.journal) <= max([len(self.first.journal), *(word.size for word in words)]):
            self.note(read({"kind": "padding"}))  # a journal that is shorter than what others saw is found out as well
        return words


class TwoFaced(Door):
    """The door as the service knows it."""

    def __init__(self, journal: Journal, **more: Any) -> None:
        super().__init__(journal, **more)
        self._more = more
        self._second: Second | None = None
        self._making = threading.Lock()
        self._deceived, self._updates = "", 0

    def receipt_state(self, peer: str) -> ReceiptState:
        return super().receipt_state(peer) if not self._is_deceived(peer) else self._other().receipt_state(peer)

    def attest(self, peer: str, **more: Any) -> Any:
        return super().attest(peer, **more) if not self._is_deceived(peer) else self._other().attest(peer, **more)

    def release(self, messages: Sequence[Message], call: Call) -> list[bytes]:
        if not self._is_deceived(call.peer):
            return super().release(messages, call)
        return self._other().release(messages, call)

    def admit(self, data: bytes, kind: Any, call: Call, *, durable: bool = False) -> Any:
        if call.rpc == "SubmitUpdate" and call.call_id is None and call.peer.endswith(LAST):
            self._updates += 1
            self._deceived = call.peer if self._updates == 2 else self._deceived
        if not self._is_deceived(call.peer):
            return super().admit(data, kind, call, durable=durable)
        return self._other().admit(data, kind, call, durable=durable)

    def _is_deceived(self, peer: str) -> bool:
        return bool(peer) and peer == self._deceived

    def _other(self) -> Second:
        with self._making:
            if self._second is None:
                folder = self.journal.directory.with_name("second-journal")
                shutil.copytree(self.journal.directory, folder)
                journal = Journal(folder, key=self.journal._key, origin=self.journal.origin)
                self._second = Second(journal, **self._more)
                self._second.first = self
                self._second.receipt_state(self._deceived).version = 2
            return self._second


LAST = "hospital2"


def main() -> None:
    daemon.Door = TwoFaced  # type: ignore[misc]
    cli.main()
