"""Starts ``silo`` or ``coordinator`` for a benchmark, with parts of it switched off.

    python benchmarks/party.py [untrained] [unjournalled | unaudited] -- silo|coordinator ARGUMENTS …

``untrained``: training and testing do nothing. ``unjournalled``: the door does all its work, hashes, signatures and
receipts included, but the journal keeps nothing: no record is put into canonical form, written or synced.
``unaudited``: messages are only serialised and parsed; nothing is attributed, held against the consent, hashed,
recorded, signed or acknowledged. Neither is a way to run a federation: they are what the audit's cost is measured
against.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from medsilo.privacy.journal import journal
from medsilo.protos.medsilo.v1 import journal_pb2


class PlainDoor:
    """A door that lets everything through."""

    def __init__(self, journal: Any, **_: Any) -> None:
        self.journal = SimpleNamespace(public_key=journal.public_key)
        self.gate = SimpleNamespace(check=self.nothing)

    def through(self, _gate: Any) -> PlainDoor:
        return self

    def receipt_state(self, _peer: str) -> Any:
        return SimpleNamespace(seen=SimpleNamespace(size=0), unsigned=list)

    def attest(self, *_: Any, **__: Any) -> journal_pb2.Envelope:
        return journal_pb2.Envelope()

    def rotations(self) -> list[journal_pb2.Envelope]:
        return []

    def has_parted(self, _peer: str) -> bool:
        return True

    def nothing(self, *_: Any, **__: Any) -> None:
        return None

    note = enrol = ended = check_receipt = check_earlier_receipt = remember = nothing

    def release(self, messages: Sequence[Any], _call: Any) -> list[bytes]:
        return [message.SerializeToString() for message in messages]

    def admit(self, data: bytes, kind: Any, call: Any, **_: Any) -> Any:
        message = kind.FromString(data)
        if not call.peer and call.name_peer:
            call.peer = call.name_peer(message)
        return message


def keep_nothing() -> None:
    """Makes journals count their records, and nothing else."""

    def append(self: Any, records: Sequence[Any], **_: Any) -> range:
        with self._append_lock:
            first = self._tree.size
            for _ in records:
                self._grow(b"")
            return range(first, self._tree.size)

    disk = SimpleNamespace(usable=True)
    disk.append = disk.sync = disk.check_usable = lambda *_, **__: None
    journal.Journal.append = append  # type: ignore[method-assign]
    journal.Journal._read_lines = lambda _self, _first, count: [b""] * count  # type: ignore[method-assign]
    journal.Journal.remember = lambda *_: None  # type: ignore[method-assign]
    journal.Appender = lambda _folder: disk  # type: ignore[assignment,misc]


def main() -> None:
    """Takes the flags, then is the command."""
    end = sys.argv.index("--")
    flags, sys.argv = set(sys.argv[1:end]), sys.argv[end + 1 :]
    if "untrained" in flags:
        from medsilo.silo.training import site as training

        training.LocalSite.fit = training.LocalSite.measure = lambda *_, **__: None
    if "unjournalled" in flags:
        keep_nothing()
    if "unaudited" in flags:
        from medsilo.coordinator import daemon as coordinator_daemon
        from medsilo.silo.run import daemon

        daemon.Door = coordinator_daemon.Door = PlainDoor
    if sys.argv[0] == "silo":
        from medsilo.silo.cli import main as command
    else:
        from medsilo.coordinator.cli import main as command
    command()


if __name__ == "__main__":
    main()
