"""The journal: what was written stays, and what was changed is noticed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from privacy.checkpoint import Checkpoint, verify
from privacy.errors import JournalError
from privacy.journal import CHECKPOINTS, RECORDS, Journal, read_records, verify_records
from privacy.merkle import MerkleTree

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
ORIGIN = "medsilo/test/silo/hospital1"
# The reference leaves and root of RFC 6962's test vectors.
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOT = "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"


def open_journal(folder: Path) -> Journal:
    return Journal(folder, key=KEY, origin=ORIGIN)


def fill(folder: Path, count: int) -> None:
    with open_journal(folder) as journal:
        for number in range(count):
            journal.append([{"kind": "test", "number": number}])
            journal.checkpoint()


def lines(folder: Path) -> list[bytes]:
    return (folder / RECORDS).read_bytes().splitlines(keepends=True)


def test_the_tree_is_rfc_6962s() -> None:
    tree = MerkleTree()
    assert tree.root() == hashlib.sha256(b"").digest()
    for leaf in LEAVES:
        tree.append(bytes.fromhex(leaf))
    assert tree.root().hex() == ROOT


def plain_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word by word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + plain_root(leaves[:split]) + plain_root(leaves[split:])).digest()


def test_the_tree_agrees_with_the_definition_at_every_size() -> None:
    tree, leaves = MerkleTree(), []
    for number in range(70):
        leaves.append(str(number).encode())
        tree.append(leaves[-1])
        assert tree.root() == plain_root(leaves)


def test_a_checkpoint_holds_for_its_key_and_its_text_alone() -> None:
    note = Checkpoint(ORIGIN, 7, bytes(32)).sign(KEY)
    assert verify(note, PUBLIC) == Checkpoint(ORIGIN, 7, bytes(32))
    with pytest.raises(JournalError):
        verify(note, Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    for position in range(len(note) - 1):
        changed = note[:position] + chr(ord(note[position]) ^ 1) + note[position + 1 :]
        with pytest.raises(JournalError):
            verify(changed, PUBLIC)


@given(st.text(max_size=100))
def test_no_text_is_taken_for_a_checkpoint(text: str) -> None:
    with pytest.raises(JournalError):
        verify(text, PUBLIC)


def test_records_are_canonical_json_and_go_on_after_reopening(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with open_journal(tmp_path) as journal:
        assert journal.append([{"kind": "a"}, {"kind": "b"}]) == range(3, 5)
    assert [record["index"] for record in read_records(tmp_path)] == [0, 1, 2, 3, 4]
    for line in lines(tmp_path):
        assert rfc8785.dumps(json.loads(line)) + b"\n" == line
    assert verify_records(tmp_path, PUBLIC) == (5, 5)


def test_a_line_cut_by_a_crash_is_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for name in (RECORDS, CHECKPOINTS):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"half')
    with open_journal(tmp_path) as journal:
        assert len(journal) == 3
        journal.append([{"kind": "test"}])
    assert len(list(read_records(tmp_path))) == 4
    assert verify_records(tmp_path, PUBLIC) == (4, 4)


@pytest.mark.parametrize("damage", ["changed", "dropped", "swapped", "cut off", "renumbered", "not JSON"])
def test_damage_is_noticed_by_the_check_and_on_opening(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, 4)
    kept = lines(tmp_path)
    match damage:
        case "changed":
            kept[1] = kept[1].replace(b'"number":1', b'"number":9')
        case "dropped":
            del kept[1]
        case "swapped":
            kept[1], kept[2] = kept[2], kept[1]
        case "cut off":
            del kept[3]
        case "renumbered":
            del kept[1]
            kept = [line.replace(b'"index":%d' % (n + 1), b'"index":%d' % n) for n, line in enumerate(kept)]
        case "not JSON":
            kept[2] = b"rubbish\n"
    (tmp_path / RECORDS).write_bytes(b"".join(kept))
    with pytest.raises(JournalError):
        verify_records(tmp_path, PUBLIC)
    with pytest.raises(JournalError, match=r"records\.jsonl"):
        open_journal(tmp_path)
    assert lines(tmp_path) == kept, "a damaged journal is evidence: opening it changes nothing"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with open_journal(tmp_path), pytest.raises(JournalError, match="another process"):
        open_journal(tmp_path)
    open_journal(tmp_path).close()


def test_records_of_many_threads_all_arrive_once(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:

        def work(worker: int) -> None:
            for number in range(50):
                journal.append([{"worker": worker, "number": number}], durable=number % 10 == 0)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(record["worker"], record["number"]) for record in read_records(tmp_path)]
    assert sorted(found) == [(worker, number) for worker in range(8) for number in range(50)]
    for worker in range(8):
        assert [number for who, number in found if who == worker] == list(range(50))
    assert verify_records(tmp_path, PUBLIC) == (400, 400)


def test_a_full_disk_refuses_the_record_and_spoils_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from privacy.errors import JournalError
from privacy.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
journal = Journal(Path({str(tmp_path)!r}), key=key, origin={ORIGIN!r})
journal.append([{{"kind": "fits"}}])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    journal.append([{{"kind": "too long", "text": "x" * 2000}}])
except JournalError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append([{{"kind": "fits again"}}])
journal.close()
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "nothing is sent without a record" in outcome.stdout
    assert [record["kind"] for record in read_records(tmp_path)] == ["fits", "fits again"]
    assert verify_records(tmp_path, PUBLIC) == (2, 2)
