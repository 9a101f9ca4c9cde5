"""A federation whose every key an attacker has, its clocks, and one honest witness with a clock of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from medsilo.privacy.consent.gate import PlanGate
from medsilo.privacy.door.witness_door import WitnessDoor
from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.exposure import Exposure
from medsilo.privacy.identity.cosignature import COSIGNATURE, ED25519, NoteKey
from medsilo.privacy.journal.checkpoint import cosign, read_note
from medsilo.privacy.journal.journal import Journal
from medsilo.privacy.journal.records import CosignedRecord
from medsilo.privacy.witness.book import Book, ConflictError
from medsilo.privacy.witness.protocol import AddCheckpoint, joined
from tests.support.evidence.exchanging import CONSENT, COORDINATOR, Exchange, Party, key_of, origin_of

HOSPITALS = ("spiffe://test/silo/hospital1", "spiffe://test/silo/hospital2")
WITNESS = NoteKey("witness.example.org", COSIGNATURE, key_of(99).public_key().public_bytes_raw())
BEGUN = 1_800_000_000.0


@dataclass
class Clocks:
    """``true``: the time, which the witness goes by. ``wrong``: by how much the parties' clocks are ahead."""

    true: float = BEGUN
    wrong: float = 0.0

    def stamp(self) -> str:
        return datetime.fromtimestamp(self.true + self.wrong, UTC).isoformat(timespec="milliseconds")[:23] + "Z"

    @contextmanager
    def set(self) -> Iterator[None]:
        """Meanwhile journals go by the parties' clocks; and nothing waits for a disk."""

        def line(journal: Journal, note: str) -> str:
            return cosign(note, journal.origin, journal._key, int(self.true + self.wrong))

        with (
            mock.patch("medsilo.privacy.journal.journal._now", self.stamp),
            mock.patch.object(Journal, "cosign", line),
            mock.patch("os.fsync", return_value=None),
        ):
            yield


@dataclass
class World:
    """One coordinator and hospitals of it. ``interval``: seconds between a round and the next."""

    folder: Path
    clocks: Clocks
    hospitals: int = 1
    interval: float = 600.0
    exchanges: list[Exchange] = field(default_factory=list)
    witness: Book | None = None

    def begin(self) -> World:
        parties = {identity: number + 1 for number, identity in enumerate(HOSPITALS[: self.hospitals])}
        parties[COORDINATOR] = 200
        logs = [
            NoteKey(origin_of(identity), ED25519, key_of(seed).public_key().public_bytes_raw())
            for identity, seed in parties.items()
        ]
        self.witness = Book(self.folder / "witness", WITNESS.name, key_of(99), logs, lambda: self.clocks.true)
        coordinator = Party(COORDINATOR, self.folder / "coordinator", key_of(200))
        consent = {
            **CONSENT,
            "exposures": [*CONSENT["exposures"], "CHECKPOINT"],
            "witnesses": {"keys": [WITNESS.text], "needed": 1, "fresh_hours": None},
        }
        for number, identity in enumerate(HOSPITALS[: self.hospitals]):
            silo = Party(identity, self.folder / identity.rpartition("/")[2], key_of(number + 1))
            self.exchanges.append(Exchange(silo, coordinator, consent=consent))
            self.exchanges[-1].begin()
        return self

    def parties(self) -> list[Party]:
        coordinators = {id(exchange.coordinator): exchange.coordinator for exchange in self.exchanges}
        return [*(exchange.silo for exchange in self.exchanges), *coordinators.values()]

    def round(self, number: int, *, shown: bool = True, chunks: int = 2) -> None:
        """A round of all hospitals; then the journals are ``shown`` to the witness."""
        for exchange in self.exchanges:
            exchange.rounds([number], chunks=chunks)
        self.clocks.true += self.interval
        if shown:
            self.show()

    def show(self) -> list[bool]:
        """Has all journals cosigned, as far as the witness does it."""
        return [show(party, self.witness) for party in self.parties() if self.witness is not None]

    def copy(self, folder: Path) -> World:
        """The journals as they lie on disk now, with the same keys and the same witness, to go on otherwise."""
        found = World(folder, self.clocks, self.hospitals, self.interval, witness=self.witness)
        coordinators: dict[int, Party] = {}
        for exchange in self.exchanges:
            silo = _copied(exchange.silo, folder)
            coordinator = coordinators.get(id(exchange.coordinator)) or _copied(exchange.coordinator, folder)
            coordinators[id(exchange.coordinator)] = coordinator
            found.exchanges.append(Exchange(silo, coordinator, consent=exchange.consent))
        return found

    def close(self) -> None:
        for party in self.parties():
            party.journal.close()

    def bundles(self, folder: Path) -> dict[str, Path]:
        """All evidence, of closed journals, by whose it is."""
        folder.mkdir(parents=True, exist_ok=True)
        return {party.name: party.bundle(folder / f"{party.name}.json") for party in self.parties()}


def show(party: Party, witness: Book) -> bool:
    """Has a journal's checkpoint cosigned, and recorded that, as daemons do; whether the witness has done it."""
    note = party.journal.checkpoint()
    size, old = read_note(note).size, 0
    for _ in range(2):
        proof = tuple(party.journal.consistency(old, size)) if old else ()
        question = AddCheckpoint(old, proof, note)
        try:
            line = witness.add(question)
        except ConflictError as error:
            if not old < error.size <= size:
                return False
            old = error.size
            continue
        except MedsiloError:
            return False
        door = WitnessDoor(party.door, PlanGate(Exposure), witness.key, run=None, plan_sha256=None)
        door.release(question, "", lambda _length: b"")
        party.door.note(CosignedRecord(checkpoint=joined(note, [line]), witnesses=[witness.key.text], away={}))
        return True
    return False


def _copied(party: Party, folder: Path) -> Party:
    target = folder / party.name
    shutil.copytree(party.folder, target)
    return Party(party.identity, target, party.key)
