"""A witness answers as C2SP's tlog-witness says, and never cosigns two histories of one log."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.errors import JournalError, JournalInUseError
from medsilo.privacy.identity.cosignature import ED25519, NoteKey, cosigned_at, words_of
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.merkle import ProvingTree
from medsilo.privacy.witness.book import Book
from medsilo.privacy.witness.protocol import AddCheckpoint, joined
from medsilo.privacy.witness.serving import application

ORIGIN = "medsilo/tissue/silo/hospital1"
KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
WITNESS = Ed25519PrivateKey.from_private_bytes(bytes([2]) * 32)
NOW = 1_800_000_000


def grown(size: int, marks: str = "") -> ProvingTree:
    """A log of that many records; ``marks``: what sets its records from the 20th on apart."""
    leaves = [f"{number}{marks if number >= 20 else ''}".encode() for number in range(size)]
    tree = ProvingTree(lambda first, count: leaves[first : first + count])
    for leaf in leaves:
        tree.append(leaf)
    return tree


def request(size: int, old: int = 0, *, marks: str = "", origin: str = ORIGIN, key: Ed25519PrivateKey = KEY) -> bytes:
    tree = grown(size, marks)
    note = Checkpoint(origin, size, tree.root()).sign(key)
    proof = tuple(tree.consistency(old, size)) if old else ()
    return b"".join(AddCheckpoint(old, proof, note).parts())


def make(folder: Path) -> Book:
    log = NoteKey(ORIGIN, ED25519, KEY.public_key().public_bytes_raw())
    return Book(folder, "ethics.example.org/w", WITNESS, [log], lambda: NOW)


def ask(book: Book, *bodies: bytes) -> list[tuple[int, str, str]]:
    async def answers() -> list[tuple[int, str, str]]:
        found = []
        async with TestClient(TestServer(application(book))) as client:
            for body in bodies:
                answer = await client.post("/add-checkpoint", data=body)
                found.append((answer.status, answer.headers["Content-Type"], await answer.text()))
        return found

    return asyncio.run(answers())


def test_a_checkpoint_that_continues_the_last_one_is_cosigned(tmp_path: Path) -> None:
    book = make(tmp_path)
    first, second = request(20), request(37, 20)
    for body, (status, _, text) in zip((first, second), ask(book, first, second), strict=True):
        assert status == 200
        note = joined(AddCheckpoint.read(body).note, [text.removesuffix("\n")])
        assert cosigned_at(note, book.key) == NOW


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"old 1\n\n" + request(20), 400),
        (request(20).replace(b"old 0", b"old 00"), 400),
        (b"old 30\n\n" + request(20).partition(b"\n\n")[2], 400),
        (b"old 0\n" + b"AA==\n" * 64 + b"\n" + request(20).partition(b"\n\n")[2], 400),
        (request(20, key=WITNESS), 403),
        (request(20).replace(b"\n20\n", b"\n21\n"), 403),
        (request(20, origin="medsilo/tissue/silo/hospital2"), 404),
        (request(40, 10), 409),
        (request(30, 29), 409),
        (request(30, 30, marks="another"), 409),
        (b"old 30\n\n" + request(40, 30).partition(b"\n\n")[2], 422),
        (request(40, 30, marks="another"), 422),
    ],
)
def test_what_is_not_a_continuation_is_refused_by_its_status(tmp_path: Path, body: bytes, status: int) -> None:
    book = make(tmp_path)
    good, (found, kind, text), after = ask(book, request(30), body, request(41, 30))
    assert good[0] == 200
    assert found == status
    if status == 409:
        assert (kind, text) == ("text/x.tlog.size", "30\n")
    assert after[0] == 200  # nothing of it has stayed


def test_a_witness_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    book = make(tmp_path)
    ask(book, request(30))
    book.close()
    again = make(tmp_path)
    fork, rollback, on = ask(again, request(40, 30, marks="another"), request(25), request(40, 30))
    assert (fork[0], rollback[0], on[0]) == (422, 409, 200)


def test_a_witness_keeps_size_and_root_of_each_log_and_nothing_else(tmp_path: Path) -> None:
    ask(make(tmp_path), request(30), request(41, 30))
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"}
    name = f"{hashlib.sha256(ORIGIN.encode()).hexdigest()}.checkpoint"
    assert kept == {name: Checkpoint(ORIGIN, 41, grown(41).root()).text().encode()}


def test_a_damaged_state_is_not_begun_anew(tmp_path: Path) -> None:
    book = make(tmp_path)
    ask(book, request(30))
    book.close()
    path = next(tmp_path.glob("*.checkpoint"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(JournalError, match="begins anew"):
        make(tmp_path)


def test_two_witnesses_do_not_share_a_folder(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(JournalInUseError):
        make(tmp_path)


def test_of_two_histories_at_once_one_is_cosigned(tmp_path: Path) -> None:
    book = make(tmp_path)
    ask(book, request(20))

    async def race() -> list[int]:
        async with TestClient(TestServer(application(book))) as client:
            bodies = [request(33, 20, marks=f"history {number}") for number in range(8)]
            answers = await asyncio.gather(*(client.post("/add-checkpoint", data=body) for body in bodies))
            return sorted(answer.status for answer in answers)

    assert asyncio.run(race()) == [200] + [409] * 7


def test_the_witness_tells_the_last_checkpoint_under_its_own_signature(tmp_path: Path) -> None:
    book = make(tmp_path)
    ask(book, request(30))

    async def last(origin: str) -> tuple[int, str]:
        async with TestClient(TestServer(application(book))) as client:
            answer = await client.get(f"/checkpoint/{origin}")
            return answer.status, await answer.text()

    status, note = asyncio.run(last(ORIGIN))
    (word,) = words_of(note, [book.key])
    assert (status, word.size, word.root, word.time) == (200, 30, grown(30).root(), NOW)
    assert asyncio.run(last("medsilo/tissue/silo/hospital2"))[0] == 404
