"""The threat model names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_threat_model_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "threat-model.md").read_text()))
    found = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 20
    assert named - found == set()
