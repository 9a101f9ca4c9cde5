"""Everything that is installed is pinned, and a check that nobody could make has not passed."""

from __future__ import annotations

import json

import pytest
from packaging.requirements import Requirement

from supply_chain.pins import CONSTRAINTS, declared, differences, installed, pinned
from supply_chain.vulnerabilities import CLEAN, NOT_CHECKED, VULNERABLE, verdict


def test_everything_that_commands_and_tests_need_is_pinned_at_what_is_installed() -> None:
    needed = installed(declared())
    assert {"torch", "grpcio", "pydantic-core", "pytest", "sympy"} <= set(needed), "needs of needs are among them"
    assert differences(needed, pinned(CONSTRAINTS.read_text())) == []


def test_what_is_missing_or_at_another_version_is_named() -> None:
    needed = {"a": ("A", "1.0"), "b": ("b", "2.0"), "torch": ("torch", "2.15.0+cpu")}
    pins = pinned("# why\nB==2.1\n\ntorch==2.15.0\nunused==9\n")
    assert differences(needed, pins) == ["A 1.0 is needed and not pinned", "b is pinned at 2.1, and 2.0 is installed"]


@pytest.mark.parametrize("line", ["a>=1", "a", "a==1.*", "a==1,!=2"])
def test_a_line_that_leaves_the_version_open_is_no_pin(line: str) -> None:
    with pytest.raises(ValueError, match="is not a pin"):
        pinned(line)


def test_what_only_an_extra_needs_counts_where_the_extra_is_asked_for() -> None:
    assert "psycopg-binary" not in installed([Requirement("psycopg")])
    assert "psycopg-binary" in installed([Requirement("psycopg[binary]")])


GOOD = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("output", "errors", "code", "words"),
    [
        ({"dependencies": [GOOD]}, "", CLEAN, ["no vulnerability is known of 1 packages"]),
        ({"dependencies": [GOOD, BAD]}, "", VULNERABLE, ["b 2: CVE-1, mended in 3"]),
        # pip-audit itself says "No known vulnerabilities found" here, and ends with 0.
        ({"dependencies": [UNKNOWN, UNKNOWN]}, "", NOT_CHECKED, ["NOT CHECKED", "2 of 2 packages", "not found"]),
        ({"dependencies": [GOOD, UNKNOWN]}, "", NOT_CHECKED, ["NOT CHECKED", "1 of 2 packages"]),
        ({"dependencies": [BAD, UNKNOWN]}, "", VULNERABLE, ["CVE-1", "NOT CHECKED", "1 of 2"]),
        ({"dependencies": []}, "", NOT_CHECKED, ["NOT CHECKED"]),
        ("", "Traceback\nConnectionError: no route", NOT_CHECKED, ["NOT CHECKED", "no package", "no route"]),
        ("", "", NOT_CHECKED, ["NOT CHECKED"]),
    ],
)
def test_only_what_was_answered_for_every_package_passes(
    output: object, errors: str, code: int, words: list[str]
) -> None:
    found, said = verdict(output if isinstance(output, str) else json.dumps(output), errors)
    assert found == code
    assert all(word in said for word in words), said
