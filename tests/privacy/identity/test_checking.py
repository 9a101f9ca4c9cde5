"""Signatures and form are checked in a second process: the verdict is the same to the word, whatever becomes of it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.files.canonical import read_canonical, read_unchecked, write_canonical
from medsilo.privacy.identity import checking
from medsilo.privacy.journal.journal import RECORDS
from medsilo.privacy.report.as_json import as_json
from medsilo.privacy.report.builder import make_report
from tests.support.evidence.exchanging import Exchange, copy_of, meet


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    found = meet(tmp_path_factory.mktemp("exchanged"))
    found.rounds(range(4))
    found.attest()
    found.close()
    return found


@pytest.fixture(autouse=True)
def begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process has something to do in a short journal, and several batches of it, on any machine."""
    monkeypatch.setattr(checking, "BEFORE_SECOND", 20)
    monkeypatch.setattr(checking, "_BATCH_BYTES", 4000)
    cores(monkeypatch, 2)


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(count)))


@pytest.fixture
def signatures_here(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Those that this process checks."""
    found: list[bytes] = []

    def check(public_key: bytes, signature: bytes, data: bytes) -> None:
        found.append(signature)
        check_signature(public_key, signature, data)

    check_signature = checking.check_signature
    monkeypatch.setattr(checking, "check_signature", check)
    return found


def last_of_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What each batch that goes to the second process ends with."""
    found: list[bytes] = []
    write = checking._SecondProcess._write

    def spy(process: Any) -> None:
        found.extend(process._batch[-1:])
        write(process)

    with monkeypatch.context() as patched:
        patched.setattr(checking._SecondProcess, "_write", spy)
        assert verify_evidence(folder).sound
    return found


def alone(monkeypatch: pytest.MonkeyPatch, verify: Callable[[], Any]) -> Any:
    """What it comes to on one core."""
    with monkeypatch.context() as patched:
        cores(patched, 1)
        return verify()


def lines_of(folder: Path) -> list[bytes]:
    return (folder / RECORDS).read_bytes().splitlines()


def attested(line: bytes) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(line).get("attestation")
    return found


def with_another_signature(line: bytes) -> bytes:
    record = json.loads(line)
    (signature,) = record["attestation"]["signatures"]
    signed = bytearray(base64.b64decode(signature["sig"]))
    signed[5] ^= 1
    signature["sig"] = base64.b64encode(signed).decode()
    return write_canonical(record)


def damaged(exchange: Exchange, target: Path, index: int, change: Callable[[bytes], bytes]) -> Path:
    folder = copy_of(exchange.silo.folder, target)
    lines = lines_of(folder)
    lines[index] = change(lines[index])
    (folder / RECORDS).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def test_most_signatures_of_a_sound_journal_are_checked_there_and_none_twice(
    exchange: Exchange, signatures_here: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_another = verify_evidence(exchange.silo.folder, peer=exchange.coordinator.folder)
    few = len(signatures_here)
    by_itself = alone(monkeypatch, lambda: verify_evidence(exchange.silo.folder, peer=exchange.coordinator.folder))
    assert with_another.sound
    assert asdict(with_another) == asdict(by_itself)
    assert few < 20 < len(signatures_here) - few


def test_a_bad_signature_is_named_wherever_in_a_batch_it_stands(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = last_of_batches(exchange.silo.folder, monkeypatch)
    lines = lines_of(exchange.silo.folder)
    signed = [index for index, line in enumerate(lines) if attested(line)]
    at_ends = [index for index in signed if any(payload_of(lines[index]) in end for end in ends)]
    assert len(ends) > 5
    assert at_ends
    assert signed[-1] == len(lines) - 1
    for index in {*at_ends[:2], signed[0], signed[len(signed) // 2], signed[-2], signed[-1]}:
        folder = damaged(exchange, tmp_path / str(index), index, with_another_signature)
        found = verify_evidence(folder)
        assert found.index == index
        assert "the signature does not hold" in found.problem
        assert asdict(found) == asdict(alone(monkeypatch, lambda folder=folder: verify_evidence(folder)))


def payload_of(line: bytes) -> bytes:
    content = attested(line)
    assert content is not None
    return base64.b64decode(content["payload"])


def test_a_record_in_another_spelling_is_named(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = len(lines_of(exchange.silo.folder)) - 3
    folder = damaged(exchange, tmp_path / "spelt", index, lambda line: line.replace(b'":"', b'": "', 1))
    found = verify_evidence(folder)
    assert found.index == index
    assert "canonical" in found.problem
    assert asdict(found) == asdict(alone(monkeypatch, lambda: verify_evidence(folder)))


def test_a_bad_signature_comes_before_what_is_wrong_after_it(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process comes to the later one first; the second one has not told of the earlier one then."""
    signed = [index for index, line in enumerate(lines_of(exchange.silo.folder)) if attested(line)]
    folder = damaged(exchange, tmp_path / "two", signed[-3], with_another_signature)
    lines = lines_of(folder)
    (folder / RECORDS).write_bytes(b"".join(line + b"\n" for line in lines[: signed[-3] + 1]) + b"no record\n")
    found = verify_evidence(folder)
    assert found.index == signed[-3]
    assert asdict(found) == asdict(alone(monkeypatch, lambda: verify_evidence(folder)))


def test_a_report_takes_each_record_once_though_the_journal_is_read_twice(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = [index for index, line in enumerate(lines_of(exchange.silo.folder)) if attested(line)]
    for folder in (
        exchange.silo.folder,
        damaged(exchange, tmp_path / "damaged", signed[-1], with_another_signature),
    ):
        found = make_report(folder, key=exchange.silo.public)
        by_itself = alone(monkeypatch, lambda folder=folder: make_report(folder, key=exchange.silo.public))
        assert found.records == len(lines_of(folder))
        assert as_json(found) == as_json(by_itself)


@pytest.mark.parametrize(
    "program",
    [
        "/nowhere/python",
        "",
        "#!/bin/sh\nexit 1",
        "#!/bin/sh\ncat > /dev/null\nprintf 7",
        "#!/bin/sh\ncat > /dev/null\nkill -9 $$",
    ],
    ids=["none", "unknown", "ends at once", "has checked something else", "is killed"],
)
def test_a_process_that_is_not_to_be_had_or_is_lost_changes_nothing(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    if program.startswith("#!"):
        path = tmp_path / "program"
        path.write_text(program)
        path.chmod(0o700)
        program = str(path)
    monkeypatch.setattr(sys, "executable", program)
    index = max(index for index, line in enumerate(lines_of(exchange.silo.folder)) if attested(line))
    broken = damaged(exchange, tmp_path / "damaged", index, with_another_signature)
    assert verify_evidence(exchange.silo.folder).sound
    found = verify_evidence(broken)
    assert found.index == index
    assert asdict(found) == asdict(alone(monkeypatch, lambda: verify_evidence(broken)))


def test_there_is_none_on_one_core_nor_for_a_short_journal(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was begun")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    cores(monkeypatch, 1)
    assert verify_evidence(exchange.silo.folder).sound
    cores(monkeypatch, 2)
    monkeypatch.setattr(checking, "BEFORE_SECOND", 5000)
    assert verify_evidence(exchange.silo.folder).sound


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"b":[true,null,"ä"]}', "0.5", "1e+21", "9007199254740991", '"\U0001f600"', '{"z":2,"\U0001f600":1}'],
)
def test_what_is_read_unchecked_is_what_is_read_with_the_check(text: str) -> None:
    assert read_unchecked(text.encode()) == read_canonical(text.encode())


@pytest.mark.parametrize("data", [b"", b"{", b"NaN", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_value_error_without_the_check_as_well(data: bytes) -> None:
    with pytest.raises(ValueError) as unchecked:
        read_unchecked(data)
    with pytest.raises(ValueError) as checked:
        read_canonical(data)
    assert str(unchecked.value) == str(checked.value)
