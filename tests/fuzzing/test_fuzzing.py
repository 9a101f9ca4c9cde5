"""Damaged input ends in one of our own errors: the short form of ``python -m tests.fuzzing``."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from medsilo.privacy.errors import JournalError
from medsilo.privacy.exposure import SCHEMA_FILES
from medsilo.privacy.journal.stored_schema import StoredSchema
from tests.fuzzing.parsers import PARSERS, Parser
from tests.fuzzing.running import examine, input_of

SLOW = {
    "bundles": 25,
    "journals": 40,
    "experiment_yaml": 15,
    "coordinator_yaml": 40,
    "silo_yaml": 40,
    "consent_yaml": 40,
}
INPUTS = 150


@pytest.mark.parametrize("name", PARSERS)
def test_damaged_input_is_taken_or_refused_and_nothing_else_happens(name: str, tmp_path: Path) -> None:
    outcome = examine(name, SLOW.get(name, INPUTS), seed=0, keep=tmp_path)
    assert outcome.failures == []
    assert outcome.refused > 0, "an example that is never damaged tests nothing"


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        (lambda _: {}["not our error"], "KeyError"),
        (lambda _: [None for _ in itertools.repeat(None) if False], "Hang"),
        (lambda _: bytearray(1 << 40), "MemoryError"),
    ],
    ids=["crash", "hang", "memory"],
)
def test_a_parser_with_a_defect_is_found_and_its_input_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, defect: Callable[[bytes], object], found: str
) -> None:
    def read(data: bytes) -> None:
        if data != b"good":
            defect(data)

    monkeypatch.setitem(PARSERS, "bad", lambda _: Parser(read, [b"good"]))
    monkeypatch.setattr("tests.fuzzing.running.SECONDS", 0.05)
    outcome = examine("bad", 3, seed=0, keep=tmp_path)
    assert outcome.failures[0].error.startswith(found)
    (kept,) = tmp_path.glob("*.bin")
    assert kept.read_bytes() == input_of(PARSERS["bad"](tmp_path), "bad", 0, outcome.failures[0].index)


def test_a_stored_schema_with_a_name_that_is_no_text_is_refused() -> None:
    """Found by the long form: protobuf gave such a name as bytes."""
    files = [file.serialized_pb.replace(b".medsilo.v1.Envelope", b"\xffmedsilo.v1.Envelope") for file in SCHEMA_FILES]
    with pytest.raises(JournalError, match="the stored schema cannot be read"):
        StoredSchema([base64.b64encode(file).decode() for file in files])
