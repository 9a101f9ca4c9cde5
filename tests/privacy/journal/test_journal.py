"""The journal: what was written stays, and what was changed is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import rfc8785

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS, read_records
from tests.support.evidence.plain_journal import ORIGIN, open_journal, plain_record, verified


def fill(folder: Path, count: int) -> None:
    with open_journal(folder) as journal:
        for number in range(count):
            journal.append([plain_record(number)])
            journal.checkpoint()


def lines(folder: Path) -> list[bytes]:
    return (folder / RECORDS).read_bytes().splitlines(keepends=True)


def test_records_are_canonical_json_and_go_on_after_reopening(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with open_journal(tmp_path) as journal:
        assert journal.append([plain_record(3), plain_record(4)]) == range(3, 5)
    assert [record["index"] for record in read_records(tmp_path)] == [0, 1, 2, 3, 4]
    for line in lines(tmp_path):
        assert rfc8785.dumps(json.loads(line)) + b"\n" == line
    assert verified(tmp_path) == (5, 5)


def test_a_line_cut_by_a_crash_is_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for name in (RECORDS, CHECKPOINTS):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"half')
    with open_journal(tmp_path) as journal:
        assert len(journal) == 3
        journal.append([plain_record(3)])
    assert len(list(read_records(tmp_path))) == 4
    assert verified(tmp_path) == (4, 4)


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
    assert not verify_evidence(tmp_path).sound
    with pytest.raises(JournalError, match=r"records\.jsonl"):
        open_journal(tmp_path)
    assert lines(tmp_path) == kept, "a damaged journal is evidence: opening it changes nothing"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with open_journal(tmp_path), pytest.raises(JournalError, match="another process"):
        open_journal(tmp_path)
    open_journal(tmp_path).close()


def test_records_of_many_threads_all_arrive_once(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([plain_record(0)])

        def work(worker: int) -> None:
            for number in range(50):
                journal.append([plain_record(1 + number, worker=worker)], durable=number % 10 == 0)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(record["worker"], record["number"] - 1) for record in list(read_records(tmp_path))[1:]]
    assert sorted(found) == [(worker, number) for worker in range(8) for number in range(50)]
    for worker in range(8):
        assert [number for who, number in found if who == worker] == list(range(50))
    assert verified(tmp_path) == (401, 401)


def test_a_full_disk_refuses_the_record_and_spoils_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, signal
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from medsilo.privacy.errors import DiskError
from medsilo.privacy.journal.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
journal = Journal(Path({str(tmp_path)!r}), key=key, origin={ORIGIN!r})
journal.append([{plain_record(0, text="fits")!r}])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    journal.append([{plain_record(1, text="too long" * 250)!r}])
except DiskError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append([{plain_record(1, text="fits again")!r}])
journal.close()
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "nothing leaves or counts that could not be kept" in outcome.stdout
    assert [record["text"] for record in read_records(tmp_path)] == ["fits", "fits again"]
    assert verified(tmp_path) == (2, 2)
