"""Text from elsewhere is shown as what it is, and can do nothing: on terminals, in logs, in messages and plans."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.table import Table

from medsilo.privacy.consent.plan import RunPlan
from medsilo.privacy.errors import RefusedError
from medsilo.privacy.pages.wording import grouped
from medsilo.privacy.party import logs
from medsilo.privacy.party.console import PlainConsole
from medsilo.privacy.printable import cell, check_texts, from_the_other_side, printable
from medsilo.protos.medsilo.v1 import coordinator_pb2 as wire
from medsilo.protos.medsilo.v1 import plan_pb2

HOSTILE = "a\x1b[31mb\r\n2031 INFO fine\u202ec\u2066d\u200be\x9bf\x00"


def test_what_is_not_to_be_seen_is_shown_as_its_escape() -> None:
    assert printable(HOSTILE) == r"a\x1b[31mb\r\n2031 INFO fine\u202ec\u2066d\u200be\x9bf\x00"
    assert printable("\ud800\U000e0001") == r"\ud800\U000e0001"
    assert printable("one\n\ttwo\x1b", lines=True) == "one\n\ttwo\\x1b"
    assert printable("Zürich, 三 – “ε” ✓") == "Zürich, 三 – “ε” ✓"


def test_words_of_any_length_are_cut() -> None:
    assert len(from_the_other_side("\x1b" * 10**6)) < 10_000


def test_a_message_with_such_a_text_is_refused_by_the_fields_name() -> None:
    check_texts(wire.GetPlanRequest(silo="hospital1", nonce=b"\x1b\n"))
    with pytest.raises(RefusedError, match=r"GetPlanRequest\.silo holds control characters: a\\x1b"):
        check_texts(wire.GetPlanRequest(silo=HOSTILE))
    inner = wire.GetPlanResponse(plan=plan_pb2.RunPlan(run="r", training=plan_pb2.Training(optimizer="sgd\u202e")))
    with pytest.raises(RefusedError, match=r"GetPlanResponse\.plan\.training\.optimizer holds"):
        check_texts(inner)


@pytest.mark.parametrize("parameters", [{"mode": HOSTILE}, {HOSTILE: 1}])
def test_a_plan_cannot_bring_such_a_text_in_json(parameters: dict[str, object]) -> None:
    method = plan_pb2.Method(name="fedavg", parameters_json=json.dumps(parameters))
    with pytest.raises(RefusedError, match="control characters") as caught:
        RunPlan.from_message(plan_pb2.RunPlan(federation="test", coordinator="c", run="r", method=method))
    assert str(caught.value).isprintable()


def test_a_terminal_gets_no_escape_sequence_in_sentences_or_tables() -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system="standard", width=300)
    table = Table("what")
    table.add_row(HOSTILE)
    console.print(table, HOSTILE, markup=False)
    console.print(HOSTILE, style="red", markup=False)
    for sequence in ("\x1b[31mb", "\r", "\u202e", "\u2066", "\u200b", "\x9b", "\x00"):
        assert sequence not in file.getvalue()
    assert file.getvalue().count("fine") == 3


def test_a_terminal_gets_our_numbers_as_they_are_read() -> None:
    file = io.StringIO()
    PlainConsole(file=file, width=300).print(grouped(1_755_080), markup=False)
    assert file.getvalue().split() == ["1", "755", "080"]


@pytest.mark.parametrize("form", logs.LogFormat)
def test_a_log_has_one_line_for_each_record_whatever_its_words(
    form: logs.LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    try:
        logs.begin(form)
        logging.getLogger("medsilo").warning("refused: %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logging.getLogger("medsilo").exception("it failed: %s", "x\ny")
        written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert {one for one in written if not one.isprintable()} == {"\n"}
    lines = written.splitlines()
    begun = [line for line in lines if not line.startswith(" ")]
    assert len(begun) == 2, "what belongs to a record and stands on further lines is set in"
    assert "fine" in begun[0]
    assert r"x\ny" in begun[1]
    assert "ValueError" in written


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tumour 1.png", "tumour 1.png"),
        ("+", "+"),
        ("=HYPERLINK(A1).png", "'=HYPERLINK(A1).png"),
        ("@SUM(1).png", "'@SUM(1).png"),
        ("-1+1", "'-1+1"),
        ("\t=1.png", r"\t=1.png"),
        ("a\x1b[2J.png", r"a\x1b[2J.png"),
    ],
)
def test_a_cell_is_no_formula_and_no_escape_sequence(text: str, shown: str) -> None:
    assert cell(text) == shown
